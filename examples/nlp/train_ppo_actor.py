"""The actor of a PPO run; serve_critic.py and serve_reward_model.py are its servers. Settings: conf/ppo.yaml, then key=value (--help)."""

from aligner.algorithms.registry import program

main = program("ppo")

if __name__ == "__main__":
    main()
