# ruff: noqa: F401
"""The only importer of Megatron-Core: prepares the platform, then exports every name that this project uses.

Importing this module imports Megatron-Core (seconds), so light modules do not import it at their top. On a machine without CUDA the CPU
platform is installed first, since Megatron-Core binds `torch` at import.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import queue
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from aligner.errors import AlignerError

# Megatron-Core warns of its own deprecated calls and of missing kernels on every rank; a user cannot act on that.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
warnings.filterwarnings("ignore", message=r".*\.grad attribute of a Tensor that is not a leaf.*")
# 0.19 logs on every start that GPTModel and its ways to save and to read older checkpoints will be replaced, and that it chose a layout of
# the optimizer's buffers.
for _name in (
    "models.gpt.gpt_model",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.common",
    "distributed.distributed_data_parallel",
):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "Transformer Engine / Apex are not installed": we chose the local layers
    if not torch.cuda.is_available():
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found": we know
        from aligner.parallel import cpu_platform

        cpu_platform.install()
    from megatron.core import __version__ as version, dist_checkpointing, optimizer as optimizers, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import (
        Adam,
        ChainedOptimizer,
        OptimizerConfig,
        ParamKey,
        clip_grads,
        distrib_optimizer,
        get_megatron_optimizer,
        get_standard_config_overrides,
    )
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import layers as parallel_layers
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel.mappings import (
        all_gather_last_dim_from_tensor_parallel_region,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer import MegatronModule, TransformerConfig
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_utils import (
        MoEAuxLossAutoScaler,
        get_tokens_per_expert_and_token_count,
        switch_load_balancing_loss_func,
    )
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
    from megatron.core.utils import local_multi_tensor_l2_norm

if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine in 0.16.1: no router would compute
    moe_utils.te_general_gemm = None

# Checkpoints of 0.19: planned for another package of NVIDIA unless this option is set, since our thread writes; common state within.
_LATER = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
if _LATER and "no_dist" not in inspect.signature(torch.distributed.checkpoint.load).parameters:
    raise AlignerError(f"megatron-core {version} needs torch 2.7 or newer for its checkpoints, here is {torch.__version__}")
SAVE_PLAN = {"async_strategy": "mcore"} if _LATER else {}
NEEDS_COMMON_FILE = not _LATER


@cache
def transformer_engine_problem() -> str:
    """The reason why NVIDIA's Transformer Engine cannot be used here; empty if it can."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:
        if error.name == "transformer_engine":
            return "the package transformer-engine is not installed"
        return f"transformer-engine does not import: {error}"
    except (ImportError, OSError, RuntimeError) as error:  # a library of CUDA's that is missing, a wheel for another torch
        return f"transformer-engine does not import: {' '.join(str(error).split())[:200]}"
    return ""


def fp8_problem(recipe: str) -> str:
    """The reason why Transformer Engine cannot compute with this recipe here; empty if it can. Requires Transformer Engine."""
    state = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    name = {"blockwise": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}.get(recipe, "is_fp8_available")
    is_available, reason = getattr(state, name, lambda: (False, "it needs a newer version"))()
    return "" if is_available else str(reason)


def transformer_engine_version() -> str:
    return str(importlib.import_module("transformer_engine").__version__)


def importable_kernels() -> frozenset[str]:
    """Fused kernels that Megatron-Core has found: Transformer Engine's, and Apex's sums of weight gradients."""
    permutation = (
        *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
        *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
    )
    found = {
        "rope": all(getattr(rope_utils, f"fused_apply_rotary_pos_emb{kind}", None) for kind in ("", "_thd")),
        "permutation": all(getattr(moe_utils, name, None) for name in permutation),
        "weight_gradients": parallel_layers._grad_accum_fusion_available,
        "experts": not transformer_engine_problem() and _te_extension().TEColumnParallelGroupedLinear is not None,
    }
    return frozenset(name for name, is_found in found.items() if is_found)


def fused_adam() -> str:
    """The package of the optimizer's fused Adam; empty if it is torch's."""
    return {"transformer_engine": "Transformer Engine", "apex": "Apex"}.get(Adam.__module__.split(".")[0], "")


@contextmanager
def hybrid_optimizer(kind: type) -> Iterator[None]:
    """In the block, Megatron-Core uses `kind`, a subclass, in place of HybridDeviceOptimizer."""
    optimizers.HybridDeviceOptimizer = distrib_optimizer.HybridDeviceOptimizer = kind
    try:
        yield
    finally:
        optimizers.HybridDeviceOptimizer = distrib_optimizer.HybridDeviceOptimizer = HybridDeviceOptimizer


@contextmanager
def sgd_as(make: Any) -> Iterator[None]:
    """In the block, Megatron-Core gets from `make` what it asks for by `optimizer="sgd"`: the way to an optimizer that it does not know."""
    original, optimizers.SGD = optimizers.SGD, make
    try:
        yield
    finally:
        optimizers.SGD = original


def _te_extension() -> Any:
    return importlib.import_module("megatron.core.extensions.transformer_engine")


def _refuse_corruption(record: logging.LogRecord) -> bool:
    """A logging filter: upstream's warning ends the save."""
    if "data corruption" in record.getMessage():
        raise RuntimeError(f"Megatron-Core {version}: {record.getMessage()}")
    return True


# Upstream fills wrongly cut parts of the optimizer's buffers with zeros (Megatron-LM pull request 5077).
logging.getLogger("megatron.core.optimizer.distrib_optimizer").addFilter(_refuse_corruption)


def sharded_leaves(state: Any) -> Iterator[Any]:
    return (value for value in nested_values(state) if isinstance(value, ShardedTensor | ShardedTensorFactory))


def submodules_of(spec: Any) -> Any:
    """The submodules of a specification's module; 0.19 gives its class and these as a `functools.partial`."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def transformer_engine_specs(
    *, num_experts: int | None, qk_layernorm: bool, grouped_experts: bool = False, split_norms: bool = False
) -> tuple[Any, Any]:
    """(specification of a layer, its norm) from Transformer Engine's modules. `grouped_experts`: a rank's experts are one module;
    `split_norms`: norms are modules, not fused with the next linear layer. Requires Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    te = _te_extension()
    layer = get_gpt_layer_with_transformer_engine_spec(num_experts=num_experts, moe_grouped_gemm=grouped_experts, qk_layernorm=qk_layernorm)
    parts = layer.submodules
    # A norm has one name in checkpoints for any module. Megatron-Core's local layers map it, these do not for separate norms.
    parts.sharded_state_dict_keys_map = dict(get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map)
    if split_norms:
        parts.input_layernorm = parts.pre_mlp_layernorm = te.TENorm
        parts.self_attention.submodules.linear_qkv = te.TEColumnParallelLinear
        if not num_experts:
            submodules_of(parts.mlp).linear_fc1 = te.TEColumnParallelLinear
    return layer, te.TENorm


def initialize_user_buffers(shape: tuple[int, int], *, tp: int, dtype: torch.dtype, fp8: bool) -> None:
    """Make the buffers by which Transformer Engine's layers exchange activations of `dtype`, or of 8 bits, while they compute, for inputs
    [tokens, hidden].

    Collective, once in a process. Requires Transformer Engine 2.7 or newer.
    """
    from transformer_engine.pytorch.module import base

    mode = base.UserBufferQuantizationMode.FP8 if fp8 else base.UserBufferQuantizationMode.NONE
    base.initialize_ub(shape=list(shape), tp_size=tp, quantization_modes=[mode], dtype=dtype, bootstrap_backend="nccl")


def _norm_on_device(chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool) -> tuple[torch.Tensor, None]:
    """The L2 norm of all tensors together, float32 [1], on their device: upstream's substitute reads each tensor's on the host."""
    norms = [torch.norm(tensor).float() for tensors in tensor_lists for tensor in tensors]
    return torch.norm(torch.stack(norms)).reshape(1), None


def repair_for_torch_adam(optimizer: type) -> None:
    """Make `optimizer` (DistributedOptimizer) save and load torch's AdamW, where neither Transformer Engine nor Apex ships a fused Adam.

    It assumes a fused Adam: state always allocated, no `step` per parameter. torch's AdamW allocates state at its first step and counts
    `step` per parameter. Upstream gives all parameters *one* shared `step` tensor on load, which AdamW would advance once per parameter (a
    resumed run then diverges by 3e-3).
    """
    save, load = optimizer.state_dict, optimizer.load_state_dict

    @torch.no_grad()
    def set_main_param_and_optimizer_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        destination = {"param": main, **self.optimizer.state[main]}
        for key, value in tensors.items():
            if key != "step" and torch.is_tensor(value):
                destination[key].copy_(value)

    def state_dict(self: Any) -> Any:
        if not self.is_stub_optimizer and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    self.optimizer.state[p] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
        return save(self)

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for parameter_state in self.optimizer.state.values():
            if "step" in parameter_state:
                parameter_state["step"] = parameter_state["step"].clone()

    optimizer._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states
    optimizer.state_dict = state_dict
    optimizer.load_state_dict = load_state_dict


if Adam is torch.optim.AdamW:
    repair_for_torch_adam(DistributedOptimizer)
if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
    clip_grads.l2_norm_impl = _norm_on_device
# Our saves write from threads, so their results stay in this process. Upstream starts a manager process for them, which imports the main
# script again (seconds) and outlives a rank that is killed.
filesystem_async._results_queue = queue.Queue()
