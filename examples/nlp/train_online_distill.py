"""Distillation on the student's own samples. Settings: conf/online_distill.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainOnlineDistillation


@entrypoint(TrainOnlineDistillation, "online_distill")
def main(config: TrainOnlineDistillation) -> int:
    # After the settings are known to be good: this imports Megatron-Core.
    from aligner.jobs.online_distillation import train_online_distillation

    return train_online_distillation(config)


if __name__ == "__main__":
    main()
