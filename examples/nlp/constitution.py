"""Constitutional AI: critiques, revisions and AI preferences. Settings: conf/constitution.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import ConstitutionalAI


@entrypoint(ConstitutionalAI, "constitution")
def main(config: ConstitutionalAI) -> int:
    from aligner.jobs.constitution import write_feedback  # after the settings are known to be good: this imports Megatron-Core

    return write_feedback(config)


if __name__ == "__main__":
    main()
