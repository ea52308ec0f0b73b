"""Constitutional AI: critiques, revisions and AI preferences. Settings: conf/constitution.yaml, then key=value arguments; see --help."""

from aligner.algorithms.registry import program

main = program("constitution")

if __name__ == "__main__":
    main()
