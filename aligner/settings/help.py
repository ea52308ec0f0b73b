"""What `--help` prints: the settings that matter most with an example; or those of a section; or all. No Hydra.

Of the configs in conf/ it is known without their recipes, which import torch: `SETTINGS_FILE` holds what `make settings` found.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence

from aligner.errors import ConfigError
from aligner.files import conf_directory, recipe_folders
from aligner.settings.schema import SchemaKey, is_known, named_as

ALL = "all"
SETTINGS_FILE = (
    "settings.json"  # of conf/; rows: [key, type, comment, section, open, value]; configs: name -> {groups, rows: their indices}
)

# The settings that matter most, in the order in which they are shown; of every recipe those that it has and uses.
MATTER = (
    *("data.train", "data.validation", "data.max_length", "data.apply_chat_template", "data.attributes"),
    *("model.path", "teacher.path", "judge.path", "reward.function.path", "reward.model.path", "critic.model.path", "run.directory"),
    *("algorithm.batch_size", "algorithm.prompts_per_step", "algorithm.rollouts_per_step", "algorithm.group_size"),
    *("algorithm.mini_batch_size", "algorithm.num_samples", "algorithm.epochs_per_iteration", "algorithm.advantage_estimator"),
    *(
        "algorithm.loss",
        "algorithm.divergence",
        "algorithm.kl_coef",
        "algorithm.beta",
        "algorithm.attributes",
        "algorithm.adds",
        "algorithm.pairs",
    ),
    *("algorithm.top_k", "algorithm.served_by", "optimizer.lr", "critic.optimizer.lr", "loop.max_steps", "loop.save_every"),
    *("loop.validate_every", "rollout.engine", "rollout.sampling.temperature", "rollout.sampling.max_response_length"),
    *("model.micro_batch_size", "model.recompute", "model.lora.rank", "num_processes", "parallel.tp", "parallel.pp"),
)

# What an example gives besides data.train and model.path; a recipe that is not here needs no more.
_REWARD = "reward.function.path=rewards.py:score"
NEEDED = {
    "grpo": _REWARD,
    "ppo": "reward.model.path=runs/reward_model/export critic.model.path=runs/reward_model/export",
    "online_dpo": _REWARD,
    "rejection_sampling": _REWARD,
    "online_distill": "teacher.path=models/Qwen2.5-7B",
}
_EXAMPLE = "model.path=models/Qwen2.5-1.5B data.train=data/train.jsonl"

# Sections that do something with certain settings only (a key without a value: one that is there and not empty). Without any of them
# `--help` leaves the section out, and says so.
NEEDS = {
    "rollout.vllm": ("rollout.engine=vllm",),
    "rollout.tensorrt_llm": ("rollout.engine=tensorrt_llm",),
    "reward.model": ("reward.serve=true",),
    "reward.parallel": ("reward.serve=true",),
    "reward.server": ("reward.serve=true",),
    "server_client": ("reward.serve=true", "critic.server.host", "algorithm.served_by"),
}


def of_shipped(config: str, arguments: Sequence[str], *, program: str) -> str | None:
    """The help that `CONFIG --help [TOPIC]` asks for; None if these arguments ask for more, or the config is not one of conf/.

    Raises ConfigError as `render` does.
    """
    asked = arguments[:1] in (("--help",), ("-h",)) and len(arguments) <= 2 and not any("=" in one for one in arguments)
    if not asked or (found := _shipped().get(config)) is None:
        return None
    groups, keys, values = found
    return render(keys, values, program=program, file=config, groups=groups, topic="".join(arguments[1:]))


def recipe_with(settings: Sequence[str]) -> str:
    """The recipe of conf/ that has all of these settings and the fewest others; empty if none has."""
    known = {folder.name: _shipped()[folder.name][1] for folder in recipe_folders() if folder.name in _shipped()}
    having = [name for name, keys in known.items() if all(is_known(setting, keys) for setting in settings)]
    return min(having, key=lambda name: len(known[name]), default="")


@functools.cache
def _shipped() -> dict[str, tuple[list[str], list[SchemaKey], dict[str, str]]]:
    """The groups, keys and values of every config of conf/."""
    file = conf_directory() / SETTINGS_FILE
    written = json.loads(file.read_text()) if file.is_file() else {"configs": {}}
    found = {}
    for name, config in written["configs"].items():
        rows = [written["rows"][i] for i in config["rows"]]
        keys = [
            SchemaKey(key=key, type=kind, comment=comment, section=section, open=opens) for key, kind, comment, section, opens, _ in rows
        ]
        found[name] = (config["groups"], keys, {row[0]: row[5] for row in rows if row[5] is not None})
    return found


def render(keys: Sequence[SchemaKey], values: Mapping[str, str], *, program: str, file: str, groups: Sequence[str], topic: str = "") -> str:
    """The help on a topic: "" (what matters most), "all", a section such as `rollout` or `rollout.sampling`, or one setting.

    `program` is how the program is called; `values` has what each setting is, as it is written on a command line; `file` is the
    composed config; `groups` are its presets, one a line. Raises ConfigError for a topic that there is not.
    """
    if topic:
        return "\n".join(_of_topic(keys, values, topic))
    unused = _unused(keys, values)
    sections = [_section_line(key, keys) for key in keys if key.section and "." not in key.key and key.key not in unused]
    return "\n".join(
        [
            f"usage: {program} [--config-name NAME] [--config-dir DIR] [key=value ...] [group=preset ...]",
            f"       [--help [SECTION|SETTING|{ALL}]] [--cfg job] [--multirun key=value,value ...]",
            f"\nExample:\n  {program} {example(file)}",
            f"\nWhat matters most, as {file}.yaml and the arguments have it (--cfg job prints all of it as YAML):",
            *(_line(key, values) for key in most_important(keys, values)),
            f"\nSections (--help SECTION lists the settings, --help {ALL} those of every section):",
            *sections,
            *(f"  not used without {' or '.join(needs)}: {', '.join(names)}" for needs, names in _by_need(unused)),
            "\nGroups:",
            *(f"  {line}" for line in groups),
            "  of your own, in DIR/GROUP/NAME.yaml: --config-dir DIR",
        ]
    )


def most_important(keys: Sequence[SchemaKey], values: Mapping[str, str]) -> list[SchemaKey]:
    """The settings that matter most, of those that the recipe has and uses."""
    unused = _unused(keys, values)
    there = {key.key: key for key in keys if not any(key.key.startswith(f"{section}.") for section in unused)}
    return [there[key] for key in MATTER if key in there]


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
        raise ConfigError(f"--help {topic}: " + (f"did you mean --help {near[0]}?" if near else f"no section; there are {ALL}, {top}"))
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


def _section_line(section: SchemaKey, keys: Sequence[SchemaKey]) -> str:
    count = sum(key.key.startswith(f"{section.key}.") and not key.section for key in keys)
    return f"  {section.key:<14} {count:>4}  {section.comment}"


def _unused(keys: Sequence[SchemaKey], values: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The sections of the recipe that its settings leave without a use: the settings of its own that would change this."""
    there = {key.key for key in keys}
    found = {}
    for section, needs in NEEDS.items():
        own = tuple(need for need in needs if need.partition("=")[0] in there)
        if section in there and own and not any(_holds(need, values) for need in own):
            found[section] = own
    return found


def _holds(need: str, values: Mapping[str, str]) -> bool:
    key, _, value = need.partition("=")
    return values[key] == value if value else values[key] not in ("''", '""')


def _by_need(unused: Mapping[str, tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[str]]]:
    return [(needs, [name for name, own in unused.items() if own == needs]) for needs in dict.fromkeys(unused.values())]
