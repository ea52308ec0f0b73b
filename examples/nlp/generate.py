"""Responses to prompts, by the built-in engine or another one. Settings: conf/generate.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import Generate


@entrypoint(Generate, "generate")
def main(config: Generate) -> int:
    from aligner.jobs.writing import generate  # after the settings are known to be good: this imports Megatron-Core

    return generate(config)


if __name__ == "__main__":
    main()
