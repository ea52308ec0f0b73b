"""Whose layers do the models get on these nodes, and which kernels are not fused? The log of the run will say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aligner.commands.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.planner.config import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """One node's choice: component -> whose layers, why, and what is not fused; and the components whose layers are torch's."""

    described: dict[str, str] = field(default_factory=dict)
    of_torch: list[str] = field(default_factory=list)


def _observe(context: Context) -> Chosen:
    from aligner.models.create import read_architecture  # Megatron-Core comes with it
    from aligner.models.modules.fusions import fusions
    from aligner.models.modules.megatron_config import resolve_dtype

    described, of_torch = {}, []
    for model in context.config.models():
        found = fusions(read_architecture(model.config, vocab_size=1), model.config, resolve_dtype(model.config.dtype))
        whose = "Transformer Engine's" if found.transformer_engine else "torch's"
        off = ", ".join(f"{kernel.value} ({one.off})" for kernel, one in found.kernels.items() if one.off)
        rest = f"; not fused: {off}" if off and found.transformer_engine else ""
        products = f"float32 products: {model.config.float32_matmul.value}"  # whatever the node's environment says
        described[model.component] = f"layers are {whose} ({found.reason}), {products}{rest}"
        if not found.transformer_engine:
            of_torch.append(model.component)
    return Chosen(described=described, of_torch=of_torch)


def judge(context: Context, seen: Mapping[int, Chosen]) -> Finding:
    """Fatal: nodes that choose otherwise. Warning: torch's layers where the config is for GPUs. What cannot be had has already raised."""
    ours = seen[0]
    if others := [rank for rank, chosen in seen.items() if chosen != ours]:
        text = f"{who(context.allocation, others)}: {_text(seen[others[0]])}; and not {_text(ours)}"
        return Finding(level=Level.fatal, found=text, advice="one container or environment for all nodes")
    if ours.of_torch and context.config.cluster.device == Device.gpu:
        advice = "install transformer-engine, or use the container; model.layers=torch says that torch's are meant"
        meant = all(model.config.layers.value == "torch" for model in context.config.models() if model.component in ours.of_torch)
        return Finding(level=Level.ok if meant else Level.warning, found=_text(ours), advice="" if meant else advice)
    return Finding(level=Level.ok, found=_text(ours))


def _text(chosen: Chosen) -> str:
    texts = set(chosen.described.values())
    return texts.pop() if len(texts) == 1 else "; ".join(f"{component}: {text}" for component, text in chosen.described.items())


LAYERS = Item(
    "layers", Where.every_node, _observe, judge, timeout_seconds=300.0, needs=("config", "hub", "devices"), advice="see model.layers"
)
