"""Kahneman-Tversky optimisation on judged responses. Settings: conf/kto.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainKTO


@entrypoint(TrainKTO, "kto")
def main(config: TrainKTO) -> int:
    from aligner.jobs.supervised import train_kto  # after the settings are known to be good: this imports Megatron-Core

    return train_kto(config)


if __name__ == "__main__":
    main()
