"""SteerLM 2: several weighed responses to each prompt. Settings: conf/steerlm2/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("steerlm2")

if __name__ == "__main__":
    main()
