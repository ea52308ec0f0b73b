"""Which engine a run samples with: picks by `rollout.engine`, and imports a wrapped package only if it is the one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.tokenizer import Tokenizer
from aligner.errors import EngineError
from aligner.models.config import Architecture
from aligner.models.families import architecture_to_hf
from aligner.models.modules.build import LanguageModel
from aligner.models.modules.linear import weight_storage
from aligner.models.training.offload import HostMemory
from aligner.models.training.policy import MegatronPolicy
from aligner.parallel import platform
from aligner.parallel.collectives import gather_objects, together
from aligner.parallel.transfer import block_group
from aligner.protocols import FollowUp, Replica
from aligner.rollout.builtin.megatron import MegatronEngine
from aligner.rollout.builtin.refit import MIB
from aligner.rollout.config import ENGINES, EngineKind, RolloutConfig, ShareWork, VerifyRefit, check_engine
from aligner.rollout.engine import ForeignEngine
from aligner.rollout.engine.choice import choose
from aligner.rollout.engine.episodes import Conversing
from aligner.rollout.engine.foreign import StreamedEngine, WeightStream
from aligner.rollout.engine.gate import Gate
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.rollout.engine.manifest import hf_manifest
from aligner.rollout.engine.work import WorkSharing

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

    The tokenizer says what ends a response and which ids stand for no token, which are never sampled; without one `eos_id` ends it, and
    `decode` (token ids -> text) is for stop strings. With `follow_up` responses are episodes of several turns. Raises ConfigError if the
    engine cannot be laid out as the config says, EngineError if it cannot be started or filled.
    """
    end_ids, missing, rows = [eos_id], [], policy.chunks[0].architecture.vocab_size
    if tokenizer is not None:
        end_ids, missing, decode = list(tokenizer.end_ids), tokenizer.missing_ids(rows), partial(tokenizer.decode, skip_special=False)
    gate: Gate | None = None
    if config.engine == EngineKind.auto:
        config = _chosen(policy, config)
    if config.engine == EngineKind.megatron:
        if config.asynchronous.max_staleness:
            tp = config.tp or policy.chunks[0].pg_collection.tp.size()
            gate = Gate(block_group(tp, backend="gloo"), timeout_seconds=config.asynchronous.timeout_seconds)
        engine = MegatronEngine(policy.chunks, config, eos_id=end_ids[0], decode=decode, pauses=gate)
        group = engine.shards.group if engine.shards.count > 1 else None
    else:
        trained = policy.chunks[0].pg_collection.tp
        tp = config.tp or trained.size()
        check_engine(config, policy.chunks[0].architecture, tp=tp, world_size=dist.get_world_size())
        while missing[-1:] == [rows - 1]:  # its model ends with the last token: there are no rows behind it
            rows = missing.pop()
        precision = torch.get_float32_matmul_precision()
        engine = _streamed(policy, config, tp=tp, eos_id=end_ids[0], rows=rows)
        platform.set_float32_matmul(precision)  # starting vLLM sets its own
        group = trained if tp == trained.size() > 1 else block_group(tp)
    fixed = not _shares(config.share_work, policy.chunks[0])
    conversing = None
    if follow_up is not None:
        ranks = dist.get_world_size() // engine.replica.count
        conversing = Conversing(follow_up=follow_up, group=block_group(ranks, backend="gloo"), in_step=fixed)
    sharing = WorkSharing(engine.replica, group, fixed=fixed)
    more: dict[str, Any] = {"conversing": conversing, "end_ids": end_ids[1:], "missing": missing}
    return PhasedEngine(engine, config.sampling, sharing, offload=config.offload, gate=gate, **more)


def _chosen(policy: MegatronPolicy, config: RolloutConfig) -> RolloutConfig:
    """`config` with the engine that all ranks found; said once. Raises EngineError if they found different ones."""
    chunk = policy.chunks[0]
    tp = config.tp or chunk.pg_collection.tp.size()
    delta_nets = bool(chunk.architecture.linear_attention_layers)
    found = gather_objects(str(choice := choose(config, tp=tp, batch_invariant=chunk.batch_invariant, delta_nets=delta_nets)))
    if others := [rank for rank, one in enumerate(found) if one != found[0]]:
        raise EngineError(
            f"{found[0]} on rank 0, but on rank {others[0]} {found[others[0]]}: all nodes need the same packages, or name the engine"
        )
    if dist.get_rank() == 0:
        print(choice, flush=True)
    return replace(config, engine=choice.engine.value)


def _shares(choice: ShareWork, chunk: LanguageModel) -> bool:
    """Whether replicas share one queue."""
    return choice is ShareWork.always or choice is ShareWork.auto and (platform.device().type == "cuda" or chunk.batch_invariant)


def _streamed(policy: MegatronPolicy, config: RolloutConfig, *, tp: int, eos_id: int, rows: int) -> StreamedEngine:
    """A wrapped package's engine, started. Its vocabulary has so many rows, the first of the policy's."""
    chunk = policy.chunks[0]
    sizes = replace(chunk.architecture, vocab_size=rows)
    dtype = chunk.config.params_dtype
    directory = TemporaryDirectory(prefix="aligner-engine-")  # what these packages read a model's sizes from
    hf = architecture_to_hf(sizes) | {"dtype": str(dtype).removeprefix("torch.")}
    (Path(directory.name) / "config.json").write_text(json.dumps(hf))
    foreign = together(
        lambda: _foreign(config, chunk, Path(directory.name), sizes, tp=tp, eos_id=eos_id), "making the rollout engine", error=EngineError
    )
    manifest = hf_manifest(sizes, dtype)

    def cut(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, tensor = named
        return name, tensor[: manifest.tensors[name].shape[0]] if name in manifest.tensors else tensor

    stream = WeightStream(
        export=lambda: map(cut, policy.export_weights()),
        manifest=manifest,
        bucket_bytes=config.refit_bucket_mib * MIB,
        verified=config.verify_refit == VerifyRefit.checksum,
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    replica = Replica(index=rank // tp, count=size // tp, is_leader=rank % tp == 0)
    parameters = HostMemory(kept=lambda: weight_storage(policy.chunks))
    return StreamedEngine(foreign, stream, replica, policy=parameters if config.offload else None, at_end=directory.cleanup)


def _foreign(config: RolloutConfig, chunk: LanguageModel, directory: Path, sizes: Architecture, *, tp: int, eos_id: int) -> ForeignEngine:
    dtype, length = chunk.config.params_dtype, chunk.max_sequence_length
    if config.engine == EngineKind.tensorrt_llm:
        from aligner.rollout.tensorrt_llm.engine import TensorRTLLMEngine

        return TensorRTLLMEngine(config, path=directory, dtype=dtype, eos_id=eos_id, max_sequence_length=length, tp=tp)
    if config.engine != EngineKind.vllm:
        (entry,) = entry_points(group=ENGINES, name=config.engine)
        settings = {"dtype": dtype, "eos_id": eos_id, "max_sequence_length": length, "tp": tp}
        return entry.load()(config, path=directory, architecture=sizes, **settings)
    from aligner.rollout.vllm.engine import VLLMEngine, VLLMModel

    model = VLLMModel(directory=directory, architecture=sizes, dtype=dtype, max_sequence_length=length, eos_id=eos_id)
    return VLLMEngine(model, config, tp=tp)
