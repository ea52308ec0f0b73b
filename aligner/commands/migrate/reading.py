"""What was given: its framework, what it trains, and every key with its value."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from aligner.commands.migrate.shell import UNREAD, commands
from aligner.commands.migrate.tables import VALUE_HEAD, Table, tables
from aligner.errors import ConfigError
from aligner.settings.compose import resolved
from aligner.settings.schema import flat

_SCRIPTS = {".sh", ".bash", ".sub", ".sbatch", ".slurm", ".txt"}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
RANKS = {  # options of launchers whose product, each kind at most once, is the number of ranks
    "nproc_per_node": "per_node", "num_gpus": "per_node", "gpus-per-node": "per_node", "ntasks-per-node": "per_node",
    "nnodes": "nodes", "num_nodes": "nodes", "N": "nodes", "nodes": "nodes",
    "num_processes": "all", "ntasks": "all", "n": "all", "np": "all",
}  # fmt: skip
_VALUELESS = set("standalone multi_gpu use_deepspeed use_fsdp no_local_rank module m u no_python no-wait same_network".split())
_COMMAND = re.compile(r"^[ \t]*(?:\w+=\S+ +)*(?:accelerate|torchrun|deepspeed|python3?|trl|uv)\b[^\n]*(?:(?<=\\)\n[^\n]*)*", re.MULTILINE)


@dataclass(kw_only=True, slots=True)
class Source:
    """A command or file of one framework."""

    table: Table
    trains: str
    given: dict[str, Any] = field(default_factory=dict)
    launcher: dict[str, Any] = field(default_factory=dict)  # options of its launcher, and its environment
    ranks: int = 0  # according to the launcher; 0: not given


def read(text: str, *, framework: str = "", trains: str = "") -> Source:
    """A file (YAML or a script) or a command. Raises ConfigError if it is neither, or not of a known framework."""
    path = Path(text) if "\n" not in text and len(text) < 4096 else None
    if path is not None and os.path.isfile(path):  # Path.is_file raises if a name is as long as a command may be
        written = path.read_text()
        if path.suffix in (".yaml", ".yml", ".json"):
            return _of_file(_mapping(written, str(path)), str(path), framework, trains)
        if path.suffix in _SCRIPTS or written.startswith("#!"):
            return _of_script(written, path.parent, str(path), framework, trains)
        if path.suffix == ".py" and (documented := ast.get_docstring(ast.parse(written))):  # how to start it, among other text
            return _of_script("\n".join(_COMMAND.findall(documented)), path.parent, str(path), framework, trains)
        raise ConfigError(f"{path}: neither YAML (.yaml, .yml, .json) nor a shell script ({', '.join(sorted(_SCRIPTS))})")
    if path is not None and " " not in text and ("/" in text or path.suffix):
        raise ConfigError(f"{text}: there is no such file")
    return _of_script(text, Path("."), "the command", framework, trains)


def value_of(text: str) -> Any:
    """The value of a word of a command line: a number, true or false, null, a list, else the text."""
    if _NUMBER.fullmatch(text):
        plain = text.replace("_", "")
        return int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("null", "~") or text == "None":
        return None
    if text[:1] not in ("[", "{", "("):
        return text
    inner = f"[{text[1:-1]}]" if text[0] == "(" else text
    try:
        found = yaml.safe_load(re.sub(r"(?<!['\"\w/])(\$\{[^{}]*\}[\w./-]*)", r'"\1"', inner))
    except yaml.YAMLError:
        return text
    return [value_of(one) if isinstance(one, str) else one for one in found] if isinstance(found, list) else found


def _of_file(written: dict[str, Any], where: str, framework: str, trains: str) -> Source:
    known = _candidates(framework)
    if framework and trains:
        found = [(known[0], trains)]
    else:
        found = [(table, program) for table in known if (program := table.trained_by_file(written))][:1]
    if not found and trains and not framework:
        found = [(table, trains) for table in known if trains in table.recipes and all(map(table.knows, written))]
        if len(found) != 1:
            raise ConfigError(f"{where}: cannot tell from its keys which framework this is; pass --from {'|'.join(tables())}")
    if not found:
        which = framework or "|".join(tables())
        raise ConfigError(f"{where}: its keys do not tell what it trains; pass --from {which} and --trains (such as sft, dpo, grpo)")
    ((table, program),) = found
    _refuse_others(program, where, table)
    return Source(table=table, trains=trains or program, given=dict(flat(written)) if table.style == "hydra" else dict(written))


def _of_script(text: str, folder: Path, where: str, framework: str, trains: str) -> Source:
    lines = list(commands(text, folder))
    found = [source for words in lines if (source := _of_words(words, folder, where, framework, trains)) is not None]
    if not found:
        sourced = ", ".join(words[1] for words in lines if words[0] == "source" and words[1:])
        known = ", ".join(table.name for table in _candidates(framework))
        raise ConfigError(
            f"{where}: no command of {known} in it"
            + (f"; it runs {sourced}, which is not beside it: give that script" if sourced else "")
            + f"; for a program of your own with such keys pass --from {framework or 'trl'} --trains {trains or 'grpo'}"
        )
    first, *others = found
    for other in others:
        is_again = other.given == first.given or first.trains not in first.table.recipes
        if is_again and (other.table, other.trains) == (first.table, first.trains):
            first = first if first.ranks else other
        elif (both := _joined(first, other)) is None:
            names = ", ".join(f"{one.table.name} {one.trains}" for one in found)
            raise ConfigError(f"{where}: {len(found)} commands that train ({names}); give one of them")
        else:
            first = both
    return first


def joined(sources: Sequence[Source]) -> Source:
    """Several files as one source: an actor's and its critic's. Raises ConfigError if they are not of one run."""
    first, *others = sources
    for other in others:
        if (both := _joined(first, other)) is None:
            raise ConfigError(
                f"{first.table.name} {first.trains} and {other.table.name} {other.trains} are not of one run; give one at a time"
            )
        first = both
    return first


def _joined(one: Source, other: Source) -> Source | None:
    """None if neither is a part of the other's run."""
    if other.table is not one.table or not {one.trains, other.trains} & one.table.parts.keys():
        return None
    main, part = (one, other) if other.trains in one.table.parts else (other, one)
    prefix = main.table.parts[part.trains]
    given = main.given | {f"{prefix}{key}": value for key, value in part.given.items()}
    return Source(table=main.table, trains=main.trains, given=given, launcher=main.launcher | part.launcher, ranks=main.ranks)


def _of_words(words: Sequence[str], folder: Path, where: str, framework: str, trains: str) -> Source | None:
    """A command that trains; None if it does something else."""
    unsure: Table | None = None
    for table in _candidates(framework):
        program_at = _by_trainer(table, words, folder) or table.program_in(words)
        if program_at is None and framework and trains:  # a program of the user's own: the word before its first key
            place = next((at for at, word in enumerate(words) if table.knows(word.partition("=")[0].lstrip("-+"))), 0)
            program_at = (place - 1, trains) if place else None
        if program_at is not None:
            if words[0].startswith(UNREAD):
                raise ConfigError(f"{where}: the command {' '.join(words[1:])[:80]!r}: {words[0].removeprefix(UNREAD)}")
            place, program = program_at
            _refuse_others(program, where, table)
            launcher, ranks = _launcher(words[:place], folder)
            given = dict(_hydra(words[place + 1 :], folder) if table.style == "hydra" else _flags(words[place + 1 :], folder, table))
            if table.trainers and (file := _beside(words[place], folder)) and VALUE_HEAD in file.read_text():
                given[VALUE_HEAD] = True
            if program == "?" and not trains:
                program = table.trained_by_keys(given) or next((one for part, one in table.by_path.items() if part in where), "")
                if not program:
                    unsure = table
                    continue
            return Source(table=table, trains=trains or program, given=given, launcher=launcher, ranks=ranks)
    if unsure is not None:
        known = "|".join(unsure.recipes)
        raise ConfigError(f"{where}: the keys of this command do not tell what it trains; pass --trains {known} (of {unsure.name})")
    return None


def _by_trainer(table: Table, words: Sequence[str], folder: Path) -> tuple[int, str] | None:
    """(place of a program that is a file here, what the trainer that it creates trains, or the trainer's name)."""
    for place, word in enumerate(words):
        file = _beside(word, folder) if table.trainers and word.endswith(".py") else None
        if file is not None and (found := re.search(r"= *([A-Z]\w+Trainer)\(", file.read_text())):
            return place, table.trainers.get(found[1], found[1])
    return None


def _beside(name: str, folder: Path) -> Path | None:
    """The file of that name: here, in the folder, or below a folder above it, as the root of a repository is above its examples."""
    places = (Path(), folder, *folder.resolve().parents)
    return next((place / name for place in places if os.path.isfile(place / name)), None)


def _refuse_others(program: str, where: str, table: Table) -> None:
    """Raise ConfigError for a program that trains nothing: tables mark it with `!`, followed by the command that does its work here."""
    if program.startswith("!"):
        raise ConfigError(f"{where}: of {table.name}, and it trains nothing that is mapped here: {program[1:]}")


def _candidates(framework: str) -> list[Table]:
    if framework and framework not in tables():
        raise ConfigError(f"--from {framework}: allowed: {', '.join(tables())}")
    return [tables()[framework]] if framework else list(tables().values())


def _launcher(words: Sequence[str], folder: Path) -> tuple[dict[str, Any], int]:
    """(options of the launcher and the environment, the number of ranks that follows, or 0)."""
    told: dict[str, Any] = {}
    counts: dict[str, int] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if (variable := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word)) is not None:
            told[variable[1]] = variable[2]
        elif word.startswith("-") and word.strip("-"):
            name, equals, text = word.lstrip("-").partition("=")
            takes_next = not equals and name not in _VALUELESS and place < len(words) and not words[place].startswith("-")
            if takes_next:
                text = words[place]
                place += 1
            if name in ("m", "u", "module"):
                continue
            told[word.partition("=")[0]] = value_of(text) if text else True
            kind = RANKS.get(name.replace("-", "_"), RANKS.get(name, ""))
            if kind:
                counts[kind] = int(text) if text.isdigit() else 0  # 0: a variable that nothing sets
            file = _beside(text, folder) if name == "config_file" and text else None
            if file is not None and isinstance(count := _mapping(file.read_text(), str(file)).get("num_processes"), int):
                counts.setdefault("all", count)
    return told, counts.get("all", 0) or (counts.get("per_node", 0) * counts.get("nodes", 1))


def _hydra(words: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """The keys of `key=value` words, over the config file that they name, if it exists."""
    overrides: dict[str, Any] = {}
    place: dict[str, str] = {}
    for number, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name.startswith("--"):
            following = words[number + 1] if number + 1 < len(words) else ""
            place[name] = text if equals else following
            overrides[name] = place[name]
        elif equals:
            overrides[name.lstrip("+~")] = value_of(re.sub(r'^\\?"(.*?)\\?"$', r"\1", text))
        elif number == 0 or not words[number - 1].startswith("--"):
            overrides[word] = None
    file = folder / place.get("--config-path", "") / f"{place.get('--config-name', '').removesuffix('.yaml')}.yaml"
    text = file.read_text() if "--config-name" in place and file.is_file() else "{}"
    found = dict(flat(_mapping(text, str(file), overrides)))
    own = {key: found.get(key, value) for key, value in flat(_mapping(text, str(file))) if key not in overrides}
    yield from (own | {key: found.get(key, value) if "${" in str(value) else value for key, value in overrides.items()}).items()


def _flags(words: Sequence[str], folder: Path, table: Table) -> Iterator[tuple[str, Any]]:
    """The keys of `--key value ...`, over the named files (`--config FILE`, or a YAML file alone)."""
    values: dict[str, list[str] | None] = {}
    files: list[str] = []
    overrides: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = [text] if equals else None
            name = "" if equals else name
        elif name:
            values[name] = [*(values[name] or []), word]
        elif word.endswith((".yaml", ".yml", ".json")):
            files.append(word)
        elif "=" in word:
            key, _, text = word.partition("=")
            overrides[key] = value_of(text)
        else:
            overrides[word] = None
    given: dict[str, Any] = {}
    files += [text for key in table.config_flags for text in values.pop(key, None) or []]
    for file in files:
        if (path := _beside(file, folder)) is None:
            raise ConfigError(f"{file}: there is no such file, so its keys would be missing; start where it lies, or give its path")
        given |= _mapping(path.read_text(), str(path))
    for key, texts in values.items():
        plain = [value_of(text) for text in texts or []]
        denied = key.removeprefix("no_")
        if not plain and denied != key and table.knows(denied) and not table.knows(key):
            given[denied] = False
        else:
            given[key] = True if not plain else plain[0] if len(plain) == 1 else plain
    yield from (given | overrides).items()


def _mapping(text: str, where: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    try:
        found = resolved(text, overrides)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    typed: dict[str, Any] = with_texts(found, lambda text: value_of(text) if _NUMBER.fullmatch(text) else text)  # YAML 1.1: 1e-5 is a text
    return typed


def with_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """The value with all of its texts changed."""
    if isinstance(value, dict):
        return {key: with_texts(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [with_texts(one, change) for one in value]
    return change(value) if isinstance(value, str) else value
