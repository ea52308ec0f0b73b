"""Supervised fine-tuning. Settings: conf/sft/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("sft")

if __name__ == "__main__":
    main()
