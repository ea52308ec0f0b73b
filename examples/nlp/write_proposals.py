"""Log-probs of sampled responses, for SteerLM 2. Settings: conf/proposals/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("proposals")

if __name__ == "__main__":
    main()
