"""What errors say of keys: which setting an unknown one means (synonyms.yaml, or what is spelled like it), and what was typed."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from aligner.errors import ConfigError
from aligner.settings.schema import SchemaKey, is_known, named_as

LEAST_ALIKE = 0.7  # of two words, below which one is not a typing error for the other
_VALUES = {  # what others call the values of ours
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    **{f"{one}_proj": f"{one} (qkv: of q, k and v)" for one in "qkv"},
    **{"o_proj": "proj", "out_proj": "proj", "qkv_proj": "qkv", "c_attn": "qkv"},
    **{"gate_proj": "gate", "up_proj": "up", "gate_up_proj": "fc1", "down_proj": "fc2", "attention": "qkv", "mlp": "fc1"},
}
_COMPONENTS = {"critic": "critic", "reward": "reward", "reward_model": "reward", "rm": "reward"}  # first part of a key: section


@functools.cache  # read once, and only when a key is unknown
def synonyms() -> dict[str, dict[str, list[str]]]:
    """Project -> its name of a setting -> what may be meant: synonyms.yaml, and as `migrate` what `aligner migrate`'s tables add."""
    here = Path(__file__).parent
    found: dict[str, dict[str, list[str]]] = yaml.safe_load((here / "synonyms.yaml").read_text())
    known = {name for table in found.values() for name in table}
    ours: dict[str, set[str]] = {}  # by each end of a key there; only of one meaning in all tables
    for path in sorted((here.parent / "commands" / "migrate" / "tables").glob("*.yaml")):
        table = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for row in table if isinstance(table, list) else table["keys"]:
            meant = row.get("ours", "")
            for key in (row["key"], *row.get("also", ())):
                for name in (key.split(".", start)[-1] for start in range(key.count(".") + 1)):
                    ours.setdefault(name, set()).add(meant if isinstance(meant, str) else " and ".join(meant))
    return found | {"migrate": {name: list(of) for name, of in ours.items() if len(of) == 1 and "" not in of and name not in known}}


def unknown_keys(written: Mapping[str, Any], keys: Sequence[SchemaKey], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree that the schema does not know, down to the last ones."""
    for name, value in written.items():
        key = f"{prefix}{name}"
        known = is_known(key, keys)
        if isinstance(value, dict) and value and not (known and _takes_anything(key, keys)):
            yield from unknown_keys(value, keys, f"{key}.")
        elif not known:
            yield key


def hint(key: str, keys: Sequence[SchemaKey]) -> str:
    """What to say of a key that the schema does not know: the setting that is meant, that there is none, or where to look."""
    names = [named_as(known.key, key) for known in keys if not known.key.endswith("*")]
    if near := _spelled_alike(key, names):
        return f"did you mean {near}?"
    absent: list[str] = []
    for meaning in _meanings(key):
        target, _, remark = (part.strip() for part in meaning.partition(";"))
        if not target:
            return f"there is no such setting: {remark}"
        if placed := _placed(target, key, keys):
            return f"did you mean {placed}?" + (f" ({remark})" if remark else "")
        absent += [part for part in target.split(" and ") if part not in absent]
    if near := _same_leaf(key, names) or ("" if absent else _alike_leaf(key, names)):
        return f"did you mean {near}?"
    leaves = [name for table in synonyms().values() for name in table if "." not in name]
    if not absent and (near := difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.85)):
        return hint(near[0], keys)  # a typing error for another project's name
    if absent:
        return f"this recipe has no {' or '.join(absent)}; see --help"
    section = key.partition(".")[0]
    return f"see --help {section}" if any(name.startswith(f"{section}.") for name in names) else "see --help"


def meant_value(value: str, allowed: str) -> str:
    """Which of the allowed values, `a, b`, is meant by another; empty if none is like it."""
    options = allowed.split(", ")
    known = _VALUES.get(value.rpartition(".")[2].lower(), value)
    if known.partition(" ")[0].lower() in options:
        return known.lower()
    return next(iter(difflib.get_close_matches(value, options, n=1)), "")


def no_setting(texts: Sequence[str]) -> ConfigError | None:
    """What is said of the first text that assigns nothing: `key = value` typed with spaces, or a word."""
    bare = next((i for i, text in enumerate(texts) if text.startswith("=") or ("=" not in text and not text.startswith("~"))), None)
    if bare is None:
        return None
    before, text, after = texts[bare - 1] if bare else "", texts[bare], texts[bare + 1 : bare + 3]
    if before.endswith("="):
        typed = [before, text]
    elif text.startswith("="):
        typed = [before, text, *(after[:1] if text == "=" else [])]
    elif after and after[0].startswith("="):
        typed = [text, *after[: 2 if after[0] == "=" else 1]]
    else:
        return ConfigError(f"{text!r} is not a setting: settings are written key=value (aligner train CONFIG --help lists them)")
    return ConfigError(f"{' '.join(typed)!r}: a setting is written without spaces around '=': {''.join(typed)}")


def refuse_unknown(unknown: Sequence[tuple[str, str]], keys: Sequence[SchemaKey]) -> None:
    """Raise ConfigError naming all of the (key, where it is written), if there are any."""
    lines = [" ".join(f"{key} {where}".split()) + f": {hint(key, keys)}" for key, where in unknown]
    if len(lines) == 1:
        raise ConfigError(f"unknown setting {lines[0]}")
    if lines:
        raise ConfigError("\n  ".join([f"{len(lines)} unknown settings", *lines]))


def as_typed(error: ConfigError, names: Sequence[str], path: str) -> ConfigError:
    """The error of the section at `path`, of the settings `names`, with their keys as typed.

    The section knows part of its path at most, for it may be in several places: it says `server.port`, `guard.logprob_gap.warn` or `port`.
    """
    if not path:
        return error
    parts, below = path.split("."), "|".join(map(re.escape, names))
    for start in range(len(parts)):
        own = re.compile(rf"(?<![\w.]){re.escape('.'.join(parts[start:]))}(?=\.(?:{below})\b)")
        if own.search(str(error)):
            return ConfigError(own.sub(path, str(error)))
    bare = re.match(rf"(?:{below})\b", str(error))
    return ConfigError(f"{path}.{error}" if bare else f"{path}: {error}")


def _takes_anything(key: str, keys: Sequence[SchemaKey]) -> bool:
    """Whether what is below a known key is the user's own."""
    return not any(known.section and named_as(known.key, key) == key or known.key.startswith(f"{key}.*") for known in keys)


def _meanings(key: str) -> Iterator[str]:
    """What others mean by a key, by its longest end first."""
    parts = key.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for table in synonyms().values():
            yield from table.get(end, ())


def _placed(target: str, key: str, keys: Sequence[SchemaKey]) -> str | None:
    """`a=b`, or `a and b`, with keys as this schema has them: in the section of the critic if `key` is of the critic. None: it has not."""
    found = []
    for part in target.split(" and "):
        name, equals, value = part.partition("=")
        section = _COMPONENTS.get(key.partition(".")[0], "")
        places = [f"{section}.{name}", f"{section}.{name.rpartition('.')[2]}"] if section and not name.startswith(f"{section}.") else []
        place = next((place for place in (*places, name) if is_known(place, keys)), None)
        if place is None:
            return None
        found.append(f"{place}{equals}{value}")
    return " and ".join(found)


def _spelled_alike(key: str, names: Sequence[str]) -> str | None:
    """The known key of as many parts each of which is spelled like this one's."""
    parts = key.split(".")
    alike = [name for name in names if _are_alike(parts, name.split("."))]
    return _closest(key, alike)


def _same_leaf(key: str, names: Sequence[str]) -> str | None:
    """The known key with the same last part; of several the one whose section is most like this one's, if any is."""
    section, _, leaf = key.rpartition(".")
    same = [name for name in names if name.rpartition(".")[2] == leaf]
    if section and len(same) > 1:
        same = [name for name in same if _likeness(section, name.rpartition(".")[0]) >= 0.6]
    return _closest(key, same)


def _alike_leaf(key: str, names: Sequence[str]) -> str | None:
    """The known key whose last part is spelled much like this one's, in whatever section."""
    leaf = key.rpartition(".")[2]
    leaves = {name: name.rpartition(".")[2] for name in names}
    return _closest(
        key, [name for name, other in leaves.items() if other != leaf and 0.8 <= _likeness(leaf, other) and _are_alike([leaf], [other])]
    )


def _are_alike(parts: Sequence[str], others: Sequence[str]) -> bool:
    """Whether each part is a typing error for the other's, word by word: `max_length` is none for `min_length`."""
    if len(parts) != len(others):
        return False
    for part, other in zip(parts, others, strict=True):
        words, other_words = part.split("_"), other.split("_")
        least = LEAST_ALIKE
        if len(words) != len(other_words):  # a `_` more or less
            words, other_words, least = ["".join(words)], ["".join(other_words)], 0.9
        if any(_likeness(word, other) < least for word, other in zip(words, other_words, strict=True)):
            return False
    return True


def _closest(key: str, names: Sequence[str]) -> str | None:
    return max(names, key=lambda name: _likeness(key, name), default=None)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
