"""Estimators, objectives and pair losses of the user's own: named by file, refused before anything is loaded, checked at every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aligner.algorithms.dpo import DPOConfig
from aligner.algorithms.grpo import GRPO, GRPOConfig
from aligner.errors import ConfigError
from aligner.losses.advantages import counted_rows, estimate, outcome_rewards
from aligner.losses.preference import DPOVariant, dpo_loss
from aligner.types import PolicyBatch, PreferenceBatch, TokenOutputs

EXAMPLES = Path(__file__).parents[3] / "examples" / "extend"
OPO, TRUNCATED, HINGE = (str(EXAMPLES / name) for name in ("estimator.py:opo", "objective.py:truncated", "pair_loss.py:squared_hinge"))


@pytest.fixture
def own(tmp_path):
    def write(body: str, signature: str = "rewards, mask, group_ids") -> str:
        file = tmp_path / f"own{len(list(tmp_path.iterdir()))}.py"
        file.write_text(f"import torch\n\ndef mine({signature}):\n    {body}\n")
        return f"{file}:mine"

    return write


def test_an_estimator_by_hand() -> None:
    """Two groups of two: lengths 1 and 3, rewards 4 and 0 (baseline 1); lengths 2 and 2, rewards 1 and 3 (baseline 2)."""
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 0]]).bool()
    scores, groups = torch.tensor([4.0, 0.0, 1.0, 3.0]), torch.tensor([7, 7, 2, 2])
    found = estimate(GRPOConfig(advantage_estimator=OPO).resolved_estimator(), outcome_rewards(scores, mask), mask, groups)
    assert torch.equal(found, torch.tensor([3.0, -1.0, -1.0, 1.0])[:, None] * mask)
    valid = torch.tensor([True, True, True, False])  # a row without a reward weighs nothing
    found = estimate(GRPOConfig(advantage_estimator=OPO).resolved_estimator(), outcome_rewards(scores, mask), mask, groups, valid=valid)
    assert found[2].tolist() == [0, 0, 0, 0] and found[3].tolist() == [0, 0, 0, 0] and found[0, 1] == 3
    assert torch.equal(counted_rows(GRPOConfig(advantage_estimator=OPO).resolved_estimator(), groups, valid), valid)


def test_grpo_asks_the_estimator_that_is_named(fakes, make_task) -> None:
    config = GRPOConfig(prompts_per_step=1, group_size=2, mini_batch_size=2, advantage_estimator=OPO, kl_coef=0)
    algorithm = GRPO(config, fakes.FakePolicy([]), make_task([]))
    assert algorithm.advantage_estimator.function.__name__ == "opo" and config.greedy_per_round == 0


def test_an_objective_is_ours_or_the_users() -> None:
    """For the policy that sampled both have REINFORCE's gradient; with a ratio above the bound the weight is cut."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    batch = PolicyBatch(
        tokens=torch.ones(2, 3, dtype=torch.long),
        lengths=torch.tensor([3, 3]),
        loss_mask=mask,
        old_logprobs=torch.full((2, 3), -1.0),
        advantages=torch.full((2, 3), 2.0),
    )
    gradients = {}
    for name in (TRUNCATED, "cispo", "ppo"):
        logprobs = torch.tensor([[-1.0] * 3, [0.0] * 3], requires_grad=True)  # ratios 1 and e
        output = GRPOConfig(objective=name).loss(max_response_length=3)(TokenOutputs(logprobs=logprobs), batch)
        output.total.backward()
        gradients[name] = logprobs.grad
    assert torch.equal(gradients[TRUNCATED], gradients["cispo"]) and not torch.equal(gradients[TRUNCATED], gradients["ppo"])


def pairs() -> tuple[TokenOutputs, PreferenceBatch]:
    mask = torch.tensor([[0, 1], [0, 1]]).bool()
    batch = PreferenceBatch(
        tokens=torch.ones(2, 2, dtype=torch.long),
        lengths=torch.tensor([2, 2]),
        loss_mask=mask,
        margins=torch.zeros(1),
        ref_logprobs=torch.tensor([[0.0, -1.0], [0.0, -2.0]]),
    )
    return TokenOutputs(logprobs=torch.tensor([[0.0, -0.5], [0.0, -2.5]])), batch


def test_a_pair_loss_by_hand(own) -> None:
    """D = (-0.5 + 1) - (-2.5 + 2) = 1; beta 0.25: (1 - 0.25)^2."""
    config = DPOConfig(loss=HINGE, beta=0.25)
    assert config.keeps_reference and config.reports[0] == "validation/loss"
    assert dpo_loss(*pairs(), **config.settings()).total.item() == pytest.approx(0.5625)
    assert DPOConfig(loss=DPOVariant.ipo).settings()["variant"] is DPOVariant.ipo
    with pytest.raises(ValueError, match=r"mine returned \(\), expected \(1,\): one loss per pair"):
        dpo_loss(*pairs(), **DPOConfig(loss=own("return ratios.chosen.sum()", "ratios")).settings())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: GRPOConfig(advantage_estimator="opo"),
            "algorithm.advantage_estimator=opo: allowed: grpo, rloo, .* or path/to/file.py:name",
        ),
        (lambda: GRPOConfig(objective="tpo"), "algorithm.objective=tpo: allowed: ppo, gspo, .* or path/to/file.py:name"),
        (lambda: DPOConfig(loss="dpo"), "algorithm.loss=dpo: allowed: sigmoid, .* or path/to/file.py:name"),
        (
            lambda: GRPOConfig(advantage_estimator="nowhere.py:f").resolved_estimator(),
            "algorithm.advantage_estimator 'nowhere.py:f': no such file",
        ),
        (
            lambda: GRPOConfig(advantage_estimator=TRUNCATED).resolved_estimator(),
            r"missing a .* 'clip'; expected truncated\(rewards, mask, ",
        ),
        (lambda: DPOConfig(loss=OPO).settings(), r"missing a required argument: 'mask'; expected opo\(ratios\)"),
    ],
)
def test_what_cannot_be_called_is_refused_by_its_setting(make, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
