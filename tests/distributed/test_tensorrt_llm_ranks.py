"""The TensorRT-LLM engine where several ranks share a replica: over gloo, with a process that runs the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("tensorrt_llm_job.py")


def save_model(directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def test_two_ranks_share_a_replica(run_distributed, tmp_path):
    save_model(tmp_path / "model")
    run_distributed(JOB, 2, tmp_path / "model", tmp_path)


@pytest.mark.mpi
def test_workers_that_mpi_spawns_below_ranks_that_mpiexec_started(mpiexec, clean_environment, tmp_path):
    """Two MPI worlds: that of training, and below one of its ranks the engine's own, whose workers are found by name and by socket."""
    save_model(tmp_path / "model")
    environment = clean_environment({"FAKE_TENSORRT_LLM_SPAWNS": "1", "PATH": f"{mpiexec.parent}{os.pathsep}{os.environ['PATH']}"})
    command = [str(mpiexec), "-n", "2", sys.executable, str(JOB), str(tmp_path / "model"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("workers ended well") == 2, done.stdout + done.stderr
