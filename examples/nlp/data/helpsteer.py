"""Turns files of HelpSteer, HelpSteer2, HelpSteer2-Preference and HelpSteer3-Preference (2311.09528, 2406.08673, 2410.01257, 2505.11475)
into records.

    python examples/nlp/data/helpsteer.py train.jsonl.gz regression.jsonl                     # for regression_reward_model
    python examples/nlp/data/helpsteer.py train.jsonl.gz steerlm.jsonl --format steerlm       # attribute-conditioned SFT, annotation
    python examples/nlp/data/helpsteer.py preference.jsonl.gz pairs.jsonl --format pairs      # for reward_model, dpo

Fields: prompt, response and five attributes from 0 to 4; of preferences response_1, response_2, preference_strength (-3: the first is much
better, 3: the second is); of HelpSteer3 context, response1, response2, overall_preference, the same. A prompt of several turns has marks
such as <extra_id_1>Assistant in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from conversion import Record, converter, each_record, label_text, run, steerlm

from aligner.data.forms import HELPSTEER_ATTRIBUTES as ATTRIBUTES, helpsteer_turns as messages


def regression(record: Record) -> Iterator[Record]:
    """A conversation with its labels by name."""
    turns = [*messages(record["prompt"]), {"role": "assistant", "content": record["response"]}]
    yield {"messages": turns, "label": {name: record[name] for name in ATTRIBUTES}}


def conditioned(record: Record) -> Iterator[Record]:
    """SteerLM's record, whose last turn has a label."""
    turns = [*messages(record["prompt"]), {"role": "assistant", "content": record["response"]}]
    yield steerlm(turns, [*[None] * (len(turns) - 1), label_text({name: record[name] for name in ATTRIBUTES})])


def pairs(record: Record) -> Iterator[Record]:
    """The better response first, with how much better it is; none where they are equally good."""
    if "context" in record:  # HelpSteer3
        prompt = [{"role": turn["role"], "content": turn["content"]} for turn in record["context"]]
        first, second, strength = record["response1"], record["response2"], record["overall_preference"]
    else:
        prompt = messages(record["prompt"])
        first, second, strength = record["response_1"], record["response_2"], record["preference_strength"]
    if not -3 <= strength <= 3:
        raise ValueError(f"a preference of {strength}, expected one from -3 to 3")
    if strength:
        chosen, rejected = (first, second) if strength < 0 else (second, first)
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, "chosen_reward": abs(strength), "rejected_reward": 0}


FORMATS = {"regression": regression, "steerlm": conditioned, "pairs": pairs}


def main() -> int:
    parser = converter(__doc__)
    parser.add_argument("--format", choices=FORMATS, default="regression")
    arguments = parser.parse_args()
    return run(arguments.source, arguments.target, each_record(FORMATS[arguments.format]))


if __name__ == "__main__":
    sys.exit(main())
