"""Supervised fine-tuning on the best of the policy's own samples. Settings: conf/rejection_sampling/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("rejection_sampling")

if __name__ == "__main__":
    main()
