"""The critic server of a PPO run, or with recipe=NAME of another run that has one. Settings as of those; see --help."""

from aligner.jobs.start import server_program

main = server_program("critic")

if __name__ == "__main__":
    main()
