"""A reward model of attributes of responses. Settings: conf/regression_reward_model/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("regression_reward_model")

if __name__ == "__main__":
    main()
