"""The policy against its own judgement. Settings: conf/self_rewarding.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainSelfRewarding


@entrypoint(TrainSelfRewarding, "self_rewarding")
def main(config: TrainSelfRewarding) -> int:
    from aligner.jobs.self_rewarding import train_self_rewarding  # after the settings are known to be good: this imports Megatron-Core

    return train_self_rewarding(config)


if __name__ == "__main__":
    main()
