"""Labels for responses, by a regression reward model. Settings: conf/annotate.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import Annotate


@entrypoint(Annotate, "annotate")
def main(config: Annotate) -> int:
    from aligner.jobs.writing import annotate  # after the settings are known to be good: this imports Megatron-Core

    return annotate(config)


if __name__ == "__main__":
    main()
