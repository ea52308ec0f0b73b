"""Distillation from a teacher's stored log-probs. Settings: conf/distill/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("distill")

if __name__ == "__main__":
    main()
