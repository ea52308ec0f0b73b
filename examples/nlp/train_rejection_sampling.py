"""Supervised fine-tuning on the best of the policy's own samples. Settings: conf/rejection_sampling.yaml, then key=value arguments."""

from aligner.config import entrypoint
from aligner.schemas import TrainRejectionSampling


@entrypoint(TrainRejectionSampling, "rejection_sampling")
def main(config: TrainRejectionSampling) -> int:
    from aligner.jobs.online_preference import train_rejection_sampling  # after the settings are known to be good: it imports Megatron-Core

    return train_rejection_sampling(config)


if __name__ == "__main__":
    main()
