"""The reward server of a PPO run, or with recipe=grpo (or config=grpo_...) of another online run. Settings as of those; see --help."""

from aligner.jobs.start import server_program

main = server_program("reward")

if __name__ == "__main__":
    main()
