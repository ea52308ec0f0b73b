"""Distillation from a teacher's stored log-probs. Settings: conf/distill/, then key=value; see --help."""

from aligner.algorithms.registry import program

main = program("distill")

if __name__ == "__main__":
    main()
