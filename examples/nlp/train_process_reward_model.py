"""A reward model that judges every step of a response. Settings: conf/process_reward_model/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("process_reward_model")

if __name__ == "__main__":
    main()
