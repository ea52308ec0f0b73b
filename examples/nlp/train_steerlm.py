"""SteerLM: fine-tuning on labelled conversations. Settings: conf/steerlm/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("steerlm")

if __name__ == "__main__":
    main()
