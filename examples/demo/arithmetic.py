"""The demo's task, made here and offline: sums of two small numbers, one token per character.

`python examples/demo/arithmetic.py OUT_DIR` writes a Hugging Face tokenizer directory and five jsonl files. The supervised set is small and
partly wrong on purpose: a model trained on it is mediocre, and reinforcement learning has something to mend. Same seed, same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-= "
TOKENS = (PAD, BOS, EOS, UNK, *CHARACTERS)  # a token's id is its position


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """How large the task is: operands are 0..max_operand, `noise` the fraction of wrong answers in the supervised set."""

    max_operand: int = 19
    num_sft: int = 160
    noise: float = 0.3
    num_pairs: int = 16000
    num_prompts: int = 320
    num_validation: int = 80
    num_validation_pairs: int = 400

    def __post_init__(self) -> None:
        distinct = (self.max_operand + 1) ** 2
        if not 0 < self.num_validation < distinct:
            raise ValueError(f"num_validation is {self.num_validation}, allowed: 1 to {distinct - 1} (of {distinct} different sums)")
        if not 0.0 <= self.noise <= 1.0:
            raise ValueError(f"noise is {self.noise}, allowed: 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFiles:
    """What `generate` wrote."""

    tokenizer: Path
    sft: Path
    pairs: Path
    prompts: Path
    validation: Path
    validation_pairs: Path


def is_correct(response: str, answer: str) -> bool:
    """Exact match, but for spaces around it."""
    return response.strip() == answer.strip()


def generate(seed: int, out_dir: str | Path, task: Task | None = None) -> TaskFiles:
    """Write tokenizer, sft {prompt, response}, pairs {prompt, chosen, rejected}, prompts and validation {prompt, answer} below `out_dir`.

    The validation prompts, and pairs made of them, are in validation.jsonl and validation_pairs.jsonl and in no other file.
    """
    task = Task() if task is None else task
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    operands = range(task.max_operand + 1)
    sums = [(a, b) for a in operands for b in operands]
    rng.shuffle(sums)
    held_out, pool = sums[: task.num_validation], sums[task.num_validation :]
    files = TaskFiles(
        tokenizer=out / "tokenizer",
        sft=out / "sft.jsonl",
        pairs=out / "pairs.jsonl",
        prompts=out / "prompts.jsonl",
        validation=out / "validation.jsonl",
        validation_pairs=out / "validation_pairs.jsonl",
    )
    write_tokenizer(files.tokenizer)
    _write(files.sft, (_sft_record(rng, a, b, task.noise) for a, b in _draw(rng, pool, task.num_sft)))
    _write(files.pairs, (_pair_record(rng, a, b) for a, b in _draw(rng, pool, task.num_pairs)))
    _write(files.prompts, (_prompt_record(a, b) for a, b in _draw(rng, pool, task.num_prompts)))
    _write(files.validation, (_prompt_record(a, b) for a, b in held_out))
    _write(files.validation_pairs, (_pair_record(rng, a, b) for a, b in _draw(rng, held_out, task.num_validation_pairs)))
    return files


def wrong_answer(rng: random.Random, answer: int) -> str:
    """A plausible mistake: off by a little, off by ten (a lost carry), one digit replaced, left out or added, or another sum's answer."""
    digits = list(str(answer))
    while True:
        kind, position, digit = rng.randrange(6), rng.randrange(len(digits)), rng.choice(CHARACTERS[:10])
        if kind < 2:
            candidate = str(abs(answer + rng.choice((-1, 1)) * rng.randint(1, 4)))
        elif kind == 2:
            candidate = str(abs(answer + rng.choice((-10, 10))))
        elif kind == 3:
            edit = rng.choice(([], [digit], [digits[position], digit]))
            candidate = "".join([*digits[:position], *edit, *digits[position + 1 :]])
        else:
            candidate = str(rng.randrange(2 * answer + 10))
        if candidate not in ("", str(answer)) and (candidate == "0" or candidate[0] != "0"):
            return candidate


def write_tokenizer(directory: Path) -> None:
    """A directory that `transformers.AutoTokenizer` loads: one token per character, decoded without spaces in between."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, BOS, EOS, UNK)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _draw(rng: random.Random, pool: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """`count` sums, each as often as any other (give or take one)."""
    rounds = -(-count // len(pool))
    return [pair for _ in range(rounds) for pair in rng.sample(pool, len(pool))][:count]


def _sft_record(rng: random.Random, a: int, b: int, noise: float) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "response": wrong_answer(rng, a + b) if rng.random() < noise else str(a + b)}


def _pair_record(rng: random.Random, a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": wrong_answer(rng, a + b)}


def _prompt_record(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def _write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the arithmetic task's tokenizer and data.")
    parser.add_argument("out_dir")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-operand", type=int, default=Task().max_operand)
    parser.add_argument("--noise", type=float, default=Task().noise)
    arguments = parser.parse_args()
    task = Task(max_operand=arguments.max_operand, noise=arguments.noise)
    files = generate(arguments.seed, arguments.out_dir, task)
    for path in (files.tokenizer, files.sft, files.pairs, files.prompts, files.validation, files.validation_pairs):
        print(path)


if __name__ == "__main__":
    main()
