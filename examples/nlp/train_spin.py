"""Self-play fine-tuning: the data against the policy's own responses. Settings: conf/spin/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("spin")

if __name__ == "__main__":
    main()
