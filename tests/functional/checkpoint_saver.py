"""A process that only saves checkpoints, to be killed while it does. Imports once, then forks a saver for every line it reads.

usage: checkpoint_saver.py RUN_DIRECTORY      (lines on stdin: "sync" or "async")

A saver resumes from the newest checkpoint, checks that it holds exactly what its step must hold, and saves step after step without end.
It says `forked PID`, `resumed STEP`, then `saving STEP` and `saved STEP`; its parent says `ended` when it is gone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

import torch

PR_SET_PDEATHSIG = 1


def say(text: str) -> None:
    """In one piece: two processes write here."""
    os.write(1, (text + "\n").encode())


def make_policy(topology):
    from aligner.models.config import Architecture, ModelConfig
    from aligner.models.create import create_policy
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.training.trainable import Training
    from aligner.parallel.topology import ParallelConfig

    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "ffn_hidden_size": 16}
    architecture = Architecture(vocab_size=16, max_position_embeddings=16, **sizes)
    config = ModelConfig(make_vocab_divisible_by=8)
    return create_policy(config, architecture, ParallelConfig(), topology, Training(optimizer=OptimizerConfig(), total_steps=10_000))


def tensors(model) -> list[torch.Tensor]:
    """Weights and moments: what a step writes numbers into."""
    (part,) = model.optimizer.chained_optimizers
    moments = [state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    mains = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    return [*(p for chunk in model.chunks for p in chunk.parameters()), *mains, *moments]


@torch.no_grad()
def become(model, step: int) -> None:
    """The state of `step`, which follows from its number: every tensor is filled with it, plus its own place in the list."""
    for number, tensor in enumerate(tensors(model)):
        tensor.fill_(step + (number % 7) / 8)
    model.version = step


def must_be(model, step: int) -> None:
    """Raise AssertionError where any number is not that of `step`. The main weights are views of the weights' memory, or copies of them."""
    weights = list(model.chunks[0].parameters())
    found = tensors(model)
    expected = [p.clone() for p in found]
    become(model, step)
    assert model.version == step
    for number, (tensor, before) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(tensor, before), f"tensor {number} of {len(weights)} + {len(found) - len(weights)} is not that of step {step}"


def save_for_ever(directory: Path, mode: str) -> None:
    from aligner.cluster.run_directory import RunDirectory
    from aligner.loop.checkpointing import POLICY, RunCheckpointer
    from aligner.losses.sft import sft_loss
    from aligner.parallel import launch
    from aligner.parallel.topology import ParallelConfig, initialize
    from aligner.run.session import Session
    from aligner.run.settings import CheckpointConfig
    from aligner.types import LabeledBatch

    launch.initialize("gloo", timeout_seconds=60, fingerprint="saver", environ={"ALIGNER_LAUNCH": "single"})
    topology = initialize(ParallelConfig(), seed=1)
    session = Session(topology=topology, directory=RunDirectory(directory).create(), config_yaml="")
    policy = make_policy(topology)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    policy.train_step(LabeledBatch(tokens=tokens, lengths=torch.tensor([4]), loss_mask=tokens > 0), sft_loss)  # Adam has its moments now
    config = CheckpointConfig(keep=2, asynchronous=mode == "async")
    keeper = RunCheckpointer(session, policy.model, name=POLICY, tokenizer=directory, config=config)
    step, state = keeper.load()
    if step:
        assert state == {"step": step}
        must_be(policy.model, step)
    leftover = [path.name for path in (directory / "checkpoints" / POLICY).glob(".[wr]*")]
    assert not leftover, leftover
    say(f"resumed {step}")
    while True:
        step += 1
        become(policy.model, step)
        say(f"saving {step}")
        keeper.save(step, {"step": step}, {})
        become(policy.model, step + 10_000)  # the training goes on
        keeper.wait()
        say(f"saved {step}")


def main() -> None:
    import aligner.loop.checkpointing  # noqa: F401  (the imports that a saver need not repeat)
    import aligner.models.create  # noqa: F401

    gc.collect()
    gc.freeze()  # Megatron-Core collects at every save: in a fork that would look at, and copy, everything that was imported
    say("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            say(f"forked {os.getpid()}")
            save_for_ever(Path(sys.argv[1]), line.strip())
        os.waitpid(pid, 0)
        say("ended")


if __name__ == "__main__":
    main()
