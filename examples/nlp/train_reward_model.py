"""Train a reward model on pairs of responses. Settings: conf/reward_model/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("reward_model")

if __name__ == "__main__":
    main()
