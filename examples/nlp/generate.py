"""Responses to prompts, by the built-in engine or another one. Settings: conf/generate/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("generate")

if __name__ == "__main__":
    main()
