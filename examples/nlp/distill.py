"""Distillation from a teacher's stored log-probs. Settings: conf/distill.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainDistillation


@entrypoint(TrainDistillation, "distill")
def main(config: TrainDistillation) -> int:
    from aligner.jobs.distillation import train_distillation  # after the settings are known to be good: this imports Megatron-Core

    return train_distillation(config)


if __name__ == "__main__":
    main()
