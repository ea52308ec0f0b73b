"""`aligner data validate`, `inspect` and `tasks`: read data as a job would and report on it; write the prompts of an environment."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from aligner.agents.verifiers import verifiers_tasks
from aligner.algorithms.registry import composed, recipes
from aligner.commands.parts import InspectOptions, ValidateOptions
from aligner.commands.preflight.samples import fitted, load_sample
from aligner.data.config import BadLines, RecordForm
from aligner.data.forms import FORMS, Purpose, candidates
from aligner.data.inspection import (
    BRACKETS,
    COLOURS,
    Lengths,
    Row,
    View,
    describe_fields,
    duplicates,
    histogram,
    pieces,
    render,
    spread,
    view_of,
)
from aligner.data.mixture import read_alone
from aligner.data.records import raw_object
from aligner.data.report import LoadReport, NoUsableRecord
from aligner.data.sources import read_records
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.data.vision import Vision, thumbnail
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.environments.environment import Environment
from aligner.environments.kinds import HasTasks, HasTools, build_environment
from aligner.errors import ConfigError, DataError
from aligner.files import publish
from aligner.models.checkpoint.files import LATEST, resolve
from aligner.models.config import HFArchitecture, SeeingArchitecture
from aligner.reporting.pages import render_page
from aligner.run.from_hub import fetch_named
from aligner.run.settings import JobRun
from aligner.settings.compose import from_yaml

# Kinds of data, and a recipe that reads them.
KINDS = {
    "sft": "sft",
    "preference": "reward_model",
    "prompts": "grpo",
    "regression": "regression_reward_model",
    "steps": "process_reward_model",
    "kto": "kto",
    "demonstrations": "spin",
    "distillation": "distill",
    "steerlm": "steerlm",
    "requests": "generate",
    "unlabelled": "annotate",
    "responses": "proposals",
    "proposals": "steerlm2",
}
# Purposes of a data set, the most specific first, and the kind that `aligner data validate` calls them.
_PURPOSES = {
    Purpose.steps: "steps",
    Purpose.regression: "regression",
    Purpose.preference: "preference",
    Purpose.judged: "kto",
    Purpose.supervised: "sft",
    Purpose.prompts: "prompts",
}
_INSPECTED = 200  # records; an even number: some forms have pairs of lines
BAD = 1  # exit code; a mistake in the command is 2, as everywhere
FEW = 3  # lines that are listed of each kind of problem, unless all are
BAR = 40  # width of the longest bar of a histogram
# What differs between problems of one kind: values, numbers, what is in brackets.
_VALUES = re.compile(r" (is|are both|has the fields|share) (?!missing|not |the last ).*?(?=, expected|, allowed|$)")
_NUMBERS = re.compile(r"\b\d+\b")
_BRACKETS = re.compile(r" \(.*\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    report: LoadReport
    lengths: Lengths | None = None  # None where nothing can be used
    num_tokens: int = 0
    num_learnt: int = 0
    repeated: list[tuple[str, str]] = field(default_factory=list)
    histogram: list[tuple[int, int, int]] = field(default_factory=list)  # least and most tokens, rows; of records that are too long too
    images: dict[int, int] = field(default_factory=dict)  # images of a record -> records; empty without images
    slots: Lengths | None = None  # tokens of an image


def validate(target: str, overrides: Sequence[str], options: ValidateOptions) -> int:
    """Check the data of `conf/<target>.yaml`, or a file of `options.kind`; prints, returns the exit code: 1 if lines are bad."""
    findings, pages = [], []
    for finding, views, tokenizer in examine(target, overrides, options):
        findings.append(finding)
        show(finding, sys.stdout, lists_all=options.lists_all)
        show_samples(views[: options.num_samples], tokenizer, sys.stdout)
        pages.append((finding, samples(views[: options.num_samples], tokenizer)))
    if options.html_path is not None:
        options.html_path.write_text(render_page("data.html", target=target, sets=pages), encoding="utf-8")
    if options.json_path is not None:
        options.json_path.write_text(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    return BAD if any(finding.report.num_bad for finding in findings) else 0


def examine(
    target: str, overrides: Sequence[str], options: ValidateOptions, first: int | None = None
) -> Iterator[tuple[Finding, list[View], Tokenizer]]:
    """Of every source of the data what `inspect` finds, and the tokenizer that it was read with."""
    config = config_of(target, overrides, options)
    fetch_named(config, weights=False)
    tokenizer = _tokenizer(config)
    config = _with_lengths(config, tokenizer, options)
    for location, data in read_alone(config.data):
        yield *inspect(replace(config, data=data), location, tokenizer, first), tokenizer


def inspect(config: JobRun, location: str, tokenizer: Tokenizer, first: int | None = None) -> tuple[Finding, list[View]]:
    """Every record of `location` (or the first so many), read as the job would; reports bad ones regardless of data.bad_lines."""
    lenient = replace(config, data=replace(config.data, bad_lines=BadLines.skip))
    try:
        examples, report = load_sample(lenient, location, tokenizer, first=first)
    except NoUsableRecord as error:
        return Finding(report=error.report, histogram=histogram([one.length for one in error.report.too_long])), []
    views = [view_of(example) for example in examples]
    rows = [row for view in views for row in view.rows]
    lengths = [len(row.tokens) for row in rows]
    images, vision = [image for view in views for image in view.images], tokenizer.vision
    finding = Finding(
        report=report,
        lengths=spread(lengths),
        num_tokens=sum(lengths),
        num_learnt=sum(sum(row.loss_mask) for row in rows),
        repeated=duplicates(views),
        histogram=histogram([*lengths, *(one.length for one in report.too_long)]),
        images=dict(sorted(Counter(len(view.images) for view in views).items())) if images else {},
        slots=spread([vision.num_slots(image) for image in images]) if images and vision else None,
    )
    return finding, views


def show(finding: Finding, out: TextIO, *, lists_all: bool = False) -> None:
    """The first few problems of each kind, or all; then figures."""
    report = finding.report
    few = None if lists_all else FEW
    kinds: dict[str, list[str]] = {}
    for problem in report.problems:
        kinds.setdefault(kind_of(problem), []).append(problem)
    listed = [("bad", kind, problems) for kind, problems in kinds.items()]
    listed.append(("too long", "", [f"{one.source}: {one.length} tokens, more than {one.limit}" for one in report.too_long]))
    listed.append(("warning", "the same tokens", [f"{source}: the same tokens as {first}" for source, first in finding.repeated]))
    for level, kind, problems in listed:
        for problem in problems[:few]:
            print(f"{level}: {problem}", file=out)
        if few is not None and len(problems) > few:
            print(f"{level}: ... and {len(problems) - few} more{f': {kind}' if kind else ''} (--all lists them)", file=out)
    print(f"{report.location}: {report.num_kept} of {report.num_records} records can be used, {report.num_bad} bad", file=out)
    for kind, problems in kinds.items():
        print(f"  bad: {len(problems)} records: {kind}", file=out)
    for text in [*report.long_texts(), *report.notes()]:
        print(f"  {text}", file=out)
    _show_lengths(finding, out)
    counts = f"too long and left out: {report.num_too_long}; truncated: {report.num_truncated}; duplicates: {len(finding.repeated)}"
    print(f"  {counts}", file=out)


def kind_of(problem: str) -> str:
    """The kind of a bad line's problem: the message without place, values and numbers."""
    message = re.sub(r"^.*?:\d+: ", "", problem)
    return _NUMBERS.sub("N", _VALUES.sub(r" \1 ...", _BRACKETS.sub("", message)))


def _show_lengths(finding: Finding, out: TextIO) -> None:
    lengths = finding.lengths
    if lengths is not None:
        print(f"  tokens of a row: min {lengths.least}, median {lengths.middle:g}, p95 {lengths.p95}, max {lengths.most}", file=out)
        print(f"  tokens in all: {finding.num_tokens:,}, of which {finding.num_learnt:,} in the loss mask", file=out)
    if finding.slots is not None:
        print(f"  images of a record: {', '.join(f'{number} ({count} records)' for number, count in finding.images.items())}", file=out)
        slots = finding.slots
        print(f"  tokens of an image: min {slots.least}, median {slots.middle:g}, p95 {slots.p95}, max {slots.most}", file=out)
    tallest = max((count for *_, count in finding.histogram), default=0)
    for least, most, count in finding.histogram:
        print(f"  {f'{least}-{most}':>15} tokens {count:>9} rows {'#' * -(-BAR * count // tallest)}".rstrip(), file=out)


def show_samples(views: Sequence[View], tokenizer: Tokenizer, out: TextIO) -> None:
    """The rows of some examples, as the model will see them."""
    marks = COLOURS if out.isatty() else BRACKETS
    for view in views:
        for row in view.rows:
            note = f" ({row.note})" if row.note else ""
            seen = _seen(row, tokenizer)
            print(f"\n--- {view.source}{note}: {len(row.tokens)} tokens, {sum(row.loss_mask)} in the loss mask{seen}", file=out)
            print(render(row, tokenizer, marks), file=out)


def _seen(row: Row, tokenizer: Tokenizer) -> str:
    slots = [str(tokenizer.vision.num_slots(image)) for image in row.images] if row.images and tokenizer.vision is not None else []
    return f", {len(slots)} images of {', '.join(slots)} tokens" if slots else ""


def samples(views: Sequence[View], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Some examples as plain data, for pages: their rows' texts, and small copies of their images."""
    store = tokenizer.vision.store if tokenizer.vision is not None else None
    found = []
    for view in views:
        rows = [
            {"note": row.note, "seen": _seen(row, tokenizer), "tokens": len(row.tokens), "pieces": pieces(row, tokenizer)}
            for row in view.rows
        ]
        found.append(
            {"source": view.source, "rows": rows, "images": [thumbnail(store.get(image)) for image in view.images] if store else []}
        )
    return found


def config_of(target: str, overrides: Sequence[str], options: InspectOptions) -> JobRun:
    """The config that is named, or that of a recipe which reads `options.kind`. Raises ConfigError."""
    if not options.kind:
        if options.tokenizer:
            raise ConfigError("--tokenizer: is for --kind; with a config give model.tokenizer=DIR")
        return composed(target, overrides)
    recipe = KINDS.get(options.kind)
    if recipe not in recipes():
        raise ConfigError(f"--kind {options.kind}: allowed: {', '.join(kind for kind, name in KINDS.items() if name in recipes())}")
    if not options.tokenizer:
        raise ConfigError("--kind: needs --tokenizer DIR, the directory with the tokenizer of the model")
    given = [f"data.train={json.dumps(target)}", f"model.tokenizer={json.dumps(options.tokenizer)}"]
    return composed(recipe, [*given, *overrides])


def _with_lengths(config: JobRun, tokenizer: Tokenizer, options: ValidateOptions) -> JobRun:
    """The config with the job's lengths; for a file alone, with those of the model beside the tokenizer (without one, any length)."""
    if options.kind and not config.model.path:
        if not (Path(config.model.tokenizer) / "config.json").exists():
            return config
        data = fitted(replace(config, model=replace(config.model, path=config.model.tokenizer))).data
        return replace(config, data=data)
    return fitted(config)


def _tokenizer(config: JobRun) -> Tokenizer:
    """The tokenizer of the data's model, also beside a checkpoint."""
    path = Path(config.model.tokenizer_path)
    tokenizer = load_tokenizer(resolve(path) if not config.model.tokenizer and (path / LATEST).exists() else path)
    return _seeing(config, tokenizer.chatting(config.data))


def _seeing(config: JobRun, tokenizer: Tokenizer) -> Tokenizer:
    """With the image processor of the data's model, if it sees; there is no run, so its images are in a temporary directory."""
    from aligner.models.create import read_architecture  # Megatron-Core comes with it

    architecture = read_architecture(config.model, vocab_size=tokenizer.vocab_size) if config.model.path else None
    if architecture is not None and not isinstance(architecture, (HFArchitecture, SeeingArchitecture)):
        return tokenizer
    found = [Path(config.model.path) if config.model.path else None, Path(tokenizer.path)]
    return tokenizer.seeing(Vision.of([None if one is None else one if one.is_dir() else resolve(one) for one in found], None))


def inspect_data(target: str, overrides: Sequence[str], options: InspectOptions) -> int:
    """Describe a file or a data set of the Hub, read as `options.kind`, or as the first purpose that its first record fits. Without a
    tokenizer samples are shown with a stand-in of bytes and ChatML. Returns the exit code: 1 if lines are bad."""
    with TemporaryDirectory() as folder:
        chosen = InspectOptions(kind=options.kind or "sft", tokenizer=options.tokenizer or str(_stand_in(Path(folder))))
        config = config_of(target, overrides, chosen)
        fetch_named(config, weights=False)
        location, tokenizer = config.data.train, load_tokenizer(config.model.tokenizer_path)
        kinds = kinds_of(location) if not options.kind else [options.kind]
        if kinds[0] != chosen.kind:
            config = config_of(location, overrides, InspectOptions(kind=kinds[0], tokenizer=config.model.tokenizer))
        if not options.tokenizer or not tokenizer.has_chat_template:
            config.data.chat_template = config.data.chat_template or "chatml"
        tokenizer = _seeing(config, tokenizer.chatting(config.data))
        return _show_inspected(config, location, tokenizer, kinds, options)


def _show_inspected(config: JobRun, location: str, tokenizer: Tokenizer, kinds: Sequence[str], options: InspectOptions) -> int:
    finding, views = inspect(config, location, tokenizer, first=_INSPECTED)
    report = finding.report
    print(f"{location}: read as {kinds[0]}" + (f" (also good for {', '.join(kinds[1:])}: --kind)" if kinds[1:] else ""))
    for line in [*describe_fields(report), *report.notes()]:
        print(f"  {line}")
    for problem in report.problems[: options.num_samples]:
        print(f"bad: {problem}")
    print(f"  {report.num_kept} of the first {report.num_records} records can be used, {report.num_bad} bad")
    if not options.tokenizer:
        print("  samples as ChatML; --tokenizer DIR shows them as a model will see them")
    show_samples(views[: options.num_samples], tokenizer, sys.stdout)
    return BAD if report.num_bad else 0


def kinds_of(location: str) -> list[str]:
    """The kinds that the first readable record fits. Raises DataError if its form is unknown."""
    raw = next((raw for raw in read_records(location) if not raw.error), None)
    if raw is None:
        raise DataError(f"{location}: has no readable record")
    record = raw_object(raw)
    forms = {purpose: candidates(record, purpose) for purpose in _PURPOSES}
    found = [kind for purpose, kind in _PURPOSES.items() if forms[purpose]]
    if forms[Purpose.preference] == [RecordForm.text]:  # only if good and bad texts alternate
        found = [*(kind for kind in found if kind != "preference"), "preference"]
    if found:
        return found
    known = "; ".join(f"{name.value} {form.shape}" for name, form in FORMS.items())
    raise DataError(f"{raw.source}: has the fields {sorted(map(str, record))}, expected those of a form: {known}")


def _stand_in(folder: Path) -> Path:
    """A tokenizer whose tokens are bytes and the marks of ChatML."""
    from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(str(folder))
    return folder


@dataclass
class _Settings:
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)


def tasks(target: Path, overrides: Sequence[str], count: int, seed: int, prompts: str) -> int:
    """Write prompts that an environment brings along, or prompts with the tools that it offers, as a file for `data.train`. Returns 0.

    Raises ConfigError if the environment has neither tasks nor tools.
    """
    config = from_yaml(_Settings, "", overrides).environment
    if target.suffix != ".jsonl":
        raise ConfigError(f"FILE is {target}, expected a name that ends in .jsonl")
    records = list(_records(config, count, seed, prompts))
    publish(target, lambda new: new.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records)))
    print(f"{target}: {len(records)} prompts of {config.title}", flush=True)
    return 0


def _records(config: EnvironmentConfig, count: int, seed: int, prompts: str) -> Iterator[dict[str, Any]]:
    if config.chosen is EnvironmentKind.verifiers:
        yield from verifiers_tasks(config, count, seed)
        return
    if config.asks_endpoint or not config.is_on:
        raise ConfigError(
            f"environment.kind={config.kind.value}: has no prompts of its own; allowed: a kind with `name` or `server`, or path"
        )
    environment = build_environment(config)
    try:
        if prompts:
            yield from _with_tools(config, environment, prompts)
        elif isinstance(environment, HasTasks):
            yield from environment.tasks(count, seed)
        else:
            raise ConfigError(f"{config.title}: has no method tasks(count, seed), so no prompts of its own")
    finally:
        if close := getattr(environment, "close", None):
            close()


def _with_tools(config: EnvironmentConfig, environment: Environment, prompts: str) -> Iterator[dict[str, Any]]:
    if not isinstance(environment, HasTools):
        raise ConfigError(f"--prompts {prompts}: {config.title} has no method tools(), so nothing is to be added")
    offered = environment.tools()
    for raw in read_records(prompts):
        record = dict(raw.value) if isinstance(raw.value, dict) else {}
        asked = record.get("prompt")
        if isinstance(asked, str):  # a chat template writes tools around messages
            record["prompt"] = [{"role": "user", "content": asked}]
        yield record | {"tools": offered}
