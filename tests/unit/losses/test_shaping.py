"""What happens to scores before they are rewards, by hand."""

import pytest
import torch
from torch import tensor

from aligner.errors import ConfigError
from aligner.losses.shaping import Moments, ShapingConfig, Standardize, shape

SCORES = tensor([1.0, -3.0, 5.0, 100.0])
LENGTHS = tensor([60, 80, 90, 100])
VALID = tensor([True, True, True, False])


def shaped(config, scores=SCORES, valid=VALID, state=None, lengths=LENGTHS):
    return shape(scores, lengths, valid, config, state or Moments(), max_length=100)


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, tensor(expected, dtype=actual.dtype), rtol=0, atol=atol)


def test_the_defaults_change_nothing_but_rows_without_a_score():
    rewards, state, metrics = shaped(ShapingConfig(), scores=tensor([0.1, -3.3, 1e-9, float("nan")]))
    assert rewards.tolist() == tensor([0.1, -3.3, 1e-9, 0.0]).tolist() and rewards.dtype == torch.float32
    assert state == Moments() and not metrics


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"clip_low": -2.0}, [1, -2, 5, 0]),
        ({"clip_high": 0.5}, [0.5, -3, 0.5, 0]),
        ({"clip_low": -2.0, "clip_high": 2.0, "scale": 3.0, "shift": 0.5}, [3.5, -5.5, 6.5, 0]),  # clipped first, shifted last
        ({"overlong_buffer": 20}, [1, -3, 4.5, 0]),  # 60 and 80: nothing; 90: half of 1
        ({"overlong_buffer": 50, "overlong_penalty": 2.0}, [0.6, -4.2, 3.4, 0]),  # 10, 30 and 40 fiftieths of 2
        ({"clip_high": 1.0, "scale": 0.1, "overlong_buffer": 20}, [0.1, -0.3, -0.4, 0]),  # the penalty is not scaled
    ],
)
def test_by_hand(config, expected):
    close(shaped(ShapingConfig(**config))[0], expected)


def test_what_was_clipped_and_penalised_is_counted_over_valid_rows():
    _, _, metrics = shaped(ShapingConfig(clip_low=-2.0, clip_high=2.0, overlong_buffer=20))
    assert metrics == pytest.approx({
        "shaping/clipped_fraction": 2 / 3,
        "shaping/overlong_fraction": 1 / 3,
        "shaping/overlong_penalty": -0.5 / 3,
    })  # fmt: skip


def test_standardised_over_the_batch():
    # valid: 1 -3 5, mean 1, variance (0 + 16 + 16) / 3, deviation 3.2659863
    rewards, state, metrics = shaped(ShapingConfig(standardize=Standardize.batch, scale=2.0, shift=1.0))
    close(rewards, [1, 1 - 8 / 3.2659863, 1 + 8 / 3.2659863, 0])
    assert metrics == pytest.approx({"shaping/mean": 1.0, "shaping/std": 3.2659863}) and state == Moments()


@pytest.mark.parametrize("standardize", [Standardize.batch, Standardize.running])
@pytest.mark.parametrize("valid", [[True] * 4, [True, False, False, False], [False] * 4])
def test_equal_single_and_no_scores_become_zero(standardize, valid):
    rewards, _, _ = shaped(ShapingConfig(standardize=standardize), scores=torch.full((4,), 0.7), valid=tensor(valid))
    assert rewards.tolist() == [0.0] * 4


def test_running_statistics_are_those_of_all_scores_so_far():
    config, state, generator = ShapingConfig(standardize=Standardize.running), Moments(), torch.Generator().manual_seed(0)
    seen = torch.zeros(0, dtype=torch.float64)
    for size in (5, 1, 7):
        scores = 100.0 + torch.randn(size, generator=generator)  # a mean far from 0: squares minus square of the mean would cancel
        seen = torch.cat([seen, scores.double()])
        rewards, state, metrics = shaped(config, scores, torch.ones(size, dtype=torch.bool), state, torch.ones(size))
        assert state.count == len(seen)
        assert state.mean == pytest.approx(seen.mean().item(), rel=1e-12)
        assert state.std == metrics["shaping/std"] == pytest.approx(seen.std(correction=0).item(), rel=1e-9)
        close(rewards, ((scores.double() - seen.mean()) / (seen.var(correction=0) + 1e-8).sqrt()).tolist())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"clip_low": float("nan")}, r"shaping\.clip_low=nan: must be a finite number or null"),
        ({"clip_high": float("inf")}, r"shaping\.clip_high=inf: must be a finite number or null"),
        ({"clip_low": 1.0, "clip_high": 1.0}, r"shaping\.clip_low=1\.0: must be below clip_high=1\.0"),
        ({"scale": 0.0}, r"shaping\.scale=0\.0: must be above 0"),
        ({"scale": float("inf")}, r"shaping\.scale=inf: must be a finite number$"),
        ({"shift": float("nan")}, r"shaping\.shift=nan"),
        ({"overlong_buffer": -1}, r"shaping\.overlong_buffer=-1: must not be negative"),
        ({"overlong_penalty": -1.0}, r"shaping\.overlong_penalty=-1\.0: must not be negative"),
    ],
)
def test_what_cannot_be_is_named(fields, named):
    with pytest.raises(ConfigError, match=rf"algorithm\.{named}"):
        ShapingConfig(**fields)


def test_a_buffer_longer_than_a_response_may_be():
    with pytest.raises(
        ConfigError, match=r"algorithm\.shaping\.overlong_buffer=101: must be at most rollout\.sampling\.max_response_length=100"
    ):
        shaped(ShapingConfig(overlong_buffer=101))


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_valid_score_that_is_not_finite_is_refused(score):
    with pytest.raises(ValueError, match="1 valid scores are not finite"):
        shaped(ShapingConfig(standardize=Standardize.running), scores=tensor([score, 1.0, 2.0, 3.0]))
