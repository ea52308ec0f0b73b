"""The reward server of a PPO run, or with recipe=grpo (or config=grpo_...) of another online run. Settings as of those; see --help."""

import sys

from aligner.config import belongs_to, entrypoint
from aligner.schemas import OnlineRun, TrainGRPO, TrainOnlineDPO, TrainPPO, TrainRejectionSampling

RECIPES = {"ppo": TrainPPO, "grpo": TrainGRPO, "online_dpo": TrainOnlineDPO, "rejection_sampling": TrainRejectionSampling}


def main() -> None:
    chosen = [argument for argument in sys.argv[1:] if argument.startswith("recipe=")]
    files = [argument.removeprefix("config=") for argument in sys.argv[1:] if argument.startswith("config=")]
    of_files = [next((recipe for recipe in RECIPES if belongs_to(file, recipe)), file) for file in files]
    recipe = ([argument.removeprefix("recipe=") for argument in chosen] or of_files or ["ppo"])[-1]
    if recipe not in RECIPES:
        print(f"error: recipe={recipe}; allowed: {', '.join(RECIPES)}", file=sys.stderr)
        sys.exit(2)

    @entrypoint(RECIPES[recipe], recipe)
    def serve(config: OnlineRun) -> None:
        from aligner.jobs.serving import serve_reward_model  # after the settings are known to be good: this imports Megatron-Core

        serve_reward_model(config)

    serve([argument for argument in sys.argv[1:] if argument not in chosen])


if __name__ == "__main__":
    main()
