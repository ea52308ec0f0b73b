"""CPU time of everything that turns a step's scores into advantages, and of every policy loss, for 1,024 x 1,024 tokens on one thread.

    python benchmarks/advantages.py [--rows 1024] [--length 1024] [--repeats 5]

Held against GAE as a plain loop over tokens, with which the run also compares its results, and against the forward pass without gradient
of the small random model over as many tokens (measured on a few rows and scaled up by their number). The least of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from random_model import SIZES, random_prompts, write_model
from sides import HERE, Mismatch
from torch import Tensor

from aligner.losses.advantages import Estimator, estimate, gae, outcome_rewards, shaped_rewards, whiten
from aligner.losses.aggregation import Aggregation
from aligner.losses.kl import KLEstimator, kl_estimate
from aligner.losses.policy import Objective, policy_loss
from aligner.losses.shaping import Moments, ShapingConfig, Standardize, shape
from aligner.types import PolicyBatch, TokenOutputs

GROUP = 8
FORWARD_ROWS = 4  # of which the forward pass is measured
TOLERANCE = 1e-5  # of an advantage, relative to the largest


def cpu_seconds(action: Callable[[], object], repeats: int) -> float:
    """The least of the repeats, after one to warm up."""
    action()
    least = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        action()
        least = min(least, time.process_time() - started)
    return least


def looped_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Advantages by the recursion, token by token."""
    advantages, next_value, next_advantage = torch.zeros_like(values), torch.zeros(len(values)), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], next_advantage, 0.0)
    return advantages


def masks(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Responses of different lengths after prompts of different lengths; and the same with an environment's tokens among them."""
    at = torch.arange(length)
    starts = torch.randint(length // 16, length // 4, (rows, 1), generator=generator)
    ends = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    mask = (at >= starts) & (at < ends)
    return mask, mask & ((at - starts) % 100 < 60)


def forward_seconds(length: int, rows: int) -> float:
    """CPU seconds of a log-prob pass of the small model over `rows` rows, from one over FORWARD_ROWS of them."""
    from aligner.algorithms.sft import TrainSFT
    from aligner.models import create
    from aligner.models.config import ModelConfig
    from aligner.run.session import open_session
    from aligner.run.settings import RunConfig
    from aligner.types import LabeledBatch

    size = SIZES["small"]
    tokens = torch.tensor(random_prompts(size, count=FORWARD_ROWS, length=length, seed=1))
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[:, 0] = False
    batch = LabeledBatch(tokens=tokens, lengths=torch.full((FORWARD_ROWS,), length), loss_mask=mask)
    with tempfile.TemporaryDirectory() as folder:
        write_model(size, Path(folder) / "model", positions=length, seed=0)
        settings = ModelConfig(path=f"{folder}/model", micro_batch_size=FORWARD_ROWS)
        config = TrainSFT(run=RunConfig(directory=folder, num_threads=1), model=settings)
        with open_session(config, config.run, config.parallel, component="trainer") as session:
            architecture = create.read_architecture(settings, vocab_size=0)
            policy = create.create_policy(settings, architecture, config.parallel, session.topology, create.training(settings, None))
            return cpu_seconds(lambda: policy.logprobs(batch), 1) * rows / FORWARD_ROWS


def cases(rows: int, length: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the first is the yardstick. Raises Mismatch where GAE is not the loop's."""
    generator = torch.Generator().manual_seed(0)
    mask, with_gaps = masks(rows, length, generator)
    values, old, ref, new = (torch.randn(rows, length, generator=generator) for _ in range(4))
    scores, valid, groups = torch.randn(rows, generator=generator), torch.ones(rows, dtype=torch.bool), torch.arange(rows) // GROUP
    rewards = shaped_rewards(scores, mask, kl_estimate(old, ref, KLEstimator.k1), 0.01)
    for some, what in ((mask, "responses in one piece"), (with_gaps, "responses with gaps")):
        expected = looped_gae(rewards, values, some, 0.99, 0.95)
        error = (gae(rewards, values, some, 0.99, 0.95)[0] - expected).abs().max() / expected.abs().max()
        if not error <= TOLERANCE:
            raise Mismatch(f"GAE of {what} is {error:.1e} from the loop's")
    config = ShapingConfig(clip_low=-3, clip_high=3, standardize=Standardize.running, overlong_buffer=length // 4)
    found: dict[str, Callable[[], object]] = {
        "GAE, a loop over tokens": partial(looped_gae, rewards, values, mask, 0.99, 0.95),
        "GAE": partial(gae, rewards, values, mask, 0.99, 0.95),
        "GAE, gaps in the mask": partial(gae, rewards, values, with_gaps, 0.99, 0.95),
        "whitening": partial(whiten, rewards, mask),
        "scores to token rewards": partial(outcome_rewards, scores, mask),
        "shaping, all of it": partial(shape, scores, mask.sum(dim=1), valid, config, Moments(), max_length=length),
    }
    for estimator in Estimator:
        baselines = scores if estimator is Estimator.remax else None
        found[f"estimator {estimator.value}"] = partial(estimate, estimator, rewards, mask, groups, baselines=baselines)
    advantages = estimate(Estimator.grpo, rewards, mask, groups)
    batch = PolicyBatch(
        tokens=torch.zeros(rows, length, dtype=torch.int64),
        lengths=torch.full((rows,), length),
        loss_mask=mask,
        old_logprobs=old,
        advantages=advantages,
        ref_logprobs=ref,
    )
    for objective in Objective:
        found[f"loss {objective.value}, with gradient"] = partial(loss_and_gradient, objective, old + 0.1 * new, batch)
    return found


def loss_and_gradient(objective: Objective, logprobs: Tensor, batch: PolicyBatch) -> None:
    """One policy loss with a KL term, forward and backward down to the log-probs."""
    leaf = logprobs.requires_grad_()
    clips = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
    outputs = TokenOutputs(logprobs=leaf)
    policy_loss(outputs, batch, objective=objective, aggregation=Aggregation.sequence_mean, kl_coef=0.01, **clips).total.backward()
    leaf.grad = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024, help=f"responses, a multiple of {GROUP}")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row, prompt included")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the figures are written, as JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    try:
        measured = {name: cpu_seconds(action, chosen.repeats) for name, action in cases(chosen.rows, chosen.length).items()}
    except Mismatch as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    loop = measured["GAE, a loop over tokens"]
    forward = forward_seconds(chosen.length, chosen.rows)
    print(f"{chosen.rows:,} x {chosen.length:,} tokens, one CPU thread; a forward pass of the small model: {forward:,.0f} s")
    print(f"  {'':<34}{'CPU, ms':>9}{'of the loop':>13}{'of a forward pass':>19}")
    for name, seconds in measured.items():
        print(f"  {name:<34}{seconds * 1e3:>9.2f}{seconds / loop:>13.1%}{seconds / forward:>19.4%}")
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / time.strftime("advantages-%Y%m%d-%H%M%S.json")
    figures = {"rows": chosen.rows, "length": chosen.length, "forward_seconds": forward, "cpu_seconds": measured}
    path.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
