"""A teacher's log-probs of supervised records. Settings: conf/teacher_logprobs/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("teacher_logprobs")

if __name__ == "__main__":
    main()
