"""A reward model that judges every step of a response. Settings: conf/process_reward_model.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainProcessRewardModel


@entrypoint(TrainProcessRewardModel, "process_reward_model")
def main(config: TrainProcessRewardModel) -> int:
    from aligner.jobs.supervised import train_process_reward_model  # after the settings are known to be good: this imports Megatron-Core

    return train_process_reward_model(config)


if __name__ == "__main__":
    main()
