"""Kahneman-Tversky optimisation on judged responses. Settings: conf/kto/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("kto")

if __name__ == "__main__":
    main()
