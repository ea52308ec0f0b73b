"""DPO on pairs of the policy's own samples. Settings: conf/online_dpo.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainOnlineDPO


@entrypoint(TrainOnlineDPO, "online_dpo")
def main(config: TrainOnlineDPO) -> int:
    from aligner.jobs.online_preference import train_online_dpo  # after the settings are known to be good: this imports Megatron-Core

    return train_online_dpo(config)


if __name__ == "__main__":
    main()
