"""Labels for responses, by a regression reward model. Settings: conf/annotate.yaml, then key=value arguments; see --help."""

from aligner.algorithms.registry import program

main = program("annotate")

if __name__ == "__main__":
    main()
