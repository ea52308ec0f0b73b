"""Distillation on the student's own samples. Settings: conf/online_distill/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("online_distill")

if __name__ == "__main__":
    main()
