"""SIGKILL at random moments of saving: the newest visible checkpoint is always whole, and is the one that its step wrote."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ranks
import torch
from preloaded import ForkedProcess
from ranks import world
from training_jobs import eventually

from aligner.cluster.run_directory import RunDirectory
from aligner.loop.checkpointing import POLICY, RunCheckpointer
from aligner.losses.sft import sft_loss
from aligner.models.config import Architecture, ModelConfig
from aligner.models.create import create_policy
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.trainable import Training
from aligner.parallel.topology import ParallelConfig
from aligner.run.session import Session
from aligner.run.settings import CheckpointConfig
from aligner.types import LabeledBatch

pytestmark = pytest.mark.timeout(400)


def make_policy(topology):
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
    found = tensors(model)
    expected = [p.clone() for p in found]
    become(model, step)
    assert model.version == step
    for number, (tensor, before) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(tensor, before), f"tensor {number} of {len(found)} is not that of step {step}"


def save_for_ever(directory: Path, mode: str) -> None:
    """Resume from the newest checkpoint, check that it holds exactly what its step must hold, and save step after step without end."""
    with world(seed=1) as topology:
        session = Session(topology=topology, directory=RunDirectory(directory).create(), config_yaml="")
        policy = make_policy(topology)
        tokens = torch.ones(1, 4, dtype=torch.int64)
        policy.train_step(
            LabeledBatch(tokens=tokens, lengths=torch.tensor([4]), loss_mask=tokens > 0), sft_loss
        )  # Adam has its moments now
        config = CheckpointConfig(keep=2, asynchronous=mode == "async")
        keeper = RunCheckpointer(session, policy.model, name=POLICY, tokenizer=directory, config=config)
        step, state = keeper.load()
        if step:
            assert state == {"step": step}
            must_be(policy.model, step)
        leftover = [path.name for path in (directory / "checkpoints" / POLICY).glob(".[wr]*")]
        assert not leftover, leftover
        print(f"resumed {step}", flush=True)
        while True:
            step += 1
            become(policy.model, step)
            print(f"saving {step}", flush=True)
            keeper.save(step, {"step": step}, {})
            become(policy.model, step + 10_000)  # the training goes on
            keeper.wait()
            print(f"saved {step}", flush=True)


class Saver:
    """A process that saves for ever; `expect(word)` waits for the next line it prints, and gives the number in it."""

    def __init__(self, process: ForkedProcess, log: Path) -> None:
        self._process, self._log, self._heard = process, log, 0
        self.resumed = self.expect("resumed")

    def _lines(self) -> list[str]:
        return [
            line for line in self._log.read_text().splitlines(keepends=True) if line.startswith(("resumed", "sav")) and line[-1] == "\n"
        ]

    def expect(self, word: str) -> int:
        assert eventually(lambda: len(self._lines()) > self._heard or self._process.poll() is not None, 120), self._log.read_text()[-3000:]
        assert len(self._lines()) > self._heard, self._log.read_text()[-3000:]
        heard, number = self._lines()[self._heard].split()
        self._heard += 1
        assert heard == word, self._log.read_text()[-3000:]
        return int(number)

    def kill(self) -> int:
        """SIGKILL; the last step that it said it had saved (0: none)."""
        self._process.kill()
        self._process.wait()
        return max((int(line.split()[1]) for line in self._lines() if line.startswith("saved")), default=0)


@pytest.fixture
def start(tmp_path, clean_environment, preloaded) -> Iterator[Callable[[str], Saver]]:
    started: list[ForkedProcess] = []

    def begin(mode: str) -> Saver:
        log = tmp_path / f"saver{len(started)}.log"
        log.touch()
        ranks.ask(tmp_path, save_for_ever, (tmp_path / "run", mode))
        started.append(preloaded.start([ranks.__file__, str(tmp_path)], clean_environment({"ALIGNER_LAUNCH": "single"}), log, tmp_path))
        return Saver(started[-1], log)

    yield begin
    for process in started:
        process.kill()
        process.wait()


def seconds_of_a_save(saver: Saver) -> float:
    """How long a save takes here, so that kills fall into it. Measured once it is warm."""
    for _ in range(3):
        saver.expect("saving")
        begun = time.monotonic()
        saver.expect("saved")
    saver.kill()
    return time.monotonic() - begun


@pytest.mark.parametrize(("mode", "kills"), [("sync", 50), ("async", 10)])
def test_kills_at_random_moments(mode, kills, start, tmp_path):
    """Every saver checks the checkpoint that the killed one before it left: all files by their SHA-256, all numbers by their step."""
    moments, folder = random.Random(11), tmp_path / "run" / "checkpoints" / "policy"
    duration = seconds_of_a_save(start(mode))
    saved, interrupted = 3, 0
    for _ in range(kills):
        saver = start(mode)
        assert saver.resumed >= saved  # what was said to be saved is there; at most one more than was said
        for _ in range(moments.randint(0, 1)):
            saver.expect("saving")
            saver.expect("saved")
        step = saver.expect("saving")
        time.sleep(moments.uniform(0.0, 1.5 * duration))
        saved = max(step - 1, saver.kill())
        interrupted += bool(list(folder.glob(".writing_*")))
    assert start(mode).resumed >= saved
    assert interrupted > 0  # else the kills missed the saves
