"""The planner runs layers of every family on fake tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hf_models import HF_MODELS

JOB = Path(__file__).with_name("family_plan_job.py")


def test_a_layer_of_every_family_is_planned():
    result = subprocess.run([sys.executable, JOB], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found.keys() == HF_MODELS.keys()
    assert all(min(numbers) > 5000 for numbers in found.values())
    # By hand, gpt_neox untied: a rank of two has half of 64 rows (61 and padding to 128 make 128) of two embeddings, and of two layers half
    # of 3 x 32 x 32 + 96, of 32 x 32, of 2 x 32 x 48 + 48; whole are two biases of 32 and two norms of 64 in each, and the last norm.
    layer = (3 * 32 * 32 + 96 + 32 * 32 + 2 * 32 * 48 + 48) // 2 + 2 * 32 + 2 * 64
    assert found["gpt_neox"][2] == 2 * 64 * 32 + 2 * layer + 64
