"""The demo's task, made here and offline: sums such as 37+5=42, one token per character.

`python examples/demo/arithmetic.py OUT_DIR` writes a Hugging Face tokenizer directory and five jsonl files. The supervised set is partly
wrong on purpose: who wrote it mostly forgets to carry (37+5=32). A model trained on it does so too, and reinforcement learning has
something to mend. Same seed, same bytes.
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
    """The sums, and how many of what is made of them.

    `noise` is the fraction of wrong answers in the supervised set. With `carries` the mistake is a forgotten carry, so that only sums with
    one are answered wrong, and half of the rejected answers are wrong by just the carry; without, every mistake is a random one.
    """

    first: range = range(10, 90)
    second: range = range(1, 10)
    carries: bool = True
    num_sft: int = 2080
    noise: float = 0.7
    num_pairs: int = 20800
    num_prompts: int = 520
    num_validation: int = 200
    num_validation_pairs: int = 1000

    def __post_init__(self) -> None:
        distinct = len(self.first) * len(self.second)
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
    sums = [(a, b) for a in task.first for b in task.second]
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
    _write(files.sft, (_sft_record(rng, a, b, task) for a, b in _draw(rng, pool, task.num_sft)))
    _write(files.pairs, (_pair_record(rng, a, b, task) for a, b in _draw(rng, pool, task.num_pairs)))
    _write(files.prompts, (_prompt_record(a, b) for a, b in _draw(rng, pool, task.num_prompts)))
    _write(files.validation, (_prompt_record(a, b) for a, b in held_out))
    _write(files.validation_pairs, (_pair_record(rng, a, b, task) for a, b in _draw(rng, held_out, task.num_validation_pairs)))
    return files


def wrong_by_the_carry(a: int, b: int) -> str:
    """The sum without its carry, or with one too many where it has none: the units are right, the tens are not."""
    return str(a + b - 10 if has_carry(a, b) else a + b + 10)


def has_carry(a: int, b: int) -> bool:
    """Whether the units of the two add up to ten or more."""
    return a % 10 + b % 10 >= 10


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
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, BOS, EOS, UNK)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, TOKENS.index(BOS))])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _draw(rng: random.Random, pool: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """`count` sums, each as often as any other (give or take one)."""
    rounds = -(-count // len(pool))
    return [pair for _ in range(rounds) for pair in rng.sample(pool, len(pool))][:count]


def _sft_record(rng: random.Random, a: int, b: int, task: Task) -> dict[str, str]:
    if task.carries:
        response = wrong_by_the_carry(a, b) if has_carry(a, b) and rng.random() < task.noise else str(a + b)
    else:
        response = wrong_answer(rng, a + b) if rng.random() < task.noise else str(a + b)
    return {"prompt": f"{a}+{b}=", "response": response}


def _pair_record(rng: random.Random, a: int, b: int, task: Task) -> dict[str, str]:
    by_the_carry = task.carries and rng.random() < 0.5
    rejected = wrong_by_the_carry(a, b) if by_the_carry else wrong_answer(rng, a + b)
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": rejected}


def _prompt_record(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def _write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the arithmetic task's tokenizer and data.")
    parser.add_argument("out_dir")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=Task().noise, help="the fraction of carries that the supervised set forgets")
    arguments = parser.parse_args()
    files = generate(arguments.seed, arguments.out_dir, Task(noise=arguments.noise))
    for path in (files.tokenizer, files.sft, files.pairs, files.prompts, files.validation, files.validation_pairs):
        print(path)


if __name__ == "__main__":
    main()
