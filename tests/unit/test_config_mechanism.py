"""Composition with a toy schema and YAML files made here: what is accepted, and how everything else is refused."""

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from aligner.algorithms.registry import composed
from aligner.cluster import outcomes
from aligner.errors import CheckpointError, ConfigError, DataError, RunHalted, ServerTimeout
from aligner.run.program import entrypoint
from aligner.settings.compose import compose, fingerprint, from_yaml, schema_of, to_yaml


class Reduction(str, Enum):
    token = "token"
    sequence = "sequence"


@dataclass(kw_only=True, slots=True)
class Algorithm:
    group_size: int = 8  # responses per prompt
    kl_coef: float = 0.01
    clip: float | None = None
    reduction: Reduction = Reduction.token
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(f"algorithm.group_size={self.group_size}: must be at least 2")


@dataclass(kw_only=True, slots=True)
class Sizes:
    width: int = 64
    heads: int = 4
    head_dim: int = 0  # 0: width / heads

    def __post_init__(self) -> None:
        self.head_dim = self.head_dim or self.width // self.heads


@dataclass(kw_only=True, slots=True)
class Model:
    path: str = "???"
    sizes: Sizes = field(default_factory=Sizes)


@dataclass(kw_only=True, slots=True)
class Root:
    steps: int = 10
    model: Model = field(default_factory=Model)
    algorithm: Algorithm = field(default_factory=Algorithm)


@pytest.fixture
def conf(tmp_path):
    """conf/ as the project lays it out: one file per program, groups beside it, a group file that extends another."""
    files = {
        "train.yaml": "defaults:\n  - model: small\n  - algorithm: grpo\n  - _self_\nsteps: 20\n",
        "plain.yaml": "model: {path: here}\n",
        "model/small.yaml": "path: small-model\n",
        "model/wide.yaml": "defaults: [small, _self_]\nsizes: {width: 256}\n",
        "algorithm/grpo.yaml": "group_size: 4\n",
        "algorithm/sequence.yaml": "reduction: sequence\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def make(conf, *overrides, name="train"):
    return compose(Root, name, list(overrides), folders=[conf])


def refusal(conf, *overrides, name="train"):
    with pytest.raises(ConfigError) as caught:
        make(conf, *overrides, name=name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_dataclass_then_group_then_program_then_command_line(conf):
    config = make(conf, "algorithm.kl_coef=0.5")
    assert type(config) is Root
    assert type(config.algorithm) is Algorithm
    assert (config.steps, config.model.path) == (20, "small-model")
    assert (config.algorithm.group_size, config.algorithm.kl_coef, config.algorithm.clip) == (4, 0.5, None)
    assert config.algorithm.betas == [0.9, 0.98]


def test_choices_and_values_of_the_command_line(conf):
    config = make(conf, "algorithm=sequence", "model=wide")  # the latter extends another option
    assert config.algorithm == Algorithm(reduction=Reduction.sequence)
    assert (config.model.path, config.model.sizes.width) == ("small-model", 256)
    given = ["algorithm.clip=0.2", "algorithm.betas=[0.5,0.6]", "+algorithm.arguments.target=hello", "algorithm.reduction=sequence"]
    config = make(conf, *given, "algorithm.group_size=${steps}")
    assert (config.algorithm.clip, config.algorithm.betas) == (0.2, [0.5, 0.6])
    assert config.algorithm.arguments == {"target": "hello"}
    assert config.algorithm.reduction is Reduction.sequence and config.algorithm.group_size == 20


def test_derived_field_follows_the_override_and_not_the_default(conf):
    # 64 / 4 = 16 by default, 256 / 4 = 64 with model=wide, 256 / 8 = 32 with the override on top.
    assert make(conf).model.sizes.head_dim == 16
    assert make(conf, "model=wide").model.sizes.head_dim == 64
    assert make(conf, "model=wide", "model.sizes.heads=8").model.sizes.head_dim == 32


@dataclass(kw_only=True, slots=True)
class Named(Model):
    name: str = "x"


@dataclass(kw_only=True, slots=True)
class Deriving:
    """Writes into the section below it, and puts another kind in the place of one."""

    scale: int = 1
    sizes: Sizes = field(default_factory=Sizes)
    model: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        self.sizes.width *= self.scale
        if self.scale == 1:
            self.model = Named(path="here")


@dataclass(kw_only=True, slots=True)
class OfDeriving:
    own: Deriving = field(default_factory=Deriving)


def test_what_a_section_makes_of_the_defaults_below_it_is_no_default(tmp_path):
    made = compose(OfDeriving, "mine", ["own.scale=3", "own.sizes.heads=2", "own.model.path=there"], [tmp_path / "mine", tmp_path]).own
    assert (made.sizes, made.model) == (Sizes(width=192, heads=2, head_dim=32), Model(path="there"))


def test_hydra_copies_the_schema_of_one_recipe(conf):
    make(conf)
    compose(Sizes, "mine", [], [conf / "mine", conf])
    assert sorted(name for name in ConfigStore.instance().repo if name.startswith("aligner")) == [
        "aligner_entry.yaml",
        "aligner_schema.yaml",
    ]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_unknown_key_on_the_command_line(conf, prefix):
    message = refusal(conf, f"{prefix}algorithm.group_sise=4")
    assert "unknown setting algorithm.group_sise" in message
    assert "did you mean algorithm.group_size?" in message


@pytest.mark.parametrize("file", ["train.yaml", "algorithm/grpo.yaml"])
def test_unknown_key_in_yaml(conf, file):
    line = "algorithm: {group_sise: 4}\n" if file == "train.yaml" else "group_sise: 4\n"
    (conf / file).write_text((conf / file).read_text() + line)
    message = refusal(conf)
    assert "unknown setting algorithm.group_sise" in message
    assert f"in {conf / file}" in message
    assert "did you mean algorithm.group_size?" in message


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("algorithm.group_size=four", "algorithm.group_size", "'four'"),
        ("algorithm.reduction=tokens", "algorithm.reduction", "'tokens'"),
        ("algorithm.kl_coef=[1]", "algorithm.kl_coef", "[1]"),
        ("steps=null", "steps", "may not be null"),
        ("algorithm=7", "algorithm", "7"),
        (f"steps={2**70}", f"steps={2**70}", "must be a number of 64 bits"),
        ("steps=1,2", "'steps=1,2' lists several values", "--multirun all of them (a list is written [a,b])"),
    ],
)
def test_wrong_value_names_field_and_value(conf, override, key, value):
    message = refusal(conf, override)
    assert key in message
    assert value in message


def test_wrong_value_in_yaml_names_the_file(conf):
    (conf / "algorithm" / "grpo.yaml").write_text("group_size: many\n")
    message = refusal(conf)
    assert "algorithm.group_size" in message and "'many'" in message and f"in {conf / 'algorithm' / 'grpo.yaml'}" in message


@pytest.mark.parametrize(("key", "number"), [("algorithm.kl_coef", "nan"), ("algorithm.clip", "inf"), ("algorithm.betas", "-inf")])
def test_numbers_that_are_not_finite(conf, key, number):
    written, place = (f"[0.9,{number}]", f"{key}.1") if key.endswith("betas") else (number, key)
    assert refusal(conf, "model.path=x", f"{key}={written}") == f"{place}={number}: must be a finite number"


def test_numbers_of_ones_own_code_may_be_infinite(conf):
    assert make(conf, "model.path=x", "+algorithm.arguments.most=inf").algorithm.arguments == {"most": math.inf}


@dataclass(kw_only=True, slots=True)
class Server:
    algorithm: Algorithm = field(default_factory=Algorithm)


@dataclass(kw_only=True, slots=True)
class TwoPlaces:
    first: Server = field(default_factory=Server)
    second: Server = field(default_factory=Server)


@pytest.mark.parametrize("place", ["first.algorithm", "second.algorithm"])
def test_a_section_names_its_setting_as_it_is_written(place):
    with pytest.raises(ConfigError, match=f"^{place}.group_size=1: must be at least 2$"):
        from_yaml(TwoPlaces, "", [f"{place}.group_size=1"])


def test_missing_option_lists_the_options(conf):
    message = refusal(conf, "algorithm=gpro")
    assert message.startswith("algorithm=gpro: ") and "grpo" in message and "sequence" in message


@pytest.fixture
def presets(tmp_path, monkeypatch):
    """conf/ with three recipes, two of which have presets, and a directory of the user's own; `compose` finds them as it does conf/'s."""
    files = {
        "conf/train/train.yaml": "defaults: [model: small, algorithm: grpo, _self_]\nsteps: 20\n",
        "conf/train/train_on_it.yaml": "defaults: [train, override algorithm: sequence, _self_]\n",
        "conf/train/algorithm/grpo.yaml": "group_size: 4\n",
        "conf/serve/serve.yaml": "{}\n",
        "conf/serve/algorithm/sequence.yaml": "{}\n",
        "conf/plain/plain.yaml": "model: {path: here}\n",
        "conf/model/small.yaml": "path: small-model\n",
        "own/algorithm/mine.yaml": "group_size: 6\n",
        "own/mine.yaml": "defaults: [train, override algorithm: mine, _self_]\nsteps: 7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("aligner.files.shipped", lambda folder: tmp_path / folder)
    return tmp_path


def test_a_preset_of_another_recipe_is_refused_wherever_it_is_chosen(presets):
    for overrides, name in ((["algorithm=sequence"], "train"), ([], "train_on_it")):
        with pytest.raises(ConfigError, match=r"^algorithm=sequence: a preset of serve, given to train; allowed: grpo$"):
            compose(Root, name, overrides)
    with pytest.raises(ConfigError, match=r"^algorithm=grpo: a preset of train, given to plain; allowed: none$"):
        compose(Root, "plain", ["+algorithm=grpo"])
    with pytest.raises(ConfigError, match=r"^algorithm=gpro: train has no such preset; allowed: grpo$"):
        compose(Root, "train", ["algorithm=gpro"])
    assert compose(Root, "train_on_it", ["algorithm=grpo"]).algorithm.group_size == 4  # what was chosen there is not used


def test_a_preset_of_a_group_that_the_config_has_not_chosen_from_needs_no_plus(presets):
    for text in ("model=small", "+model=small"):
        assert compose(Root, "plain", [text, "steps=3"]).model.path == "small-model"
    with pytest.raises(ConfigError, match="^model=smal: plain has no such preset; allowed: small$"):
        compose(Root, "plain", ["model=smal"])


def test_a_recipe_takes_the_presets_of_the_folders_that_it_names(presets):
    folders = [presets / "conf" / name for name in ("train", "serve", ".")]
    assert compose(Root, "train", ["algorithm=sequence"], folders).algorithm == Algorithm()
    with pytest.raises(ConfigError, match="^there is no .*train/serve.yaml$"):
        compose(Root, "serve", [], folders)


def test_configs_and_presets_of_ones_own(presets, capsys):
    ran, folders = [], [presets / "conf" / "train", presets / "conf"]
    main, own = entrypoint(Root, "train", folders)(ran.append), str(presets / "own")
    main(["--config-dir", own, "algorithm=mine"])
    main([f"--config-dir={own}", "--config-name", "mine"])
    main(["-cd", own, "-cn", "mine.yaml", "algorithm=grpo"])
    main(["config=train", f"hydra.searchpath=[file://{own}]"])
    assert [(config.steps, config.algorithm.group_size) for config in ran] == [(20, 6), (7, 6), (7, 4), (20, 4)]
    for arguments, text in (
        (["--config-name", "mine"], "config=mine: this program is of train; allowed: train, train_on_it, or a file in --config-dir DIR"),
        (["--config-name", "serve"], "config=serve: this program is of train; allowed: train, train_on_it, or a file in --config-dir DIR"),
        (["--config-dir", f"{own}/none"], f"--config-dir {own}/none (hydra.searchpath): there is no such directory"),
        (["--config-name"], "Option '--config-name' requires an argument."),
        (["--cfg", "hydra"], "Invalid value for '--cfg' / '-c': 'hydra' is not 'job'."),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert capsys.readouterr().err == f"error: {text}\n"


def test_a_recipe_without_a_file_has_the_defaults(tmp_path):
    assert compose(Sizes, "mine", ["heads=2"], [tmp_path / "mine", tmp_path]) == Sizes(heads=2, head_dim=Sizes(heads=2).head_dim)


def test_missing_file_or_value_and_broken_yaml(conf):
    assert "there is no" in refusal(conf, name="nothing")
    (conf / "plain.yaml").write_text("steps: 1\n")
    assert "model.path is required" in refusal(conf, name="plain")
    (conf / "plain.yaml").write_text("steps: [1\n")
    assert "line" in refusal(conf, name="plain")


def test_yaml_round_trip_and_fingerprint(conf):
    config = make(conf, "algorithm.reduction=sequence", "model=wide")
    assert from_yaml(Root, to_yaml(config)) == config
    same, other = make(conf, "algorithm.reduction=sequence", "model=wide"), make(conf, "model=wide")
    assert fingerprint(to_yaml(config)) == fingerprint(to_yaml(same)) != fingerprint(to_yaml(other))
    with pytest.raises(ConfigError, match="did you mean steps"):
        from_yaml(Root, "stepps: 3")


def test_a_saved_config_is_of_the_smallest_schema_that_knows_its_keys():
    @dataclass(kw_only=True, slots=True)
    class More(Sizes):
        depth: int = 1

    assert schema_of([More, Sizes], "width: 3") is Sizes
    assert schema_of([More, Sizes], "width: 3\ndepth: 2") is More
    with pytest.raises(ConfigError, match="fits none of More, Sizes"):
        schema_of([More, Sizes], "widths: 3")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 2),
        (RunHalted("x"), 78),
        (CheckpointError("x"), 1),
        (ServerTimeout("x"), 1),
        (OSError("x"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_exit_code_and_recorded_outcome_of_an_error(error, code, monkeypatch, conf, tmp_path, capsys):
    monkeypatch.setenv("ALIGNER_OUTCOMES", str(tmp_path / "outcomes"))
    monkeypatch.setenv("RANK", "3")

    @entrypoint(Root, "train", [conf])
    def main(config):
        raise error

    with pytest.raises(OSError if isinstance(error, OSError) else SystemExit) as caught:
        main([])
    if not isinstance(error, OSError):
        assert caught.value.code == code and capsys.readouterr().err == "error: x\n"
    (outcome,) = outcomes.read(tmp_path / "outcomes")
    assert (outcome.rank, outcome.code) == (3, code) and outcome.message.endswith("x")


@pytest.mark.parametrize("returned", [None, 0, 75])
def test_exit_code_that_a_program_returns(returned, monkeypatch, conf, tmp_path):
    monkeypatch.setenv("ALIGNER_OUTCOMES", str(tmp_path / "outcomes"))
    main = entrypoint(Root, "train", [conf])(lambda config: returned)
    if returned:
        with pytest.raises(SystemExit) as caught:
            main([])
        assert caught.value.code == returned
    else:
        main([])
    assert [outcome.code for outcome in outcomes.read(tmp_path / "outcomes")] == [returned or 0]


def test_program_help_and_cfg(capsys, monkeypatch, conf):
    ran = []
    main = entrypoint(Root, "train", [conf])(ran.append)
    main(["--help", "all", "steps=7"])
    out = capsys.readouterr().out
    assert "steps=7" in out
    group_size = next(line for line in out.splitlines() if line.strip().startswith("algorithm.group_size="))
    assert group_size.split() == ["algorithm.group_size=4", "int", "responses", "per", "prompt"]
    for option in (["--cfg"], ["--cfg", "job"], ["--cfg=job"], ["-c", "job"]):
        main(option)
        assert from_yaml(Root, capsys.readouterr().out) == make(conf)
    assert ran == []
    main([])
    assert ran == [make(conf)]


def test_help_lists_ones_own_presets(capsys, presets):
    (presets / "own" / "unknown").mkdir()
    (presets / "own" / "unknown" / "section.yaml").write_text("{}\n")
    folders = [presets / "conf" / "train", presets / "conf"]
    entrypoint(Root, "train", folders)(lambda config: None)(["--help", "--config-dir", str(presets / "own")])
    groups = capsys.readouterr().out.partition("Groups:\n")[2].splitlines()
    assert groups[:-1] == ["  algorithm=grpo|mine", "  model=small", "  unknown=section"]


def test_a_full_disk_is_one_line_with_rank_and_file(conf, monkeypatch, capsys):
    """No bug: exit code 1, as starting again may mend it."""
    monkeypatch.setenv("RANK", "3")

    @entrypoint(Root, "train", [conf])
    def main(config):
        raise OSError(28, "No space left on device", "/run/metrics.jsonl")

    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 1
    said = "error: rank 3: the file system is full: /run/metrics.jsonl (ENOSPC: No space left on device)"
    assert capsys.readouterr().err.strip() == said


def test_a_path_of_the_examples_is_found_from_any_directory(tmp_path, monkeypatch) -> None:
    """Shipped configs and README name them so; one that is here, or is nowhere, stays as it was written."""
    monkeypatch.chdir(tmp_path)
    digits = Path(__file__).parents[2] / "examples/nlp/data/digits"
    given = "data.train=[{path: examples/nlp/data/digits/prompts.jsonl}, examples/none.jsonl]"
    config = composed("ppo_smoke_cpu", [given])
    assert config.model.tokenizer == str(digits / "tokenizer")
    assert config.data.train == [{"path": str(digits / "prompts.jsonl")}, {"path": "examples/none.jsonl"}]
    config = composed("grpo", ["reward.function.path=examples/extend/estimator.py:opo", "data.train=x"])
    assert config.reward.function.path == f"{digits.parents[2]}/extend/estimator.py:opo"
    (tmp_path / "examples/nlp/data/digits/tokenizer").mkdir(parents=True)
    assert composed("ppo_smoke_cpu", []).model.tokenizer == "examples/nlp/data/digits/tokenizer"
