"""GRPO on one component, with reward functions or a reward server. Settings: conf/grpo.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainGRPO


@entrypoint(TrainGRPO, "grpo")
def main(config: TrainGRPO) -> int:
    from aligner.jobs.online import train_grpo  # after the settings are known to be good: this imports Megatron-Core

    return train_grpo(config)


if __name__ == "__main__":
    main()
