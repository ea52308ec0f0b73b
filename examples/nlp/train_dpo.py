"""Direct preference optimisation on pairs of responses. Settings: conf/dpo/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("dpo")

if __name__ == "__main__":
    main()
