"""A reward model of attributes of responses. Settings: conf/regression_reward_model.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainRegressionRewardModel


@entrypoint(TrainRegressionRewardModel, "regression_reward_model")
def main(config: TrainRegressionRewardModel) -> int:
    from aligner.jobs.supervised import train_regression_reward_model  # after the settings are known to be good: this imports Megatron-Core

    return train_regression_reward_model(config)


if __name__ == "__main__":
    main()
