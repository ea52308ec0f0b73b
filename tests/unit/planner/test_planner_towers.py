"""FLOPs and seconds of vision towers in plans, against what torch counts in `transformers`' own towers of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_parts
import pytest
import torch
import transformers
from own_models import SIZES, VISION
from torch.utils.flop_counter import FlopCounterMode

from aligner.models import create
from aligner.models.config import Dtype, Implementation, ModelConfig, Part, Recompute
from aligner.planner import layers, times
from aligner.planner.config import ClusterConfig
from aligner.planner.tower import tower_of
from aligner.planner.workload import Component, Phase, Tower

SIDE = 16  # patches of an image; in Qwen2.5-VL 16 windows of 16 patches
ONE_TERAFLOP = {"bf16_tflops": 1.0, "achievable_flops": 1.0, "achievable_attention": 1.0}
AT_ONCE = ClusterConfig(**ONE_TERAFLOP, hbm_gb_per_second=1e30, achievable_bandwidth=1.0)  # memory costs nothing
BOTH = [Part.vision, Part.projector]


def config_of(name: str) -> Any:
    kind, text, tower, more = VISION[name]
    sizes: dict[str, Any] = {} if "spatial_merge_size" in tower else {"image_size": 4 * SIDE}
    sizes |= {"num_hidden_layers": 24} if name == "llava" else {}
    more = more | ({"mm_tokens_per_image": SIDE} if name == "gemma3" else {})
    return getattr(transformers, f"{kind}Config")(text_config=SIZES | text, vision_config=tower | sizes, **more)


def planned(name: str, folder: Path, **fields: Any) -> tuple[Component, Tower]:
    """A component of this model whose sequences have one image each, and its tower."""
    config_of(name).save_pretrained(folder)
    own = {"implementation": Implementation.auto if name.startswith("qwen") else Implementation.transformers}
    model = ModelConfig(path=str(folder), images=True, dtype=Dtype.float32, **own, **fields)
    architecture = create.read_architecture(model, vocab_size=0)
    work = plan_parts.work(Phase.train, length=1024, response_length=512)
    features = SIDE if name == "gemma3" else SIDE**2 if name == "llava" else SIDE**2 // 4
    component = replace(plan_parts.component(work=work), architecture=architecture, model=model, image_tokens=features)
    tower = tower_of(component)
    assert tower is not None
    return component, tower


def counted(name: str, *parts: Part) -> tuple[int, int]:
    """FLOPs of an image's features, and with the backward pass if these parts are trained: of plain attention, as torch counts no other on
    CPUs."""
    torch.manual_seed(0)
    config = config_of(name)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{VISION[name][0]}ForConditionalGeneration")(config).model
    for key, parameter in model.named_parameters():
        part = Part.projector if any(word in key for word in ("merger", "projector", "connector")) else Part.vision
        parameter.requires_grad_(part in parts)
    pixels = torch.randn(1, 3, 4 * SIDE, 4 * SIDE)
    with FlopCounterMode(display=False) as counter:
        if hasattr(model, "visual"):
            output = model.visual(torch.randn(SIDE**2, 2 * 3 * 4 * 4), grid_thw=torch.tensor([[1, SIDE, SIDE]]))
        elif name == "mistral3":
            output = model.get_image_features(pixels, image_sizes=torch.tensor([[4 * SIDE, 4 * SIDE]]))
        else:
            output = model.get_image_features(pixels[None] if name == "smolvlm" else pixels)
        forward = counter.get_total_flops()
        if parts:
            sum(one.sum() for one in (*output.pooler_output, *(getattr(output, "deepstack_features", None) or []))).backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("name", VISION)
def test_flops_of_every_tower_are_those_that_torch_counts(name: str, tmp_path: Path) -> None:
    """The planned seconds of an image at 10^12 FLOPs a second. A plan leaves out CLIP's class token, and that the pixels get no gradient,
    nor, in LLaVA, the tower's last layer."""
    for freeze, parts in (([], BOTH), ([Part.vision], [Part.projector]), (BOTH, [])):
        component, tower = planned(name, tmp_path, freeze=freeze)
        kernels = layers.kernels(component, AT_ONCE)
        forward, trained = (times.tower_seconds(component, tower, 1, kernels, trains=trains) * 1e12 for trains in (False, True))
        expected, of_step = counted(name, *parts)
        assert forward == pytest.approx(expected, rel=0.01 if name == "llava" else 1e-9)
        assert trained == pytest.approx(of_step, rel=0.05 if parts else 0.01)
        assert bool(parts) == (of_step > expected)


def test_a_tower_that_is_recomputed_computes_four_times(tmp_path: Path) -> None:
    _, tower = planned("qwen3_vl", tmp_path, freeze=[])
    assert tower.trained_flops == 3 * tower.flops and (tower.patches, tower.depth, tower.width, tower.windowed) == (4, 2, 32, 0)
    _, again = planned("qwen3_vl", tmp_path, freeze=[], recompute=Recompute.full)
    assert again.flops == tower.flops and again.trained_flops == 4 * tower.flops
