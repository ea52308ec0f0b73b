"""Turns files of OASST1 and OASST2 (2304.07327), trees (*.trees.jsonl.gz) or flat messages (*.messages.jsonl.gz, parquet), into chats.

    python examples/nlp/data/oasst.py oasst_ready.trees.jsonl.gz chat.jsonl --lang en               # {"messages": [...]}, the best replies
    python examples/nlp/data/oasst.py oasst_all.trees.jsonl.gz steerlm.jsonl --format steerlm --threads all

A thread is a way from a tree's prompt to its last reply of an assistant. `best` goes on with the reply of the lowest rank, `all` with each.
Deleted messages, and those that reviewers refused, end a thread. Labels from 0 to 1 become whole numbers from 0 to 4, as SteerLM has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial

from conversion import Record, converter, label_text, run, steerlm

from aligner.data.records import raw_object
from aligner.data.sources import RawRecord, read_records
from aligner.errors import DataError

ATTRIBUTES = ("quality", "toxicity", "humor", "creativity")
ROLES = {"prompter": "user", "assistant": "assistant"}
LIKERT = 4


def trees(records: Iterable[RawRecord]) -> Iterator[tuple[str, Record]]:
    """(source, root message) of every tree; flat messages are put together by their parents."""
    replies: dict[str, list[Record]] = {}
    roots: list[tuple[str, Record]] = []
    for raw in records:
        try:
            record = raw_object(raw)
        except DataError as error:
            raise DataError(f"{raw.source}: {error}") from error
        if "prompt" in record:
            yield raw.source, record["prompt"]
        elif record.get("parent_id") is None:
            roots.append((raw.source, record))
        else:
            replies.setdefault(record["parent_id"], []).append(record)
    yield from ((source, _with_replies(root, replies)) for source, root in roots)


def threads(message: Record, *, lang: str, every: bool) -> Iterator[list[Record]]:
    """The ways from a message to the last replies of an assistant that are of use."""
    if not _is_of_use(message, lang):
        return
    found = False
    replies = sorted(message.get("replies") or [], key=_rank)
    for reply in replies:
        for rest in threads(reply, lang=lang, every=every):
            found = True
            yield [message, *rest]
        if found and not every:
            return
    if not found and message["role"] == "assistant":
        yield [message]


def chat(thread: list[Record]) -> Record:
    """A conversation."""
    return {"messages": _messages(thread)}


def conditioned(thread: list[Record]) -> Record:
    """SteerLM's record; the assistant's turns have labels where somebody judged them."""
    return steerlm(_messages(thread), [_label(message) if message["role"] == "assistant" else None for message in thread])


FORMATS = {"chat": chat, "steerlm": conditioned}


def convert(location: str, *, kind: str, lang: str, every: bool) -> Iterator[Record]:
    """The records of all threads. Raises DataError naming file and line."""
    for source, root in trees(read_records(location)):
        try:
            yield from [FORMATS[kind](thread) for thread in threads(root, lang=lang, every=every)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{source}: not a record of OASST ({error!r})") from error


def _with_replies(message: Record, replies: dict[str, list[Record]]) -> Record:
    return {**message, "replies": [_with_replies(reply, replies) for reply in replies.get(message["message_id"], [])]}


def _rank(message: Record) -> int:
    """Lower is better; messages without a rank come last."""
    rank = message.get("rank")
    return rank if rank is not None else sys.maxsize


def _is_of_use(message: Record, lang: str) -> bool:
    refused = message.get("deleted") or message.get("review_result") is False
    return not refused and bool(message["text"].strip()) and lang in ("", message["lang"])


def _messages(thread: list[Record]) -> list[dict[str, str]]:
    return [{"role": ROLES[message["role"]], "content": message["text"]} for message in thread]


def _label(message: Record) -> str | None:
    """Trees have labels by name; in parquet files they are lists of names and of values."""
    labels = message.get("labels") or {}
    if isinstance(labels.get("name"), list):
        values = dict(zip(labels["name"], labels["value"], strict=True))
    else:
        values = {name: label["value"] for name, label in labels.items()}
    return label_text({name: LIKERT * values[name] for name in ATTRIBUTES if name in values}) or None


def main() -> int:
    parser = converter(__doc__)
    parser.add_argument("--format", choices=FORMATS, default="chat")
    parser.add_argument("--threads", choices=("best", "all"), default="best")
    parser.add_argument("--lang", default="", help="only messages in this language, such as en")
    arguments = parser.parse_args()
    every = arguments.threads == "all"
    return run(arguments.source, arguments.target, partial(convert, kind=arguments.format, lang=arguments.lang, every=every))


if __name__ == "__main__":
    sys.exit(main())
