"""Which settings go with which estimator: what one of them cannot do, or would not look at, is refused."""

from __future__ import annotations

from aligner.errors import ConfigError
from aligner.losses.advantages import GROUPED, PER_RESPONSE, Estimator
from aligner.losses.shaping import ShapingConfig, Standardize


def check_estimator(
    estimator: Estimator, *, group_size: int, dynamic_sampling: bool, normalize_std: bool, gamma: float, shaping: ShapingConfig
) -> None:
    """Raise ConfigError naming the setting that does not go with the estimator, and what does."""
    name = estimator.value
    if not 0 <= gamma <= 1:
        raise ConfigError(f"algorithm.gamma={gamma}: must be between 0 and 1")
    if estimator in GROUPED and group_size < 2:
        raise ConfigError(
            f"algorithm.group_size={group_size}: a group needs at least 2 responses to compare, with estimator={name}; "
            f"1 is allowed with {_names(set(Estimator) - GROUPED)}"
        )
    if dynamic_sampling and estimator not in GROUPED:
        raise ConfigError(f"algorithm.dynamic_sampling=true: estimator={name} learns from equal rewards; allowed with {_names(GROUPED)}")
    if not normalize_std and estimator is not Estimator.grpo:
        raise ConfigError(f"algorithm.normalize_std=false: estimator={name} does not divide by a group's deviation; allowed: true")
    if gamma != 1 and estimator in PER_RESPONSE:
        raise ConfigError(f"algorithm.gamma={gamma}: estimator={name} has one advantage per response; allowed: 1")
    if estimator is Estimator.remax:
        _check_baselines(shaping)


def _check_baselines(shaping: ShapingConfig) -> None:
    """A greedy response's reward is clipped and scaled as the others are; the rest would hold the two against each other in two units."""
    if shaping.standardize is not Standardize.none:
        raise ConfigError(
            f"algorithm.shaping.standardize={shaping.standardize.value}: estimator=remax compares with greedy responses, which are not "
            f"among those that are standardised; allowed: none"
        )
    if shaping.overlong_buffer:
        raise ConfigError(
            f"algorithm.shaping.overlong_buffer={shaping.overlong_buffer}: estimator=remax keeps only the reward of the greedy response "
            f"that it compares with; allowed: 0"
        )


def _names(estimators: set[Estimator] | frozenset[Estimator]) -> str:
    return ", ".join(estimator.value for estimator in Estimator if estimator in estimators)
