"""Whose layers a model gets and what they fuse follows from what can be imported; nothing is asked for that would then be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aligner.models.config import Activation, Architecture, Dtype, Layers, LoraConfig, ModelConfig, PositionEmbedding
from aligner.models.modules.fusions import Kernel, say_once, table
from aligner.models.modules.megatron_config import transformer_config
from aligner.parallel import mcore
from aligner.parallel.mcore import ColumnParallelLinear
from aligner.parallel.topology import ParallelConfig

pytestmark = pytest.mark.usefixtures("topology")

MIXTURE = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
EVERYTHING = frozenset({"rope", "experts", "permutation"})


@pytest.fixture
def with_te(monkeypatch):
    """As on a GPU where Transformer Engine imports, Apex does not, and torch can compile kernels."""
    from aligner.models.modules import fusions

    def make(kernels: frozenset[str] = EVERYTHING, *, triton: bool = True) -> None:
        monkeypatch.setattr(mcore, "transformer_engine_problem", lambda: "")
        monkeypatch.setattr(mcore, "transformer_engine_version", lambda: "2.9.0")
        monkeypatch.setattr(mcore, "importable_kernels", lambda: kernels)
        monkeypatch.setattr(mcore, "fused_adam", lambda: "Transformer Engine")
        monkeypatch.setattr(fusions.importlib.util, "find_spec", lambda name: object() if triton else None)

    return make


def found(architecture: dict[str, Any] | None = None, dtype: torch.dtype = torch.bfloat16, **model: Any):
    from aligner.models.modules.fusions import fusions

    return fusions(Architecture(vocab_size=61, **(architecture or {})), ModelConfig(**model), dtype)


def off(fused) -> dict[str, str]:
    return {kernel.name: one.off for kernel, one in fused.kernels.items() if one.off}


@pytest.mark.cpu
def test_without_a_gpu_nothing_is_fused(capsys):
    fused = found()
    assert not fused.transformer_engine and fused.reason == "there is no GPU"
    assert set(off(fused)) == {kernel.name for kernel in Kernel}
    lines = table(fused).splitlines()
    assert lines[0] == "layers are torch's (there is no GPU); fused kernels:" and len(lines) == 1 + len(Kernel)
    assert lines[3].split("  ", 1)[1].strip().startswith("rotary embedding") and lines[3].endswith("off: the layers are torch's")
    say_once(fused, rank=0)
    assert capsys.readouterr().out == ""  # nothing was expected of a CPU


def test_auto_is_transformer_engine_where_it_imports(with_te):
    with_te()
    fused = found()
    assert fused.transformer_engine and fused.reason == "transformer-engine 2.9.0"
    assert off(fused) == {"experts": "the model has no experts", "permutation": "the model has no experts"}
    assert off(found(MIXTURE)) == {}


def test_auto_is_torch_where_transformer_engine_would_be_wrong(with_te):
    with_te()
    for settings, dtype, reason in (
        ({"layers": Layers.torch}, torch.bfloat16, "model.layers=torch"),
        ({"batch_invariant": True}, torch.bfloat16, "model.batch_invariant=true"),
        ({}, torch.float32, "Transformer Engine's attention over packed rows is of 16 bits, the model of float32"),
    ):
        fused = found(dtype=dtype, **settings)
        assert not fused.transformer_engine and fused.reason == reason
    assert found(dtype=torch.float32, layers=Layers.transformer_engine).transformer_engine  # whoever asks for it gets it


def test_each_fusion_names_what_it_lacks(with_te):
    with_te(frozenset(), triton=False)
    lacking = off(found(MIXTURE))
    assert lacking == {
        "rope": "needs transformer-engine 1.4 or newer",
        "swiglu": "triton is not installed",
        "residual": "triton is not installed",
        "experts": "needs transformer-engine 1.9 or newer",
        "permutation": "needs transformer-engine 2.1 or newer",
    }


def test_what_the_model_is_decides_too(with_te):
    with_te()
    gelu = {"gated_mlp": False, "activation": Activation.gelu_tanh}
    assert off(found(gelu))["swiglu"] == "the activation is another"
    learned = {"position_embedding": PositionEmbedding.learned}
    assert off(found(learned))["rope"] == "positions are learned"
    adapters = off(found(MIXTURE, lora=LoraConfig(rank=4)))
    assert set(adapters) == {"norm", "experts"}
    shared = off(found(share_prompts=True, packing=True, micro_batch_tokens=64))
    assert shared["attention"] == "model.share_prompts=true: torch's"


def test_megatrons_config_asks_for_nothing_that_it_would_refuse(with_te):
    """`gradient_accumulation_fusion` makes Megatron-Core's output layer raise where Apex is absent, whoever's the other layers are."""
    with_te(frozenset())
    model = ModelConfig(dtype=Dtype.bfloat16)
    config = transformer_config(Architecture(vocab_size=61, **MIXTURE), model, ParallelConfig())
    assert config.transformer_impl == "transformer_engine" and config.bias_activation_fusion and config.bias_dropout_fusion
    assert not (config.apply_rope_fusion or config.moe_grouped_gemm or config.moe_permute_fusion or config.cross_entropy_loss_fusion)
    ColumnParallelLinear(128, 64, config=config, init_method=config.init_method, bias=False, skip_bias_add=False, gather_output=False)


def test_torchs_layers_add_weight_gradients_with_apex(with_te, monkeypatch):
    with_te(frozenset({"weight_gradients"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "weight_gradients" not in off(found(layers=Layers.torch))
    with_te(frozenset())
    assert off(found(layers=Layers.torch))["weight_gradients"] == "Apex's fused_weight_gradient_mlp_cuda does not import"


def test_why_transformer_engine_does_not_import(monkeypatch):
    def problem(error: Exception | None) -> str:
        def load(name: str) -> object:
            assert name == "transformer_engine.pytorch"
            if error is not None:
                raise error
            return object()

        monkeypatch.setattr(mcore.importlib, "import_module", load)
        mcore.transformer_engine_problem.cache_clear()
        return mcore.transformer_engine_problem()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        assert problem(None) == ""
        assert problem(ModuleNotFoundError(name="transformer_engine")) == "the package transformer-engine is not installed"
        missing = ModuleNotFoundError("No module named 'einops'", name="einops")
        assert problem(missing) == "transformer-engine does not import: No module named 'einops'"
        assert problem(OSError("libcudnn.so.9: cannot open")) == "transformer-engine does not import: libcudnn.so.9: cannot open"
    finally:
        mcore.transformer_engine_problem.cache_clear()
