"""Supervised fine-tuning. Settings: conf/sft.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainSFT


@entrypoint(TrainSFT, "sft")
def main(config: TrainSFT) -> int:
    from aligner.jobs.supervised import train_sft  # after the settings are known to be good: this imports Megatron-Core

    return train_sft(config)


if __name__ == "__main__":
    main()
