"""The only importer of Megatron-Core: prepares the platform, then exports every name that this project uses.

Importing this module imports Megatron-Core (seconds), so modules that must stay light do not import it at their top. On a machine
without CUDA the CPU platform is installed first; that cannot be postponed, since Megatron-Core binds `torch` at import.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import queue
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from aligner.parallel import torch_adam

# Megatron-Core warns of its own deprecated calls and of kernels that are not installed, on every rank; a user can do nothing about them.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
warnings.filterwarnings("ignore", message=r".*\.grad attribute of a Tensor that is not a leaf.*")
# 0.19 says on every start that GPTModel and its own ways to save, and to read older checkpoints, will be replaced one day, and that it
# chose a layout of the optimizer's buffers by itself.
for _name in (
    "models.gpt.gpt_model",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.common",
    "distributed.distributed_data_parallel",
):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "Transformer Engine / Apex are not installed": the local layers are what we asked for
    if not torch.cuda.is_available():
        from aligner.parallel import cpu_platform

        cpu_platform.install()
    from megatron.core import __version__ as version
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import Adam, ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer import MegatronModule, TransformerConfig
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_utils import (
        MoEAuxLossAutoScaler,
        get_tokens_per_expert_and_token_count,
        switch_load_balancing_loss_func,
    )
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine in 0.16.1: no router would compute
    moe_utils.te_general_gemm = None

# Checkpoints of 0.19: planned for another package of NVIDIA's unless it is told that a thread of ours writes; common state within.
_LATER = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
SAVE_PLAN = {"async_strategy": "mcore"} if _LATER else {}
NEEDS_COMMON_FILE = not _LATER


def has_transformer_engine() -> bool:
    """Whether NVIDIA's Transformer Engine can be used here."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def _refuse_corruption(record: logging.LogRecord) -> bool:
    """A logging filter: what upstream only warns of ends the save."""
    if "data corruption" in record.getMessage():
        raise RuntimeError(f"Megatron-Core {version}: {record.getMessage()}")
    return True


# It fills with zeros what it has cut out of the optimizer's buffers at the wrong place (Megatron-LM pull request 5077).
logging.getLogger("megatron.core.optimizer.distrib_optimizer").addFilter(_refuse_corruption)


def sharded_leaves(state: Any) -> Iterator[Any]:
    """The sharded tensors, and factories of such, of a sharded state."""
    return (value for value in nested_values(state) if isinstance(value, ShardedTensor | ShardedTensorFactory))


def submodules_of(spec: Any) -> Any:
    """The submodules of a specification's module; 0.19 gives its class and these as a `functools.partial`."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def transformer_engine_specs(*, num_experts: int | None, qk_layernorm: bool, split_norms: bool = False) -> tuple[Any, Any]:
    """(specification of a layer, its norm) out of Transformer Engine's modules; `split_norms`: each norm a module of its own, instead of
    being fused with the linear layer behind it. Only where `has_transformer_engine`."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=qk_layernorm)
    if split_norms:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TENorm
        parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not num_experts:
            submodules_of(parts.mlp).linear_fc1 = TEColumnParallelLinear
    return layer, TENorm


def initialize_user_buffers(shape: tuple[int, int], *, tp: int, fp8: bool) -> None:
    """Make the buffers through which Transformer Engine's layers exchange activations while they compute, for inputs of [tokens, hidden].

    Collective, once in a process. Only where `has_transformer_engine`, which must be 2.7 or newer.
    """
    from transformer_engine.pytorch.module import base

    mode = base.UserBufferQuantizationMode.FP8 if fp8 else base.UserBufferQuantizationMode.NONE
    base.initialize_ub(shape=list(shape), tp_size=tp, quantization_modes=[mode], bootstrap_backend="nccl")


if Adam is torch.optim.AdamW:
    torch_adam.repair(DistributedOptimizer)
# Our saves write from threads, so their results stay in this process. Upstream starts a manager process for them, which imports the main
# script again (seconds) and outlives a rank that is killed.
filesystem_async._results_queue = queue.Queue()

__all__ = [
    "ChainedOptimizer",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "IdentityOp",
    "LanguageModule",
    "MegatronModule",
    "MoEAuxLossAutoScaler",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "RowParallelLinear",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "copy_to_tensor_model_parallel_region",
    "dist_checkpointing",
    "ensure_metadata_has_dp_cp_group",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_tokens_per_expert_and_token_count",
    "has_transformer_engine",
    "initialize_user_buffers",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "set_tensor_model_parallel_attributes",
    "sharded_leaves",
    "switch_load_balancing_loss_func",
    "tensor_parallel",
    "transformer_engine_specs",
    "version",
]
