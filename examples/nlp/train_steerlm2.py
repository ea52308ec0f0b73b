"""SteerLM 2: several weighed responses to each prompt. Settings: conf/steerlm2.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainSteerLM2


@entrypoint(TrainSteerLM2, "steerlm2")
def main(config: TrainSteerLM2) -> int:
    from aligner.jobs.steerlm2 import train_steerlm2  # after the settings are known to be good: this imports Megatron-Core

    return train_steerlm2(config)


if __name__ == "__main__":
    main()
