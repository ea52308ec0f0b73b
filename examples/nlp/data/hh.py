"""Turns files of HH-RLHF (2204.05862), two dialogues {"chosen", "rejected"} a record, into conversations for chat models.

    python examples/nlp/data/hh.py train.jsonl.gz pairs.jsonl                  # {"prompt": [...], "chosen", "rejected"}
    python examples/nlp/data/hh.py train.jsonl.gz chat.jsonl --format sft      # {"messages": [...]}, the chosen dialogues

Models without a chat template take the files as they are. Dialogues whose last turns are equal or empty, or answer nobody, are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby

from conversion import Record, converter, each_record, run

from aligner.data.records import split_dialogue
from aligner.errors import DataError

_REPLY = "\n\nAssistant:"  # ends the part that two dialogues share
_TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def messages(dialogue: str) -> list[dict[str, str]]:
    """The turns of a dialogue, those of one speaker on end as one. Raises DataError where it does not begin with a mark."""
    before, *rest = _TURN.split(dialogue)
    if before.strip() or not rest:
        raise DataError(f"a dialogue begins with {dialogue[:40]!r}, expected '\\n\\nHuman:'")
    spoken = zip(rest[0::2], rest[1::2], strict=True)
    return [
        {"role": ROLES[speaker], "content": "\n\n".join(text.strip() for _, text in turns)}
        for speaker, turns in groupby(spoken, key=lambda turn: turn[0])
    ]


def pairs(record: Record) -> Iterator[Record]:
    """The dialogue up to where the two part, and both replies."""
    prompt, chosen, rejected = split_dialogue(record["chosen"], record["rejected"])
    chosen, rejected = chosen.strip(), rejected.strip()
    turns = messages(prompt.removesuffix(_REPLY))
    if chosen and rejected and chosen != rejected and turns[-1]["role"] == "user":
        yield {"prompt": turns, "chosen": chosen, "rejected": rejected}


def sft(record: Record) -> Iterator[Record]:
    """The chosen dialogue."""
    turns = messages(record["chosen"])
    if turns[-1]["role"] == "assistant" and all(turn["content"] for turn in turns):
        yield {"messages": turns}


FORMATS = {"pairs": pairs, "sft": sft}


def main() -> int:
    parser = converter(__doc__)
    parser.add_argument("--format", choices=FORMATS, default="pairs")
    arguments = parser.parse_args()
    return run(arguments.source, arguments.target, each_record(FORMATS[arguments.format]))


if __name__ == "__main__":
    sys.exit(main())
