"""TensorRT-LLM's executor in this process: pausing it, replacing its model's weights, giving memory back and taking it again.

All of it goes through private parts of the package, recorded in the contract. The rules: weights are replaced while the executor is paused
(`control_action`); a refit ends with each module's own work after loading and with forgetting all cached prefixes; what stays paused for
long is taken for hung, so training must not happen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from aligner.errors import EngineError
from aligner.parallel import platform
from aligner.rollout.engine import Memory
from aligner.rollout.tensorrt_llm_contract import Contract
from aligner.rollout.tensorrt_llm_environment import limit

_BEFORE, _AFTER = ("pre_reload_weights",), ("process_weights_after_loading", "post_load_weights")


class Executor:
    """Around `LLM._executor.engine` (a PyExecutor) of one rank. In a replica of several ranks every rank calls every method."""

    def __init__(self, engine: Any, contract: Contract, *, pause_seconds: float) -> None:
        self._engine = engine
        self._contract = contract
        self._pause_seconds = pause_seconds
        self._refit = ExitStack()
        self._is_loading = False

    def begin_refit(self) -> None:
        """Pause until `finish_refit` or `abort_refit`, and get the modules ready."""
        if self._is_loading:
            raise EngineError("TensorRT-LLM: a refit began before the last one ended")
        self._is_loading = True
        self._pause(self._refit)
        platform.synchronize()
        if self._contract.find("ModelLoader.begin_update_weights"):
            self._loader.begin_update_weights()
        self._call_modules(_BEFORE)

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy full tensors, by Hugging Face name, into the fused and split ones. Done when it returns."""
        self._loader.reload(self._model, dict(bucket), allow_partial_loading=True)
        platform.synchronize()

    def finish_refit(self) -> None:
        """Finish after the last bucket; then continue."""
        if self._contract.find("WorkerExtension.finalize_weight_update"):
            self._finalize_by_extension()
        else:
            self._call_modules(_AFTER)
        self._engine.reset_prefix_cache()
        platform.synchronize()
        self._resume()

    def abort_refit(self) -> None:
        """Continue with mixed weights, which must not be used. Does nothing outside of a refit."""
        if not self._is_loading:
            return
        try:
            if self._contract.find("ModelLoader.abort_update_weights"):
                self._loader.abort_update_weights()
        finally:
            self._resume()

    def release(self, memory: frozenset[Memory]) -> None:
        """Give device memory back; its contents are lost to us, whatever the package keeps of them."""
        from tensorrt_llm._torch.virtual_memory import release_with_tag

        self._exchange(release_with_tag, memory)

    def materialize(self, memory: frozenset[Memory]) -> None:
        """Take it again, at the same addresses."""
        from tensorrt_llm._torch.virtual_memory import materialize_with_tag

        self._exchange(materialize_with_tag, memory)

    def parameter(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The model's parameter of exactly this name and shape, if it has one: those that it neither fuses, renames nor pads."""
        found = dict(self._model.named_parameters()).get(name)
        return found if found is not None and tuple(found.shape) == shape else None

    @property
    def _model(self) -> Any:
        return self._engine.model_engine.model

    @property
    def _loader(self) -> Any:
        return self._engine.model_engine.model_loader

    def _pause(self, stack: ExitStack) -> None:
        """Enter control_action: its requests are done and its loop stands still."""
        drains = {"drain": True} if self._contract.accepts("PyExecutor.control_action", "drain") else {}
        with limit(self._pause_seconds, "to pause its executor (control_action)"):
            stack.enter_context(self._engine.control_action(**drains))

    def _resume(self) -> None:
        self._is_loading = False
        self._refit.close()

    def _exchange(self, action: Callable[..., int], memory: frozenset[Memory]) -> None:
        tags = [tag for kind in sorted(memory) for tag in self._contract.rules.memory_tags[kind.value]]
        with ExitStack() as stack:
            self._pause(stack)
            if Memory.kv_cache in memory:
                self._engine.reset_prefix_cache()  # the cache's contents go: nobody may find a prefix in them
            platform.synchronize()
            action(*tags)
            platform.synchronize()

    def _call_modules(self, names: Sequence[str]) -> None:
        """Call the hooks that modules have, as the package's own refit does. Which ones have any only they know: so it is asked."""
        for module in self._model.modules():
            if getattr(module, "_weights_removed", False):
                continue
            for name in names:
                hook = getattr(module, name, None)
                if hook is not None:
                    hook()

    def _finalize_by_extension(self) -> None:
        """The package's own finalisation, which keeps what captured CUDA graphs refer to in place. It is a method of a class for Ray's
        workers that only needs to know the executor."""
        from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

        extension = WorkerExtension.__new__(WorkerExtension)
        extension.engine = self._engine
        extension.finalize_weight_update()
