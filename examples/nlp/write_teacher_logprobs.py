"""A teacher's log-probs of supervised records. Settings: conf/teacher_logprobs.yaml, then key=value arguments; see --help."""

from aligner.config import entrypoint
from aligner.schemas import WriteTeacherLogprobs


@entrypoint(WriteTeacherLogprobs, "teacher_logprobs")
def main(config: WriteTeacherLogprobs) -> int:
    from aligner.jobs.distillation import write_teacher_logprobs  # after the settings are known to be good: this imports Megatron-Core

    return write_teacher_logprobs(config)


if __name__ == "__main__":
    main()
