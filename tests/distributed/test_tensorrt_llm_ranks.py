"""The TensorRT-LLM engine where several ranks share a replica: over gloo with a stand-in, and its communicators in MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("tensorrt_llm_job.py")
BLOCKS = """
import os
from aligner.errors import LaunchError
from aligner.parallel import mpi
assert not mpi.is_started()
place = mpi.join(os.environ)
assert mpi.is_started()
pair = mpi.block_communicator(2)
first = pair.bcast(place.rank, root=0)
assert pair.Get_size() == 2 and pair.Get_rank() == place.rank % 2 and first == place.rank - place.rank % 2 and pair.py2f() is not None
assert mpi.block_communicator(1).Get_size() == 1
try:
    mpi.block_communicator(3)
except LaunchError as error:
    assert "has 4 ranks, which blocks of 3 do not fill" in str(error)
else:
    raise AssertionError
mpi.finalize()
print("blocks are right")
"""


def test_two_ranks_share_a_replica(run_distributed, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    run_distributed(JOB, 2, tmp_path / "model", tmp_path)


@pytest.mark.mpi
def test_each_block_of_ranks_is_an_mpi_world(mpiexec, clean_environment):
    command = [str(mpiexec), "-n", "4", sys.executable, "-c", BLOCKS]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("blocks are right") == 4, done.stdout + done.stderr
