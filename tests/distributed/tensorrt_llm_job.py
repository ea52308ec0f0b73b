"""Two ranks that share one replica of the TensorRT-LLM engine, over the stand-in of the package.

usage: tensorrt_llm_job.py MODEL_DIRECTORY SCRATCH_DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from aligner.parallel import launch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes"))

EOS = 2


def main(directory: Path, scratch: Path) -> None:
    from fake_tensorrt_llm import installed

    from aligner.models.config import ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.trainable import Training
    from aligner.parallel import mpi, topology
    from aligner.parallel.collectives import gather_objects
    from aligner.parallel.topology import ParallelConfig
    from aligner.rollout.config import EngineKind, RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.rollout.tensorrt_llm_config import TensorRTLLMConfig
    from aligner.types import Prompt, SamplingConfig

    launch.initialize("gloo", timeout_seconds=60, fingerprint="tensorrt_llm", collective_timeout_seconds=60)
    parallel = ParallelConfig()
    layout = topology.initialize(parallel, seed=1)
    model = ModelConfig(path=str(directory), make_vocab_divisible_by=8)
    policy = create_policy(model, read_architecture(model, vocab_size=0), parallel, layout, Training(optimizer=None))
    mpi.block_communicator = lambda size: f"block of {size}"  # MPI has not started these ranks
    sampling = SamplingConfig(max_response_length=5)
    prompts = [Prompt(id=i, tokens=(5 + i, 7, 9)[: 1 + i % 3], source=f"p:{i}") for i in range(9)]
    with installed("1.2.1", scratch / str(dist.get_rank())) as world:
        settings = TensorRTLLMConfig(spmd=True)
        config = RolloutConfig(engine=EngineKind.tensorrt_llm, sampling=sampling, tp=2, max_batch_size=2, tensorrt_llm=settings)
        engine = create_engine(policy, config, eos_id=EOS)
        for version in (1, 2):
            engine.sleep()
            engine.refit(version)
            engine.wake()
            rollouts = [one for part in engine.generate(prompts, list(range(9))) for one in part]
            found = gather_objects(sorted(one.prompt.id for one in rollouts))
            assert found == [list(range(9)), []], found  # the leader's; the other took part
            assert {one.policy_version for one in rollouts} <= {version}
        given = world.llms[-1].given
        assert given["tensor_parallel_size"] == 2 and given["allreduce_strategy"] == "NCCL" and "executor_cls" in given
        assert world.communicators == ["block of 2"] * 2
        assert sum(event.startswith("reload") for event in world.events) > 0  # on both ranks
        engine.engine.shutdown()
    launch.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
