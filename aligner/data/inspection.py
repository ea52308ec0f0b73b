"""Examples as the model will see them, for people to read: their lengths, which of them are there twice, and their text with what is learnt
marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

from aligner.data.config import RecordForm
from aligner.data.distillation import DistilledExample
from aligner.data.forms import FORMS
from aligner.data.labelled import MISSING
from aligner.data.preferences import PreferencePair
from aligner.data.proposals import ProposedGroup, SampledGroup
from aligner.data.regression import LabelledExample
from aligner.data.report import LoadReport
from aligner.data.requests import Request, Unlabelled
from aligner.data.steps import SteppedExample
from aligner.data.supervised import Demonstration, SupervisedExample
from aligner.data.tokenizer import Tokenizer
from aligner.data.unpaired import UnpairedExample
from aligner.errors import DataError
from aligner.types import Prompt

Example = (
    Prompt
    | Request
    | Unlabelled
    | SupervisedExample
    | Demonstration
    | PreferencePair
    | UnpairedExample
    | LabelledExample
    | SteppedExample
    | DistilledExample
    | SampledGroup
    | ProposedGroup
)
# What becomes of a field of ours, in words.
_PURPOSES = {
    "prompt": "the prompt",
    "messages": "the conversation",
    "text": "the text",
    "instruction": "the prompt",
    "input": "the prompt",
    "conversations": "the conversation",
    "response": "the response",
    "completion": "the response",
    "output": "the response",
    "chosen": "the better response",
    "chosen_response": "the better response",
    "rejected": "the worse response",
    "rejected_response": "the worse response",
    "chosen_reward": "how good the better response is",
    "rejected_reward": "how good the worse response is",
    "label": "the label",
    "preference": "the label",
    **dict.fromkeys(("answer", "reward_model", "ground_truth", "solution"), "the answer, for reward functions"),
    "tools": "the tools that the model may call",
    "mask": "whose turns are not learnt",
    "type": "whether labels are shown",
    "system": "the system message",
}
BRACKETS = ("[[", "]]")
COLOURS = ("\x1b[7;32m", "\x1b[0m")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence of tokens; a listing appends `note`: labels, or the row's purpose."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One example: its rows, and where it comes from."""

    source: str
    rows: tuple[Row, ...]

    @property
    def key(self) -> Hashable:
        """Equal for examples with the same tokens."""
        return tuple(row.tokens for row in self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Of rows, in tokens."""

    least: int
    middle: float
    p95: int
    most: int


def view_of(example: Example) -> View:
    """An example of any kind. Raises DataError for one that is none of them."""
    if isinstance(example, (Prompt, Request, Unlabelled)):
        return _view_of_unlearnt(example)
    if isinstance(example, (SampledGroup, ProposedGroup)):
        return _view_of_group(example)
    if isinstance(example, (SupervisedExample, DistilledExample)):
        return View(source=example.source, rows=(_row(example),))
    if isinstance(example, Demonstration):
        return View(source=example.prompt.source, rows=(_row(example.row(example.response), "the response that is given"),))
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
    """One of those that are answered or scored, not learnt."""
    if isinstance(example, Unlabelled):
        rows = [_unlearnt(tokens, f"turn {turn}, to be scored") for turn, tokens in zip(example.turns, example.rows, strict=True)]
        return View(source=example.source, rows=tuple(rows))
    if isinstance(example, Request):
        return View(source=example.prompt.source, rows=(_unlearnt(example.prompt.tokens, "to be answered"),))
    return View(source=example.source, rows=(_unlearnt(example.tokens, f"answer: {example.answer}" if example.answer else ""),))


def _view_of_group(example: SampledGroup | ProposedGroup) -> View:
    """All responses to a prompt; of those with log-probs, these."""
    notes = [f"response {number}" for number in range(1, len(example.rows) + 1)]
    if isinstance(example, ProposedGroup):
        proposals = example.proposals or ("not given",) * len(notes)
        known = zip(notes, example.targets, proposals, strict=True)
        notes = [f"{note}: log P(a|x,y) + log P(y|x) {target:g}, log Q(y|a,x) {proposal}" for note, target, proposal in known]
    rows = tuple(_row(row, note) for row, note in zip(example.rows, notes, strict=True))
    return View(source=example.rows[0].source, rows=rows)


def describe_fields(report: LoadReport) -> list[str]:
    """Lines that say in which form records are, and how their fields are used."""
    lines = [f"form {name} {FORMS[RecordForm(name)].shape}: {count} records" for name, count in report.forms.items()]
    purposes: dict[str, list[str]] = {}
    for name, ours in report.uses.items():
        purposes.setdefault(_PURPOSES.get(ours, ours), []).append(name)
    return [*lines, *(f"  {', '.join(names)}: {purpose}" for purpose, names in purposes.items())]


def lengths_of(views: Sequence[View]) -> Lengths:
    """Of all rows of at least one example; p95: the least length that 95% of them do not exceed."""
    found = sorted(len(row.tokens) for view in views for row in view.rows)
    return Lengths(least=found[0], middle=median(found), p95=found[-(-95 * len(found) // 100) - 1], most=found[-1])


def histogram(lengths: Sequence[int], most: int = 10) -> list[tuple[int, int, int]]:
    """(least, largest, how many) of each of at most `most` classes of equal, round width that begin with the shortest one's."""
    if not lengths:
        return []
    low, high = min(lengths) - 1, max(lengths)
    widths = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    width = next(width for width in widths if -(-high // width) - low // width <= most)
    counts = Counter((length - 1) // width for length in lengths)
    return [(one * width + 1, (one + 1) * width, counts[one]) for one in range(low // width, -(-high // width))]


def duplicates(views: Sequence[View]) -> list[tuple[str, str]]:
    """(source, source of the first with the same tokens) of every example that was there before."""
    first: dict[Hashable, str] = {}
    return [(view.source, first[view.key]) for view in views if first.setdefault(view.key, view.source) != view.source]


def render(row: Row, tokenizer: Tokenizer, marks: tuple[str, str] = BRACKETS) -> str:
    """The text of a row, special tokens too, each run of trained tokens between `marks`."""
    pieces, start, size = [], 0, len(row.tokens)
    written = ""
    for stop in range(1, size + 1):
        if stop < size and row.loss_mask[stop] == row.loss_mask[start]:
            continue
        whole = tokenizer.decode(row.tokens[:stop], skip_special=False)
        # A tokenizer may leave out the space at the beginning of what it is given: pieces are cut from the whole text.
        apart = tokenizer.decode(row.tokens[start:stop], skip_special=False)
        piece = whole[len(written) :] if whole.startswith(written) else apart
        pieces.append(f"{marks[0]}{piece}{marks[1]}" if row.loss_mask[start] else piece)
        written, start = whole, stop
    return "".join(pieces)


def _unlearnt(tokens: tuple[int, ...], note: str) -> Row:
    return Row(tokens=tokens, loss_mask=(False,) * len(tokens), note=note)


def _row(example: SupervisedExample | DistilledExample, note: str = "") -> Row:
    return Row(tokens=example.tokens, loss_mask=example.loss_mask, note=note)
