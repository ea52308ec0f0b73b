"""Examples as the model sees them, for people to read: lengths, duplicates, and texts with marks around what is trained on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from aligner.data.collate import PreferencePair, SupervisedExample
from aligner.data.config import RecordForm
from aligner.data.distillation import DistilledExample
from aligner.data.forms import FORMS
from aligner.data.images import images_in
from aligner.data.judged import LabelledExample, SteppedExample, UnpairedExample
from aligner.data.labelled import MISSING, Request, Unlabelled
from aligner.data.proposals import ProposedGroup, SampledGroup
from aligner.data.report import LoadReport
from aligner.data.supervised import Demonstration, answered
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt

# The purpose of our fields, in words.
_PURPOSES = {
    **dict.fromkeys(("prompt", "instruction", "input"), "the prompt"),
    **dict.fromkeys(("messages", "conversations"), "the conversation"),
    **dict.fromkeys(("response", "completion", "output"), "the response"),
    **dict.fromkeys(("chosen", "chosen_response"), "the better response"),
    **dict.fromkeys(("rejected", "rejected_response"), "the worse response"),
    **dict.fromkeys(("label", "preference"), "the label"),
    **dict.fromkeys(("answer", "reward_model", "ground_truth", "solution"), "the answer, for reward functions"),
    "text": "the text",
    "chosen_reward": "the score of the better response",
    "rejected_reward": "the score of the worse response",
    "tools": "the tools that the model may call",
    "mask": "the speaker whose turns are not trained on",
    "type": "whether labels are shown",
    "system": "the system message",
}
BRACKETS = ("[[", "]]")
COLOURS = ("\x1b[7;32m", "\x1b[0m")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence of tokens; `note`, shown after it, has labels, or the row's purpose."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    note: str = ""
    images: tuple[str, ...] = ()  # their digests


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One example: its origin, and its rows."""

    source: str
    rows: tuple[Row, ...]

    @property
    def key(self) -> Hashable:
        """Equal for examples with the same tokens and images."""
        return tuple((row.tokens, row.images) for row in self.rows)

    @property
    def images(self) -> tuple[str, ...]:
        """Its images, once if its rows share them."""
        return max((row.images for row in self.rows), key=len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths of rows, in tokens."""

    least: int
    middle: float
    p95: int
    most: int


def view_of(example: object) -> View:
    """The view of an example of any kind. Raises DataError for another object."""
    if isinstance(example, (Prompt, Request, Unlabelled)):
        return _view_of_unlearnt(example)
    if isinstance(example, (SampledGroup, ProposedGroup)):
        return _view_of_group(example)
    if isinstance(example, (SupervisedExample, DistilledExample)):
        return View(source=example.source, rows=(_row(example),))
    if isinstance(example, Demonstration):
        return View(source=example.prompt.source, rows=(_row(answered(example.prompt, example.response), "the given response"),))
    if isinstance(example, PreferencePair):
        margin = f", better by {example.margin:g}" if example.margin else ""
        return View(source=example.source, rows=(_row(example.chosen, f"chosen{margin}"), _row(example.rejected, "rejected")))
    if isinstance(example, LabelledExample):
        labels = ", ".join("-" if label == MISSING else f"{label:g}" for label in example.labels)
        return View(source=example.row.source, rows=(_row(example.row, f"labels: {labels}"),))
    if isinstance(example, SteppedExample):
        return View(source=example.row.source, rows=(_row(example.row, f"steps: {', '.join(f'{label:g}' for label in example.labels)}"),))
    if isinstance(example, UnpairedExample):
        return View(source=example.row.source, rows=(_row(example.row, "desirable" if example.desirable else "undesirable"),))
    raise DataError(f"an example is a {type(example).__name__}, which cannot be shown")


def _view_of_unlearnt(example: Prompt | Request | Unlabelled) -> View:
    if isinstance(example, Unlabelled):
        rows = [_unlearnt(tokens, f"turn {turn}, to be scored") for turn, tokens in zip(example.turns, example.rows, strict=True)]
        return View(source=example.source, rows=tuple(rows))
    if isinstance(example, Request):
        return View(source=example.prompt.source, rows=(_asked(example.prompt, "to be answered"),))
    return View(source=example.source, rows=(_asked(example, f"answer: {example.answer}" if example.answer else ""),))


def _view_of_group(example: SampledGroup | ProposedGroup) -> View:
    notes = [f"response {number}" for number in range(1, len(example.rows) + 1)]
    if isinstance(example, ProposedGroup):
        proposals = example.proposals or ("not given",) * len(notes)
        known = zip(notes, example.targets, proposals, strict=True)
        notes = [f"{note}: log P(a|x,y) + log P(y|x) {target:g}, log Q(y|a,x) {proposal}" for note, target, proposal in known]
    rows = tuple(_row(row, note) for row, note in zip(example.rows, notes, strict=True))
    return View(source=example.rows[0].source, rows=rows)


def describe_fields(report: LoadReport) -> list[str]:
    """Lines with the forms of records, and the use of their fields."""
    lines = [f"form {name} {FORMS[RecordForm(name)].shape}: {count} records" for name, count in report.forms.items()]
    purposes: dict[str, list[str]] = {}
    for name, ours in report.uses.items():
        purposes.setdefault(_PURPOSES.get(ours, ours), []).append(name)
    return [*lines, *(f"  {', '.join(names)}: {purpose}" for purpose, names in purposes.items())]


def spread(lengths: Sequence[int]) -> Lengths:
    """Of at least one length; p95: the least length that 95% of them do not exceed."""
    found = sorted(lengths)
    return Lengths(least=found[0], middle=median(found), p95=found[-(-95 * len(found) // 100) - 1], most=found[-1])


def histogram(lengths: Sequence[int], most: int = 10) -> list[tuple[int, int, int]]:
    """(least, largest, count) of each of at most `most` classes of equal, round width, from the shortest length's class on."""
    if not lengths:
        return []
    low, high = min(lengths) - 1, max(lengths)
    widths = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    width = next(width for width in widths if -(-high // width) - low // width <= most)
    counts = Counter((length - 1) // width for length in lengths)
    return [(one * width + 1, (one + 1) * width, counts[one]) for one in range(low // width, -(-high // width))]


def duplicates(views: Sequence[View]) -> list[tuple[str, str]]:
    """(source, source of the first with the same tokens) of every repeated example."""
    first: dict[Hashable, str] = {}
    return [(view.source, first[view.key]) for view in views if first.setdefault(view.key, view.source) != view.source]


def render(row: Row, tokenizer: Tokenizer, marks: tuple[str, str] = BRACKETS) -> str:
    """The text of a row, including special tokens, with `marks` around each run of trained tokens."""
    return "".join(f"{marks[0]}{text}{marks[1]}" if learnt else text for text, learnt in pieces(row, tokenizer))


def pieces(row: Row, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The text of a row, including special tokens, in runs of trained tokens and of others; of an image's slots, the number."""
    found, start, size = [], 0, len(row.tokens)
    written, slots = "", tokenizer.vision.slots if row.images and tokenizer.vision is not None else ()
    for stop in range(1, size + 1):
        if stop < size and row.loss_mask[stop] == row.loss_mask[start]:
            continue
        whole = tokenizer.decode(row.tokens[:stop], skip_special=False)
        # A tokenizer may omit a space at the beginning: pieces are cut from the whole text.
        apart = tokenizer.decode(row.tokens[start:stop], skip_special=False)
        piece = whole[len(written) :] if whole.startswith(written) else apart
        for slot in slots:
            piece = re.sub(f"(?:{re.escape(slot)}){{2,}}", lambda run, slot=slot: f"{slot}*{len(run[0]) // len(slot)}", piece)  # type: ignore[misc]
        found.append((piece, row.loss_mask[start]))
        written, start = whole, stop
    return found


def _asked(prompt: Prompt, note: str) -> Row:
    return replace(_unlearnt(prompt.tokens, note), images=images_in(prompt.extras))


def _unlearnt(tokens: tuple[int, ...], note: str) -> Row:
    return Row(tokens=tokens, loss_mask=(False,) * len(tokens), note=note)


def _row(example: SupervisedExample | DistilledExample, note: str = "") -> Row:
    return Row(tokens=example.tokens, loss_mask=example.loss_mask, note=note, images=images_in(example.extras))
