"""Self-play fine-tuning: the data against the policy's own responses. Settings: conf/spin.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainSPIN


@entrypoint(TrainSPIN, "spin")
def main(config: TrainSPIN) -> int:
    from aligner.jobs.spin import train_spin  # after the settings are known to be good: this imports Megatron-Core

    return train_spin(config)


if __name__ == "__main__":
    main()
