"""The critic server of a PPO run, or with recipe=NAME of another run that has one. Settings as of those; see --help."""

from aligner.algorithms.registry import server_program
from aligner.run.settings import JobRun


def serve(config: JobRun) -> None:
    from aligner.jobs.serves import serve_critic  # after the settings are known to be good: this imports Megatron-Core

    serve_critic(config)


main = server_program("critic", serve)

if __name__ == "__main__":
    main()
