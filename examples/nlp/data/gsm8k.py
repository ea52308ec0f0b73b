"""Turns files of GSM8K ({"question", "answer"}, the final answer behind `####`; github.com/openai/grade-school-math) into prompts.

    python examples/nlp/data/gsm8k.py train.jsonl prompts.jsonl            # {"messages": [...], "answer": "72"}, for chat models
    python examples/nlp/data/gsm8k.py train.jsonl prompts.jsonl --plain    # {"prompt": "Question: ...", "answer": "72"}

aligner.rewards.maths finds a response's answer behind its last `####`, which is what the instruction asks for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aligner.errors import DataError
from aligner.rewards.maths import MARK, final_answer

INSTRUCTION = f'Let\'s think step by step and output the final answer after "{MARK}".'


def convert(source: Path, *, plain: bool) -> Iterator[dict[str, Any]]:
    """The records of `source` as prompts. Raises DataError naming file and line where one is not a question with an answer."""
    for number, line in enumerate(source.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            question, solution = record["question"].strip(), record["answer"]
            if MARK not in solution or not final_answer(solution):
                raise ValueError(f"no answer behind {MARK}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{source}:{number}: not a record of GSM8K ({error!r}): {line[:80]!r}") from error
        yield _plain(question, solution) if plain else _chat(question, solution)


def _chat(question: str, solution: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{question} {INSTRUCTION}"}], "answer": final_answer(solution)}


def _plain(question: str, solution: str) -> dict[str, Any]:
    return {"prompt": f"Question: {question}\n{INSTRUCTION}\nAnswer:", "answer": final_answer(solution)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="train.jsonl or test.jsonl of GSM8K")
    parser.add_argument("target", type=Path, help="the file to write")
    parser.add_argument("--plain", action="store_true", help="plain prompts, for models without a chat template")
    arguments = parser.parse_args()
    try:
        records = list(convert(arguments.source, plain=arguments.plain))
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.target.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    print(f"{len(records)} prompts written to {arguments.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
