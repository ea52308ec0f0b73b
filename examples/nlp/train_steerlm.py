"""SteerLM: fine-tuning on labelled conversations. Settings: conf/steerlm.yaml, then key=value arguments; see --help."""

from aligner.algorithms.registry import program

main = program("steerlm")

if __name__ == "__main__":
    main()
