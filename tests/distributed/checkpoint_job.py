"""Continue a run from a checkpoint at this layout: one more step. Every rank writes what it has; then the layout saves its own checkpoint.

usage: checkpoint_job.py TP CHECKPOINT OUTPUT_DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch


def main() -> None:
    tp, source, output = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    launch.initialize("gloo", timeout_seconds=60, fingerprint="checkpoint", collective_timeout_seconds=60)
    from aligner.losses.sft import sft_loss
    from aligner.models import checkpoint
    from aligner.models.config import ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.trainable import Training
    from aligner.parallel.topology import ParallelConfig, initialize

    parallel = ParallelConfig(tp=tp)
    topology = initialize(parallel, seed=5)
    inputs = torch.load(output / "inputs.pt", weights_only=False)
    config = ModelConfig(path=str(source))  # the vocabulary is padded to 128 rows in one process, to 256 with two tensor-parallel ranks
    training = Training(optimizer=inputs["optimizer"], total_steps=6, micro_batch_size=2)
    policy = create_policy(config, read_architecture(config, vocab_size=0), parallel, topology, training)
    result = {"state": checkpoint.load(policy.model, source), "version": policy.version}
    result["loaded"] = {name: tensor.clone() for name, tensor in policy.export_weights()}
    metrics = policy.train_step(inputs["batch"], sft_loss)
    result["metrics"] = {name: metric.value() for name, metric in metrics.items()}
    result["trained"] = {name: tensor.clone() for name, tensor in policy.export_weights()}
    checkpoint.save(output / "checkpoints", policy.model, checkpoint.SaveRequest(step=3, state=result["state"]))
    torch.save(result, output / f"rank{dist.get_rank()}.pt")
    launch.shutdown()


if __name__ == "__main__":
    main()
