"""vLLM as a rollout engine, in the training processes: each rank has an `LLM` whose worker is this process, on this rank's device.

Requests and results are tokens, so no tokenizer is loaded. With `rollout.tp` ranks to a replica each of them schedules the same requests
(vLLM's external launcher), and their workers use training's process groups. Weights arrive through vLLM's weight-transfer interface, with
this project's backend (`aligner.rollout.vllm.weights`).
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib import import_module
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.images import images_in
from aligner.data.vision import Vision
from aligner.errors import AlignerError, ConfigError, EngineError
from aligner.models.config import Architecture, Family
from aligner.parallel import platform
from aligner.rollout.config import RolloutConfig
from aligner.rollout.engine import ALL_MEMORY, Capabilities, GenRequest, GenResult, Memory, Work, callers_of, check_ids, missing_ids
from aligner.rollout.engine.manifest import Manifest, named_few
from aligner.rollout.vllm import INSTALL, adapters, images
from aligner.types import FinishReason, LogprobKind, SamplingConfig

_SAME = "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty"  # as in our SamplingConfig
_OTHER = "logit_bias min_tokens max_tokens stop_token_ids ignore_eos seed logprobs detokenize output_kind"
_IPC = "IPCWeightTransferEngine"
# The functions and arguments of vLLM in use: any version that has all of them is accepted.
USED = (
    ("vllm", "LLM.collective_rpc method kwargs, LLM.apply_model func, LLM.reset_prefix_cache, LLM.sleep level, LLM.wake_up tags"),
    ("vllm", f"SamplingParams {_SAME} {_OTHER}"),
    ("vllm.inputs", "tokens_input prompt_token_ids"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request request_id prompt params, LLMEngine.step, LLMEngine.abort_request request_ids"),
    ("vllm.v1.worker.gpu_worker", "Worker.start_weight_update, Worker.update_weights update_info, Worker.finish_weight_update"),
    ("vllm.distributed.parallel_state", "destroy_model_parallel"),
    ("vllm.distributed.weight_transfer.base", "WeightTransferUpdateInfo"),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine name module_path_or_cls class_name"),
    ("vllm.distributed.weight_transfer.ipc_engine", f"{_IPC}.start_weight_update, {_IPC}.finish_weight_update"),
)
# Parts of its core in this process, without a public interface.
HELD = ("_finalizer", "engine_core.batch_queue", "engine_core.scheduler.has_requests", "engine_core.model_executor.shutdown")
BACKEND = "aligner"  # the name in vLLM's weight transfer
DRAIN_SECONDS = 60.0  # for steps that a generation left in vLLM's queue: one or two
LEAST_BIAS = -100.0  # the least that vLLM adds to a logit
LARGEST_PAGE = 128  # tokens; vLLM's on the CPU, 16 on a GPU
_REASONS = {"stop": FinishReason.stop, "length": FinishReason.length}
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


class VLLMEngine:
    """`aligner.rollout.engine.ForeignEngine`, which describes the methods. `tp` consecutive ranks share a replica.

    path: a directory with the Hugging Face config.json of a model of this `architecture`; weights in it are not read. The model has
    `weight_bytes` of them. `vision` reads the images of rows. `lora`: the adapters that refits shall bring alone; `adapters` takes them,
    and is None if vLLM cannot, as `merges` says.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        path: Path,
        architecture: Architecture,
        dtype: torch.dtype,
        eos_id: int,
        max_sequence_length: int,
        tp: int,
        weight_bytes: int,
        vision: Vision | None = None,
        lora: Manifest | None = None,
    ) -> None:
        self._config, self._path, self._architecture, self._dtype = config, path, architecture, dtype
        self._eos_id, self.max_sequence_length, self._tp = eos_id, max_sequence_length, tp
        self._weight_bytes = weight_bytes + (0 if lora is None else lora.num_bytes)
        self._vision, self._has_tower = vision, images.is_seen(architecture)
        self._images: images.GivenImages | None = None
        self._has_inner_level = False  # known once it has started
        self._lora, self.merges = lora, ""
        self.adapters: adapters.VLLMAdapters | None = None
        # Whether vLLM computes log-probs after applying the temperature (and all else), not before.
        self._scaled = config.sampling.temperature not in (0.0, 1.0) and not config.sampling.reshaping()
        kind = self._kind(config.sampling)
        self.capabilities = Capabilities(name="vLLM", logprobs=kind, sees=self._has_tower and vision is not None, serves=True)
        self._llm: Any = None
        self._manifest, self._loaded, self._version = Manifest(tensors={}), set(), 0
        self._wanted: set[str] = set()  # parameters of vLLM's model in an update
        self._updating = False  # whether vLLM is between the start and the finish of an update of its weights
        self._ids = count()  # of requests, unique over the engine's life: a leftover step has none of a later generation's
        self._can_sleep, self._asleep = config.offload and torch.cuda.is_available(), frozenset()

    def start(self) -> None:
        """Collective over the component. Raises EngineError if vLLM is missing or lacks a part in use."""
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
        except ImportError as error:
            raise EngineError(f"rollout.engine=vllm: vLLM cannot be imported ({error}); {INSTALL}") from error
        if self._lora is not None and (reason := adapters.unsupported(self._path, adapters.rank_of(self._lora))):
            self._lora, self.merges = None, reason
        settings = self._settings()
        more = (*(images.USED if self._has_tower else ()), *(adapters.USED if self._lora is not None else ()))
        _check_use((*USED, *more, ("vllm.engine.arg_utils", f"EngineArgs {' '.join(settings)}")))
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        with suppress(ValueError):  # an engine was started before
            WeightTransferEngineFactory.register_engine(BACKEND, "aligner.rollout.vllm.weights", "InProcessWeights")
        if self._has_tower:
            images.register(json.loads((self._path / "config.json").read_text())["architectures"][0])
        whole = classes_of_transformers()
        with _generators_kept():  # vLLM seeds the process's generators
            self._llm = vllm.LLM(**settings)
        self._llm.apply_model(partial(keep_apart, whole))
        self._has_inner_level = bool(self._llm.apply_model(images.has_inner_level)[0])
        client = self._llm.llm_engine.engine_core
        try:
            attrgetter(*HELD)(client)
            if self.capabilities.sees and self._vision is not None:
                self._images = images.GivenImages(self._llm, self._vision, self._dtype)
        except AttributeError as error:
            raise _unfit(str(error)) from error
        if self._lora is not None:
            given = adapters.VLLMAdapters(self._llm, self._path, self._lora, self._renewed)
            self.merges = given.without_layer()
            self.adapters = None if self.merges else given
        # At shutdown or collection vLLM would destroy training's process groups.
        client._finalizer.detach()

    def _settings(self) -> dict[str, Any]:
        sizes, config = self._architecture, self._config
        launcher = {}
        if dist.is_initialized():
            os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(platform.device().index or 0)}
            launcher = {"distributed_executor_backend": "external_launcher"}
        memory = {"gpu_memory_utilization": self._memory_share()} if torch.cuda.is_available() else {}
        own: dict[str, Any] = dict(images.SETTINGS) if self._has_tower else {}
        own |= adapters.settings(self._lora) if self._lora is not None else {}
        if sizes.family == Family.cohere2 and sizes.sliding_window:  # vLLM's windows are one token longer
            own |= {"hf_overrides": {"sliding_window": sizes.sliding_window - 1}}
        if sizes.no_rope_layers:  # else vLLM decides by the context's length, whatever the model's config says
            own |= {"override_generation_config": {"attn_temperature_tuning": sizes.attention_temperature > 0}}
        return (
            launcher
            | memory
            | own
            | {
                "model": str(self._path),
                "load_format": "dummy",
                "dtype": str(self._dtype).removeprefix("torch."),
                "skip_tokenizer_init": True,
                "generation_config": "vllm",
                "tensor_parallel_size": self._tp,
                "max_model_len": self.max_sequence_length,
                "max_num_seqs": config.max_batch_size,
                "max_num_batched_tokens": max(config.prefill_chunk_tokens, config.max_batch_size),
                "kv_cache_memory_bytes": self._cache_bytes(),
                "enable_prefix_caching": config.vllm.prefix_caching,
                "enforce_eager": config.vllm.enforce_eager,
                "enable_sleep_mode": self._can_sleep,
                "weight_transfer_config": {"backend": BACKEND},
                "logprobs_mode": "processed_logprobs" if self._scaled else "raw_logprobs",
                "seed": 0,
            }
        )

    def _memory_share(self) -> float:
        """The part of the device's memory that must be free at the start: weights and cache. vLLM checks it (`request_memory`) although the
        cache's size is given; its default of 0.92 is never free beside a trainer.

        Raises EngineError if less is free.
        """
        torch.cuda.empty_cache()  # vLLM counts the device's free memory, without what training's allocator could reuse
        free, total = torch.cuda.mem_get_info()
        weights, cache = self._weight_bytes // self._tp, self._cache_bytes()
        if weights + cache > free:
            sizes = {"weights": weights, "cache": cache, "free": free, "total": total}
            gib = {name: f"{size / 2**30:.1f}" for name, size in sizes.items()}
            raise EngineError(
                f"rollout.engine=vllm: its weights ({gib['weights']} GiB) and key-value cache ({gib['cache']} GiB) do not fit into the "
                f"{gib['free']} GiB that are free of the device's {gib['total']}; allowed: a smaller rollout.kv_cache_tokens or "
                "rollout.max_batch_size, a larger rollout.tp, optimizer.offload=true"
            )
        return (weights + cache) / total

    def _cache_bytes(self) -> int:
        sizes, pages = self._architecture, -(-self.max_sequence_length // LARGEST_PAGE)
        tokens = self._config.kv_cache_tokens or pages * self._config.max_batch_size * LARGEST_PAGE
        groups = max(sizes.num_key_value_heads // self._tp, 1)
        # vLLM keeps one page for itself.
        return (tokens + LARGEST_PAGE) * 2 * sizes.num_layers * groups * sizes.head_dim * self._dtype.itemsize

    def begin_refit(self, manifest: Manifest) -> None:
        self._manifest, self._loaded = manifest, set()
        self._llm.collective_rpc("start_weight_update")
        self._updating, self._wanted = True, set(self._parameters())  # read now, before parameters appear that vLLM computes

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        named = [(self._file_name(name), tensor) for name, tensor in bucket]
        try:
            self._llm.collective_rpc("update_weights", kwargs={"update_info": {"weights": named, "loaded": self._loaded}})
        except Exception:
            self._updating = False  # vLLM gives it up
            raise

    def finish_refit(self, version: int) -> None:
        """Raises EngineError naming weights of vLLM's model that did not arrive."""
        self.abort_refit()
        names = [name for name in self._parameters() if name in self._wanted]
        if missing := [name for name in names if name not in self._loaded]:
            raise EngineError(f"vLLM's model has weights that the policy did not send: {named_few(missing)} of {len(names)}")
        self._renewed(version)

    def _renewed(self, version: int) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not forget the prefixes that it computed with the weights before")
        if self._has_tower:
            self._llm.llm_engine.reset_encoder_cache()
        self._version = version

    def abort_refit(self) -> None:
        if self._updating:
            self._updating = False
            self._llm.collective_rpc("finish_weight_update")

    def read_back(self, name: str) -> Tensor | None:
        *parents, part, kind = name.split(".")
        group = [".".join([*parents, each, kind]) for each in _FUSED if _FUSED[each] == _FUSED.get(part)]
        if not group or any(each not in self._manifest.tensors for each in group):
            group, fused = [name], part  # also an up_proj without a gate
        else:
            fused = _FUSED[part]
        held = self._parameters().get(self._own_name(".".join([*parents, fused, kind])))
        start = sum(self._manifest.tensors[each].shape[0] for each in group[: group.index(name)])
        end = start + self._manifest.tensors[name].shape[0]
        if self._tp > 1 or held is None or held.dtype != self._dtype or held.shape[:1] < (end,):
            return None  # a part of it, or packed for a kernel
        return held[start:end]

    def _own_name(self, name: str) -> str:
        """What vLLM's model calls a parameter of the files, whose names differ where the model has a tower."""
        name = self._file_name(name)
        mapper = self._llm.apply_model(lambda model: getattr(model, "hf_to_vllm_mapper", None))[0] if self._has_tower else None
        return name if mapper is None else str(mapper.map_name(name))

    def _file_name(self, name: str) -> str:
        return images.with_inner_level(name) if self._has_inner_level else name

    def sleep(self, memory: frozenset[Memory]) -> None:
        """All memory or none, and on a GPU only. Weights under adapters, which refits do not bring again, wait in the host's memory."""
        if self._can_sleep and memory == ALL_MEMORY:
            self._llm.sleep(level=2 if self.adapters is None else 1)
            self._asleep = memory

    def wake(self, memory: frozenset[Memory]) -> None:
        if tags := [kind.value for kind in Memory if kind in memory & self._asleep]:
            self._llm.wake_up(tags)
            self._asleep -= memory

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Raises ConfigError for settings of `sampling` that vLLM does not support here."""
        engine, callers, more = self._llm.llm_engine, callers_of(work), True
        self._kind(sampling)
        given = {} if self.adapters is None else {"lora_request": self.adapters.request}
        running: dict[str, GenRequest] = {}
        try:
            while more or running:
                if callers is not None and (left := callers.left()):
                    engine.abort_request(gone := [name for name, request in running.items() if request.index in left])
                    running = {name: request for name, request in running.items() if name not in gone}
                room = self._config.max_batch_size - len(running)
                if more and room:
                    requests = work.take(room)
                    more = bool(requests) or work.is_open
                    for request in requests:
                        try:
                            if callers is not None:
                                self._check(request)
                            prompt, params = self._prompt(request), self._params(request, request.sampling or sampling)
                        except AlignerError as error:
                            if callers is None:
                                raise
                            callers.refuse(request.index, error)
                            continue
                        running[name := str(next(self._ids))] = request
                        engine.add_request(name, prompt, params, **given)
                outputs = self._step() if running else []
                if finished := [output for output in outputs if output.finished and output.request_id in running]:
                    if callers is not None:
                        _tell_likeliest(finished, running, callers.hear)
                    yield [self._result(output, running.pop(output.request_id), sampling) for output in finished]
        except Exception:
            engine.abort_request(list(running))  # but do not drain: a failed engine may hang
            raise
        except GeneratorExit:
            self._drain(running)
            raise
        self._drain(running)

    def _step(self) -> list[Any]:
        with _generators_kept():  # on the CPU vLLM draws from the process's generator
            return self._llm.llm_engine.step()

    def _drain(self, running: dict[str, GenRequest]) -> None:
        """Withdraw running requests, and step until vLLM has nothing left: on a GPU it is one step ahead of its results."""
        core, until = self._llm.llm_engine.engine_core.engine_core, time.monotonic() + DRAIN_SECONDS
        self._llm.llm_engine.abort_request(list(running))
        while core.scheduler.has_requests() or core.batch_queue:
            if time.monotonic() > until:
                left = f"{len(core.batch_queue or ())} steps in its queue, {len(running)} requests withdrawn"
                raise EngineError(f"vLLM was not done {DRAIN_SECONDS:.0f} s after the last response of a generation ({left})")
            self._step()

    def _check(self, request: GenRequest) -> None:
        """Raise EngineError or ConfigError for what others may send."""
        check_ids(request, self._architecture.vocab_size)
        if request.sampling is not None:
            self._kind(request.sampling)

    def _prompt(self, request: GenRequest) -> Any:
        from vllm.inputs import tokens_input

        if self._images is not None and images_in(request.extras):
            return self._images.prompt(request)
        return tokens_input(list(request.tokens))

    def _params(self, request: GenRequest, sampling: SamplingConfig) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self.max_sequence_length - len(request.tokens)
        return SamplingParams(
            **{name: getattr(sampling, name) for name in _SAME.split()},
            **({"logit_bias": dict.fromkeys(gaps, LEAST_BIAS)} if (gaps := missing_ids(sampling)) else {}),
            min_tokens=min(sampling.min_response_length, room, request.limit or room),
            max_tokens=min(sampling.longest, room, request.limit or room),
            stop_token_ids=sorted({self._eos_id, *sampling.stop_token_ids}.intersection(range(self._architecture.vocab_size))),
            ignore_eos=True,  # vLLM's own; this run's is a stop token
            seed=request.seed,
            logprobs=request.top,  # besides the sampled token's
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _kind(self, sampling: SamplingConfig) -> LogprobKind:
        self._config.vllm.check(sampling)
        if self._scaled and (refused := sampling.reshaping()):  # then vLLM's log-probs are after reshaping
            scaled = f"where rollouts have temperature={self._config.sampling.temperature}"
            raise ConfigError(f"rollout.sampling.{refused[0]}: not available with rollout.engine=vllm {scaled}; allowed: the default")
        return LogprobKind.sampled if self._scaled or sampling.temperature in (0.0, 1.0) else LogprobKind.raw

    def _result(self, output: Any, request: GenRequest, sampling: SamplingConfig) -> GenResult:
        (one,) = output.outputs
        if one.finish_reason not in _REASONS:
            raise EngineError(f"vLLM ended the response to request {request.index} for another reason: {one.finish_reason}")
        return GenResult(
            index=request.index,
            tokens=tuple(one.token_ids),
            logprobs=tuple(step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)),
            kind=self._kind(request.sampling or sampling),
            finish_reason=_REASONS[one.finish_reason],
            weight_version=self._version,
        )

    def shutdown(self) -> None:
        """Keeps the process groups, since training's are among them."""
        if self._llm is not None:
            from vllm.distributed.parallel_state import destroy_model_parallel

            core = self._llm.llm_engine.engine_core.engine_core
            core.model_executor.shutdown()
            core.scheduler.shutdown()
            destroy_model_parallel()  # its own: a dense model's have no group for a later engine's experts
            self._llm = None
            gc.unfreeze()
            gc.collect()

    def _parameters(self) -> dict[str, Tensor]:
        """By the names that its model loads them by: a layer with an adapter is within another."""
        found: list[dict[str, Tensor]] = self._llm.apply_model(lambda model: dict(model.named_parameters()))
        return {name.replace(".base_layer.", "."): parameter for name, parameter in found[0].items()}


def _tell_likeliest(finished: Sequence[Any], running: Mapping[str, GenRequest], hear: Callable[..., None]) -> None:
    """Of the responses whose requests ask for them, with everything else: results do not have them."""
    for output in finished:
        request, (one,) = running[output.request_id], output.outputs
        if request.top:
            places = [sorted(((token, own.logprob) for token, own in step.items()), key=lambda best: -best[1]) for step in one.logprobs]
            logprobs = [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
            hear(request.index, tuple(one.token_ids), logprobs, [place[: request.top] for place in places])


def _generators_kept() -> AbstractContextManager[None]:
    """Restores torch's generators of the process and of this rank's device, and no other, at the end."""
    device = platform.device()
    return torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else [])


def classes_of_transformers() -> dict[type, Any]:
    """The classes of models that `transformers` has loaded, each with its own `__init__` or None."""
    module = sys.modules.get("transformers.modeling_utils")
    found, left = {}, [module.PreTrainedModel] if module is not None else []
    while left:
        kind = left.pop()
        found[kind] = vars(kind).get("__init__")
        left += kind.__subclasses__()
    return found


def keep_apart(whole: Mapping[type, Any], model: torch.nn.Module) -> None:
    """For a model that it has no layers for, vLLM takes `transformers`' modules, and changes their class so that a call is compiled.

    The policy may have modules of that class: vLLM's alone get another one, with the change. `whole`: the classes as they were.
    """
    for kind in [one for one in {type(module) for module in model.modules()} & whole.keys() if "__call__" in vars(one)]:
        own = type(kind.__name__, (kind,), {"__call__": vars(kind)["__call__"], "__module__": kind.__module__})
        for module in model.modules():
            if type(module) is kind:
                module.__class__ = own
        del kind.__call__
        if whole[kind] is not None:
            kind.__init__ = whole[kind]  # type: ignore[misc]
        else:
            del kind.__init__


def _check_use(used: Iterable[tuple[str, str]]) -> None:
    """Raise EngineError naming parts that vLLM lacks, or has with other arguments."""
    wrong = []
    for module, calls in used:
        for name, *arguments in map(str.split, calls.split(",")):
            try:
                found = attrgetter(name)(import_module(module))
                own = (None,) if inspect.isfunction(found) and "." in name else ()  # self
                inspect.signature(found).bind(*own, **dict.fromkeys(arguments))
            except (ImportError, AttributeError, TypeError) as error:
                wrong.append(f"{module}.{name} ({error})")
    if wrong:
        raise _unfit("; ".join(wrong))


def _unfit(wrong: str) -> EngineError:
    found = getattr(import_module("vllm"), "__version__", "?")
    return EngineError(
        f"rollout.engine=vllm: the installed version of vLLM, {found}, does not match this engine (written for 0.32 and 0.33): {wrong}; "
        f"allowed: {INSTALL}; rollout.engine=megatron"
    )
