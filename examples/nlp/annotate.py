"""Labels for responses, by a regression reward model. Settings: conf/annotate/, then key=value; see --help."""

from aligner.algorithms.registry import program

main = program("annotate")

if __name__ == "__main__":
    main()
