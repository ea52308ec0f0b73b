"""`rollout.engine=auto`: of the engines that have been executed with this code, vLLM if it is here and can do what the run asks for, else
the built-in one. TensorRT-LLM and engines of other packages (entry points) are used by name only.

Nothing is imported for the choice: packages are asked whether they are installed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from aligner.errors import AlignerError, ConfigError, EngineError
from aligner.parallel import platform
from aligner.rollout.config import EngineKind, RolloutConfig, check_settings
from aligner.rollout.tensorrt_llm import contract as tensorrt_llm_contract
from aligner.rollout.vllm.engine import INSTALL


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An engine, and for each other one why it is not that one."""

    engine: EngineKind
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        not_taken = "".join(f"; not {reason}" for reason in self.reasons)
        return f"rollout.engine=auto: {self.engine.value}{not_taken}; rollout.engine=NAME takes another"


def choose(config: RolloutConfig, *, tp: int, batch_invariant: bool = False, delta_nets: bool = False) -> Choice:
    """The engine for `config`, whose `engine` is auto, with replicas of `tp` ranks, on this machine; `delta_nets`: the model has some."""
    reasons = ("tensorrt_llm (it has never been executed with this code)",) if find_spec(tensorrt_llm_contract.PACKAGE) else ()
    try:
        if platform.device().type != "cuda":
            raise EngineError("it is for GPUs")
        _check_vllm(config)
        if batch_invariant:
            raise EngineError("model.batch_invariant=true: its log-probs are not the trainer's to the bit")
        if delta_nets:
            raise EngineError("the model's delta nets are sampled from by the built-in engine alone")
        check_settings(replace(config, engine=EngineKind.vllm.value), tp=tp)
    except AlignerError as error:
        return Choice(engine=EngineKind.megatron, reasons=(f"vllm ({error})", *reasons))
    return Choice(engine=EngineKind.vllm, reasons=reasons)


def check_installed(config: RolloutConfig) -> None:
    """Raise ConfigError if the engine that `config` names is of a package that is not here."""
    for kind, package, remedy in (
        (EngineKind.vllm, "vllm", INSTALL),
        (EngineKind.tensorrt_llm, tensorrt_llm_contract.PACKAGE, "use the image of the Dockerfile"),
    ):
        if config.engine == kind.value and find_spec(package) is None:
            raise ConfigError(f"rollout.engine={kind.value}: {package} is not installed; {remedy}, or rollout.engine=megatron")


def _check_vllm(config: RolloutConfig) -> None:
    if find_spec("vllm") is None:
        raise EngineError("not installed")
    if config.sampling.temperature != 1 and (reshaping := config.sampling.reshaping()):
        raise EngineError(
            f"its log-probs would be at temperature 1: rollout.sampling.temperature={config.sampling.temperature}, {reshaping[0]}"
        )
