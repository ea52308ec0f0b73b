"""What a value of another framework is here: the general rules of the tables, and functions that need more than one key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from aligner.commands.migrate.tables import Entry, as_text

OF_TEXT = ("model", "data", "data_prefix", "remote_reward", "verl_reward")  # transforms that leave a shell's variable unchanged


class Kind(str, Enum):
    """What became of a key."""

    mapped = "mapped"
    same = "same by default"
    another = "has another meaning here"
    none = "has no counterpart"
    unknown = "unknown"


@dataclass(kw_only=True, slots=True)
class Meaning:
    """The settings of ours that follow from one key, and a note."""

    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    differs: bool = False  # ours is not quite the same
    absent: bool = False  # ours does not exist
    part: bool = False  # another key's setting includes it
    severity: str = ""  # severity if it is not carried over, in place of the entry's

    @property
    def kind(self) -> Kind:
        return Kind.another if self.differs else Kind.none if self.absent else Kind.mapped


@dataclass(kw_only=True, slots=True)
class Context:
    """Every key's value, given or by default, and the questions and remarks that arise."""

    values: dict[str, Any]
    given: set[str]
    recipe: str
    ranks: int  # 0: not known
    examples: int  # number of training examples; 0: not known
    derived: Mapping[str, Callable[[Context], float]]  # factors that are not keys
    model: str = ""  # the trained model, as it was given
    questions: list[str] = field(default_factory=list)  # without an answer it is another experiment, or does not run
    remarks: list[str] = field(default_factory=list)  # it is the same experiment, but the user should know this

    def value(self, key: str) -> Any:
        return self.values.get(key)

    def number(self, key: str) -> float:
        """0 if the value is not a number."""
        value = self.values.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else 0

    def first(self, *keys: str) -> float:
        """The first number that is not 0; 0 if all are."""
        return next(filter(None, map(self.number, keys)), 0)

    def product(self, factors: Sequence[str]) -> float:
        """The product of keys and of derived factors; `ranks` is the number of ranks: 1 (and a question) if it was not given."""
        result: float = 1
        for key in factors:
            if key == "ranks":
                result *= self.known_ranks()
            elif key in self.derived:
                result *= self.derived[key](self)
            elif self.values.get(key) is not None:
                result *= self.number(key)
        return result

    def known_ranks(self) -> int:
        if not self.ranks:
            self.ask("the number of ranks, on which batch sizes depend, was not given: taken as 1; say --ranks N")
        return self.ranks or 1

    def ask(self, question: str) -> None:
        self.questions.append(question)


def to_ours(entry: Entry, value: Any, note: str = "", *, differs: bool = False) -> Meaning:
    """The value for each of the entry's settings."""
    return Meaning(settings=dict.fromkeys(entry.ours, value), note=note, differs=differs)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def apply(entry: Entry, value: Any, context: Context, functions: Mapping[str, Any]) -> Meaning:
    """The entry's rule; `functions` are the transforms by name."""
    if entry.into:
        return Meaning(part=True, note=f"part of {', '.join(entry.into)}" + (f": {entry.note}" if entry.note else ""))
    if entry.transform:
        found: Meaning = functions[entry.transform](entry, value, context)
        found.settings |= (entry.settings or {}).get("*", {})
        found.note = found.note or entry.note
    elif entry.settings is not None:
        settings = entry.settings.get(as_text(value), entry.settings.get("*"))
        found = _no_such_value(entry.settings, entry.note) if settings is None else Meaning(settings=dict(settings), note=entry.note)
    else:
        found = _plain(entry, value, context)
    found.differs = found.differs or (entry.meaning == "another" and not found.absent)
    return found


def _no_such_value(known: Mapping[str, Any], note: str = "") -> Meaning:
    values = ", ".join(name for name in known if name != "*")
    return Meaning(absent=True, note=f"there is no such value here (those with one: {values})" + (f"; {note}" if note else ""))


def _plain(entry: Entry, value: Any, context: Context) -> Meaning:
    settings = {name: _whole(value * context.product(keys)) for name, keys in entry.products.items() if isinstance(value, int | float)}
    if entry.values is not None:
        if (text := as_text(value)) not in entry.values:
            return _no_such_value(entry.values)
        value = entry.values[text]
    if (entry.factors or entry.plus) and isinstance(value, int | float) and not isinstance(value, bool):
        value = _whole(value * context.product(entry.factors) + entry.plus)
    return Meaning(settings=dict.fromkeys(entry.ours, value) | settings, note=entry.note)


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else float(f"{value:.12g}")


def spread(entry: Entry, value: Any, context: Context) -> Meaning:
    """A list with a value for each setting."""
    values = value if isinstance(value, list) else _numbers(value)
    if len(values) != len(entry.ours):
        return Meaning(absent=True, note=f"expected {len(entry.ours)} values")
    return Meaning(settings=dict(zip(entry.ours, values, strict=True)))


def _numbers(value: Any) -> list[float]:
    return [float(part) for part in re.split(r"[,\s]+", str(value).strip("()[] ")) if re.fullmatch(r"[-+.\deE]+", part)]


_NOT_HERE = {  # parts of the names of models whose files are not here
    r"(?i)[-_/.](vl|vlm|omni|vision|multimodal|audio|ocr)\b|llava|internvl|minicpm-[ov]|paligemma|smolvlm|idefics": "reads images or sound",
    r"(?i)[-_](awq|gptq|gguf|bnb|[48]bit|int[48]|w4a16|fp8|mxfp4|nvfp4)\b": "has quantized weights",
}
_MIXTURE = r"(?i)mixtral|[-_]moe|-a\d+(\.\d+)?b\b|deepseek-(v[23]|r1$)|glm-4\.[5-9]|moonlight|kimi-k2"


def model(entry: Entry, value: Any, context: Context) -> Meaning:
    """A directory, an archive, or a model of the Hub; a question if its name stands for a kind of model that does not load here."""
    for pattern, what in _NOT_HERE.items():
        if re.search(pattern, str(value)) and not Path(str(value)).is_dir():
            context.ask(f"{entry.ours[0]}={value}: judging by its name, it {what}; only text models in 16 bits load here (docs/models.md)")
    return to_ours(entry, str(value))


_LIMITS = {"train": ("max_samples", "data.train_max_samples"), "validation": ("max_samples", "data.val_max_samples")}


def at_most(context: Context, examples: int) -> int:
    """The number of examples that are read: another key may limit all of them, or each data set."""
    limit = _limit(context, "train")
    names = context.value("dataset") if isinstance(context.value("stage"), str) else ""  # LLaMA-Factory limits each data set
    return min(examples, limit * (str(names).count(",") + 1)) if limit else examples


def _limit(context: Context, name: str) -> int:
    """0: no limit."""
    return int(next((context.number(key) for key in _LIMITS[name] if context.number(key) > 0), 0))


def data(entry: Entry, value: Any, context: Context) -> Meaning:
    """A file or directory, a data set of the Hub, or a mixture of several; NeMo writes the weight of each before it."""
    given = [str(one) for one in value] if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
    weights = [float(part) for part in given if re.fullmatch(r"[\d.]+", part)] or _probabilities(context)
    parts = [part for part in given if part and not re.fullmatch(r"[\d.]+", part)]
    if not parts:
        return Meaning(absent=True, note="it names no data")
    is_train = "train" in "".join(entry.ours)
    splits = ("dataset_train_split", "train_split") if is_train else ("dataset_test_split", "eval_split")
    split = next((context.value(key) for key in splits if context.value(key)), None)
    paths = [_data_path(part, split, context.value("dataset_config")) for part in parts]
    if entry.question and (names := [part for part in parts if not re.search(r"[/.]", part)]):
        context.ask(f"{entry.ours[0]}: {', '.join(names)}: {entry.question}")
    found: list[Any] = list(paths)
    wrong = ""
    if len(paths) > 1 and is_train and weights:
        wrong = f"{len(weights)} shares of {len(paths)} data sets" if len(weights) != len(paths) else ""
        found = paths if wrong else [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    if limit := _limit(context, "train" if is_train else "validation"):
        found = [({"path": one} if isinstance(one, str) else one) | {"max_records": limit} for one in found]
        if len(paths) > 1 and context.value("stage") is None:
            wrong = f"{limit} of all data sets together there, of each one here"
    settings = dict.fromkeys(entry.ours, found[0] if len(found) == 1 and isinstance(found[0], str) else found)
    return Meaning(settings=settings, differs=bool(wrong), severity="result" if wrong else "", note=wrong or entry.note)


def _probabilities(context: Context) -> list[float]:
    """The shares that another key has; empty if the data sets follow each other."""
    key = "dataset_probs" if context.value("mix_strategy") in (None, "concat") else "interleave_probs"
    value = context.value(key)
    return value if isinstance(value, list) else _numbers(value)


_FILES = {"jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "txt", "gz", "bz2", "xz", "zst"}


def _data_path(name: str, split: Any, config: Any) -> str:
    first, _, _ = name.partition("@")
    is_file = first.startswith((".", "/", "~", "$")) or Path(first).suffix[1:] in _FILES or Path(first).exists() or first.count("/") > 1
    has_split, has_config = isinstance(split, str) and (split != "train" or config), isinstance(config, str)
    parts = f"{f':{config}' if has_config else ''}{f':{split}' if has_split or has_config else ''}"
    return first if is_file else f"{'' if '/' in first else 'datasets:'}{first}{parts}"


def epochs(entry: Entry, value: Any, context: Context) -> Meaning:
    """Epochs, as steps if the examples are known; the product of entry.factors is the examples of a step."""
    per_step = context.product(entry.factors)
    if not isinstance(value, int | float) or per_step < 1:
        return Meaning(absent=True, severity="said", note="the number of examples a step is unknown")
    if not context.examples:
        return Meaning(settings={"loop.epochs": value, "loop.max_steps": 0}, note=f"{per_step:g} examples a step")
    steps_per_epoch = max(1, context.examples // int(per_step))
    note = f"{context.examples} examples, {per_step:g} a step"
    return Meaning(settings={"loop.max_steps": math.ceil(value * steps_per_epoch)}, note=note)


def steps(entry: Entry, value: Any, context: Context) -> Meaning:
    """A number of steps; if it is not above 0, epochs count."""
    if not isinstance(value, int | float) or value <= 0:
        return Meaning(note="the epochs count")
    return to_ours(entry, math.ceil(value / (context.product(entry.factors) or 1)))


def every(entry: Entry, value: Any, context: Context) -> Meaning:
    """Steps between two events; never if it is not above 0. A share of an epoch or of the run is not known in steps."""
    if value == "inf" or not isinstance(value, int | float) or value <= 0:
        return to_ours(entry, 0, "" if isinstance(value, int | float) else entry.note)
    if value < 1 or (isinstance(value, float) and value == 1.0):
        return Meaning(differs=True, note="a share of an epoch or of the run there, steps here: set it")
    return to_ours(entry, int(value))


def warmup_share(entry: Entry, value: Any, context: Context, *, whole: Callable[[float], int] = math.ceil, updates: int = 1) -> Meaning:
    """A share of the run's steps as a number of optimizer steps, of which a step has `updates`; entry.factors: as for `epochs`. `whole`
    rounds as the framework does."""
    if not isinstance(value, int | float) or value == 0:
        return to_ours(entry, 0)
    total = next((context.number(key) for key in ("max_steps", "trainer.total_training_steps") if context.number(key) > 0), 0)
    if not total and context.examples and entry.factors:
        lasting = context.first("num_train_epochs", "max_epochs", "trainer.total_epochs") or 1
        total = math.ceil(lasting * max(1, context.examples // int(context.product(entry.factors))))
    if not total:
        return as_fraction(entry, value)
    steps = whole(round(total * value, 9))
    note = f"{value:g} of {total:g} steps there" + (f": {steps}, of {updates} updates each" if updates > 1 else "")
    return to_ours(entry, steps * updates, note)


def as_fraction(entry: Entry, value: float) -> Meaning:
    """A share of the run, if its length is not known."""
    ours = (name.replace("warmup_steps", "warmup_fraction") for name in entry.ours)
    return Meaning(settings=dict.fromkeys(ours, value), note="rounded up to whole updates")


def packed(entry: Entry, value: Any, context: Context) -> Meaning:
    """Rows one after the other; a micro-batch has the product of entry.factors in tokens."""
    if value is not True:
        return Meaning(note="nothing to carry over")
    tokens = int(context.product(entry.factors)) or 4096
    note = entry.note or "memory and speed, never numbers"
    return Meaning(settings={"model.packing": True, "model.micro_batch_tokens": max(tokens, 1024)}, note=note)


_LORA = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "proj", "gate_proj": "gate", "up_proj": "up", "down_proj": "fc2",
    "query_key_value": "qkv", "qkv_proj": "qkv", "gate_up_proj": "fc1", "attention_qkv": "qkv", "attention_dense": "proj",
    "mlp_fc1": "fc1", "mlp_fc2": "fc2", "c_attn": "qkv", "dense": "proj",
}  # fmt: skip
_ALL = ["qkv", "proj", "fc1", "fc2"]
_LORA_GROUPS = {"all": _ALL, "all-linear": _ALL, "attention": ["qkv", "proj"], "mlp": ["fc1", "fc2"]}


def lora_targets(entry: Entry, value: Any, context: Context) -> Meaning:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    names = [part for part in re.split(r"[,\s\[\]'\"]+", text) if part]
    unknown = [name for name in names if name not in _LORA and name not in _LORA_GROUPS]
    has_all = any(_LORA_GROUPS.get(name) is _ALL for name in names) and re.search(_MIXTURE, context.model) is not None
    found = list(dict.fromkeys(one for name in names for one in _LORA_GROUPS.get(name, [_LORA.get(name, "")]) if one))
    for whole, parts in {"qkv": ["q", "k", "v"], "fc1": ["gate", "up"]}.items():
        if all(part in found for part in parts):
            found = [whole if one == parts[0] else one for one in found if one not in parts[1:]]
    note = f"no such layers here: {', '.join(unknown)}" if unknown else entry.note
    if has_all:
        found.append("experts")
        note = "experts included; with transformers 5 the experts of a mixture get no adapters there: then leave `experts` out"
    settings = dict.fromkeys(entry.ours, found) if found else {}
    return Meaning(settings=settings, differs=bool(unknown) or has_all, severity="result" if unknown else "", note=note)
