"""Labels for responses, by a regression reward model. Settings: conf/annotate/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("annotate")

if __name__ == "__main__":
    main()
