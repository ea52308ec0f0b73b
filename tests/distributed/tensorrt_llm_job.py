"""Two ranks that share one replica of the TensorRT-LLM engine, whose process runs the stand-in of the package.

usage: tensorrt_llm_job.py MODEL_DIRECTORY SCRATCH_DIRECTORY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes"))

EOS = 2


def main(directory: Path, scratch: Path) -> None:
    from fake_tensorrt_llm import installed

    from aligner.errors import EngineError
    from aligner.models.config import ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.training.trainable import Training
    from aligner.parallel import topology
    from aligner.parallel.collectives import gather_objects
    from aligner.parallel.topology import ParallelConfig
    from aligner.rollout.config import EngineKind, RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.rollout.tensorrt_llm import engine as tensorrt_llm
    from aligner.types import Prompt, SamplingConfig

    launch.initialize("gloo", timeout_seconds=60, fingerprint="tensorrt_llm", collective_timeout_seconds=60)
    parallel = ParallelConfig()
    layout = topology.initialize(parallel, seed=1)
    model = ModelConfig(path=str(directory), make_vocab_divisible_by=8)
    policy = create_policy(model, read_architecture(model, vocab_size=0), parallel, layout, Training(optimizer=None))
    sampling = SamplingConfig(max_response_length=5)
    prompts = [Prompt(id=i, tokens=(5 + i, 7, 9)[: 1 + i % 3], source=f"p:{i}") for i in range(9)]
    os.environ["OMPI_COMM_WORLD_SIZE"] = "2"  # as mpiexec would have started these ranks
    with installed("1.2.1", scratch / str(dist.get_rank()), in_thread=False):
        if "FAKE_TENSORRT_LLM_SPAWNS" in os.environ:
            weights_only(create_engine(policy, RolloutConfig(engine=EngineKind.tensorrt_llm, tp=2, offload=True), eos_id=EOS))
            launch.shutdown()
            return
        config = RolloutConfig(engine=EngineKind.tensorrt_llm, sampling=sampling, tp=2, max_batch_size=2, offload=True)
        engine = create_engine(policy, config, eos_id=EOS)
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
        process = engine.engine.foreign._process
        assert (process is None) == (dist.get_rank() == 1)  # one for the replica
        engine.engine.shutdown()
        assert process is None or process.returncode == 0, process.returncode
        check_refusals(tensorrt_llm, create_engine, policy, config, EngineError)
    launch.shutdown()


def weights_only(engine) -> None:
    """Refit workers that MPI spawned, and let them give memory back: they say at their end what they lack."""
    for version in (1, 2):
        engine.sleep()
        engine.refit(version)
        engine.wake()
    process = engine.engine.foreign._process
    engine.engine.shutdown()
    assert process is None or process.returncode == 0, process.returncode
    print("workers ended well", flush=True)


def check_refusals(tensorrt_llm, create_engine, policy, config, engine_error) -> None:
    """All ranks hear of a process that cannot start, of a rank that has no socket, and of a replica on two nodes; none waits."""

    def check(message: str) -> None:
        try:
            create_engine(policy, config, eos_id=EOS)
        except engine_error as error:
            assert message in str(error), error
        else:
            raise AssertionError

    start, host = tensorrt_llm.start_process, tensorrt_llm.socket.gethostname
    tensorrt_llm.start_process = lambda home, environment: start(home, environment | {"PYTHONPATH": str(home)})  # not installed there
    check("could not build its model: ModuleNotFoundError: No module named 'tensorrt_llm'")
    door = tensorrt_llm.Door

    def refuses(path: Path):
        if path.name == "worker1":
            raise engine_error("rank 1 has no room for a socket")
        return door(path)

    tensorrt_llm.Door = refuses
    check("starting tensorrt_llm failed: rank 1 has no room for a socket")
    tensorrt_llm.Door = door
    tensorrt_llm.socket.gethostname = lambda: f"node{dist.get_rank()}"
    check("rollout.tp=2: the ranks of a replica of rollout.engine=tensorrt_llm must be on one node")
    tensorrt_llm.start_process, tensorrt_llm.socket.gethostname = start, host


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
