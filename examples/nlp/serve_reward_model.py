"""The reward server of a PPO run, or with recipe=grpo (or config=grpo_...) of another online run. Settings as of those; see --help."""

from aligner.algorithms.registry import server_program
from aligner.run.settings import JobRun


def serve(config: JobRun) -> None:
    from aligner.jobs.serves import serve_reward_model  # after the settings are known to be good: this imports Megatron-Core

    serve_reward_model(config)


main = server_program("reward", serve)

if __name__ == "__main__":
    main()
