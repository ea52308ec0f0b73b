"""Makes the engine that `rollout.engine` names, and imports a wrapped package only if it is the chosen one.

`rollout.engine=auto` chooses among the engines that have run with this code: vLLM if it is installed and supports the run's settings, else
the built-in one. TensorRT-LLM and engines of other packages (entry points) are used by name only. The choice imports no package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.tokenizer import Tokenizer
from aligner.errors import AlignerError, ConfigError, EngineError
from aligner.files import own_directory
from aligner.models.config import Architecture, HFArchitecture, SeeingArchitecture
from aligner.models.families import architecture_to_hf
from aligner.models.families.mapping import ADAPTER
from aligner.models.families.own_modules import hf_config
from aligner.models.families.wrappers import with_axes
from aligner.models.modules.chunk import Chunk
from aligner.models.modules.hf_chunk import HFChunk
from aligner.models.modules.linear import linear_weight, weight_storage
from aligner.models.modules.peft import export_adapters, pair_names, projections
from aligner.models.training.offload import HostMemory
from aligner.models.training.policy import MegatronPolicy
from aligner.parallel import platform
from aligner.parallel.collectives import gather_objects, together
from aligner.parallel.transfer import block_group
from aligner.protocols import FollowUp, Replica
from aligner.rollout.builtin.megatron import MegatronEngine
from aligner.rollout.builtin.own_modules import OwnModulesEngine, has_states
from aligner.rollout.builtin.refit import MIB
from aligner.rollout.config import ENGINES, EngineKind, Refit, RolloutConfig, ShareWork, VerifyRefit, check_engine, check_settings
from aligner.rollout.engine import ForeignEngine
from aligner.rollout.engine.episodes import Conversing
from aligner.rollout.engine.foreign import Adapters, StreamedEngine, kept_together
from aligner.rollout.engine.gate import Gate
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.rollout.engine.manifest import Manifest, TensorSpec, checksum, hf_manifest, manifest_of
from aligner.rollout.engine.work import WorkSharing
from aligner.rollout.tensorrt_llm import contract as tensorrt_llm_contract
from aligner.rollout.vllm import INSTALL
from aligner.rollout.vllm.images import KINDS, is_seen

_SEES = "with model.images=true the built-in engine reads the images, with the policy's own tower"
Decode = Callable[[Sequence[int]], str]


def create_engine(
    policy: MegatronPolicy,
    config: RolloutConfig,
    *,
    tokenizer: Tokenizer | None = None,
    eos_id: int = -1,
    decode: Decode | None = None,
    follow_up: FollowUp | None = None,
) -> PhasedEngine:
    """The engine on the policy's weights, ready to generate if it does not sleep between generations. Collective over the component.

    The tokenizer knows which tokens end a response, and which ids are never sampled: they stand for no token, or for a place in an image.
    Without one `eos_id` ends a response, and `decode` (token ids -> text) serves stop strings. With `follow_up` responses are episodes of
    several turns. Raises ConfigError if the engine does not support the configured layout, EngineError if it cannot be started or filled.
    """
    chunk = policy.chunks[0]
    end_ids, missing, rows = [eos_id], [], chunk.architecture.vocab_size
    if tokenizer is not None:
        end_ids, missing, decode = list(tokenizer.end_ids), tokenizer.missing_ids(rows), partial(tokenizer.decode, skip_special=False)
    gate: Gate | None = None
    if config.engine == EngineKind.auto:
        config = _chosen(policy, config)
    if config.engine == EngineKind.megatron and config.asynchronous.max_staleness:
        tp = config.tp or chunk.pg_collection.tp.size()
        gate = Gate(block_group(tp, backend="gloo"), timeout_seconds=config.asynchronous.timeout_seconds)
    if config.engine == EngineKind.megatron and isinstance(chunk, HFChunk):
        engine, group = OwnModulesEngine(chunk, config, eos_id=end_ids[0], decode=decode, pauses=gate), None
    elif config.engine == EngineKind.megatron:
        engine = MegatronEngine(policy.chunks, config, eos_id=end_ids[0], decode=decode, pauses=gate)
        group = engine.shards.group if engine.shards.count > 1 else None
    else:
        trained = chunk.pg_collection.tp
        tp = config.tp or trained.size()
        reason = only_built_in(chunk.architecture, config.engine)
        if not reason and isinstance(chunk, HFChunk) and config.engine == EngineKind.tensorrt_llm:
            reason = f"{chunk.architecture.model_type} has transformers' own modules, which have not run with it"
        if reason:
            raise ConfigError(f"rollout.engine={config.engine}: {reason}; allowed: auto, megatron")
        check_engine(config, chunk.architecture, tp=tp, world_size=dist.get_world_size())
        whole = isinstance(chunk.architecture, (HFArchitecture, SeeingArchitecture))  # its config is that of its files
        while missing[-1:] == [rows - 1] and not whole:  # its model ends with the last token: no rows follow it
            rows = missing.pop()
        precision = torch.get_float32_matmul_precision()
        engine = _streamed(policy, config, tp=tp, eos_id=end_ids[0], rows=rows)
        platform.set_float32_matmul(precision)  # starting vLLM sets its own
        group = trained if tp == trained.size() > 1 else block_group(tp)
    shares = config.share_work is ShareWork.always
    if config.share_work is ShareWork.auto:
        shares = platform.device().type == "cuda" or chunk.batch_invariant
    conversing = None
    if follow_up is not None:
        ranks = dist.get_world_size() // engine.replica.count
        conversing = Conversing(follow_up=follow_up, group=block_group(ranks, backend="gloo"), in_step=not shares)
    sharing = WorkSharing(engine.replica, group, fixed=not shares)
    never = sorted({*missing, *_slots(tokenizer)})
    more: dict[str, Any] = {"conversing": conversing, "end_ids": end_ids[1:], "missing": never}
    return PhasedEngine(engine, config.sampling, sharing, offload=config.offload, gate=gate, **more)


def _slots(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens in whose places images come: one that was sampled would ask for an image that is not there."""
    with suppress(ConfigError):  # of a processor that cannot be used, so that nothing is seen
        return () if tokenizer is None or tokenizer.vision is None else tokenizer.vision.slot_ids
    return ()


def _chosen(policy: MegatronPolicy, config: RolloutConfig) -> RolloutConfig:
    """`config` with the engine that all ranks found, printed once. Raises EngineError if they found different ones."""
    chunk = policy.chunks[0]
    tp = config.tp or chunk.pg_collection.tp.size()
    found = gather_objects(
        str(choice := choose(config, tp=tp, batch_invariant=chunk.batch_invariant, own=only_built_in(chunk.architecture)))
    )
    if others := [rank for rank, one in enumerate(found) if one != found[0]]:
        differs = f"{found[0]} on rank 0, but on rank {others[0]} {found[others[0]]}"
        raise EngineError(f"{differs}: all nodes need the same packages, or name the engine")
    if dist.get_rank() == 0:
        print(choice, flush=True)
    return replace(config, engine=choice.engine.value)


def _streamed(policy: MegatronPolicy, config: RolloutConfig, *, tp: int, eos_id: int, rows: int) -> StreamedEngine:
    """A wrapped package's engine, started. Its vocabulary has `rows` rows, the first ones of the policy's."""
    chunk = policy.chunks[0]
    sizes = replace(chunk.architecture, vocab_size=rows)
    dtype = chunk.config.params_dtype
    directory = own_directory("aligner-engine-")  # these packages read a model's sizes from it
    hf = with_axes(architecture_to_hf(sizes)) | {"dtype": str(dtype).removeprefix("torch.")}
    (Path(directory.name) / "config.json").write_text(json.dumps(hf))
    is_own = isinstance(chunk, HFChunk)
    manifest = manifest_of(kept_together(chunk.file_outline())) if is_own else hf_manifest(sizes, dtype)
    reason = config.reason_to_merge(chunk.architecture, chunk.lora)
    adapters = None if reason else _adapters_alone(policy.chunks, manifest)
    lora = None if adapters is None else adapters.manifest
    given = {"tp": tp, "eos_id": eos_id, "weight_bytes": manifest.num_bytes, "lora": lora}
    make = partial(_foreign, config, chunk, Path(directory.name), sizes, **given)
    foreign = together(make, "making the rollout engine", error=EngineError)

    def cut(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, tensor = named
        return name, tensor[: manifest.tensors[name].shape[0]] if name in manifest.tensors else tensor

    def weights() -> Iterator[tuple[str, Tensor]]:
        named = policy.export_weights(merged=stream.adapters is None)
        return map(cut, kept_together(named) if is_own else named)

    rank, size = dist.get_rank(), dist.get_world_size()
    replica = Replica(index=rank // tp, count=size // tp, is_leader=rank % tp == 0)
    parameters = HostMemory(kept=lambda: weight_storage(policy.chunks))
    stream = StreamedEngine(
        foreign,
        weights,
        manifest,
        replica,
        bucket_bytes=config.refit_bucket_mib * MIB,
        verified=config.verify_refit == VerifyRefit.checksum,
        policy=parameters if config.offload else None,
        at_end=directory.cleanup,
    )
    if config.engine == EngineKind.vllm and foreign.adapters is not None:  # type: ignore[attr-defined]
        stream.adapters = adapters
    else:
        reason = reason or foreign.merges  # type: ignore[attr-defined]
        if config.refit is Refit.adapters:
            stream.shutdown()
            raise ConfigError(f"rollout.refit=adapters: {reason}; allowed: auto, merged")
        if rank == 0 and config.refit is Refit.auto and chunk.lora.is_on:
            print(f"rollout.refit=auto: merged, every refit sends all weights: {reason}", flush=True)
    return stream


def _adapters_alone(chunks: Sequence[Chunk], weights: Manifest) -> Adapters:
    """The adapters of a policy whose exported tensors are those of `weights`, as what a refit sends behind its frozen weights. Those are
    dense: of a packed model what training unpacks."""
    chunk, tensors = chunks[0], dict[str, TensorSpec]()
    lora, dtype = chunk.lora, chunk.config.params_dtype
    for one in projections(chunk.architecture, lora):
        outputs, inputs = weights.tensors[f"{one.name}.weight"].shape
        for name, shape in zip(pair_names(chunk, one.name), ((lora.plain.rank, inputs), (outputs, lora.plain.rank)), strict=True):
            tensors[name] = TensorSpec(shape=shape, dtype=dtype)

    def export() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in export_adapters(chunks):
            yield name, tensor.detach() * lora.scaling if ".lora_B." in name else tensor.detach()

    def digest() -> list[int]:
        own = (linear_weight(p) for chunk in chunks for name, p in chunk.named_parameters() if ADAPTER not in name)
        return torch.stack([checksum(tensor) for weight in own for tensor in weight.storage]).tolist()

    return Adapters(export=export, manifest=Manifest(tensors=tensors), digest=digest)


def _foreign(
    config: RolloutConfig, chunk: Chunk, directory: Path, sizes: Architecture, *, tp: int, eos_id: int, weight_bytes: int, lora: Any
) -> ForeignEngine:
    given = {"path": directory, "dtype": chunk.config.params_dtype, "max_sequence_length": chunk.max_sequence_length}
    if config.engine == EngineKind.tensorrt_llm:
        from aligner.rollout.tensorrt_llm.engine import TensorRTLLMEngine

        return TensorRTLLMEngine(config, **given, eos_id=eos_id, tp=tp)
    if config.engine == EngineKind.vllm:
        from aligner.rollout.vllm.engine import VLLMEngine

        own = {"eos_id": eos_id, "tp": tp, "weight_bytes": weight_bytes, "vision": chunk.vision, "lora": lora}
        return VLLMEngine(config, **given, **own, architecture=sizes)
    (entry,) = entry_points(group=ENGINES, name=config.engine)
    return entry.load()(config, **given, architecture=sizes, eos_id=eos_id, tp=tp)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An engine, and the reason against each other one."""

    engine: EngineKind
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        not_taken = "".join(f"; not {reason}" for reason in self.reasons)
        return f"rollout.engine=auto: {self.engine.value}{not_taken}; rollout.engine=NAME takes another"


def only_built_in(architecture: Architecture, engine: str = EngineKind.auto) -> str:
    """Why no package's engine, if it is not named, or not this one, samples from a model of this architecture; empty: it may."""
    if architecture.linear_attention_layers:
        return "the model's delta nets need the built-in engine"
    if engine == EngineKind.vllm and is_seen(architecture):
        return ""
    if isinstance(architecture, SeeingArchitecture):
        return _SEES
    if not isinstance(architecture, HFArchitecture):
        return ""
    config = hf_config(architecture.hf, "config.json")
    if has_states(config):
        return f"the recurrent layers of {architecture.model_type} need the built-in engine"
    if config.get_text_config() is config:
        return ""
    others = f"; rollout.engine=vllm has run with {', '.join(KINDS)}" if engine == EngineKind.vllm else ""
    return f"{architecture.model_type} is a model of images too, whose text part the built-in engine samples from{others}"


def choose(config: RolloutConfig, *, tp: int, batch_invariant: bool = False, own: str = "") -> Choice:
    """The engine for `config`, whose `engine` is auto, with replicas of `tp` ranks, on this machine; `own`: see `only_built_in`."""
    reasons = ("tensorrt_llm (it has never been executed with this code)",) if find_spec(tensorrt_llm_contract.PACKAGE) else ()
    try:
        if platform.device().type != "cuda":
            raise EngineError("it is for GPUs")
        _check_vllm(config)
        if batch_invariant:
            raise EngineError("model.batch_invariant=true: its log-probs are not the trainer's to the bit")
        if own:
            raise EngineError(own)
        check_settings(replace(config, engine=EngineKind.vllm.value), tp=tp)
    except AlignerError as error:
        return Choice(engine=EngineKind.megatron, reasons=(f"vllm ({error})", *reasons))
    return Choice(engine=EngineKind.vllm, reasons=reasons)


def check_installed(config: RolloutConfig) -> None:
    """Raise ConfigError if `config` names an engine whose package is not installed."""
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
        setting = f"rollout.sampling.temperature={config.sampling.temperature}, {reshaping[0]}"
        raise EngineError(f"its log-probs would be at temperature 1: {setting}")
