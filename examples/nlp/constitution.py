"""Constitutional AI: critiques, revisions and AI preferences. Settings: conf/constitution/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("constitution")

if __name__ == "__main__":
    main()
