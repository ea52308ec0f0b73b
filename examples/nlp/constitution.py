"""Constitutional AI: critiques, revisions and AI preferences. Settings: conf/constitution/, then key=value; see --help."""

from aligner.algorithms.registry import program

main = program("constitution")

if __name__ == "__main__":
    main()
