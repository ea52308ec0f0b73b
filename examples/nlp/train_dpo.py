"""Direct preference optimisation on pairs of responses. Settings: conf/dpo.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainDPO


@entrypoint(TrainDPO, "dpo")
def main(config: TrainDPO) -> int:
    from aligner.jobs.supervised import train_dpo  # after the settings are known to be good: this imports Megatron-Core

    return train_dpo(config)


if __name__ == "__main__":
    main()
