"""float32 products are in float32 from the start of every process, whatever the environment and other packages say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.parallel import platform

ROOT = Path(__file__).resolve().parents[3]
# In a process of its own: torch reads the variable when it is imported.
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
def now():
    return [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
found = {"imported": now()}
warnings.simplefilter("default")
from aligner.models import create
from aligner.models.config import Architecture, Float32Matmul, ModelConfig
from aligner.parallel import launch, platform, topology
from aligner.parallel.topology import ParallelConfig
launch.initialize(platform.backend(), timeout_seconds=30, fingerprint="precision", environ={"ALIGNER_LAUNCH": "single"},
    claim_gpu=lambda world: platform.claim_device(world.local_rank))
found["started"] = now()
layout = topology.initialize(ParallelConfig(), seed=1)
sizes = Architecture(vocab_size=61, num_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, ffn_hidden_size=32)
for value in Float32Matmul:
    model = ModelConfig(float32_matmul=value)
    create.create_policy(model, sizes, ParallelConfig(), layout, create.training(model, None))
    found[value.value] = now()
launch.shutdown()
print(json.dumps(found))
"""


@pytest.mark.parametrize("variable", ["0", "1"])
def test_the_setting_holds_whatever_the_environment_says(variable):
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": variable, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TF32" not in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["imported"][1] is (variable == "1")  # the variable is one that torch still reads
    assert found["started"] == found["highest"] == ["highest", False, False]
    assert found["high"] == ["high", True, True]


@pytest.fixture
def restored():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    platform.set_float32_matmul(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="a torch before 2.9 has one interface")
@pytest.mark.parametrize(("precision", "allows"), [("highest", False), ("high", True)])
def test_it_holds_where_somebody_has_used_torchs_newer_interface(precision, allows, restored):
    """torch raises where its two interfaces do not agree and one is asked."""
    torch.backends.cuda.matmul.fp32_precision = "ieee" if allows else "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee" if allows else "tf32"
    platform.set_float32_matmul(precision)
    assert torch.backends.cuda.matmul.allow_tf32 is allows and torch.backends.cudnn.allow_tf32 is allows
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_wrapped_engine_leaves_it_as_it_is(precision, monkeypatch, restored, make_model):
    """vLLM's worker sets "highest" when it is made."""
    from aligner.rollout import create
    from aligner.rollout.config import EngineKind, RolloutConfig

    policy = make_model("policy")
    platform.set_float32_matmul(precision)

    def streamed(*args, **kwargs):
        torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "highest"
        raise_later.append(True)
        return policy  # no engine: what follows is not reached

    raise_later: list[bool] = []
    monkeypatch.setattr(create, "_streamed", streamed)
    monkeypatch.setattr(create, "check_engine", lambda *args, **kwargs: None)
    config = replace(RolloutConfig(), engine=EngineKind.vllm.value)
    with pytest.raises(AttributeError):  # of a policy that is no engine
        create.create_engine(policy, config, eos_id=1)
    assert raise_later and torch.get_float32_matmul_precision() == precision
    assert torch.backends.cudnn.allow_tf32 is (precision == "high")
