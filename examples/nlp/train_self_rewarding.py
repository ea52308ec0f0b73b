"""The policy against its own judgement. Settings: conf/self_rewarding/, then key=value; see --help."""

from aligner.algorithms.registry import program

main = program("self_rewarding")

if __name__ == "__main__":
    main()
