"""Parts shared by every job: reading data and model files, the loop with its alarms, the export, the exit code.

`skipped_steps.json` in the run's directory lists the steps skipped after roll-backs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from aligner.cluster.outcomes import ExitCode
from aligner.data.order import EpochSampler, order_of
from aligner.data.report import LoadReport
from aligner.data.tokenizer import Tokenizer, check_vocabulary, listed, load_tokenizer
from aligner.data.vision import Vision
from aligner.errors import AlignerError, ConfigError, RunHalted, describe_os_error
from aligner.files import publish
from aligner.loop import loop
from aligner.loop.checkpointing import RunCheckpointer
from aligner.loop.learnt import GapAlarm, LearntNothingAlarm
from aligner.loop.loop import Built, TimeBudget, seconds_left
from aligner.models import create
from aligner.models.checkpoint.checkpoint import carry_over, copy_tokenizer, special_ids
from aligner.models.checkpoint.foreign.model import is_foreign
from aligner.models.checkpoint.wrapper import directory_of
from aligner.models.config import Architecture, HFArchitecture, ModelConfig, SeeingArchitecture
from aligner.models.modules.build import Transformer
from aligner.models.modules.fusions import note_once
from aligner.models.modules.hf_chunk import NOT_PACKED
from aligner.models.modules.peft import save_peft
from aligner.models.training.guard import GuardConfig
from aligner.models.training.trainable import TrainableModel
from aligner.models.weights import save_hf
from aligner.parallel.collectives import from_rank_0
from aligner.reporting.config import LoggingConfig
from aligner.reporting.formats import Column
from aligner.reporting.reporter import Reporter, SilentReporter
from aligner.reporting.run_view import RunView
from aligner.reporting.summary import is_empty, learnt_from
from aligner.run import lengths
from aligner.run.session import Session
from aligner.run.settings import JobRun
from aligner.servers.components import in_section
from aligner.telemetry.run_files import RunFiles


class SkippedStepsFile:
    """`aligner.loop.loop.SkippedSteps` in a file. Every rank constructs one, at the same point: rank 0 reads and writes."""

    def __init__(self, path: Path, *, most: int) -> None:
        self._path = path
        self._most = most
        self._reasons: dict[int, str] = from_rank_0(self._read)

    @property
    def steps(self) -> frozenset[int]:
        return frozenset(self._reasons)

    def add(self, step: int, reason: str) -> None:
        """Store `step` for the next start. Raises RunHalted if `most` are stored already, or this one is."""
        if len(self._reasons) >= self._most or step in self._reasons:
            known = ", ".join(map(str, sorted(self._reasons))) or "none"
            raise RunHalted(f"{reason}; the run has been rolled back enough (guard.max_roll_backs={self._most}; steps skipped: {known})")
        self._reasons[step] = reason
        from_rank_0(self._write)

    def _read(self) -> dict[int, str]:
        if not self._path.exists():
            return {}
        try:
            return {int(step): str(reason) for step, reason in json.loads(self._path.read_text()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise AlignerError(f"{self._path}: not a list of steps that the run skips: {error}") from error

    def _write(self) -> None:
        record = {str(step): self._reasons[step] for step in sorted(self._reasons)}
        try:
            publish(self._path, lambda new: new.write_text(json.dumps(record, indent=2) + "\n"))
        except OSError as error:
            raise AlignerError(f"a step to skip could not be recorded: {describe_os_error(error, self._path)}") from error


Example = TypeVar("Example")
J = TypeVar("J", bound=JobRun)


def with_lengths(config: J) -> J:
    """The config with every length filled in from the models it names. Raises ConfigError naming lengths that do not fit."""
    contexts = {}
    for key, model in config.readers().items():
        with in_section(key.rpartition(".")[0]):
            contexts[key] = create.context_length(model, create.read_architecture(model, vocab_size=0))
    return lengths.fill(config, contexts, reserved=config.reserved_length(lambda: load_model_files(config.model, config.data)[0]))


def with_steps(config: J) -> J:
    """The config with the number of steps that `loop.epochs` take. Reads data.train for it; raises DataError listing all bad lines."""
    if not config.loop.epochs:
        return config
    examples, _ = config.read(config.data.train, load_model_files(config.model, config.data, run=RunFiles(Path(config.run.directory)))[0])
    return replace(config, loop=config.loop.over(order_of(examples, config.examples_per_step, config.run.seed)))


def load_sets(
    session: Session, load: Callable[..., tuple[Sequence[Example], LoadReport]], data: Any, tokenizer: Tokenizer
) -> tuple[Sequence[Example], Sequence[Example]]:
    """(training examples, validation examples: none if no file is named), read before any model is built; prints what was left out."""
    sets: list[Sequence[Example]] = []
    for location in filter(None, (data.train, data.validation)):
        examples, report = load(location, data, tokenizer, heartbeat=session.progress.heartbeat)
        if sets:
            session.say(report.summary())
        else:
            session.trains_on(report)
        sets.append(examples)
    return sets[0], sets[1] if data.validation else []


def load_model_files(
    config: ModelConfig, data: Any = None, session: Session | None = None, *, run: RunFiles | None = None
) -> tuple[Tokenizer, Architecture]:
    """The tokenizer and the architecture of a model, checked against each other; with the chat template that `data` names (a date in it is
    the first day of the session's run, or today), and with the image processor of a model that sees. Images are kept in the session's run
    or `run`, else until the process ends."""
    tokenizer = load_tokenizer(str(tokenizer_directory(config)), create.source_directory(config))
    if data is not None:
        tokenizer = tokenizer.chatting(data, day=session.directory.first_day() if session else None)
    if session and tokenizer.writes_dates:
        told = f"the chat template writes the date: that of the run's first day, {session.directory.first_day()}, on every day"
        note_once(told, rank=session.topology.rank)
    architecture = create.read_architecture(config, vocab_size=tokenizer.vocab_size)
    check_vocabulary(tokenizer, architecture.vocab_size)
    images = session.directory if session else run
    if isinstance(architecture, (HFArchitecture, SeeingArchitecture)):
        directories = [create.source_directory(config), tokenizer_directory(config)]
        vision = Vision.of(directories, None if images is None else images.images)
        if vision is not None and isinstance(architecture, HFArchitecture) and config.packing:
            vision.refusal = NOT_PACKED
        tokenizer = tokenizer.seeing(vision)
    elif hint := create.how_to_see(config):
        note_once(hint, rank=session.topology.rank if session else 0)
    return tokenizer, architecture


def run_tokenizer(session: Session, config: JobRun, model: ModelConfig) -> Path:
    """Where checkpoints and exports of a run take their tokenizer from: the model's, with the chat template of `data.chat_template`."""
    source, target = tokenizer_directory(model), session.directory.tokenizer

    def write() -> None:
        target.mkdir(exist_ok=True)
        copy_tokenizer(source, target)
        load_tokenizer(source).chatting(config.data).save_template(target)

    if not config.data.chat_template:
        return source
    from_rank_0(write)
    return target


def tokenizer_directory(config: ModelConfig) -> Path:
    """Where the tokenizer's files are: `model.tokenizer`, else beside the weights."""
    source = create.source_directory(config)
    if source is not None and not config.tokenizer and is_foreign(source):
        raise ConfigError(f"model.tokenizer='': {source} has no tokenizer that is read in place; name a directory with one")
    return Path(config.tokenizer_path) if config.tokenizer or source is None else source


def length_of(config: Any, order: EpochSampler, tokens: str) -> str:
    """One line on a whole run: its steps, samples, epochs and `tokens`, its end, and when checkpoints are saved."""
    settings, steps = config.loop, config.loop.max_steps
    end = f"loop.epochs={settings.epochs:g}" if settings.epochs else f"loop.max_steps={steps}"
    saves = (
        [f"first after {settings.save_minutes:g} minutes, then every {settings.save_minutes:g} minutes"] if settings.save_minutes else []
    )
    saves += [f"every {settings.save_every} steps"] if settings.save_every else []
    saves += ["and at the end" if saves else "at the end only"]
    return (
        f"the run ends after {steps:,} steps ({end}) of {order.batch_size:,} samples: {steps * order.batch_size:,} samples, "
        f"{order.epoch(steps):.3g} epochs of {order.size:,}, {tokens}; checkpoints: {', '.join(saves)}"
    )


def train_to_end(session: Session, config: Any, built: Built, *, tokenizer: Path, shown: Sequence[Column], length: str) -> int:
    """Train to the last step, and export the model with the tokenizer of that directory. Returns the exit code: 0, or 75 if the run was
    stopped before the last step. Every rank calls it."""
    source = create.source_directory(config.model)
    keeper = RunCheckpointer(
        session,
        built.model,
        name=built.checkpoint,
        tokenizer=tokenizer,
        source=source,
        config=config.checkpoint,
        critic=built.critic,
        resident=built.resident,
        given_away=built.given_away,
        damaged=config.run.damaged_checkpoint,
    )
    logging, guard = config.logging, config.guard
    how = {"logging": logging, "shown": shown, "guard": guard, "model": built.model, "length": length}
    last = run_loop(session, built.algorithm, keeper, config.loop, **how)
    with built.model.averaged():
        export_at_end(session, config, last, built.model.chunks, tokenizer, source)
    return conclude(session, last, config.loop)


def conclude(session: Session, last_step: int, length: loop.LoopConfig) -> ExitCode:
    """The exit code of a run that ended at `last_step`, after the export. Writes `done.json` after the last step. Every rank calls it."""
    for text in session.last_words:
        session.say(text)
    if last_step < length.max_steps:
        return ExitCode.stopped
    from_rank_0(lambda: _write_done(session, last_step, length.epochs))
    return ExitCode.done


def _write_done(session: Session, step: int, epochs: float) -> None:
    record = {"step": step, "epochs": epochs, "run_id": session.directory.run_id(), "attempt": os.environ.get("ALIGNER_ATTEMPT", "")}
    publish(session.directory.done, lambda new: new.write_text(json.dumps(record | {"time": time.time()}) + "\n"))


def run_loop(
    session: Session,
    algorithm: loop.Algorithm,
    keeper: loop.Checkpointer,
    config: loop.LoopConfig,
    *,
    logging: LoggingConfig,
    shown: Sequence[Column],
    guard: GuardConfig,
    model: TrainableModel | None = None,
    length: str = "",
) -> int:
    """`loop.run` with the run's reporter, which is always closed and first prints the run's `length`. Returns the last finished step. Also
    raises RunHalted if the run's `model` learnt nothing and the settings make that an error."""
    watch = None if model is None else LearntNothingAlarm(guard, model.fingerprint)
    with ExitStack() as stack:

        def open_reporter(start: int) -> loop.Reporter:
            if watch is not None:
                watch.begin(start)
            opened: Reporter | SilentReporter = SilentReporter()
            if session.is_first:
                settings, about = yaml.safe_load(session.config_yaml), {"run_directory": session.directory, "columns": shown}
                opened = Reporter(logging, total_steps=config.max_steps, start_step=start, settings=settings, **about)
            stack.enter_context(opened)
            session.last_words.extend(filter(None, [opened.lost]))
            if length:
                opened.note(length)
            return opened

        last = loop.run(
            algorithm,
            config,
            checkpointer=keeper,
            open_reporter=open_reporter,
            progress=session.progress,
            budget=TimeBudget(seconds_left(os.environ), save_minutes=config.save_minutes),
            skipped_steps=SkippedStepsFile(session.directory.skipped_steps, most=guard.max_roll_backs),
            alarms=[GapAlarm(guard.logprob_gap, command=f"aligner gap {session.directory.path}"), *([watch] if watch is not None else [])],
        )
    if watch is not None and last == config.max_steps:
        _judge_whole_run(session, watch)
    return last


def _judge_whole_run(session: Session, watch: LearntNothingAlarm) -> None:
    """Print what the run learnt from. Raises RunHalted if it learnt nothing, also at a later start without steps left."""
    kept = session.directory.learnt_nothing
    if watch.num_steps:
        why = watch.whole_run(has_learnt_before=from_rank_0(lambda: _has_learnt(session.directory.path)))
        from_rank_0(lambda: kept.write_text(why) if why else kept.unlink(missing_ok=True))
    else:
        why = from_rank_0(lambda: kept.read_text() if kept.exists() else "")
    verdict = watch.verdict(why)
    if verdict.halt:
        raise RunHalted(f"{verdict.halt}; nothing is exported")
    session.say(verdict.note or from_rank_0(lambda: learnt_from(RunView(session.directory.path).metrics())))
    for report in session.reports:
        if report.num_kept < report.num_records or report.num_truncated:
            session.say(report.summary())


def _has_learnt(directory: Path) -> bool:
    """Whether this run's metrics have a step that has learned."""
    steps = [step for step in RunView(directory).metrics() if step.step]  # none at all: a disk that is full costs lines, not the run
    return not steps or not all(is_empty(step.values) for step in steps)


def export_at_end(
    session: Session, config: Any, last_step: int, chunks: Sequence[Transformer], tokenizer: Path, source: Path | None
) -> None:
    """Write the model as a Hugging Face one, with its tokenizer and the settings of the model in `source`; trained adapters are merged into
    it and also written separately for PEFT. A run that was stopped exports once it is finished. Every rank calls it."""
    if not config.run.export_hf or last_step < config.loop.max_steps:
        return
    save_hf(chunks, session.directory.export, writer=session.is_first)
    if session.is_first:
        copy_tokenizer(tokenizer, session.directory.export, source)
        whole = directory_of(chunks[0].wrapper) if chunks[0].wrapper else source
        if whole is not None and not is_foreign(whole):
            carry_over(whole, session.directory.export)
        name_special_tokens(session.directory.export, special_ids(source or tokenizer))
    kind = chunks[0].quantization
    rounded = f", adapters merged into the weights as model.quantization={kind.value} rounds them" if kind.is_on else ""
    session.say(f"Hugging Face model written to {session.directory.export}{rounded}")
    if chunks[0].lora.is_on:
        save_peft(chunks, session.directory.adapter, writer=session.is_first)
        session.say(f"PEFT adapter written to {session.directory.adapter}")


def name_special_tokens(directory: Path, own: Mapping[str, Any] | None = None) -> None:
    """Put begin, end and padding ids into an exported config.json: the model's own where it has them, else the tokenizer's. The tokenizer's
    end token is always among the ends: `generate` of other tools stops there. A model that scores gets no padding token that is also the
    end: transformers scores the last token that is not padding. Such a model takes one sequence at a time."""
    tokenizer = load_tokenizer(str(directory))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    ids = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id} | dict(own or {})
    if tokenizer.eos_id not in (ends := listed(ids["eos_token_id"])):
        ids["eos_token_id"] = [tokenizer.eos_id, *ends]
    if ids["pad_token_id"] == tokenizer.eos_id and config["architectures"][0].endswith("ForSequenceClassification"):
        ids["pad_token_id"] = None
    path.write_text(json.dumps(config | ids, indent=2) + "\n")
