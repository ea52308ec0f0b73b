"""The actor of a PPO run; serve_critic.py and serve_reward_model.py are its servers. Settings: conf/ppo.yaml, then key=value (--help)."""

from aligner.config import entrypoint
from aligner.schemas import TrainPPO


@entrypoint(TrainPPO, "ppo")
def main(config: TrainPPO) -> int:
    from aligner.jobs.online import train_ppo_actor  # after the settings are known to be good: this imports Megatron-Core

    return train_ppo_actor(config)


if __name__ == "__main__":
    main()
