"""The task of the preference recipes: stories260k's own stories, labelled by a rule. Made here, but for the model.

Prompts are sentences with names; those of the held-out names are in no training file. The model answers each several times through the
`generate` recipe. The rule is `aligner.rewards.builtin:happy_words`: the more different happy words, the better. Nobody but the rule
knows which story is better, so a win rate under it says whether a recipe learnt what its data say.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from aligner.rewards.builtin import happy_words

NAMES = "Lily Tim Sue Ben Mia Tom Anna Max Lucy Sam Sara Jack Amy Leo Jane Bob".split()
HELD_OUT_NAMES = 4  # the last ones
BEGINNINGS = (
    "Once upon a time, there was a little child named {}.",
    "One day, {} went to the park with a big red ball.",
    "There was once a child called {} who had a small toy car.",
    "{} was small and liked to play outside in the sun.",
    "It was a rainy day and {} was sad.",
    "{} lived in a big house with a garden.",
    "{} saw a dog near the tall tree.",
    "One morning, {} woke up and wanted to bake a cake.",
    "{} and mom went to the shop to buy some food.",
    "{} found a shiny box under the bed.",
    "In the forest, {} heard a strange noise.",
    "{} had a cat that liked to sleep all day.",
)
RESPONSE_LENGTH = 48  # tokens
PROMPT_LENGTH = 48
BEST = 4
LEAST_STEPS = 2  # in a story of one sentence there is no place to find

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """A file for training and one of held-out prompts."""

    train: Path
    held_out: Path

    @classmethod
    def below(cls, directory: Path, name: str) -> Files:
        return cls(train=directory / f"{name}.jsonl", held_out=directory / f"{name}_held_out.jsonl")

    @property
    def settings(self) -> list[str]:
        """As a run's data."""
        return [f"data.train={self.train}", f"data.validation={self.held_out}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryFiles:
    """What is made of the model's stories. Every record has its `prompt`, those of one prompt stand together."""

    prompts: Files
    stories: Files  # all of them: {prompt, response}
    pairs: Files  # the rule prefers `chosen` to `rejected`
    best: Files  # the best BEST stories of each prompt
    labelled: Files  # `label`: the numbers of ATTRIBUTES
    stepped: Files  # sentences; in half of the stories the words of one are in disorder


ATTRIBUTES = ("happy", "speech", "length")


def write_prompts(files: Files, *, num_names: int, num_held_out: int, num_beginnings: int) -> None:
    """Every beginning with every name: the first `num_names` to train on, the last `num_held_out` held out."""
    parts = {files.train: NAMES[: min(num_names, len(NAMES) - num_held_out)], files.held_out: NAMES[-num_held_out:]}
    for path, names in parts.items():
        write(path, ({"prompt": text.format(name)} for name in names for text in BEGINNINGS[:num_beginnings]))


def label(stories: Files, directory: Path, seed: int) -> StoryFiles:
    """Write what the recipes learn from, made of the generated `stories` ({prompt, response, ...}), below `directory`."""
    files = StoryFiles(
        prompts=Files.below(directory, "prompts"),
        **{name: Files.below(directory, name) for name in ("stories", "pairs", "best", "labelled", "stepped")},
    )
    for part in ("train", "held_out"):
        rng = random.Random(f"{seed}/{part}")
        told = [whole(record) for record in read(getattr(stories, part))]
        told = [record for record in told if record["response"]]
        groups = [list(group) for _, group in groupby(told, key=lambda record: record["prompt"])]
        write(getattr(files.stories, part), told)
        write(getattr(files.pairs, part), (pair for group in groups for pair in pairs_of(group)))
        write(getattr(files.best, part), (best for group in groups for best in sorted(group, key=score, reverse=True)[:BEST]))
        write(getattr(files.labelled, part), (record | {"label": attributes(record["response"])} for record in told))
        write(getattr(files.stepped, part), (step for record in told if (step := stepped(record, rng))))
    return files


def whole(record: Record) -> Record:
    """Prompt and response of a generated record, without the sentence that the length limit cut."""
    end = max(record["response"].rfind(mark) for mark in ".!?")
    closed = record["response"][: end + 1] + ('"' if record["response"][end + 1 : end + 2] == '"' else "")
    return {"prompt": record["prompt"], "response": closed}


def score(record: Record) -> float:
    """What the rule says of a story."""
    return happy_words([record["prompt"]], [record["response"]], [None])[0]


def pairs_of(group: Sequence[Record]) -> list[Record]:
    """Of the stories to one prompt the best with the worst, the second with the last but one, and so on while the rule tells them apart."""
    ordered = sorted(group, key=score, reverse=True)
    return [
        {"prompt": good["prompt"], "chosen": good["response"], "rejected": bad["response"]}
        for good, bad in zip(ordered[: len(ordered) // 2], reversed(ordered), strict=False)
        if score(good) > score(bad)
    ]


def attributes(response: str) -> list[float]:
    """ATTRIBUTES by rules: fifths of happy words, sentences in which somebody speaks (at most 4), tens of words."""
    speech = min(response.count('"') // 2, 4)
    return [5 * happy_words([""], [response], [None])[0], float(speech), len(response.split()) / 10]


def stepped(record: Record, rng: random.Random) -> Record | None:
    """The story's sentences as steps; with a chance of a half one of them is in disorder. None where there are too few."""
    sentences = [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", record["response"])]
    if len(sentences) < LEAST_STEPS:
        return None
    labels = [True] * len(sentences)
    spoilt = rng.randrange(2 * len(sentences))
    if spoilt < len(sentences):
        disordered = in_disorder(sentences[spoilt], rng)
        labels[spoilt] = disordered == sentences[spoilt]
        sentences[spoilt] = disordered
    return {"prompt": record["prompt"] + "\n", "steps": sentences, "labels": labels}


def in_disorder(sentence: str, rng: random.Random) -> str:
    """Its words in another order, the last mark where it was; the sentence itself where it has less than three."""
    words = sentence.rstrip(".!?").split()
    if len(words) < 3:
        return sentence
    mixed = rng.sample(words, len(words))
    while mixed == words:
        mixed = rng.sample(words, len(words))
    return " ".join(mixed) + sentence[len(sentence.rstrip(".!?")) :]


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, records: Iterable[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
