"""The optimizer's part of a checkpoint, in a form that does not know the layout it was written at.

Megatron-Core's `fully_reshardable` form has moments and main weights under the parameters' names, whole. What it has besides is a list of
parameter groups per optimizer, and of those there are two where the experts are spread over ranks and one where they are not. The groups
are of the config of the run, but for the number of steps taken; so that number is read, and the groups are those of the model at hand.
"""

from __future__ import annotations

from typing import Any

from aligner.errors import CheckpointError
from aligner.parallel.mcore import ChainedOptimizer, DistributedOptimizer

# The default form raises in 0.16. Without a prefix the names are the same, whichever of the chained optimizers a parameter belongs to.
_FORM = "fully_reshardable"
_METADATA = {"distrib_optim_sharding_type": _FORM, "chained_optim_avoid_prefix": True}
_CONFIGURED = ("max_lr", "min_lr", "betas", "eps")


def sharded_state(optimizer: ChainedOptimizer, sharded_weights: dict[str, Any], *, is_loading: bool = False) -> dict[str, Any]:
    """The optimizer's state with its place in the whole model's. Every rank calls it: the state is gathered over data-parallel ranks."""
    return optimizer.sharded_state_dict(sharded_weights, is_loading=is_loading, metadata=_METADATA)


def restore(optimizer: ChainedOptimizer, loaded: dict[Any, Any]) -> None:
    """Put a loaded state into the optimizer. Learning rates, betas and epsilon stay those of this run's config.

    Raises CheckpointError where optimizers that are not distributed were saved with the experts spread otherwise.
    """
    configured = [{name: group[name] for name in _CONFIGURED} for group in optimizer.param_groups]
    parts = optimizer.chained_optimizers
    if all(isinstance(part, DistributedOptimizer) for part in parts):
        optimizer.load_state_dict(_regrouped(parts, loaded))
    elif len(parts) == 1 and 0 in loaded or len(parts) > 1 and set(loaded) != set(range(len(parts))):
        raise CheckpointError(
            "its experts were spread over ranks otherwise (parallel.ep); resharding them needs optimizer.distributed=true"
        )
    else:
        optimizer.load_state_dict(loaded)
    for group, settings in zip(optimizer.param_groups, configured, strict=True):
        group.update(settings)


def _regrouped(parts: list[DistributedOptimizer], loaded: dict[Any, Any]) -> dict[Any, Any]:
    """`loaded` is a mixture: what is sharded has the structure of `parts`, what is common that of the optimizers that were saved."""
    contents = [loaded, *(value for key, value in loaded.items() if isinstance(key, int))]
    groups = [group for content in contents if "optimizer" in content for group in content["optimizer"]["param_groups"]]
    step = max(group["step"] for group in groups if "step" in group)
    states = [
        {
            "optimizer": {"param_groups": [{**group, "step": step} for group in part.state_dict()["optimizer"]["param_groups"]]},
            "param_state": (loaded if len(parts) == 1 else loaded[number])["param_state"],
            "param_state_sharding_type": _FORM,
        }
        for number, part in enumerate(parts)
    ]
    return states[0] if len(parts) == 1 else dict(enumerate(states))
