"""The critic server of a PPO run. Settings: conf/ppo.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import TrainPPO


@entrypoint(TrainPPO, "ppo")
def main(config: TrainPPO) -> None:
    from aligner.jobs.serving import serve_critic  # after the settings are known to be good: this imports Megatron-Core

    serve_critic(config)


if __name__ == "__main__":
    main()
