"""What a value of another framework is here: the general rules of the tables, and those functions that need more than one key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aligner.jobs.migrate.context import Context, Meaning
from aligner.jobs.migrate.tables import Entry, as_text

RANK_OPTIONS = (
    "nproc_per_node", "nnodes", "num_processes", "num_gpus", "num_nodes", "ntasks", "ntasks_per_node", "gpus_per_node", "n", "np", "N",
)  # fmt: skip
OF_TEXT = ("model", "data", "data_prefix", "reward_model", "reward_and_critic")  # transforms that leave a shell's variable as it is
Transform = Callable[[Entry, Any, Context], Meaning]


def apply(entry: Entry, value: Any, context: Context, functions: Mapping[str, Transform]) -> Meaning:
    """The entry's rule; `functions` are the transforms by name."""
    if entry.into:
        return Meaning(part=True, note=f"part of {', '.join(entry.into)}" + (f": {entry.note}" if entry.note else ""))
    if entry.transform:
        found = functions[entry.transform](entry, value, context)
        if not found.note:
            found.note = entry.note
    elif entry.settings is not None:
        found = _of_settings(entry, value)
    else:
        found = _plain(entry, value, context)
    found.differs = found.differs or (entry.meaning == "another" and not found.absent)
    return found


def _of_settings(entry: Entry, value: Any) -> Meaning:
    settings = entry.settings or {}
    found = settings.get(as_text(value), settings.get("*"))
    if found is None:
        known = ", ".join(name for name in settings if name != "*")
        return Meaning(
            absent=True, note=f"there is no such value here (those with one: {known})" + (f"; {entry.note}" if entry.note else "")
        )
    return Meaning(settings=dict(found), note=entry.note)


def _plain(entry: Entry, value: Any, context: Context) -> Meaning:
    settings = {name: _whole(value * context.product(keys)) for name, keys in entry.products.items() if isinstance(value, int | float)}
    if entry.values is not None:
        if (text := as_text(value)) not in entry.values:
            known = ", ".join(entry.values)
            return Meaning(absent=True, note=f"there is no such value here (those with one: {known})")
        value = entry.values[text]
    if (entry.factors or entry.plus) and isinstance(value, int | float) and not isinstance(value, bool):
        value = _whole(value * context.product(entry.factors) + entry.plus)
    return Meaning(settings=dict.fromkeys(entry.ours, value) | settings, note=entry.note)


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else float(f"{value:.12g}")


def spread(entry: Entry, value: Any, context: Context) -> Meaning:
    """A list, one setting for each of its values."""
    values = value if isinstance(value, list) else _numbers(value)
    if len(values) != len(entry.ours):
        return Meaning(absent=True, note=f"expected {len(entry.ours)} values")
    return Meaning(settings=dict(zip(entry.ours, values, strict=True)))


def _numbers(value: Any) -> list[float]:
    return [float(part) for part in re.split(r"[,\s]+", str(value).strip("()[] ")) if re.fullmatch(r"[-+.\deE]+", part)]


def model(entry: Entry, value: Any, context: Context) -> Meaning:
    """A directory, an archive, or a model of the Hub."""
    return Meaning(settings=dict.fromkeys(entry.ours, str(value)))


def data(entry: Entry, value: Any, context: Context) -> Meaning:
    """A file or directory, a data set of the Hub, or a mixture of several; NeMo writes the weight of each before it."""
    given = [str(one) for one in value] if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
    weights = [float(part) for part in given if re.fullmatch(r"[\d.]+", part)] or _probabilities(context)
    parts = [part for part in given if part and not re.fullmatch(r"[\d.]+", part)]
    if not parts:
        return Meaning(absent=True, note="no data is named in it")
    is_train = "train" in "".join(entry.ours)
    split = context.value("dataset_train_split" if is_train else "dataset_test_split")
    paths = [_data_path(part, split) for part in parts]
    if len(paths) == 1:
        return Meaning(settings=dict.fromkeys(entry.ours, paths[0]), note=entry.note)
    if not is_train or not weights:
        return Meaning(settings=dict.fromkeys(entry.ours, paths), note=entry.note)
    if len(weights) != len(paths):
        return Meaning(settings=dict.fromkeys(entry.ours, paths), differs=True, note=f"{len(weights)} shares of {len(paths)} data sets")
    sources = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    return Meaning(settings=dict.fromkeys(entry.ours, sources), note=entry.note)


def _probabilities(context: Context) -> list[float]:
    """The shares that another key has; none where the data sets are one after another."""
    key = "dataset_probs" if context.value("mix_strategy") in (None, "concat") else "interleave_probs"
    value = context.value(key)
    return value if isinstance(value, list) else _numbers(value)


def _data_path(name: str, split: Any) -> str:
    first, _, _ = name.partition("@")
    is_hub = not first.startswith((".", "/", "~", "$")) and not Path(first).suffix and not Path(first).exists() and first.count("/") <= 1
    return f"datasets:{first}{f':{split}' if isinstance(split, str) and split != 'train' else ''}" if is_hub else first


def epochs(entry: Entry, value: Any, context: Context) -> Meaning:
    """Epochs to steps: entry.factors are the keys whose product is the examples of a step."""
    if not isinstance(value, int | float):
        return Meaning(absent=True, note="not a number")
    per_step = context.product(entry.factors)
    if not context.examples:
        steps = f"{value:g} epochs are {value:g} * examples / {per_step:g} steps"
        context.ask(f"loop.max_steps: the run's length is in steps here, {steps}; say --examples N, or set it")
        return Meaning(differs=True, note=f"{steps} here; say --examples N")
    steps_per_epoch = max(1, context.examples // int(per_step))
    return Meaning(
        settings={"loop.max_steps": math.ceil(value * steps_per_epoch)}, note=f"{context.examples} examples, {per_step:g} a step"
    )


def steps(entry: Entry, value: Any, context: Context) -> Meaning:
    """A number of steps; not above 0: epochs count."""
    if not isinstance(value, int | float) or value <= 0:
        return Meaning(note="the epochs count")
    return Meaning(settings=dict.fromkeys(entry.ours, math.ceil(value / (context.product(entry.factors) or 1))))


def every(entry: Entry, value: Any, context: Context) -> Meaning:
    """Steps between two events; not above 0: never. A share of an epoch or of the run is not known in steps."""
    if value == "inf" or not isinstance(value, int | float) or value <= 0:
        return Meaning(settings=dict.fromkeys(entry.ours, 0), note="" if isinstance(value, int | float) else entry.note)
    if value < 1 or (isinstance(value, float) and value == 1.0):
        return Meaning(differs=True, note="a share of an epoch or of the run there; here in steps: set it")
    return Meaning(settings=dict.fromkeys(entry.ours, int(value)))


def warmup_share(entry: Entry, value: Any, context: Context) -> Meaning:
    """A share of the optimizer steps to a number of them; entry.factors: as for `epochs`."""
    if not isinstance(value, int | float) or value == 0:
        return Meaning(settings=dict.fromkeys(entry.ours, 0))
    total = next((context.number(key) for key in ("max_steps", "trainer.total_training_steps") if context.number(key) > 0), 0)
    if not total and context.examples and entry.factors:
        lasting = next(
            (context.number(key) for key in ("num_train_epochs", "max_epochs", "trainer.total_epochs") if context.number(key)), 1
        )
        total = math.ceil(lasting * max(1, context.examples // int(context.product(entry.factors))))
    if not total:
        context.ask(f"{', '.join(entry.ours)}: in optimizer steps here, {value:g} of all of them there; say --examples N, or set it")
        return Meaning(differs=True, note=f"a share there ({value:g}), optimizer steps here")
    return Meaning(settings=dict.fromkeys(entry.ours, math.ceil(total * value)), note=f"{value:g} of {total:g} optimizer steps")


def packed(entry: Entry, value: Any, context: Context) -> Meaning:
    """Rows one after the other, as many tokens as the keys of entry.factors make."""
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
    """Names of linear layers."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    names = [part for part in re.split(r"[,\s\[\]'\"]+", text) if part]
    unknown = [name for name in names if name not in _LORA and name not in _LORA_GROUPS]
    found = list(dict.fromkeys(one for name in names for one in _LORA_GROUPS.get(name, [_LORA.get(name, "")]) if one))
    for whole, parts in {"qkv": ["q", "k", "v"], "fc1": ["gate", "up"]}.items():
        if all(part in found for part in parts):
            found = [whole if one == parts[0] else one for one in found if one not in parts[1:]]
    note = f"no such layers here: {', '.join(unknown)}" if unknown else ""
    return Meaning(settings=dict.fromkeys(entry.ours, found) if found else {}, differs=bool(unknown), note=note)


GENERAL = [spread, model, data, epochs, steps, every, warmup_share, packed, lora_targets]
