"""The actor of a PPO run; serve_critic.py and serve_reward_model.py are its servers. Settings: conf/ppo/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("ppo")

if __name__ == "__main__":
    main()
