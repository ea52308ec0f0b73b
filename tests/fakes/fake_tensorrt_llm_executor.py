"""The executor of the stand-in: one thread that decodes, paused by `control_action`; its model; its memory by tags."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_tensorrt_llm_binding import bound
from fake_tensorrt_llm_model import Misuse, Model
from torch import Tensor

WAIT_SECONDS = 60.0


class World:
    """Everything of one installed version."""

    def __init__(self, contract: Any) -> None:
        self.contract = contract
        self.events: list[str] = []
        self.llms: list[Any] = []
        self.first_rank = 0  # of the executors in this process
        self.building: list[Any] = []  # the executors of the LLM that is being made, by rank
        self.paused = threading.local()  # the executor that this thread has paused
        self.answers = True  # False: requests never end
        self.zero_is_none = False  # whether logprobs=0 gives none, and not those of the sampled tokens alone
        self.asked: list[int] = []  # log-probs a token, of each request that ended
        self.error: Exception | None = None  # what every request ends with instead

    def bind(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return bound(self.contract.find(name), name, self.contract, args, kwargs)

    @property
    def engine(self) -> Any:
        """Of the first rank."""
        return self.llms[-1].engines[0]

    @property
    def asleep(self) -> set[str]:
        return {tag for llm in self.llms for engine in llm.engines for tag in engine.asleep}

    def release_with_tag(self, *tags: str) -> int:
        return self._exchange("release", tags, asleep=True)

    def materialize_with_tag(self, *tags: str) -> int:
        return self._exchange("materialize", tags, asleep=False)

    def _exchange(self, what: str, tags: tuple[str, ...], *, asleep: bool) -> int:
        known = set(self.contract.find("ExecutorMemoryType").members.values())
        engine = getattr(self.paused, "engine", None)
        if extra := set(tags) - known:
            raise Misuse(f"{what}_with_tag: unknown tags {sorted(extra)}")
        if engine is None or not engine.paused:
            raise Misuse(f"{what}_with_tag outside control_action")
        if not engine.sleeps:
            raise Misuse(f"{what}_with_tag on a model that was not built to sleep")
        if "kv_cache" in tags and not engine.is_reset:
            raise Misuse("the cache was given back or taken with prefixes that could still be found")
        if any((tag in engine.asleep) == asleep for tag in tags):
            raise Misuse(f"{what}_with_tag: {tags} already are")
        engine.asleep = engine.asleep | set(tags) if asleep else engine.asleep - set(tags)
        if "model" in tags:
            engine.model_engine.model.scramble()
        if engine.rank == 0:
            self.events.append(f"{what} {' '.join(tags)}")
        return len(tags)

    def stop(self) -> None:
        for llm in self.llms:
            llm.shutdown()


class Loader:
    def __init__(self, world: World, engine: Engine) -> None:
        self._world, self._engine = world, engine
        if world.contract.find("ModelLoader.begin_update_weights"):
            self.begin_update_weights = lambda: self._step("begin")
            self.finalize_update_weights = lambda: self._step("finalize")
            self.abort_update_weights = lambda: self._step("abort")
        self._begun = False

    def _step(self, what: str) -> None:
        if not self._engine.paused:
            raise Misuse(f"{what}_update_weights outside control_action")
        self._begun = what == "begin"
        self._world.events.append(f"{what}_update_weights")

    def reload(self, *args: Any, **kwargs: Any) -> None:
        given = self._world.bind("ModelLoader.reload", *args, **kwargs)
        if not self._engine.paused:
            raise Misuse("reload outside control_action")
        if hasattr(self, "begin_update_weights") and not self._begun:
            raise Misuse("reload before begin_update_weights")
        if self._engine.asleep & {"model"}:
            raise Misuse("reload while the weights sleep")
        if not given.get("allow_partial_loading", False):
            raise Misuse("reload of a part without allow_partial_loading")
        if not self._engine.needs_finish:  # the first part of a refit
            given["model"].given = set()
        self._engine.needs_finish = True
        self._engine.is_reset = False
        given["model"].take(given["weights"])
        self._world.events.append(f"reload {len(given['weights'])} on rank {self._engine.rank}")


@dataclass(eq=False)
class Running:
    """One request, and what is known of it."""

    prompt: list[int]
    params: Any
    result: Result
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generator: torch.Generator | None = None


class Result:
    """What `generate_async` returns; it can be awaited only where an event loop ran when it was made."""

    def __init__(self, engine: Engine) -> None:
        self.outputs: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._error: Exception | None = None
        self._engine = engine
        self.was_aborted = False

    async def aresult(self) -> Result:
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self

    def abort(self) -> None:
        self.was_aborted = True
        self._engine.drop(self)

    def finish(self, output: Any, error: Exception | None) -> None:
        self.outputs, self._error = [output], error
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._done.set)


class Engine:
    """The PyExecutor."""

    def __init__(self, world: World, arguments: dict[str, Any]) -> None:
        self._world = world
        self.rank = world.first_rank + len(world.building)
        world.building.append(self)
        self.peers = world.building  # of the same model, by rank; this one among them
        self.asleep: set[str] = set()
        self.num_refits = self.num_asked = 0
        self.sleeps = bool(arguments.get("enable_sleep")) or arguments.get("sleep_config") is not None
        self.sampler = str(arguments.get("sampler_type", "auto"))
        self.max_seq_len = arguments["max_seq_len"]
        self.model_engine = type("ModelEngine", (), {})()
        self.model_engine.model = Model(arguments["model"], arguments["dtype"])
        self.model_engine.model_loader = Loader(world, self)
        self.paused = self.is_reset = self.needs_finish = False
        self._running: list[Running] = []
        self._change = threading.Condition()
        self._wants_pause = self._stops = False
        self.thread = threading.Thread(target=self._loop, daemon=True, name="fake-tensorrt-llm")
        self.thread.start()

    @contextmanager
    def control_action(self, *args: Any, **kwargs: Any) -> Iterator[Engine]:
        self._world.bind("PyExecutor.control_action", *args, **kwargs)
        with self._change:
            if self._wants_pause:
                raise Misuse("control_action inside control_action: it would wait for itself")
            self._wants_pause = True
            self._change.notify_all()
            if not self._change.wait_for(lambda: self.paused, WAIT_SECONDS):
                raise Misuse("control_action: the executor did not pause")
        for peer in self.peers[1:] if self.peers[0] is self else []:  # the first rank's request is what pauses the others
            with peer._change:
                peer.num_asked += 1
                peer._change.notify_all()
        with self._change:
            if self.peers[0] is not self and not self._change.wait_for(lambda: self.num_asked, WAIT_SECONDS):
                raise Misuse("control_action, but not on the first rank")
            self.num_asked = max(0, self.num_asked - 1)
        self._world.paused.engine = self
        try:
            yield self
        finally:
            self._world.paused.engine = None
            with self._change:
                self._wants_pause = self.paused = False
                self._change.notify_all()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> None:
        self._world.bind("PyExecutor.reset_prefix_cache", *args, **kwargs)
        if not self.paused:
            raise Misuse("reset_prefix_cache outside control_action")
        model = self.model_engine.model
        if self.needs_finish and all(module in model.finalised for _, module in model.groups.values()):
            self.needs_finish = False
            self.num_refits += 1
            model.finalised = set()
        self.is_reset = True
        if self.rank == 0:
            self._world.events.append("reset_prefix_cache")

    def submit(self, running: Running) -> None:
        for engine in self.peers:
            model = engine.model_engine.model
            if engine.asleep:
                raise Misuse(f"a request while {sorted(engine.asleep)} sleep")
            if engine.needs_finish:
                raise Misuse("a request after a refit that was not finished")
            if missing := set(model.targets) - model.given - {"lm_head.weight"}:
                raise Misuse(f"a request before all weights came: {sorted(missing)[:3]}")
            if engine.num_refits != self.num_refits:
                raise Misuse(f"rank {engine.rank} had {engine.num_refits} refits, the first rank {self.num_refits}")
            engine.is_reset = False
        with self._change:
            self._running.append(running)
            self._change.notify_all()

    def drop(self, result: Result) -> None:
        with self._change:
            self._running = [one for one in self._running if one.result is not result]
            self._change.notify_all()

    def stop(self) -> None:
        with self._change:
            self._stops = True
            self._change.notify_all()
        self.thread.join(WAIT_SECONDS)

    def _loop(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(
                    lambda: self._stops or (self._running and self._world.answers) or (self._wants_pause and not self.paused), WAIT_SECONDS
                )
                if self._stops:
                    return
                if self._wants_pause and not self._running:
                    self.paused = True
                    self._change.notify_all()
                    self._change.wait_for(lambda: not self.paused or self._stops)
                    continue
                running = list(self._running) if self._world.answers else []
            if not running:
                continue
            logits = self.model_engine.model.logits([one.prompt + one.tokens for one in running])
            for one, row in zip(running, logits, strict=True):
                if self._world.error is not None or self._step(one, row):
                    self._finish(one)

    def _step(self, one: Running, logits: Tensor) -> bool:
        """Draw a token; whether the response has ended."""
        temperature = one.params.temperature
        greedy = one.params.top_k == 1 or (temperature is None and one.params.top_p is None)
        scaled = logits if greedy else logits / (1.0 if temperature is None else temperature)
        if one.generator is None:
            one.generator = torch.Generator().manual_seed(one.params.seed or 0)
        token = int(scaled.argmax()) if greedy else int(torch.multinomial(scaled.softmax(-1), 1, generator=one.generator))
        kind = self._world.contract.rules.logprobs["torch" if self.sampler == "TorchSampler" else "trtllm"]
        reported = logits if kind == "raw" else scaled
        one.tokens.append(token)
        one.logprobs.append(float(reported.log_softmax(-1)[token]))
        return token in (one.params.stop_token_ids or []) or len(one.tokens) >= one.params.max_tokens

    def _finish(self, one: Running) -> None:
        stopped = bool(one.tokens) and one.tokens[-1] in (one.params.stop_token_ids or [])
        tokens = one.tokens if one.params.include_stop_str_in_output or not stopped else one.tokens[:-1]
        entry = [{token: type("Logprob", (), {"logprob": value})()} for token, value in zip(one.tokens, one.logprobs, strict=True)]
        self._world.asked.append(one.params.logprobs)
        if one.params.logprobs:  # and the likeliest, which may be another token
            entry = [{-1: None} | named for named in entry]
        elif self._world.zero_is_none:
            entry = None
        output = type("CompletionOutput", (), {})()
        output.token_ids, output.logprobs = tokens, entry
        output.finish_reason = "length" if len(one.tokens) >= one.params.max_tokens else "stop"
        self.drop(one.result)
        one.result.finish(output, self._world.error)


def extension_class() -> type:
    class WorkerExtension:
        def finalize_weight_update(self) -> None:
            loaded = self.engine.model_engine
            loaded.model_loader.finalize_update_weights()
            for module in loaded.model.modules():
                for name in ("process_weights_after_loading", "post_load_weights"):
                    hook: Callable[[], None] | None = getattr(module, name, None)
                    if hook is not None:
                        hook()

    return WorkerExtension
