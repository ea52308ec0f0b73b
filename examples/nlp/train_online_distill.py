"""Distillation on the student's own samples. Settings: conf/online_distill.yaml, then key=value arguments; see --help."""

from aligner.algorithms.registry import program

main = program("online_distill")

if __name__ == "__main__":
    main()
