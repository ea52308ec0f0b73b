"""`rollout.engine=auto`: the first of TensorRT-LLM, vLLM and the built-in engine that is here and can do what the run asks for.

Nothing is imported for the choice: packages are asked whether they are installed and in which version. Engines of other packages (entry
points) are used by name only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from aligner.errors import AlignerError, ConfigError, EngineError
from aligner.parallel import platform
from aligner.rollout import tensorrt_llm_contract
from aligner.rollout.config import EngineKind, RolloutConfig, check_settings
from aligner.rollout.vllm import KNOWN_VERSIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An engine, and for each one that would come first why it is not that one."""

    engine: EngineKind
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"rollout.engine=auto: {self.engine.value}" + "".join(f"; not {reason}" for reason in self.reasons)


def choose(config: RolloutConfig, *, tp: int, batch_invariant: bool = False, delta_nets: bool = False) -> Choice:
    """The engine for `config`, whose `engine` is auto, with replicas of `tp` ranks, on this machine; `delta_nets`: the model has some."""
    reasons = []
    for kind, check in ((EngineKind.tensorrt_llm, _check_tensorrt_llm), (EngineKind.vllm, _check_vllm)):
        try:
            _check_needs(config, check, batch_invariant=batch_invariant)
            if delta_nets:
                raise EngineError("the model's delta nets are sampled from by the built-in engine alone")
            check_settings(replace(config, engine=kind.value), tp=tp)
        except AlignerError as error:
            reasons.append(f"{kind.value} ({error})")
        else:
            return Choice(engine=kind, reasons=tuple(reasons))
    return Choice(engine=EngineKind.megatron, reasons=tuple(reasons))


def check_installed(config: RolloutConfig) -> None:
    """Raise ConfigError if the engine that `config` names is of a package that is not here."""
    for kind, package, remedy in (
        (EngineKind.vllm, "vllm", "pip install 'aligner[vllm]'"),
        (EngineKind.tensorrt_llm, tensorrt_llm_contract.PACKAGE, "use the image of the Dockerfile"),
    ):
        if config.engine == kind.value and find_spec(package) is None:
            raise ConfigError(f"rollout.engine={kind.value}: {package} is not installed; {remedy}, or rollout.engine=megatron")


def _check_needs(config: RolloutConfig, check: Callable[[RolloutConfig], None], *, batch_invariant: bool) -> None:
    """Raise for what no wrapped package can do, and what `check` of one of them says."""
    if platform.device().type != "cuda":
        raise EngineError("it is for GPUs")
    check(config)
    if batch_invariant:
        raise EngineError("model.batch_invariant=true: its log-probs are not the trainer's to the bit")
    if config.sampling.raw_logprobs:
        raise EngineError("rollout.sampling.raw_logprobs=true: it gives log-probs of one kind")


def _check_tensorrt_llm(config: RolloutConfig) -> None:
    if find_spec(tensorrt_llm_contract.PACKAGE) is None:
        raise EngineError("not installed")
    tensorrt_llm_contract.gate(allow_drafts=config.tensorrt_llm.allow_drafts)


def _check_vllm(config: RolloutConfig) -> None:
    try:
        installed = version("vllm") if find_spec("vllm") is not None else ""
    except PackageNotFoundError:
        installed = ""
    if not installed:
        raise EngineError("not installed")
    if installed.split("+")[0] not in KNOWN_VERSIONS:
        raise EngineError(f"version {installed} is not known to work; known: {', '.join(KNOWN_VERSIONS)}")
    if config.sampling.temperature != 1 and (reshaping := config.sampling.reshaping()):
        raise EngineError(
            f"its log-probs would be at temperature 1: rollout.sampling.temperature={config.sampling.temperature}, {reshaping[0]}"
        )
