"""Runs of every recipe inside one process, as small as they can be: what tests of settings and of schedules compare.

A run goes through the recipe's own job, from a config of the schema to the algorithm and its parts; only the run directory's bookkeeping,
checkpoints and the export are left out. The critic of PPO is the served one, called without a server.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import math
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from same_numbers import CASES, MODEL, write_data

from aligner.models.config import Architecture

SMALL = {
    "model.architecture.num_layers": 1,
    "model.architecture.hidden_size": 16,
    "model.architecture.num_attention_heads": 2,
    "model.architecture.num_key_value_heads": 1,
    "model.architecture.ffn_hidden_size": 24,
    "model.architecture.initializer_range": 0.2,  # sampled and scored tokens differ from the first step on
    "model.micro_batch_size": 32,  # passes are what takes time
    "run.trace_mib": 0.0,
}
ADAM = {"lr": 1e-2, "warmup_steps": 0, "decay": "constant", "eps": 1e-3, "clip_grad": 0.0}  # the gradient's size counts, not only its sign
LEARNING = {"loop.max_steps": 2} | {f"optimizer.{name}": value for name, value in ADAM.items()}
CRITIC = {f"critic.optimizer.{name}": value for name, value in ADAM.items()}
MODEL_ALONE = "architecture"  # in place of a recipe
TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 48, "vocab_size": 61}
TINY |= {"max_position_embeddings": 128}
TEMPLATE = "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}<eos>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<a>{% endif %}"


@dataclass(kw_only=True, repr=False)
class Outcome:
    """What came out of a run. Weights are those of the last step; `files` are what a writing job has written."""

    weights: list[torch.Tensor] = field(default_factory=list)
    critic: list[torch.Tensor] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)  # of each step
    validation: dict[str, float] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    samples: list[Any] = field(default_factory=list)  # of the last step
    algorithm: Any = None
    model: Any = None
    critic_model: Any = None


@dataclass(kw_only=True)
class ModelAlone:
    """A config with nothing but a model, without the checks of a family's files."""

    architecture: Architecture = field(default_factory=lambda: Architecture(**TINY))


def _logprobs(architecture: Architecture, topology: Any) -> torch.Tensor:
    """Log-probs of fixed tokens by a model whose every weight depends on its name alone."""
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.modules.build import build_model
    from aligner.models.training.policy import MegatronPolicy
    from aligner.models.training.trainable import TrainableModel, Training
    from aligner.parallel.topology import ParallelConfig
    from aligner.types import LabeledBatch

    config = ModelConfig(dtype=Dtype.float32, make_vocab_divisible_by=2, micro_batch_size=2)
    (module,) = build_model(architecture, config, ParallelConfig(), load=False)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        parameter.data.copy_(1 + 0.3 * noise if "norm" in name else noise * (0.5 if "bias" in name or "sink" in name else 0.2))
    policy = MegatronPolicy(TrainableModel([module], topology, Training(optimizer=None, micro_batch_size=2)))
    tokens = torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    batch = LabeledBatch(tokens=tokens, lengths=torch.full((2,), 24), loss_mask=torch.arange(24).expand(2, 24) > 0)
    return policy.logprobs(batch).double()


class LocalCritic:
    """The operations that `aligner serve critic` serves, called at once."""

    def __init__(self, operations: Sequence[Any], run: str) -> None:
        self._handlers = {operation.endpoint.name: operation.handler for operation in operations}
        self._run, self.mark = run, "start"

    def values(self, batch: Any) -> Future:
        from aligner.servers.payloads import ValuesRequest

        return _done(self._handlers["critic_infer"](ValuesRequest(batch=batch)))

    def train(self, batch: Any, step: int) -> Future:
        from aligner.servers.payloads import TrainIdentity, TrainRequest

        identity = TrainIdentity(run=self._run, step=step, part=0, previous=self.mark, digest=f"{step:064}")
        reply = self._handlers["critic_train"](TrainRequest(batch=batch, identity=identity))
        self.mark = identity.mark
        return _done(reply.metrics)

    def follow(self, mark: str) -> None:
        self.mark = mark

    def close(self) -> None: ...


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class Runs:
    """`of(recipe, settings)`: the outcome of a run of two steps; equal ones are run once."""

    def __init__(self, folder: Path, topology: Any) -> None:
        self.folder = folder
        self._topology = topology
        self._number = 0
        self._known: dict[tuple, Outcome] = {}
        (folder / "runs").mkdir(parents=True)
        write_data(folder)
        (folder / "chat").mkdir()
        for file in (folder / "tokenizer").iterdir():
            (folder / "chat" / file.name).write_bytes(file.read_bytes())
        (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)

    def config(self, recipe: str, settings: Mapping[str, Any] = {}) -> Any:  # noqa: B006
        """The config of a small run with these settings, by dotted name."""
        made = changed(ModelAlone() if recipe == MODEL_ALONE else _base(recipe, self.folder), settings)
        trains = "loop" in {one.name for one in fields(made)}  # validate_every has a default, with nothing to validate on
        return changed(made, {"loop.validate_every": 0}) if trains and not getattr(made.data, "validation", "") else made

    def of(self, recipe: str, settings: Mapping[str, Any] = {}) -> Outcome:  # noqa: B006
        key = (recipe, repr(sorted(settings.items())))
        if key not in self._known:
            self._known[key] = self.new(recipe, settings)
        return self._known[key]

    def new(
        self,
        recipe: str,
        settings: Mapping[str, Any] = {},  # noqa: B006
        *,
        directory: Path | None = None,
        until: int = 0,
        since: Path | None = None,
    ) -> Outcome:
        """The outcome of a run that is not kept. Raises what the run raises.

        `until`: the step after which it is stopped and its policy saved to `directory`, from where another one goes on (`since`).
        """
        from aligner.algorithms.registry import recipes
        from aligner.jobs.start import start

        if recipe == MODEL_ALONE:
            return Outcome(weights=[_logprobs(self.config(recipe, settings).architecture, self._topology)])
        self.needed(recipe)
        self._number += 1
        directory = directory or self.folder / "runs" / str(self._number)
        config = self.config(recipe, {"run.directory": str(directory)} | settings)
        outcome = Outcome()
        torch.manual_seed(5)
        with self._in_process(outcome, until, since), contextlib.redirect_stdout(io.StringIO()):
            start(recipes()[CASES[recipe].recipe], config)
        for folder in (directory / "written", directory / "teacher"):
            outcome.files |= {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        return outcome

    def needed(self, recipe: str) -> None:
        """The files that a recipe reads besides its data: a teacher's log-probs, or another run's export."""
        if recipe == "distill":
            self.exported("teacher_logprobs", "teacher_logprobs")
        if recipe == "annotate":
            self.exported("regression_reward_model", "regression_reward_model")
        if recipe == "online_distill":
            self.exported("sft", "sft")

    def exported(self, name: str, recipe: str, settings: Mapping[str, Any] = {}) -> Path:  # noqa: B006
        """A run in the folder `runs/name`, with the export of its model."""
        directory = self.folder / "runs" / name
        if directory.is_dir():
            return directory
        made = self.new(recipe, settings, directory=directory)
        if made.model is not None:
            from aligner.models.checkpoint.checkpoint import copy_tokenizer
            from aligner.models.weights import save_hf

            save_hf(made.model.chunks, directory / "export", writer=True)
            copy_tokenizer(self.folder / "tokenizer", directory / "export")
        return directory

    @contextlib.contextmanager
    def _in_process(self, outcome: Outcome, until: int, since: Path | None) -> Iterator[None]:
        from aligner.jobs import samples as job, serves as serving, trains as trainer_job, writes as writer_job

        places = (serving, trainer_job, writer_job, job)
        with contextlib.ExitStack() as stack:
            for place in places:
                stack.enter_context(mock.patch.object(place, "open_session", self._session))
            for place in (serving, job):
                stack.enter_context(mock.patch.object(place, "announced", lambda *_, **__: contextlib.nullcontext()))
            for place in (trainer_job, job):
                stack.enter_context(mock.patch.object(place, "train_to_end", functools.partial(_train, outcome, until, since)))
            stack.enter_context(mock.patch.object(job, "create_engine", _skewed(job.create_engine)))
            stack.enter_context(mock.patch.object(job.OnlineJob, "critic", lambda self, task: _critic(outcome, self)))
            yield

    @contextlib.contextmanager
    def _session(self, config: Any, run: Any, parallel: Any, **_: Any) -> Iterator[Any]:
        from aligner.cluster.run_directory import RunDirectory
        from aligner.run.session import Session

        directory = RunDirectory(Path(run.directory))
        directory.create()
        yield Session(topology=replace(self._topology, seed=run.seed), directory=directory, config_yaml="{}")


def _train(outcome: Outcome, until: int, since: Path | None, session: Any, config: Any, built: Any, **_: Any) -> int:
    """In place of `train_to_end`: all steps and a validation."""
    from aligner.loop.loop import Clock
    from aligner.models.checkpoint import checkpoint

    outcome.algorithm, outcome.model = built.algorithm, built.model
    if built.resident is not None:
        outcome.critic_model = built.resident.model
    state = {"step": 0} if since is None else checkpoint.load(built.model, checkpoint.resolve(since))
    if since is not None:
        built.algorithm.load_state(state["algorithm"])
    for step in range(state["step"] + 1, (until or config.loop.max_steps) + 1):
        result = built.algorithm.step(step, Clock())
        outcome.metrics.append(dict(result.metrics))
        outcome.samples = list(result.samples)
    built.algorithm.finish()
    if until:
        saved = {"step": until, "algorithm": built.algorithm.state()}
        checkpoint.save(session.directory.checkpoints / "policy", built.model, checkpoint.SaveRequest(step=until, state=saved))
    if config.data.validation:
        outcome.validation = dict(built.algorithm.validate())
    outcome.weights = _weights(built.model)
    if outcome.critic_model is not None:
        outcome.critic = _weights(outcome.critic_model)
    return 0


def _critic(outcome: Outcome, job: Any) -> LocalCritic:
    """In place of `OnlineJob.critic`: the critic that would be served with this config."""
    from aligner.jobs import serves as serving

    made, served = serving.CriticService, []

    def service(model: Any, *args: Any, **kwargs: Any) -> Any:
        outcome.critic_model = model.model
        return made(model, *args, **kwargs)

    with (
        mock.patch.object(serving, "_serve", lambda session, config, name, found, *_: served.extend(found.operations)),
        mock.patch.object(serving, "CriticService", service),
    ):
        serving.serve_critic(job.config)
    return LocalCritic(served, job.session.directory.run_id())


def _skewed(create: Callable[..., Any]) -> Callable[..., Any]:
    """Engines whose log-probs are not quite the trainer's, so that a correction has something to correct."""

    def made(*args: Any, **kwargs: Any) -> Any:
        engine = create(*args, **kwargs)
        generate = engine.generate

        def skewed(*args: Any, **kwargs: Any) -> Iterator[list[Any]]:
            for part in generate(*args, **kwargs):
                yield [replace(one, logprobs=tuple(x + 0.4 * math.sin(3 * n) for n, x in enumerate(one.logprobs))) for one in part]

        engine.generate = skewed
        return engine

    return made


def _weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().double().clone() for chunk in model.chunks for p in chunk.parameters()]


@functools.cache
def _base(case: str, folder: Path) -> Any:
    """The small run of a case, from the schema's defaults: Hydra's composition takes longer than the run."""
    from aligner.algorithms.registry import recipes

    recipe = CASES[case].recipe
    given = (setting.format(data=folder, runs=folder / "runs").partition("=") for setting in (*MODEL, *CASES[case].settings))
    own: dict[str, Any] = {name: yaml.safe_load(value) for name, _, value in given if "." in name}
    schema = recipes()[recipe].config
    hints = typing.get_type_hints(schema)
    own |= SMALL | (LEARNING if "optimizer" in hints else {}) | (CRITIC | {"reward.serve": False} if recipe == "ppo" else {})
    if "reward" in hints and recipe != "spin":
        own |= {"reward.function.path": f"{folder / 'judge.py'}:score", "rollout.sampling.stop_token_ids": list(range(30, 40))}
        own |= {"data.num_validation_prompts": 2, "data.validation": ""}
    if case == "distill":
        own["run.seed"] = 3  # the teacher is a run of seed 1
    return changed(schema(), own)


def changed(config: Any, settings: Mapping[str, Any]) -> Any:
    """The config with other values of these settings (dotted names, values as in YAML), checked as a new one."""
    below: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        first, _, rest = name.partition(".")
        below.setdefault(first, {})[rest] = value
    if isinstance(config, dict):  # of sections that the user has named
        return config | {name: changed(config[name], parts) for name, parts in below.items()}
    hints, new = typing.get_type_hints(type(config)), {}
    for name, parts in below.items():
        value = typed(parts.pop(""), hints[name]) if "" in parts else getattr(config, name)
        new[name] = changed(value, parts) if parts else value
    return replace(config, **new)


def typed(value: Any, kind: Any) -> Any:
    """A value of YAML as the type of a field."""
    options = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is list:
        return [typed(one, options[0]) for one in value]
    if typing.get_origin(kind) is dict:
        return {name: typed(one, options[1]) for name, one in value.items()}
    if len(options) == 1 and value is not None:
        return typed(value, options[0])
    if kind is float and isinstance(value, str):
        return float(value)  # 1e-2 is a text in YAML
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return kind(value)
    if inspect.isclass(kind) and is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        return kind(**{name: typed(one, hints[name]) for name, one in value.items()})
    return value
