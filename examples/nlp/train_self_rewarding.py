"""The policy against its own judgement. Settings: conf/self_rewarding.yaml, then key=value arguments; see --help."""

from aligner.algorithms.registry import program

main = program("self_rewarding")

if __name__ == "__main__":
    main()
