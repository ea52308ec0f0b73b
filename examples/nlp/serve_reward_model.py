"""The reward server of a PPO run, or with recipe=grpo (or config=grpo_...) of a GRPO run. Settings as of those; see --help."""

import sys

from aligner.config import entrypoint
from aligner.schemas import TrainGRPO, TrainPPO

RECIPES = {"ppo": TrainPPO, "grpo": TrainGRPO}


def main() -> None:
    chosen = [argument for argument in sys.argv[1:] if argument.startswith("recipe=")]
    files = [argument.removeprefix("config=").split("_")[0] for argument in sys.argv[1:] if argument.startswith("config=")]
    recipe = ([argument.removeprefix("recipe=") for argument in chosen] or files or ["ppo"])[-1]
    if recipe not in RECIPES:
        print(f"error: recipe={recipe}; allowed: {', '.join(RECIPES)}", file=sys.stderr)
        sys.exit(2)

    @entrypoint(RECIPES[recipe], recipe)
    def serve(config: TrainPPO | TrainGRPO) -> None:
        from aligner.jobs.serving import serve_reward_model  # after the settings are known to be good: this imports Megatron-Core

        serve_reward_model(config)

    serve([argument for argument in sys.argv[1:] if argument not in chosen])


if __name__ == "__main__":
    main()
