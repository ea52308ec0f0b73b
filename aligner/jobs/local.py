"""A run with several components on this machine: the processes that its config asks for, under the local launcher."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from aligner.cluster.component import Component
from aligner.cluster.local import launch
from aligner.cluster.run_directory import RunDirectory
from aligner.config import compose
from aligner.errors import ConfigError
from aligner.schemas import TrainDPO, TrainGRPO, TrainPPO, TrainRewardModel, TrainSFT

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "examples" / "nlp"
RECIPES = {
    "sft": (TrainSFT, "train_sft.py"),
    "reward_model": (TrainRewardModel, "train_reward_model.py"),
    "dpo": (TrainDPO, "train_dpo.py"),
    "grpo": (TrainGRPO, "train_grpo.py"),
    "ppo": (TrainPPO, "train_ppo_actor.py"),
}


def recipe_of(name: str) -> str:
    """The recipe that a file of conf/ belongs to: `ppo_70b` to `ppo`. Raises ConfigError for a name of none."""
    for recipe in RECIPES:
        if name == recipe or name.startswith(f"{recipe}_"):
            return recipe
    raise ConfigError(f"config {name!r}: its name must begin with one of {', '.join(RECIPES)}")


def launch_local(name: str, overrides: Sequence[str], *, num_processes: int = 0) -> int:
    """Start every component of a run with the same settings; returns the exit code.

    `name` is a file stem in conf/; `num_processes` overrides the config's number of actor processes. Raises ConfigError before anything
    starts.
    """
    recipe = recipe_of(name)
    schema, script = RECIPES[recipe]
    config = compose(schema, name, overrides)
    overrides = [f"config={name}", *overrides]
    actors = num_processes or config.num_processes
    config.parallel.check_world(actors)
    components = [_component("actor" if schema in (TrainPPO, TrainGRPO) else recipe, script, overrides, actors, main=True)]
    if isinstance(config, TrainPPO):
        config.critic.parallel.check_world(config.critic.num_processes)
        components.append(_component("critic", "serve_critic.py", overrides, config.critic.num_processes))
    if isinstance(config, (TrainPPO, TrainGRPO)):
        config.reward.check_named()
    if isinstance(config, (TrainPPO, TrainGRPO)) and config.reward.serve:
        config.reward.parallel.check_world(config.reward.num_processes)
        arguments = (f"recipe={recipe}", *overrides)
        components.append(_component("reward", "serve_reward_model.py", arguments, config.reward.num_processes))
    servers = [component.name for component in components if not component.main]
    launcher = config.launcher if isinstance(config, (TrainPPO, TrainGRPO)) else None
    return launch(components, run_directory=RunDirectory(Path(config.run.directory)).create(), config=launcher, expect_services=servers)


def _component(name: str, script: str, overrides: Sequence[str], num_processes: int, *, main: bool = False) -> Component:
    command = (sys.executable, "-u", str(SCRIPTS / script), *overrides)
    return Component(name=name, command=command, num_processes=num_processes, main=main, terminal=main)
