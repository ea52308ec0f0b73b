"""What the checks of a training step cost: steps with the look at the parameters after the update and without it, in turn, in one process.

    python benchmarks/checks.py [--size large] [--rows 8] [--length 128] [--pairs 7]

Both sides train one policy on the same batch; which of a pair comes first changes. The ratio is the median over the pairs, of CPU time
where there is no GPU. What is left of it is mostly scatter, so the check alone is timed too and put beside the step: that is the figure to
trust. So are the sums over a checkpoint's tensors, beside the saving of it that they belong to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from random_model import SIZES, random_prompts, write_model
from sides import HERE

CHECKS = 20  # times that the check alone is done


def seconds(action) -> float:
    """CPU seconds of an action; on a GPU the wall's, until the device has done it."""
    now = time.perf_counter if torch.cuda.is_available() else time.process_time
    started = now()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return now() - started


def measure(name: str, rows: int, length: int, pairs: int) -> dict[str, float]:
    """Medians over the pairs: seconds of a step with and without the check, their ratio; and of the check alone."""
    from aligner.algorithms.sft import TrainSFT
    from aligner.losses.sft import sft_loss
    from aligner.models import create
    from aligner.models.checkpoint import checkpoint, optimizer as checkpoint_optimizer, sums as checkpoint_sums
    from aligner.models.config import ModelConfig
    from aligner.models.training import trainable
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.run.session import open_session
    from aligner.run.settings import RunConfig
    from aligner.types import LabeledBatch

    tokens = torch.tensor(random_prompts(SIZES[name], count=rows, length=length, seed=1))
    batch = LabeledBatch(tokens=tokens, lengths=torch.full((rows,), length), loss_mask=torch.arange(length).expand(rows, length) > 0)
    off = mock.patch.object(trainable, "non_finite_parameters", lambda runners, limit: "")
    with tempfile.TemporaryDirectory() as folder:
        write_model(SIZES[name], Path(folder) / "model", positions=length, seed=0)
        model = ModelConfig(path=f"{folder}/model", micro_batch_size=rows)
        config = TrainSFT(run=RunConfig(directory=folder, num_threads=1), model=model, optimizer=OptimizerConfig(lr=1e-5, min_lr=0.0))
        with open_session(config, config.run, config.parallel, component="trainer") as session:
            architecture = create.read_architecture(model, vocab_size=0)
            training = create.training(model, config.optimizer, total_steps=2 * pairs + 1)
            policy = create.create_policy(model, architecture, config.parallel, session.topology, training)

            def step() -> None:
                policy.train_step(batch, sft_loss)

            def unchecked() -> None:
                with off:
                    step()

            step()
            measured: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(pairs):
                for checked in (True, False) if pair % 2 else (False, True):
                    measured[checked].append(seconds(step if checked else unchecked))
            trained = policy.model

            def check() -> None:
                if found := trainable.non_finite_parameters(trained.runners, trained.guard.max_weight):
                    raise RuntimeError(found)

            def sums() -> None:
                weights = checkpoint.sharded_state(trained.chunks)
                optimizer = checkpoint_optimizer.sharded_state(trained.optimizer, weights)
                checkpoint_sums.find([weights, optimizer], vocabulary=architecture.vocab_size)

            def save() -> None:
                checkpoint.save(Path(folder) / "saved", trained, checkpoint.SaveRequest(step=1, state={}))

            alone = min(seconds(check) for _ in range(CHECKS))
            summed, saved = (min(seconds(action) for _ in range(3)) for action in (sums, save))
            parameters = sum(p.numel() for p in trained.module.parameters())
    with_check, without = (statistics.median(measured[checked]) for checked in (True, False))
    ratio = statistics.median(a / b for a, b in zip(measured[True], measured[False], strict=True))
    found = {"parameters": parameters, "with": with_check, "without": without, "ratio": ratio, "check": alone, "share": alone / without}
    return found | {"sums": summed, "save": saved}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the figures are written, as JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(chosen.size, chosen.rows, chosen.length, chosen.pairs)
    print(f"{found['parameters'] / 1e6:.2f}M parameters, a step of {chosen.rows} x {chosen.length} tokens")
    seen = f"with the check {found['with']:.4f} s, without {found['without']:.4f} s: {found['ratio']:.4f}x"
    print(f"  {seen} (median of {chosen.pairs} pairs)")
    print(f"  the check alone {found['check'] * 1e3:.3f} ms: {found['share']:.3%} of a step")
    of_save = f"{found['sums'] / found['save']:.1%} of the CPU time of saving it"
    print(f"  the sums of a checkpoint {found['sums'] * 1e3:.1f} ms: {of_save}, {found['sums'] / found['without'] / 100:.3%} of 100 steps")
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / time.strftime("checks-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps({"size": chosen.size, "rows": chosen.rows, "length": chosen.length, **found}, indent=2) + "\n")
    print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
