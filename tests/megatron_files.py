"""Checkpoints as Megatron-LM and NeMo write them, by Megatron-Core's own GPTModel: what reading them is compared with."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import tarfile
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import randomize

# What Megatron-Core writes from 0.19 on is read too (its checkpoints are those of the other tests there); it has no such file to damage.
with_common_file = pytest.mark.skipif(
    tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19), reason="this Megatron-Core writes no common.pt"
)
COMMON = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "max_position_embeddings": 64}
LLAMA = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False, "rotary_base": 500}
GROUPS = {"group_query_attention": True, "num_query_groups": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
# Arguments of Megatron-LM that say what kind of model it is; the name is the family that computes the same.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | GROUPS | UNTIED | {"kv_channels": 12, "norm_epsilon": 1e-3},
    "llama_tied": LLAMA | {"vocab_size": 61},
    "llama_biases": LLAMA | GROUPS | {"add_bias_linear": True},
    "llama_scaled": LLAMA | GROUPS | {"use_rope_scaling": True, "rope_scaling_factor": 4.0},
    "qwen2": LLAMA | GROUPS | UNTIED | {"add_qkv_bias": True},
    "qwen3": LLAMA | GROUPS | UNTIED | {"qk_layernorm": True, "kv_channels": 16},
    "mixtral": LLAMA | GROUPS | UNTIED | {"num_experts": 4, "moe_router_topk": 2},
    "qwen3_moe": LLAMA | GROUPS | UNTIED | {"qk_layernorm": True, "num_experts": 4, "moe_router_topk": 3, "moe_ffn_hidden_size": 24},
    "gpt2": {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
}
ROWS = 64  # of the embedding: the vocabulary of 61, padded


class AttnBackend(Enum):
    """An object of a class of Megatron-LM among its arguments."""

    auto = 5


AttnBackend.__module__ = "megatron.core.transformer.enums"


def arguments(name: str, **others: Any) -> argparse.Namespace:
    """The arguments as Megatron-LM keeps them, with some that do not matter and some whose values are no plain data."""
    own = COMMON | {"norm_epsilon": 1e-5, "padded_vocab_size": ROWS, "vocab_size": None, "bias_gelu_fusion": True, "kv_channels": None}
    unimportant = {"lr": 1e-4, "params_dtype": torch.float32, "encoder_num_layers": 2, "window_size": None}
    return argparse.Namespace(**(own | unimportant | ARGUMENTS[name] | others))


def build(args: argparse.Namespace, *, tp: int = 1, pp: int = 1, first: bool = True, last: bool = True) -> Any:
    """A random GPTModel, as Megatron-LM's model provider makes it of its arguments."""
    from aligner.models.config import Activation
    from aligner.models.modules.megatron_config import ACTIVATIONS
    from aligner.parallel.mcore import GPTModel, TransformerConfig, get_gpt_layer_local_spec

    given = vars(args).get
    config = TransformerConfig(
        **{name: given(name) for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels")},
        num_query_groups=args.num_query_groups if given("group_query_attention") else None,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=bool(given("swiglu")),
        activation_func=torch.nn.functional.silu if given("swiglu") else ACTIVATIONS[Activation.gelu_tanh],
        add_bias_linear=given("add_bias_linear", True),
        add_qkv_bias=bool(given("add_qkv_bias")),
        qk_layernorm=bool(given("qk_layernorm")),
        num_moe_experts=given("num_experts"),
        moe_ffn_hidden_size=given("moe_ffn_hidden_size"),
        moe_router_topk=given("moe_router_topk", 2),
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(given("num_experts"), qk_layernorm=config.qk_layernorm, normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not given("untie_embeddings_and_output_weights"),
        position_embedding_type=args.position_embedding_type,
        rotary_base=given("rotary_base", 10000),
        rope_scaling=bool(given("use_rope_scaling")),
        rope_scaling_factor=given("rope_scaling_factor", 8.0),
    )
    randomize(model, seed=3)
    return model


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What Megatron-Core computes, float32 [B, S, rows of the vocabulary]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    return model.eval()(tokens, positions, mask).float()


def save(
    directory: Path,
    model: Any,
    args: argparse.Namespace | None,
    *,
    prefix: str = "",
    metadata: dict[str, Any] | None = None,
    common_file: bool = True,
) -> Path:
    """Write `directory` as Megatron-LM (with `args`) or NeMo (without) does; without a `common_file` as of Megatron-Core 0.19."""
    from aligner.parallel.mcore import dist_checkpointing, ensure_metadata_has_dp_cp_group

    directory.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"model": model.sharded_state_dict(prefix=prefix, metadata=ensure_metadata_has_dp_cp_group(metadata))}
    common = {} if args is None else {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    if not common_file:
        state["common_state"] = dist_checkpointing.mapping.ShardedObject("common_state", common, (1,), (0,))
        common = {}
    dist_checkpointing.save(common | state, str(directory))
    return directory


def nemo_config(name: str, **others: Any) -> dict[str, Any]:
    """NeMo's words for the model of `arguments(name)`."""
    args = vars(arguments(name))
    gated, qkv = args.get("swiglu"), args.get("add_qkv_bias")
    own = {key: args[key] for key in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels")}
    own |= {"mcore_gpt": True, "encoder_seq_length": 64, "max_position_embeddings": "${.encoder_seq_length}", "hidden_dropout": 0.0}
    own |= {"num_query_groups": args.get("num_query_groups"), "normalization": "rmsnorm" if gated else "layernorm1p"}
    own |= {"activation": "fast-swiglu" if gated else "squared-relu", "bias": False, "qkv_bias": bool(qkv)}
    own |= {"position_embedding_type": "rope", "rotary_base": args.get("rotary_base", 10000), "layernorm_epsilon": args["norm_epsilon"]}
    own |= {"share_embeddings_and_output_weights": not args.get("untie_embeddings_and_output_weights")}
    return own | {"tokenizer": {"library": "huggingface", "type": "meta-llama/Llama-2-7b-hf", "model": None}} | others


def to_zarr(source: Path, target: Path) -> Path:
    """The tensors of a `torch_dist` directory as Megatron-Core's former backend wrote them: in chunks, of which the last are filled up."""
    from aligner.models.checkpoint.foreign.tensors import Files, TorchDist

    tensors = TorchDist(Files(source), "")
    for name, shape in tensors.shapes().items():
        folder = target / name
        folder.mkdir(parents=True)
        tensor = tensors.read(name, ())
        chunks = [1, *(max(1, size * 2 // 3) for size in shape[1:])] if len(shape) > 2 else [max(1, size * 2 // 3) for size in shape]
        kind = {torch.float32: "<f4", torch.bfloat16: "bfloat16", torch.float16: "<f2"}[tensor.dtype]
        described = {"chunks": chunks, "compressor": None, "dtype": kind, "fill_value": None, "filters": None, "order": "C"}
        (folder / ".zarray").write_text(json.dumps(described | {"shape": list(shape), "zarr_format": 2}))
        for place in itertools.product(*(range(math.ceil(size / chunk)) for size, chunk in zip(shape, chunks, strict=True))):
            part = tensor[tuple(slice(at * chunk, (at + 1) * chunk) for at, chunk in zip(place, chunks, strict=True))]
            whole = torch.full(chunks, 7.0, dtype=tensor.dtype)
            whole[tuple(slice(size) for size in part.shape)] = part
            (folder / ".".join(map(str, place))).write_bytes(bytes(whole.view(torch.uint8).flatten().tolist()))
    (target / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (target / "common.pt").write_bytes((source / "common.pt").read_bytes())
    return target


def pack(archive: Path, weights: Path, config: dict[str, Any], files: dict[str, bytes] | None = None, *, mode: str = "w:") -> Path:
    """A `.nemo` of a checkpoint directory and a config, with names that begin with `./`, as NeMo's have."""
    import yaml

    with tarfile.open(archive, mode) as tar:
        tar.add(weights, "./model_weights")
        for name, data in ({"model_config.yaml": yaml.safe_dump(config).encode()} | (files or {})).items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


def chunks_of(path: Path) -> list[Any]:
    from aligner.models.checkpoint.foreign.model import open_weights
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.modules.build import build_model
    from aligner.models.weights import fill
    from aligner.parallel.topology import ParallelConfig

    with open_weights(path) as weights:
        found = weights.description
        config = ModelConfig(dtype=Dtype.float32, make_vocab_divisible_by=48)
        chunks = build_model(found.architecture, config, ParallelConfig(), load=True, head=found.head)
        fill(chunks, weights)
    return chunks
