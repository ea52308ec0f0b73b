"""From what was given to our settings and one row for each key. The tables decide; nothing here knows a framework."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from aligner.algorithms.registry import composed, recipe_of
from aligner.commands.migrate import special, transforms
from aligner.commands.migrate.reading import RANKS, Source, with_texts
from aligner.commands.migrate.tables import Entry, as_text
from aligner.commands.migrate.transforms import Context, Kind, Meaning
from aligner.commands.programs import programs
from aligner.errors import ConfigError
from aligner.settings.command_line import override
from aligner.settings.explain import hint
from aligner.settings.schema import is_known, schema_keys

PLACEHOLDER = "TRAIN.jsonl"
REFERENCE = re.compile(r"\$(?:\{([\w.:]+)\}|([A-Za-z_]\w*))")  # a variable of a shell, or another key, that nothing fills in
FUNCTIONS = vars(transforms) | vars(special)  # the tables name them


class Severity(str, Enum):
    """What follows if a key is not carried over."""

    result = "result"  # the result changes: it is another experiment
    said = "said"  # the same experiment, but the user must know it
    cosmetic = "cosmetic"  # speed, memory, logs


@dataclass(kw_only=True, slots=True)
class Row:
    """One key that was given, or a default of the framework."""

    key: str
    value: Any
    kind: Kind
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    severity: Severity | None = None  # None: carried over


@dataclass(kw_only=True, slots=True)
class Migration:
    framework: str
    source: str
    trains: str
    recipe: str
    settings: dict[str, Any]  # overrides of the recipe's own values
    rows: list[Row]  # one for every given key, in order
    defaults: list[Row]  # one for every other key if the framework's default is not ours
    open_questions: list[str]  # questions that only the user can answer
    stops: list[str]  # the questions without whose answer it cannot run, or is another experiment
    is_refused: bool = False  # whether the settings contradict each other here

    @property
    def is_other(self) -> bool:
        """Whether the command cannot run unchanged, or is another experiment."""
        return bool(self.stops) or any(row.severity is Severity.result for row in (*self.rows, *self.defaults))

    def stop(self, question: str) -> None:
        self.open_questions.insert(0, question)
        self.stops.insert(0, question)

    def overrides(self) -> list[str]:
        return [override(key, replaced(value, "${{oc.env:{}}}")) for key, value in self.settings.items()]


def replaced(value: Any, form: str) -> Any:
    """The value with `form` in place of its references."""
    return with_texts(value, lambda text: REFERENCE.sub(lambda found: form.format(found[1] or found[2]), text))


def is_open(value: Any) -> bool:
    """Whether a reference in it was not filled in."""
    return bool(replaced(value, "") != value)


def migrate(source: Source, *, ranks: int = 0, examples: int = 0) -> Migration:
    """Every key of `source` in a row, and our settings that follow. Raises ConfigError if no recipe does the same training."""
    recipe = source.table.recipe_for(source.trains, source.given)
    if not recipe:
        if source.trains in source.table.parts:
            raise ConfigError(f"{source.table.name} {source.trains}: a part of a run; give the file or the command of its actor with it")
        known = ", ".join(source.table.recipes)
        raise ConfigError(f"{source.table.name} {source.trains}: no recipe here does that; allowed: {known}")
    entries = source.table.entries_for(recipe)
    context = _context(source, entries, recipe, ranks=ranks, examples=examples)
    types = {key.key: key.type for key in schema_keys(recipe_of(recipe).config)}
    maker = _Rows(context=context, base=_base(recipe), recipe=recipe, mirrors=source.table.mirrors, types=types)
    rows = maker.launcher(source, ranks)
    by_name = {name: entry for entry in entries for name in entry.names}
    seen: set[str] = set()
    for key, value in source.given.items():
        entry = by_name.get(key) or next((one for name, one in by_name.items() if "*" in name and fnmatchcase(key, name)), None)
        rows.append(maker.unknown(key, value, source) if entry is None else maker.given(key, value, entry))
        seen |= {entry.key} if entry is not None and value is not None else set()
    own = {setting for row in rows for setting in row.settings}
    absent = [entry for entry in entries if entry.key not in seen and entry.default_for(recipe) is not None]
    defaults = [row for entry in absent if (row := maker.default(entry, own)) is not None]
    return _checked(source, recipe, rows, defaults, maker)


@functools.cache  # half of the time of a migration
def _base(recipe: str) -> Any:
    return composed(recipe, [f"data.train={PLACEHOLDER}"])


def _context(source: Source, entries: Sequence[Entry], recipe: str, *, ranks: int, examples: int) -> Context:
    values = {entry.key: entry.default_for(recipe) for entry in entries}
    names = {name: entry.key for entry in entries for name in entry.names}
    for key, value in source.given.items():
        if value is not None and value != "???" and not is_open(value):
            values[names.get(key, key)] = value
    given = {names.get(key, key) for key, value in source.given.items() if value is not None}
    models = [values[entry.key] for entry in entries if "model.path" in entry.ours and entry.key in given]
    context = Context(values=values, given=given, recipe=recipe, examples=examples, ranks=ranks or source.ranks, derived=special.DERIVED)
    context.model = str(models[0]) if models else ""
    context.examples = transforms.at_most(context, examples)
    if not context.ranks and source.table.ranks and all(context.number(key) for key in source.table.ranks):
        context.ranks = int(context.product(source.table.ranks))
    return context


@dataclass(kw_only=True, slots=True)
class _Rows:
    context: Context
    base: Any
    recipe: str
    mirrors: Mapping[str, str]
    types: Mapping[str, str]  # types of our settings

    def launcher(self, source: Source, ranks: int) -> list[Row]:
        rows = []
        for key, value in source.launcher.items():
            row = Row(key=key, value=value, kind=Kind.none, severity=Severity.cosmetic)
            row.note = "an option of its launcher or environment; here `aligner launch` starts the ranks"
            if source.ranks and {key.lstrip("-"), key.lstrip("-").replace("_", "-")} & {*RANKS, "config_file"}:
                row = Row(key=key, value=value, kind=Kind.mapped, settings={"num_processes": self.context.ranks})
                row.note = "the launcher's number of ranks"
            rows.append(row)
        if ranks and not any(row.settings for row in rows):
            rows.append(Row(key="--ranks", value=ranks, kind=Kind.mapped, settings={"num_processes": ranks}, note="as given"))
        return rows

    def unknown(self, key: str, value: Any, source: Source) -> Row:
        table, row = source.table, functools.partial(Row, key=key, value=value)
        for part, prefix in table.parts.items():
            if key.startswith(prefix) and table.knows(key.removeprefix(prefix)):
                return row(kind=Kind.none, note=f"a key of the {part} there; here the actor sets it", severity=Severity.cosmetic)
        if elsewhere := dict.fromkeys(recipe for entry in table.keys if key in entry.names for recipe in entry.recipes):
            return row(kind=Kind.same, note=f"without effect there either: a key of {', '.join(elsewhere)}")
        if key.startswith("--config"):
            if str(source.given.get("--config-name")).removesuffix(".yaml") in table.own_configs:
                return row(kind=Kind.same, note=f"{table.name}'s own config: its values are the defaults of absent keys")
            self.context.ask(f"{key}={value}: no such file, so its keys are missing; start in its directory, or give the file itself")
            return row(kind=Kind.another, note="names a file with further keys", severity=Severity.said)
        said = hint(key, list(schema_keys(recipe_of(self.recipe).config)))
        near = said if said.startswith(("did you mean", "there is no such setting")) else "no similar name"
        return row(kind=Kind.unknown, note=f"not a key of {table.name} that is known here ({near})", severity=Severity.said)

    def given(self, key: str, value: Any, entry: Entry) -> Row:
        default, row = entry.default_for(self.recipe), functools.partial(Row, key=key, value=value)
        if value == "???" or (value is None and default is None):
            return row(kind=Kind.same, note="not filled in" if value == "???" else "not set")
        if value is True and entry.transform in transforms.OF_TEXT:
            self.context.ask(f"{key} has no value")
            return row(value="", kind=Kind.another, note="no value is given", severity=Severity.said)
        if is_open(value) and not self._is_text(entry):
            self.context.ask(f"{key}={value} is not filled in" + ("" if default is None else f": taken as {as_text(default)}"))
            settings = {} if default is None else self._meaning(entry, default).settings
            return row(kind=Kind.another, settings=settings, note="not filled in", severity=Severity.said)
        meaning = self._meaning(entry, default if value is None else value)
        kind, severity = meaning.kind, self._severity(entry, meaning)
        if kind is Kind.mapped and not meaning.part and all(self.is_ours(setting, one) for setting, one in meaning.settings.items()):
            kind = Kind.same
        return row(kind=kind, settings=meaning.settings, note=meaning.note, severity=severity)

    def _is_text(self, entry: Entry) -> bool:
        """Whether a variable may stay in the value: a path or a name."""
        text = bool(entry.ours) and all(self.types.get(setting) == "str" for setting in entry.ours)
        ignored = entry.meaning == "none" or bool(entry.into) or list(entry.settings or ()) == ["*"]
        return text or ignored or entry.transform in transforms.OF_TEXT

    def default(self, entry: Entry, own: set[str]) -> Row | None:
        """None if our default is the same, or a given key sets it."""
        value = entry.default_for(self.recipe)
        meaning = self._meaning(entry, value)
        changed = {name: one for name, one in meaning.settings.items() if name not in own and not self.is_ours(name, one)}
        if not changed and (meaning.kind is Kind.mapped or not meaning.note or entry.meaning == "none"):
            return None
        severity = self._severity(entry, meaning)
        return Row(key=entry.key, value=value, kind=meaning.kind, settings=changed, note=meaning.note, severity=severity)

    def _severity(self, entry: Entry, meaning: Meaning) -> Severity | None:
        """None if carried over, else how much it matters: the result changes unless the whole key has no counterpart here."""
        if not (meaning.differs or meaning.absent):
            return None
        if entry.question:
            self.context.ask(entry.question)
        of_kind = Severity.said if meaning.differs else Severity.cosmetic if entry.meaning == "none" else Severity.result
        return Severity(meaning.severity or entry.severity or of_kind)

    def is_ours(self, setting: str, value: Any) -> bool:
        ours = _plain(self.base, setting)
        return as_text(ours) == as_text(value) or bool(ours == value)

    def _condition(self, key: str) -> Any:
        """A key's value; `NAME_given`: whether it was given, and is above 0 if it is a number."""
        name = key.removesuffix("_given")
        value = self.context.value(name)
        return value if name == key else name in self.context.given and (value > 0 if isinstance(value, int | float) else bool(value))

    def _meaning(self, entry: Entry, value: Any) -> Meaning:
        for conditions, wanted in ((entry.only, True), (entry.unless, False)):
            for key, allowed in conditions.items():
                other = as_text(self._condition(key))
                if (other in map(as_text, allowed)) is not wanted:
                    return Meaning(note=f"without effect there with {key}={other}")
        if as_text(value) in map(as_text, entry.idle):
            return Meaning(note="nothing to carry over")
        if entry.meaning == "none":
            return Meaning(absent=True, note=entry.note)
        meaning = transforms.apply(entry, value, self.context, FUNCTIONS)
        for ours, other in self.mirrors.items():
            if _plain(self.base, other.rstrip(".")) is not None:
                twins = {name.replace(ours, other, 1): one for name, one in meaning.settings.items() if name.startswith(ours)}
                meaning.settings |= {name: one for name, one in twins.items() if name not in meaning.settings}
        return meaning


def _checked(source: Source, recipe: str, rows: list[Row], defaults: list[Row], maker: _Rows) -> Migration:
    settings: dict[str, Any] = {}
    for row in [*defaults, *rows]:  # given keys win
        settings |= row.settings
    chosen = {key: settings[key] for key in sorted(settings, key=_order) if not maker.is_ours(key, settings[key])}
    questions, remarks = (list(dict.fromkeys(asked)) for asked in (maker.context.questions, maker.context.remarks))
    if "num_processes" not in settings and not any("--ranks" in question for question in questions):
        remarks.append("num_processes: how many GPUs train is not given; pass --ranks N (default: 1)")
    if "data.train" not in chosen:
        chosen = {"data.train": PLACEHOLDER} | chosen
        questions.insert(0, f"data.train={PLACEHOLDER}: no data are named")
    for key in ("loop.validate_every", "loop.validate_first"):
        if chosen.get(key) and "data.validation" not in chosen:
            remarks.append(f"{key}={chosen.pop(key)} is left out: no data to validate on were named (data.validation)")
    if "model.path" not in chosen:
        questions.insert(0, "model.path: no model is named")
    found = Migration(
        framework=source.table.name,
        source=source.table.source,
        trains=source.trains,
        recipe=recipe,
        settings=chosen,
        rows=rows,
        defaults=defaults,
        open_questions=[*questions, *remarks],
        stops=questions,
    )
    keys = list(schema_keys(recipe_of(recipe).config))
    wrong = [key for key in chosen if not is_known(key, keys)]
    if wrong:
        raise ConfigError(f"{source.table.name} {source.trains}: the recipe {recipe} has no {', '.join(wrong)}")
    try:
        config = composed(recipe, [override(key, replaced(value, "{}")) for key, value in chosen.items()])
    except ConfigError as error:
        found.is_refused = True
        found.stop(f"the recipe {recipe} refuses it as it is: {error}")
        return found
    try:
        programs(recipe, config, [])
        config.check_complete()
    except ConfigError as error:
        if not (str(error).startswith("reward.") and any(one.startswith(("reward.", "environment.")) for one in questions)):
            found.stop(f"it cannot run as it is: {error}")
    return found


def _order(key: str) -> int:
    sections = ["model", "data", "reward", "critic", "algorithm", "rollout", "optimizer", "loop", "parallel", "num_processes"]
    section = key.partition(".")[0]
    return sections.index(section) if section in sections else len(sections)


def _plain(config: Any, key: str) -> Any:
    """The value of a dotted key, of enumerations their text; None if it is not set."""
    place = config
    for part in key.split("."):
        place = place.get(part) if isinstance(place, Mapping) else getattr(place, part, None)
    plain = [one.value if isinstance(one, Enum) else one for one in transforms.listed(place)]
    return plain if isinstance(place, list) else plain[0]
