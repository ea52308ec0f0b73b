"""The policy against its own judgement. Settings: conf/self_rewarding/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("self_rewarding")

if __name__ == "__main__":
    main()
