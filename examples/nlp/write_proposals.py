"""Log-probs of sampled responses, for SteerLM 2. Settings: conf/proposals.yaml, then key=value arguments; see --help."""

from aligner.algorithms.registry import program

main = program("proposals")

if __name__ == "__main__":
    main()
