"""GRPO on one component, with reward functions or a reward server. Settings: conf/grpo/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("grpo")

if __name__ == "__main__":
    main()
