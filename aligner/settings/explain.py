"""Explanations of settings: hints for unknown keys and values, the presets that exist, and what `--help` prints. No Hydra.

`--help` of the configs in conf/ does not import their recipes, which import torch: `SETTINGS_FILE` holds what `make settings` found.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from aligner.errors import ConfigError
from aligner.files import conf_directory, recipe_folders
from aligner.settings.schema import SchemaKey, is_known, named_as

LEAST_ALIKE = 0.7  # of two words that may be typing errors of each other
_VALUES = {  # other projects' values -> ours
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    **{f"{one}_proj": f"{one} (qkv: of q, k and v)" for one in "qkv"},
    **{"o_proj": "proj", "out_proj": "proj", "qkv_proj": "qkv", "c_attn": "qkv"},
    **{"gate_proj": "gate", "up_proj": "up", "gate_up_proj": "fc1", "down_proj": "fc2", "attention": "qkv", "mlp": "fc1"},
}
_COMPONENTS = {"critic": "critic", "reward": "reward", "reward_model": "reward", "rm": "reward"}  # first part of a key -> section

ALL = "all"
SETTINGS_FILE = "settings.json"  # in conf/; rows: [key, type, comment, section, open, value]; configs: name -> {groups, rows: indices}

# The settings that matter most, in the order of `--help`, which shows those that the recipe has and uses.
MATTER = (
    *("data.train", "data.validation", "data.max_length", "data.apply_chat_template", "data.attributes"),
    *("model.path", "teacher.path", "judge.path", "reward.function.path", "reward.model.path", "critic.model.path", "run.directory"),
    *("algorithm.batch_size", "algorithm.prompts_per_step", "algorithm.rollouts_per_step", "algorithm.group_size"),
    *("algorithm.mini_batch_size", "algorithm.num_samples", "algorithm.epochs_per_iteration", "algorithm.advantage_estimator"),
    *("algorithm.loss", "algorithm.divergence", "algorithm.kl_coef", "algorithm.beta", "algorithm.attributes", "algorithm.adds"),
    *("algorithm.pairs", "algorithm.top_k", "algorithm.served_by", "optimizer.lr", "critic.optimizer.lr"),
    *("loop.max_steps", "loop.save_every"),
    *("loop.validate_every", "rollout.engine", "rollout.sampling.temperature", "rollout.sampling.max_response_length"),
    *("model.micro_batch_size", "model.recompute", "model.lora.rank", "num_processes", "parallel.tp", "parallel.pp"),
)

# Settings of a recipe's example besides data.train and model.path.
_REWARD = "reward.function.path=rewards.py:score"
NEEDED = {
    "grpo": _REWARD,
    "ppo": "reward.model.path=runs/reward_model/export critic.model.path=runs/reward_model/export",
    "online_dpo": _REWARD,
    "rejection_sampling": _REWARD,
    "online_distill": "teacher.path=models/Qwen2.5-7B",
}
_EXAMPLE = "model.path=models/Qwen2.5-1.5B data.train=data/train.jsonl"

# Sections that have an effect with certain settings only (a key without a value: one that is not empty). Without any of them `--help`
# leaves the section out, with a note.
NEEDS = {
    "rollout.vllm": ("rollout.engine=vllm",),
    "rollout.tensorrt_llm": ("rollout.engine=tensorrt_llm",),
    "reward.model": ("reward.serve=true",),
    "reward.parallel": ("reward.serve=true",),
    "reward.server": ("reward.serve=true",),
    "server_client": ("reward.serve=true", "critic.server.host", "algorithm.served_by"),
}


@functools.cache  # read once, and only when a key is unknown
def synonyms() -> dict[str, dict[str, list[str]]]:
    """Project -> its name of a setting -> possible meanings: synonyms.yaml, and under `migrate` the tables of `aligner migrate`."""
    here = Path(__file__).parent
    found: dict[str, dict[str, list[str]]] = yaml.safe_load((here / "synonyms.yaml").read_text())
    known = {name for table in found.values() for name in table}
    ours: dict[str, set[str]] = {}  # by each end of a key there; used if it has one meaning in all tables
    for path in sorted((here.parent / "commands" / "migrate" / "tables").glob("*.yaml")):
        table = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for row in table if isinstance(table, list) else table["keys"]:
            meant = row.get("ours", "")
            for key in (row["key"], *row.get("also", ())):
                for name in (key.split(".", start)[-1] for start in range(key.count(".") + 1)):
                    ours.setdefault(name, set()).add(meant if isinstance(meant, str) else " and ".join(meant))
    return found | {"migrate": {name: list(of) for name, of in ours.items() if len(of) == 1 and "" not in of and name not in known}}


def unknown_keys(written: Mapping[str, Any], keys: Sequence[SchemaKey], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree that the schema does not know, with all their parts."""
    for name, value in written.items():
        key = f"{prefix}{name}"
        known = is_known(key, keys)
        if isinstance(value, dict) and value and not (known and _takes_anything(key, keys)):
            yield from unknown_keys(value, keys, f"{key}.")
        elif not known:
            yield key


def hint(key: str, keys: Sequence[SchemaKey]) -> str:
    """A hint for a key that the schema does not know: the setting that is probably meant, why it does not exist, or where to look."""
    names = [named_as(known.key, key) for known in keys if not known.key.endswith("*")]
    if near := _closest(key, [name for name in names if _are_alike(key.split("."), name.split("."))]):
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
    """The allowed value (of `a, b`) that another one probably means; empty if none is similar."""
    options = allowed.split(", ")
    known = _VALUES.get(value.rpartition(".")[2].lower(), value)
    if known.partition(" ")[0].lower() in options:
        return known.lower()
    return next(iter(difflib.get_close_matches(value, options, n=1)), "")


def no_setting(texts: Sequence[str]) -> ConfigError | None:
    """The error for the first text that assigns nothing: `key = value` typed with spaces, or a word."""
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
    """Raise ConfigError for all unknown keys, given as (key, where it is written)."""
    lines = [" ".join(f"{key} {where}".split()) + f": {hint(key, keys)}" for key, where in unknown]
    if len(lines) == 1:
        raise ConfigError(f"unknown setting {lines[0]}")
    if lines:
        raise ConfigError("\n  ".join([f"{len(lines)} unknown settings", *lines]))


def as_typed(error: ConfigError, names: Sequence[str], path: str) -> ConfigError:
    """The error of the section at `path`, with settings `names`, with its keys as typed.

    A section may be in several places, so it knows part of its path at most: it names `server.port`, `guard.logprob_gap.warn` or `port`.
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
    """Whether the user chooses the names below a known key."""
    return not any(known.section and named_as(known.key, key) == key or known.key.startswith(f"{key}.*") for known in keys)


def _meanings(key: str) -> Iterator[str]:
    """Other projects' meanings of a key, by its longest end first."""
    parts = key.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for table in synonyms().values():
            yield from table.get(end, ())


def _placed(target: str, key: str, keys: Sequence[SchemaKey]) -> str | None:
    """`a=b`, or `a and b`, with this schema's keys: in the critic's section if `key` belongs to a critic. None if it has no such keys."""
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


def _same_leaf(key: str, names: Sequence[str]) -> str | None:
    """The known key with the same last part; of several the one with the most similar section, if any is similar."""
    section, _, leaf = key.rpartition(".")
    same = [name for name in names if name.rpartition(".")[2] == leaf]
    if section and len(same) > 1:
        same = [name for name in same if _likeness(section, name.rpartition(".")[0]) >= 0.6]
    return _closest(key, same)


def _alike_leaf(key: str, names: Sequence[str]) -> str | None:
    """The known key, in any section, with a last part that is spelled much like this one's."""
    leaf = key.rpartition(".")[2]
    others = [name for name in names if name.rpartition(".")[2] != leaf]
    alike = [name for name in others if _likeness(leaf, other := name.rpartition(".")[2]) >= 0.8 and _are_alike([leaf], [other])]
    return _closest(key, alike)


def _are_alike(parts: Sequence[str], others: Sequence[str]) -> bool:
    """Whether the keys look like typing errors of each other, word by word: `max_length` and `min_length` do not."""
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


def folders_of(config: str) -> list[Path]:
    """The folders of a config of conf/ and its presets, the recipe's own first: `conf/dpo/algorithm/simpo.yaml` is one of DPO's presets,
    `conf/model/llama3_8b.yaml` one of all recipes."""
    own = next((folder for folder in recipe_folders() if (folder / f"{config}.yaml").is_file()), None)
    return [own, conf_directory()] if own else [conf_directory()]


def find_file(file: str, folders: Sequence[Path]) -> Path | None:
    """`<folder>/<file>.yaml` of the first folder that has it."""
    return next((path for folder in folders if (path := folder / f"{file}.yaml").is_file()), None)


def built_on(path: Path) -> str:
    """The config that a config's `defaults` begin with; empty if it has none."""
    written = yaml.safe_load(path.read_text())
    defaults = written.get("defaults") or [] if isinstance(written, dict) else []
    return next((entry for entry in defaults if isinstance(entry, str) and entry != "_self_"), "")


def groups_in(folders: Sequence[Path]) -> list[str]:
    """The groups of presets in these folders."""
    recipes = recipe_folders()
    found = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir() and path not in recipes}
    return sorted(name for name in found if not name.startswith((".", "__")))


def check_preset(recipe: str, file: str, folders: Sequence[Path]) -> None:
    """Raise ConfigError if the group of `<group>/<preset>` exists, here or for another recipe, but no folder contains this preset."""
    group, _, preset = file.rpartition("/")
    if not group or find_file(file, folders) is not None:
        return
    others = [folder.name for folder in recipe_folders() if (folder / f"{file}.yaml").is_file()]
    if not others and group not in groups_in(folders):
        return
    own = sorted({other.stem for folder in folders for other in (folder / group).glob("*.yaml")})
    what = f"a preset of {', '.join(others)}, given to {recipe}" if others else f"{recipe} has no such preset"
    raise ConfigError(f"{group}={preset}: {what}; allowed: {', '.join(own) or 'none'}")


def groups_of(keys: Sequence[SchemaKey], folders: Sequence[Path]) -> list[str]:
    """`group=preset|preset`: the presets that a recipe with these settings and folders accepts."""
    found = []
    for group in groups_in(folders):
        own = any((folder / group).is_dir() and folder != conf_directory() for folder in folders)
        if own or is_known(group, keys):
            presets = dict.fromkeys(preset.stem for folder in folders for preset in sorted((folder / group).glob("*.yaml")))
            found.append(f"{group}={'|'.join(presets)}")
    return found


def unknown_in_file(path: Path, package: str, keys: Sequence[SchemaKey]) -> Iterator[str]:
    """The keys of a YAML file, with settings below `package`, that the schema does not know."""
    written = yaml.safe_load(path.read_text()) or {}
    if isinstance(written, dict):
        settings = {name: value for name, value in written.items() if name not in ("defaults", "hydra")}
        yield from unknown_keys(settings, keys, f"{package}." if package else "")


def of_shipped(config: str, topic: str, *, program: str) -> str | None:
    """The help of a config of conf/; None for another config. Raises ConfigError as `render` does."""
    if (found := shipped().get(config)) is None:
        return None
    groups, keys, values = found
    return render(keys, values, program=program, file=config, groups=groups, topic=topic)


def recipe_with(settings: Sequence[str]) -> str:
    """The recipe of conf/ with all of these settings and the fewest others; empty if there is no such recipe."""
    known = {folder.name: shipped()[folder.name][1] for folder in recipe_folders() if folder.name in shipped()}
    having = [name for name, keys in known.items() if all(is_known(setting, keys) for setting in settings)]
    return min(having, key=lambda name: len(known[name]), default="")


@functools.cache
def shipped() -> dict[str, tuple[list[str], list[SchemaKey], dict[str, str]]]:
    """The groups, keys and values of every config of conf/."""
    file = conf_directory() / SETTINGS_FILE
    written = json.loads(file.read_text()) if file.is_file() else {"configs": {}}
    found = {}
    for name, config in written["configs"].items():
        rows = [written["rows"][i] for i in config["rows"]]
        keys = [SchemaKey(key=row[0], type=row[1], comment=row[2], section=row[3], open=row[4]) for row in rows]
        found[name] = (config["groups"], keys, {row[0]: row[5] for row in rows if row[5] is not None})
    return found


def render(keys: Sequence[SchemaKey], values: Mapping[str, str], *, program: str, file: str, groups: Sequence[str], topic: str = "") -> str:
    """The help on a topic: "" (what matters most), "all", a section such as `rollout` or `rollout.sampling`, or one setting.

    `program` is the start of a command line; `values` has each setting's value in command line syntax; `file` is the composed config;
    `groups` are its presets, one a line. Raises ConfigError for an unknown topic.
    """
    if topic:
        return "\n".join(_of_topic(keys, values, topic))
    unused = _unused(keys, values)
    used = {key.key: key for key in keys if not any(key.key.startswith(f"{section}.") for section in unused)}
    sections = []
    for section in (key for key in keys if key.section and "." not in key.key and key.key not in unused):
        count = sum(key.key.startswith(f"{section.key}.") and not key.section for key in keys)
        sections.append(f"  {section.key:<14} {count:>4}  {section.comment}")
    by_need = [(needs, [name for name, own in unused.items() if own == needs]) for needs in dict.fromkeys(unused.values())]
    return "\n".join(
        [
            f"usage: {program} [--config-name NAME] [--config-dir DIR] [key=value ...] [group=preset ...]",
            f"       [--help [SECTION|SETTING|{ALL}]] [--cfg job] [--multirun key=value,value ...]",
            f"\nExample:\n  {program} {example(file)}",
            f"\nThe most important settings, with the values of {file}.yaml and the arguments (--cfg job prints all settings as YAML):",
            *(_line(used[key], values) for key in MATTER if key in used),
            f"\nSections (--help SECTION lists their settings, --help {ALL} all of them):",
            *sections,
            *(f"  not used without {' or '.join(needs)}: {', '.join(names)}" for needs, names in by_need),
            "\nGroups:",
            *(f"  {line}" for line in groups),
            "  your own, in DIR/GROUP/NAME.yaml: --config-dir DIR",
        ]
    )


def example(file: str) -> str:
    """Arguments with which the recipe of a config can start."""
    recipe = max((name for name in NEEDED if file == name or file.startswith(f"{name}_")), key=len, default="")
    return f"{_EXAMPLE} {NEEDED[recipe]}" if recipe else _EXAMPLE


def _of_topic(keys: Sequence[SchemaKey], values: Mapping[str, str], topic: str) -> Iterator[str]:
    below = [key for key in keys if topic == ALL or key.key == topic or key.key.startswith(f"{topic}.")]
    if not below:
        known = [named_as(key.key, topic) for key in keys]
        near = difflib.get_close_matches(topic, known, n=1)
        top = ", ".join(key.key for key in keys if key.section and "." not in key.key)
        raise ConfigError(f"--help {topic}: " + (f"did you mean --help {near[0]}?" if near else f"not a section; allowed: {ALL}, {top}"))
    unused = _unused(keys, values)
    for key in below:
        if key.section:
            needs = unused.get(key.key)
            yield f"\n{named_as(key.key, topic)}: {key.comment}" + (f" (not used without {' or '.join(needs)})" if needs else "")
        else:
            yield _line(key, values)


def _line(key: SchemaKey, values: Mapping[str, str]) -> str:
    setting = f"{key.key}={values[key.key]}" if key.key in values else named_as(key.key, "")
    return f"  {setting:<46} {key.type}" + (f"  {key.comment}" if key.comment else "")


def _unused(keys: Sequence[SchemaKey], values: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Sections of the recipe that have no effect with the current settings, with the settings that would give them one."""
    known = {key.key for key in keys}
    found = {}
    for section, needs in NEEDS.items():
        own = tuple(need for need in needs if need.partition("=")[0] in known)
        if section in known and own and not any(_holds(need, values) for need in own):
            found[section] = own
    return found


def _holds(need: str, values: Mapping[str, str]) -> bool:
    key, _, value = need.partition("=")
    return values[key] == value if value else values[key] not in ("''", '""')


def several_values(text: str) -> ConfigError:
    """For an override of a sweep where one value is needed."""
    return ConfigError(f"{text!r} lists several values; one run takes one, --multirun all of them (a list is written [a,b])")


def shown_path(path: Path) -> str:
    """A file of settings, in messages."""
    own = conf_directory()
    return f"conf/{path.relative_to(own)}" if path.is_relative_to(own) else str(path)
