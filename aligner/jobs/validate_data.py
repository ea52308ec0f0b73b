"""`aligner data validate`: reads data as a job would, and says what is wrong with them and what the model will see."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

from aligner.config import compose
from aligner.data.config import BadLines
from aligner.data.inspection import BRACKETS, COLOURS, Lengths, View, duplicates, lengths_of, render, view_of
from aligner.data.report import LoadReport, NoUsableRecord
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.errors import ConfigError
from aligner.jobs.preflight.samples import load_sample
from aligner.jobs.programs import RECIPES, Job, recipe_of
from aligner.models.checkpoint_files import LATEST, resolve

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
BAD = 1  # exit code; a mistake in the command is 2, as everywhere
MOST_DUPLICATES = 20  # that are listed


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is asked for besides the config."""

    kind: str = ""  # of the files named instead of a config
    tokenizer: str = ""  # with `kind`
    num_samples: int = 3
    json_path: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found in one data set."""

    report: LoadReport
    lengths: Lengths | None = None  # None where nothing can be used
    num_tokens: int = 0
    num_learnt: int = 0
    repeated: list[tuple[str, str]] = field(default_factory=list)


def validate(target: str, overrides: Sequence[str], options: Options) -> int:
    """Check the data of `conf/<target>.yaml`, or a file of `options.kind`; prints, returns the exit code: 1 where lines are bad.

    Raises ConfigError for settings that do not fit, DataError for a file that is not there.
    """
    config = _config(target, overrides, options)
    tokenizer = _tokenizer(config)
    findings = []
    for location in dict.fromkeys(filter(None, (config.data.train, config.data.validation))):
        finding, views = inspect(config, location, tokenizer)
        findings.append(finding)
        show(finding, sys.stdout)
        _show_samples(views[: options.num_samples], tokenizer, sys.stdout)
    if options.json_path is not None:
        options.json_path.write_text(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    return BAD if any(finding.report.num_bad for finding in findings) else 0


def inspect(config: Job, location: str, tokenizer: Tokenizer) -> tuple[Finding, list[View]]:
    """Every record of `location`, read as the job would; bad ones are reported, whatever data.bad_lines says."""
    lenient = replace(config, data=replace(config.data, bad_lines=BadLines.skip))
    try:
        examples, report = load_sample(lenient, location, tokenizer, first=None)
    except NoUsableRecord as error:
        return Finding(report=error.report), []
    views = [view_of(example) for example in examples]
    rows = [row for view in views for row in view.rows]
    finding = Finding(
        report=report,
        lengths=lengths_of(views),
        num_tokens=sum(len(row.tokens) for row in rows),
        num_learnt=sum(sum(row.loss_mask) for row in rows),
        repeated=duplicates(views),
    )
    return finding, views


def show(finding: Finding, out: TextIO) -> None:
    """Bad lines, then figures."""
    report = finding.report
    for problem in report.problems:
        print(f"bad: {problem}", file=out)
    for source, first in finding.repeated[:MOST_DUPLICATES]:
        print(f"warning: {source}: the same tokens as {first}", file=out)
    if len(finding.repeated) > MOST_DUPLICATES:
        print(f"warning: ... and {len(finding.repeated) - MOST_DUPLICATES} more", file=out)
    print(f"{report.location}: {report.num_kept} of {report.num_records} records can be used, {report.num_bad} bad", file=out)
    lengths = finding.lengths
    if lengths is not None:
        print(f"  tokens of a row: min {lengths.least}, median {lengths.middle:g}, p95 {lengths.p95}, max {lengths.most}", file=out)
        print(f"  tokens in all: {finding.num_tokens:,}, of which {finding.num_learnt:,} in the loss mask", file=out)
    if report.unused:
        print(f"  {report.unused_text()}", file=out)
    counts = f"too long and left out: {report.num_too_long}; truncated: {report.num_truncated}; duplicates: {len(finding.repeated)}"
    print(f"  {counts}", file=out)


def _show_samples(views: Sequence[View], tokenizer: Tokenizer, out: TextIO) -> None:
    marks = COLOURS if out.isatty() else BRACKETS
    for view in views:
        for row in view.rows:
            note = f" ({row.note})" if row.note else ""
            print(f"\n--- {view.source}{note}: {len(row.tokens)} tokens, {sum(row.loss_mask)} in the loss mask", file=out)
            print(render(row, tokenizer, marks), file=out)


def _config(target: str, overrides: Sequence[str], options: Options) -> Job:
    if not options.kind:
        if options.tokenizer:
            raise ConfigError("--tokenizer: is for --kind; with a config give model.tokenizer=DIR")
        return compose(RECIPES[recipe_of(target)][0], target, overrides)
    recipe = KINDS.get(options.kind)
    if recipe not in RECIPES:
        raise ConfigError(f"--kind {options.kind}: allowed: {', '.join(kind for kind, name in KINDS.items() if name in RECIPES)}")
    if not options.tokenizer:
        raise ConfigError("--kind: needs --tokenizer DIR, the directory with the tokenizer of the model")
    given = [f"data.train={json.dumps(target)}", f"model.tokenizer={json.dumps(options.tokenizer)}"]
    return compose(RECIPES[recipe][0], recipe, [*given, *overrides])


def _tokenizer(config: Job) -> Tokenizer:
    """That of the model which the data are for, also beside a checkpoint."""
    path = Path(config.model.tokenizer_path)
    return load_tokenizer(resolve(path) if not config.model.tokenizer and (path / LATEST).exists() else path)
