"""Turns files of UltraFeedback (2310.01377), and of its binarized forms, into pairs.

    python examples/nlp/data/ultrafeedback.py ultrafeedback.jsonl pairs.jsonl              # the best completion and the worst
    python examples/nlp/data/ultrafeedback.py ultrafeedback.jsonl pairs.jsonl --pairs all  # every two of different scores
    python examples/nlp/data/ultrafeedback.py train_prefs.parquet pairs.jsonl              # {chosen: [...], rejected: [...], score_*}

Scores become chosen_reward and rejected_reward (RPO and the reward model's margins read them). Without an overall_score, a completion's
score is the mean of its ratings. Completions of equal score, or equal or empty text, make no pair.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import combinations

from conversion import Record, converter, each_record, run

from aligner.data.forms import ultrafeedback_score as score
from aligner.errors import DataError


def pairs(record: Record, *, every: bool) -> Iterator[Record]:
    """Of one record of any form."""
    if "completions" in record:
        yield from _of_completions(record, every=every)
    elif isinstance(record.get("chosen"), list):
        yield from _of_conversations(record)
    else:
        raise DataError(f"has the fields {sorted(record)}, expected {{instruction, completions}} or {{chosen: [...], rejected: [...]}}")


def _of_completions(record: Record, *, every: bool) -> Iterator[Record]:
    scored = [(score(completion), completion["response"].strip()) for completion in record["completions"]]
    ordered = sorted(((value, text) for value, text in scored if value is not None and text), key=lambda one: -one[0])
    chosen_of = combinations(ordered, 2) if every else [(ordered[0], ordered[-1])] if ordered else []
    for (better, chosen), (worse, rejected) in chosen_of:
        if better > worse and chosen != rejected:
            prompt = [{"role": "user", "content": record["instruction"]}]
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, "chosen_reward": better, "rejected_reward": worse}


def _of_conversations(record: Record) -> Iterator[Record]:
    """Two conversations that differ in their last message."""
    chosen, rejected = record["chosen"], record["rejected"]
    texts = [turns[-1]["content"].strip() for turns in (chosen, rejected)]
    if chosen[:-1] != rejected[:-1]:
        raise DataError("the two conversations differ before their last message, expected one prompt")
    if not all(texts) or texts[0] == texts[1]:
        return
    pair: Record = {"prompt": chosen[:-1], "chosen": texts[0], "rejected": texts[1]}
    if record.get("score_chosen") is not None and record.get("score_rejected") is not None:
        pair |= {"chosen_reward": record["score_chosen"], "rejected_reward": record["score_rejected"]}
    yield pair


def main() -> int:
    parser = converter(__doc__)
    parser.add_argument("--pairs", choices=("best", "all"), default="best")
    arguments = parser.parse_args()
    return run(arguments.source, arguments.target, each_record(partial(pairs, every=arguments.pairs == "all")))


if __name__ == "__main__":
    sys.exit(main())
