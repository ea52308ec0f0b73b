"""Log-probs of sampled responses, for SteerLM 2. Settings: conf/proposals.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import WriteProposals


@entrypoint(WriteProposals, "proposals")
def main(config: WriteProposals) -> int:
    from aligner.jobs.proposals import write_proposals  # after the settings are known to be good: this imports Megatron-Core

    return write_proposals(config)


if __name__ == "__main__":
    main()
