"""The report of reading a data set, and the only place that decides whether bad records stop the run."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeVar

from aligner.data.config import BadLines, Overlong
from aligner.data.forms import Recast, advice
from aligner.data.records import WrongFields
from aligner.data.rendering import NOTED
from aligner.data.sources import Fields, RawRecord, nested
from aligner.errors import DataError

_NAMING = ("prompt_field", "response_field", "answer_field")  # settings that name fields of records
_MOST_NAMES = 1000  # field names kept for a message
MAX_LISTED = 20  # bad lines shown; the rest is only counted

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRecord:
    """A record that was too long: its tokens, and the limit (`512 tokens (data.max_length)`)."""

    source: str
    length: int
    limit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Counts of one data set; `problems` are the bad records, each `file:line: what is wrong`; `too_long` the ones that were left out."""

    location: str
    num_records: int
    num_kept: int
    num_too_long: int
    num_truncated: int
    num_bad: int
    too_long: tuple[LongRecord, ...]
    problems: tuple[str, ...]
    unused: dict[str, int]  # field that nothing read -> number of used records with it
    said_of_unused: str = "that are not used"
    special_text: dict[str, int] = field(default_factory=dict)  # special token -> number of records with it in their text
    forms: dict[str, int] = field(default_factory=dict)  # form -> number of used records
    uses: dict[str, str] = field(default_factory=dict)  # field of a record -> the field of ours made of it
    parts: tuple[LoadReport, ...] = ()  # one report per source
    shares: str = ""  # the shares of these sources (`Mixture.summary`)
    left_out: str = ""  # what looks like data in the directory and is not read

    def summary(self) -> str:
        """One line for the log, and more for special tokens in texts, unused fields and unread files; for each source its own."""
        if self.parts:
            return "\n".join([*(part.summary() for part in self.parts), self.shares])
        parts = [f"{self.location}: {self.num_kept} of {self.num_records} records used", *self.long_texts()]
        for count, what in ((self.num_truncated, "truncated"), (self.num_bad, "bad and skipped")):
            if count:
                parts.append(f"{count} {what}")
        said = ", ".join(parts) + (f" (first: {self.problems[0]})" if self.problems else "")
        return "\n".join([said, *(f"{self.location}: {line}" for line in self.notes())])

    def long_texts(self) -> list[str]:
        """Describes records that were too long, by limit: `12 left out: longer than 512 tokens (data.max_length), they have 530 to 911`."""
        lengths: dict[str, list[int]] = {}
        for one in self.too_long:
            lengths.setdefault(one.limit, []).append(one.length)
        return [
            f"{len(found)} left out: longer than {limit}, {'they have' if len(found) > 1 else 'it has'} "
            + (f"{min(found)} to {max(found)}" if min(found) < max(found) else f"{min(found)}")
            for limit, found in lengths.items()
        ]

    def notes(self) -> list[str]:
        """Special tokens in texts and unused fields, each with its number of records, and unread files."""
        special, fields = (
            ", ".join(f"{repr(name[:100])[1:-1]} ({count} records)" for name, count in found.items())
            for found in (self.special_text, self.unused)
        )
        lines = (
            special and f"special tokens in texts, read as data.special_text says: {special}",
            fields and f"fields {self.said_of_unused}: {fields}",
            self.left_out,
        )
        return [line for line in lines if line]


def combined(reports: Sequence[LoadReport], shares: str) -> LoadReport:
    counts = ("num_records", "num_kept", "num_too_long", "num_truncated", "num_bad")
    tables = {name: sum((Counter(getattr(one, name)) for one in reports), Counter[str]()) for name in ("unused", "forms", "special_text")}
    return replace(
        reports[0],
        location=", ".join(report.location for report in reports),
        too_long=tuple(one for report in reports for one in report.too_long),
        problems=tuple(one for report in reports for one in report.problems),
        uses={name: use for report in reports for name, use in report.uses.items()},
        parts=tuple(reports),
        shares=shares,
        **{name: sum(getattr(report, name) for report in reports) for name in counts},
        **{name: dict(table) for name, table in tables.items()},
    )


class NoUsableRecord(DataError):
    """No record of a data set is usable; `report` has the reasons."""

    def __init__(self, report: LoadReport) -> None:
        super().__init__(f"no usable record: {report.summary()}")
        self.report = report


class TooLong(Exception):
    """Raised by a conversion to leave out a record and count it as too long: it has `length` tokens, and the setting allows `limit`."""

    def __init__(self, length: int, limit: int, setting: str) -> None:
        super().__init__(length, limit, setting)
        self.length = length
        self.limit = f"{limit} tokens ({setting})"


def too_long(length: int, limit: int, overlong: Overlong, setting: str = "data.max_length") -> NoReturn:
    """Leave out a record with more tokens than allowed: raises TooLong, or DataError if `overlong` is refuse."""
    if overlong is Overlong.refuse:
        raise DataError(f"has {length} tokens, allowed: at most {setting}={limit} (data.overlong=drop leaves such records out)")
    raise TooLong(length, limit, setting)


class Storing(Protocol):
    """Keeps the examples in files instead of in memory (`aligner.data.cache`)."""

    def convert(self, tally: Tally, items: Iterable[Any], conversion: Any, records: Any) -> Sequence[Any]:
        """As `Tally.convert`."""


STORING: ContextVar[Storing | None] = ContextVar("STORING", default=None)  # while a data set is read into the cache


class Tally:
    """Counts the outcomes of the records of one data set. A conversion sets `was_cut` for a record that it truncates.

    `config`: the settings of the data: at least one record must have the fields that they name. `whole`: records are passed on unchanged,
    so no field is unused. `unused`: the report's words for fields that nothing read.
    """

    def __init__(self, location: str, config: Any, *, whole: bool = False, unused: str = "that are not used") -> None:
        self.truncated = 0
        self.was_cut = False
        self._location = location
        self._config = config
        self._advice = Counter[str]()  # advice on records with other fields -> number of them
        self._named = {key: name for key in _NAMING if (name := getattr(config, key, ""))}
        self._have = dict.fromkeys(self._named, 0)  # setting -> number of records with its field, until one is found
        self._there: dict[str, int] = {}  # the field names of records, until all named ones are found
        self._whole = whole
        self._said_of_unused = unused
        self._records = 0
        self._kept = 0
        self._too_long: list[LongRecord] = []
        self._problems: list[str] = []
        self.images: list[tuple[str, str, list[int]]] = []  # that were read: `ImageReader.files`
        self._unused = Counter[str]()
        self._special_text = Counter[str]()
        self._forms = Counter[str]()
        self._uses: dict[str, str] = {}
        self._latest = -1  # index of the last record whose fields were noted

    def convert(
        self,
        items: Iterable[In],
        conversion: Callable[[In], Out | list[Out]],
        records: Callable[[In], Sequence[RawRecord]] = lambda item: (item,),  # type: ignore[assignment, return-value]
    ) -> list[Out]:
        """Convert every item; a DataError makes it a bad record, `TooLong` a dropped one. `records`: the records of an item.

        A conversion may return a list of any number of examples. While the cache is being written, the result is a sequence in files.
        """
        if (storing := STORING.get()) is not None:
            return storing.convert(self, items, conversion, records)  # type: ignore[return-value]
        return self.convert_here(items, conversion, records)

    def convert_here(
        self, items: Iterable[In], conversion: Callable[[In], Out | list[Out]], records: Callable[[In], Sequence[RawRecord]]
    ) -> list[Out]:
        converted: list[Out] = []
        for item in items:
            self._records, self.was_cut = self._records + 1, False
            token = NOTED.set(noted := Counter())
            for raw in records(item) if not all(self._have.values()) else ():
                self._look(raw)
            try:
                found = conversion(item)
                converted += found if isinstance(found, list) else [found]
                self._kept += 1
                self.truncated += self.was_cut
                for raw in records(item):
                    self._note_fields(raw)
            except TooLong as found:
                self._too_long.append(LongRecord(source=records(item)[0].source, length=found.length, limit=found.limit))
            except DataError as error:
                self._problems.append(f"{records(item)[0].source}: {error}")
                if isinstance(error, WrongFields):
                    self._advice[advice(records(item)[0].value, self._config)] += 1
            finally:
                NOTED.reset(token)
            self._special_text.update(noted.keys())
        return converted

    def listed(self) -> dict[str, int]:
        """The length of every list."""
        return {name: len(value) for name, value in vars(self).items() if isinstance(value, list)}

    def absorb(self, others: Sequence[Tally], marks: Sequence[Sequence[dict[str, int]]]) -> None:
        """Add the counts of tallies that took turns at blocks of the records; `marks[i]`: what the i-th had `listed` after each block."""
        for other in others:
            for name, value in vars(other).items():
                own = getattr(self, name)
                if isinstance(value, Counter):
                    own.update(value)
                elif isinstance(value, dict):
                    vars(self)[name] = own | {key: own.get(key, 0) + one if isinstance(one, int) else one for key, one in value.items()}
                elif type(value) is int and name != "_latest":
                    vars(self)[name] = own + value
        for turn in range(max(map(len, marks))):
            for other, its_marks in zip(others, marks, strict=True):
                before = its_marks[turn - 1] if turn else {}
                for name, stop in its_marks[turn].items() if turn < len(its_marks) else ():
                    getattr(self, name).extend(getattr(other, name)[before.get(name, 0) : stop])

    def _look(self, raw: RawRecord) -> None:
        record = raw.value.origin if isinstance(raw.value, Recast) else raw.value
        if isinstance(record, dict):
            if len(self._there) < _MOST_NAMES:
                inner = [f"{name}.{one}" for name, value in record.items() if isinstance(value, dict) for one in value]
                self._there |= dict.fromkeys([*record, *inner], 1)
            for key, name in self._named.items():
                self._have[key] += nested(record, name) is not None

    def _check_named(self) -> None:
        for key, name in self._named.items():
            if self._there and not self._have[key]:
                near = difflib.get_close_matches(name, self._there.keys() - {name}, n=1, cutoff=0.5)
                there = ", ".join(list(self._there)[:MAX_LISTED]) + (f"; did you mean {near[0]!r}?" if near else "")
                what = f"none of the {self._records} records of {self._location} has anything in this field"
                raise DataError(f"data.{key}={name!r}: {what}; they have {there}")

    def _note_fields(self, raw: RawRecord) -> None:
        """Note the record's form and fields, and count the ones that its conversion did not read; once per record."""
        if isinstance(raw.value, Fields) and raw.index != self._latest and not self._whole:
            self._latest = raw.index
            if isinstance(raw.value, Recast):
                self._forms[raw.value.form.value] += 1
                self._uses |= {source: ours for ours, sources in raw.value.uses().items() for source in sources if source not in self._uses}
            self._unused.update(dict.fromkeys(raw.value.unused()).keys())

    def finish(self) -> LoadReport:
        """The report. Raises DataError with all bad records (20 listed) unless they may be skipped, and if nothing is left."""
        self._check_named()
        if self._problems and self._config.bad_lines == BadLines.fail:
            raise DataError(
                f"{len(self._problems)} of {self._records} records of {self._location} are bad "
                "(data.bad_lines=skip leaves them out):\n" + "\n".join(f"  {line}" for line in self._listing())
            )
        report = LoadReport(
            location=self._location,
            num_records=self._records,
            num_kept=self._kept,
            num_too_long=len(self._too_long),
            num_truncated=self.truncated,
            num_bad=len(self._problems),
            too_long=tuple(self._too_long),
            problems=tuple(self._problems),
            unused=dict(sorted(self._unused.items(), key=lambda entry: (-entry[1], entry[0]))),
            said_of_unused=self._said_of_unused,
            special_text=dict(sorted(self._special_text.items())),
            forms=dict(self._forms),
            uses=self._uses,
        )
        if not self._kept:
            raise NoUsableRecord(report)
        return report

    def _listing(self) -> list[str]:
        """The first bad record of each problem, and what all of them may be meant as."""
        alike: dict[str, list[str]] = {}
        for problem in self._problems:
            source, _, what = problem.partition(": ")
            alike.setdefault(what, []).append(source)
        lines = [f"{found[0]}: {what}" + (f" ({len(found)} such records)" if found[1:] else "") for what, found in alike.items()]
        more = sum(map(len, list(alike.values())[MAX_LISTED:]))
        said = max(self._advice, key=lambda text: self._advice[text], default="") if not self._kept else ""
        return [*lines[:MAX_LISTED], *([f"... and {more} more"] if more else []), *([said] if said else [])]
