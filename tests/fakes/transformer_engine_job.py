"""Builds models of Transformer Engine's modules and of torch's, as fake tensors, and prints how they differ and what is fused.

Arguments: the folder of the unpacked wheel, and a JSON list of [config name, overrides]. Prints a JSON list of one object a component.
With a third argument, a JSON list of [compute capability, version of CUDA, settings of a model, of its architecture, of its layout]: what
Transformer Engine is told to compute with in 8 bits, for each.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from transformer_engine_source import claimed_gpu, described, install

OPTIONS = ("apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion")


def main(folder: str, wanted: list[tuple[str, list[str]]]) -> None:
    package = install(Path(folder))
    from aligner.commands.plan.command import components, load
    from aligner.parallel import mcore
    from aligner.planner.dry_run import fake_world

    mcore.transformer_engine_problem = lambda: ""
    check_user_buffers()
    done: dict[str, dict[str, Any]] = {}
    for name, overrides in wanted:
        for component in components(load(name, overrides)):
            key = repr((component.head, component.architecture, component.model, component.parallel))
            if key not in done:
                parallel = component.parallel
                done[key] = {"versions": [mcore.version, package.__version__], "cp": parallel.cp, "stages": []}
                for stage in sorted({0, parallel.pp - 1}):
                    with fake_world(parallel, stage=stage):
                        done[key]["stages"].append(compared(component))
            print(json.dumps({"config": [name, *overrides], "component": component.name} | done[key]), flush=True)


def eight_bits(folder: str, wanted: list[tuple[list[int], str, dict[str, Any], dict[str, Any], dict[str, Any]]]) -> None:
    """Print the recipe that Transformer Engine's context has for a layer of each model, or why it is refused."""
    package = install(Path(folder))
    from aligner.errors import ConfigError
    from aligner.models.architecture.divisible import fp8_token_multiple
    from aligner.models.config import Architecture, Fp8Recipe, ModelConfig
    from aligner.models.modules.megatron_config import transformer_config
    from aligner.parallel import mcore
    from aligner.parallel.topology import ParallelConfig

    get_fp8_context = importlib.import_module("megatron.core.fp8_utils").get_fp8_context  # behind aligner's import of Megatron-Core
    mcore.transformer_engine_problem = lambda: ""
    state = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    for capability, cuda, model, architecture, parallel in wanted:
        found: dict[str, Any] = {"versions": [mcore.version, package.__version__]}
        with claimed_gpu((capability[0], capability[1]), cuda):
            try:
                settings = ModelConfig(fp8=True, **model | {"fp8_recipe": Fp8Recipe(model.get("fp8_recipe", "auto"))})
                sizes = Architecture(vocab_size=64, **SIZES | architecture)
                config = transformer_config(sizes, settings, ParallelConfig(**parallel))
            except ConfigError as error:
                print(json.dumps(found | {"error": str(error)}), flush=True)
                continue
            with mock.patch.object(torch.distributed, "all_reduce", side_effect=AssertionError):
                with get_fp8_context(config, 0):
                    recipe = state.get_fp8_recipe()
                    found |= {"enabled": state.is_fp8_enabled(), "recipe": type(recipe).__name__, "stateless": not recipe.delayed()}
                    found |= {"format": recipe.fp8_format.name, "tokens": fp8_token_multiple(config), "weights": bool(config.fp8_param)}
                    found["scales"] = (
                        "power of two"
                        if getattr(recipe, "fp8_quant_fwd_inp", None) is None or (recipe.fp8_quant_fwd_inp.power_2_scale)
                        else "float32"
                    )
        print(json.dumps(found), flush=True)


SIZES = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "ffn_hidden_size": 512}


def check_user_buffers() -> None:
    """Ask for the buffers of `parallel.tp_comm_overlap`. Raises TypeError where Transformer Engine's function takes other arguments."""
    from transformer_engine.pytorch.module import base

    from aligner.parallel import mcore

    signature, asked = inspect.signature(base.initialize_ub), []
    with mock.patch.object(base, "initialize_ub", lambda *args, **kwargs: asked.append(signature.bind(*args, **kwargs).arguments)):
        mcore.initialize_user_buffers((64, 128), tp=2, dtype=torch.float16, fp8=False)
    assert [(one["shape"], one["tp_size"], one["dtype"]) for one in asked] == [([64, 128], 2, torch.float16)]


@contextmanager
def buffers_asked_for() -> Iterator[None]:
    """Newer versions make no layer that exchanges through buffers before these have been asked for."""
    from transformer_engine.pytorch.module import base

    with mock.patch.object(base, "_ub_initialized", False, create=True):
        with mock.patch.object(base, "initialize_ub", lambda **_: setattr(base, "_ub_initialized", True)):
            yield


def compared(component: Any) -> dict[str, Any]:
    """Of one pipeline stage: where the parameters differ, what Megatron-Core was asked for, and how many modules are whose."""
    from aligner.models.config import Layers
    from aligner.models.modules.build import build_model
    from aligner.models.modules.scalar_head import VALUES
    from aligner.planner.workload import Head

    head = None if component.head == Head.language else VALUES

    def made(layers: Layers) -> list[Any]:
        overlaps = component.parallel.tp_comm_overlap and layers is not Layers.torch
        parallel = replace(component.parallel, tp_comm_overlap=overlaps)
        return build_model(component.architecture, replace(component.model, layers=layers), parallel, load=True, head=head)

    with claimed_gpu(), buffers_asked_for():  # Megatron-Core's block asks Transformer Engine for streams, whoever's its layers are
        plain, fused = made(Layers.torch), made(Layers.transformer_engine)
        differences = [one for pair in zip(plain, fused, strict=True) for one in different(*map(described, pair))]
        differences += [one for pair in zip(plain, fused, strict=True) for one in different(*map(in_checkpoint, pair))]
    config = fused[0].config
    modules = [module for chunk in fused for module in chunk.decoder.modules()]
    attention = [layer.self_attention.core_attention for chunk in fused for layer in chunk.decoder.layers]
    return {
        "differences": differences,
        "parameters": sum(1 for chunk in fused for _ in chunk.parameters()),
        "options": {name: getattr(config, name) for name in OPTIONS},
        "adding_weight_gradients": names_of(module for module in modules if getattr(module, "fuse_wgrad_accumulation", False)),
        "not_adding": names_of(module for module in modules if getattr(module, "fuse_wgrad_accumulation", True) is False),
        "attention": names_of(attention),
        "context": sorted({context_of(one) for one in attention}),
    }


def context_of(attention: Any) -> tuple[int, str]:
    """(ranks that share a sequence, how they exchange keys and values)."""
    ranks = getattr(attention, "cp_global_ranks", None)  # torch's attention has none
    return (1, "") if ranks is None or attention.cp_group is None else (len(ranks), attention.cp_comm_type)


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[list[Any]]:
    """[name, of torch's modules, of Transformer Engine's] where these are not the same."""
    return [[name, ours.get(name), theirs.get(name)] for name in ours | theirs if ours.get(name) != theirs.get(name)]


def in_checkpoint(chunk: Any) -> dict[str, Any]:
    """Every weight's place in a distributed checkpoint, by the key there and the offset in the whole tensor; not adapters'."""
    from aligner.models.checkpoint.weights import whole_state
    from aligner.parallel.mcore import ShardedTensorFactory, sharded_leaves

    found = {}
    for leaf in sharded_leaves(whole_state(chunk)):
        for shard in sharded_leaves(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else [leaf]:
            found[f"{shard.key} from {shard.global_offset}"] = [list(shard.local_shape), list(shard.global_shape), str(shard.dtype)]
    return found


def names_of(modules: Iterable[Any]) -> list[str]:
    return sorted({type(module).__name__ for module in modules})


if __name__ == "__main__":
    (main if len(sys.argv) == 3 else eight_bits)(sys.argv[1], json.loads(sys.argv[-1]))
