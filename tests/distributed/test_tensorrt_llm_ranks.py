from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from fake_tensorrt_llm import installed
from ranks import world
from transformers import AutoConfig, AutoModelForCausalLM

from aligner.errors import EngineError
from aligner.models.config import ModelConfig
from aligner.models.create import create_policy, read_architecture
from aligner.models.training.trainable import Training
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import EngineKind, RolloutConfig
from aligner.rollout.create import create_engine
from aligner.rollout.tensorrt_llm import engine as tensorrt_llm
from aligner.types import Prompt, SamplingConfig

EOS = 2


def save_model(directory: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def share_a_replica(scratch: Path, spawns: bool) -> None:
    """Two ranks that share one replica, whose process runs the stand-in of the package; `spawns`: its workers are MPI's, which compute
    nothing but say at their end what they lack."""
    with world(seed=1) as layout:
        model = ModelConfig(path=str(scratch / "model"), make_vocab_divisible_by=8)
        policy = create_policy(model, read_architecture(model, vocab_size=0), ParallelConfig(), layout, Training(optimizer=None))
        settings = {"sampling": SamplingConfig(max_response_length=5), "tp": 2, "max_batch_size": 2, "offload": True}
        config = RolloutConfig(engine=EngineKind.tensorrt_llm, **settings)
        os.environ["OMPI_COMM_WORLD_SIZE"] = "2"  # as mpiexec would have started these ranks
        with installed("1.2.1", scratch / str(dist.get_rank()), in_thread=False):
            engine = create_engine(policy, config, eos_id=EOS)
            if spawns:
                refitted_twice(engine)
            else:
                samples_of_each_refit(engine, policy)
            process = engine.engine.foreign._process
            assert (process is None) == (dist.get_rank() == 1)  # one for the replica
            engine.engine.shutdown()
            assert process is None or process.returncode == 0, process.returncode
            if not spawns:
                check_refusals(policy, config)


def refitted_twice(engine) -> None:
    """The workers give their memory back and get weights."""
    for version in (1, 2):
        engine.sleep()
        engine.refit(version)
        engine.wake()


def samples_of_each_refit(engine, policy) -> None:
    prompts = [Prompt(id=i, tokens=(5 + i, 7, 9)[: 1 + i % 3], source=f"p:{i}") for i in range(9)]
    seen = []
    for version in (1, 2):
        engine.sleep()
        engine.refit(version)
        engine.wake()  # the stand-in generates only if both ranks' workers have woken and were refitted
        rollouts = [one for part in engine.generate(prompts, list(range(9))) for one in part]
        found = gather_objects(sorted(one.prompt.id for one in rollouts))
        assert found == [list(range(9)), []], found  # the first rank's; the other took part
        assert {one.policy_version for one in rollouts} <= {version}
        seen.append({one.prompt.id: one.response for one in rollouts})
        engine.sleep()
        with torch.no_grad():
            for parameter in policy.chunks[0].parameters():
                parameter.neg_()
    assert seen[0] != seen[1] or dist.get_rank()  # from other weights


def check_refusals(policy, config: RolloutConfig) -> None:
    """All ranks hear of a process that cannot start, of a rank that has no socket, and of a replica on two nodes; none waits."""
    start, door = tensorrt_llm.start_process, tensorrt_llm.Door

    def starts_without_it(home: Path, environment: dict[str, str]):
        return start(home, environment | {"PYTHONPATH": str(home)})

    def refuses(path: Path):
        if path.name == "worker1":
            raise EngineError("rank 1 has no room for a socket")
        return door(path)

    for place, name, broken, text in (
        (
            tensorrt_llm,
            "start_process",
            starts_without_it,
            "could not build its model: ModuleNotFoundError: No module named 'tensorrt_llm'",
        ),
        (tensorrt_llm, "Door", refuses, "starting tensorrt_llm failed: rank 1 has no room for a socket"),
        (
            *(tensorrt_llm.socket, "gethostname", lambda: f"node{dist.get_rank()}"),
            "rollout.tp=2: the ranks of a replica of rollout.engine=tensorrt_llm must be on one node",
        ),
    ):
        with mock.patch.object(place, name, broken), pytest.raises(EngineError, match=text):
            create_engine(policy, config, eos_id=EOS)


def test_two_ranks_share_a_replica(on_ranks, tmp_path):
    save_model(tmp_path / "model")
    on_ranks(share_a_replica, 2, tmp_path, False)


@pytest.mark.mpi
def test_workers_that_mpi_spawns_below_ranks_that_mpiexec_started(mpiexec, clean_environment, tmp_path):
    """Two MPI worlds: that of training, and below one of its ranks the engine's own, whose workers are found by name and by socket."""
    save_model(tmp_path / "model")
    ranks.ask(tmp_path, share_a_replica, (tmp_path, True))
    environment = clean_environment({"FAKE_TENSORRT_LLM_SPAWNS": "1", "PATH": f"{mpiexec.parent}{os.pathsep}{os.environ['PATH']}"})
    command = [str(mpiexec), "-n", "2", sys.executable, ranks.__file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and ranks.answers(tmp_path, 2) == [None, None], done.stdout + done.stderr
