"""Train a reward model on pairs of responses. Settings: conf/reward_model.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainRewardModel


@entrypoint(TrainRewardModel, "reward_model")
def main(config: TrainRewardModel) -> int:
    from aligner.jobs.supervised import train_reward_model  # after the settings are known to be good: this imports Megatron-Core

    return train_reward_model(config)


if __name__ == "__main__":
    main()
