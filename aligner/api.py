"""The recipes from Python: `aligner.train("dpo", model=..., data=[...])` in a notebook or a script.

A run is the one that `aligner launch local` starts, with its ranks, servers, checkpoints and ends, in processes of its own. This module
turns Python values into its settings (functions and rows are written into the run directory) and its files into a `Result`.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aligner.cluster.outcomes import ExitCode
from aligner.cluster.run_directory import RunDirectory
from aligner.data.mixture import is_mixture
from aligner.errors import AlignerError, ConfigError
from aligner.settings.command_line import override
from aligner.settings.schema import flat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Rows = Iterable[Mapping[str, Any]]
_REASON_LINES = 12  # of an error that lists what is wrong
_GIVEN = "given"  # folder of a run directory: what came as Python objects
_SHORT = {"model": "model.path", "data": "data.train", "validation": "data.validation", "reward": "reward.function.path"}
_SHORT |= {"max_steps": "loop.max_steps", "directory": "run.directory"}


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """What a finished run left. A notebook shows it as a table of its metrics with their courses."""

    directory: Path  # of the run
    metrics: list[dict[str, float]]  # of every step: the names of docs/algorithms.md, and `step`
    checkpoint: Path | None  # the newest one; None if the recipe writes data
    export: Path | None  # the model as a Hugging Face directory; None with run.export_hf=false

    def summary(self) -> str:
        """First, last and best value of each metric and its course, as a table of text."""
        from aligner.commands.report import all_columns
        from aligner.reporting.run_view import RunView

        return RunView(self.directory).summary(all_columns()) if self.metrics else f"{self.directory}: data, and no steps"

    def __repr__(self) -> str:
        return f"Result(steps={len(self.metrics)}, directory={str(self.directory)!r}; summary() has its metrics)"

    def _repr_html_(self) -> str:
        from aligner.commands.report import all_columns
        from aligner.reporting.run_view import RunView
        from aligner.reporting.samples_report import fragment

        return fragment(RunView(self.directory), all_columns()) if self.metrics else escape(self.summary())

    def model(self, **arguments: Any) -> PreTrainedModel:
        """The trained model as `transformers` loads it; takes `from_pretrained`'s arguments. Raises AlignerError without an export."""
        import transformers

        name = transformers.AutoConfig.from_pretrained(self._exported()).architectures[0]
        return getattr(transformers, name).from_pretrained(self._exported(), **arguments)

    def tokenizer(self, **arguments: Any) -> PreTrainedTokenizerBase:
        """Its tokenizer. Raises AlignerError if no model was exported."""
        import transformers

        return transformers.AutoTokenizer.from_pretrained(self._exported(), **arguments)

    def _exported(self) -> Path:
        if self.export is None:
            raise AlignerError(f"{self.directory} holds no exported model: the recipe writes data, or run.export_hf is false")
        return self.export


def train(
    recipe: str,
    *,
    model: str | Path | None = None,
    data: str | Path | Rows | None = None,
    validation: str | Path | Rows | None = None,
    reward: str | Callable[..., Any] | None = None,
    max_steps: int | None = None,
    directory: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Run a recipe (or one of its configs, such as "grpo_70b") on this machine to its end.

    Args:
        model: a Hugging Face directory or a checkpoint (`model.path`).
        data: a path, a list of sources, or rows as docs/data.md has them (`data.train`).
        validation: the same for `data.validation`.
        reward: a function of (prompts, responses, answers) that returns scores, or `file.py:name` (docs/rewards.md).
        max_steps: `loop.max_steps`.
        directory: `run.directory`; the same directory again resumes the run.
        overrides: settings as on the command line, such as "algorithm=dapo".
        settings: any others, as sections (`optimizer={"lr": 1e-6}`) or by their keys (`**{"optimizer.lr": 1e-6}`). Wherever a setting
            names a function, it may be one.

    Raises:
        ConfigError: a setting is wrong, with the key as it is in the settings.
        AlignerError: the run did not reach its end; the message says why and where its logs are.
    """
    given = {"model": model, "data": data, "validation": validation, "reward": reward, "max_steps": max_steps, "directory": directory}
    try:
        return _train(recipe, {name: value for name, value in given.items() if value is not None}, overrides, settings)
    except AlignerError as error:
        _show_short(error)
        raise


def _train(recipe: str, given: Mapping[str, Any], overrides: Sequence[str], settings: Mapping[str, Any]) -> Result:
    from aligner.algorithms.registry import composed
    from aligner.commands.programs import launch_local
    from aligner.reporting.run_view import RunView  # torch comes with all of these

    named = {_SHORT[name]: value for name, value in given.items() if not _is_section(value, name)}
    sections = {name: value for name, value in given.items() if _is_section(value, name)}
    leaves = dict(flat({**sections, **settings})) | named
    # What is written belongs into the run directory, whose name may be in the config.
    texts = [override(key, value) for key, value in leaves.items() if not _is_written(key, value)]
    later = [override(key, "given-later") for key, value in leaves.items() if _is_written(key, value) and not callable(value)]
    config = composed(recipe, [*overrides, *texts, *later])
    run = RunDirectory(Path(config.run.directory).absolute()).create()
    texts += [override(key, _write(run.path / _GIVEN, key, value)) for key, value in leaves.items() if _is_written(key, value)]
    with redirect_stdout(_Bar() if _is_notebook() else sys.stdout):  # type: ignore[type-var]
        code = launch_local(recipe, [*overrides, *texts])
    if code != ExitCode.done:
        raise _failure(run, recipe, code)
    return Result(
        directory=run.path,
        metrics=[{"step": record.step, **record.values} for record in RunView(run.path).metrics()],
        checkpoint=next(iter(sorted(run.checkpoints.glob("*/step_*"), reverse=True)), None),
        export=run.export if run.export.is_dir() else None,
    )


def _show_short(error: AlignerError) -> None:
    """If nobody catches it, scripts and notebooks show this error without the frames of this package: its message says what is wrong."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]  # what IPython asks for
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _one_sentence


def _one_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook` of a script: an error of `train` with the script's line; any other as Python shows it."""
    if not hasattr(error, "_render_traceback_"):
        return sys.__excepthook__(kind, error, trace)
    place = traceback.extract_tb(trace)[0]
    print(f"{place.filename}:{place.lineno}: {kind.__name__}: {error}", file=sys.stderr)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


class _Bar:
    """A notebook's stdout: the lines of steps move a bar, the others are printed."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found]  # the notebook has it

        self._stream, self._html, self._handle = sys.stdout, HTML, display(HTML(""), display_id=True)

    def write(self, text: str) -> int:
        if (step := re.search(r"\bstep +(\d+)/(\d+) .*", text)) is None:
            return self._stream.write(text)
        self._handle.update(self._html(f'<progress value="{step[1]}" max="{step[2]}"></progress> <code>{escape(step[0])}</code>'))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_section(value: Any, name: str) -> bool:
    """`model={"path": ..., "recompute": ...}` instead of the path alone."""
    return isinstance(value, Mapping) and name in ("model", "data", "reward")


def _is_written(key: str, value: Any) -> bool:
    """Whether the value becomes a file of the run directory: functions, and rows of data."""
    is_rows = key in ("data.train", "data.validation") and not isinstance(value, (str, Path)) and not is_mixture(value)
    return is_rows or (callable(value) and not isinstance(value, type))


def _write(folder: Path, key: str, value: Any) -> str:
    """Write what the setting `key` was given; returns the setting's text. Raises ConfigError for what cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    name = key.replace(".", "_")
    if isinstance(getattr(value, "num_rows", None), int):  # a `datasets.Dataset`, whose nulls may be Arrow's
        from pyarrow.parquet import write_table

        write_table(value.with_format("arrow")[:], folder / f"{name}.parquet")
        return str(folder / f"{name}.parquet")
    if not callable(value):
        return str(_write_rows(folder / f"{name}.jsonl", key, value))
    import dill  # comes with `datasets`; pickles functions of a notebook by value

    try:
        (folder / f"{name}.dill").write_bytes(dill.dumps(value, recurse=True))
    except Exception as error:
        raise ConfigError(f"{key}: {value!r} cannot be sent to the run's processes: {type(error).__name__}: {error}") from error
    program = f"""# Written by aligner.train: the function that {key} was given.
import sys
from pathlib import Path

sys.path += [path for path in {[path for path in sys.path if path]!r} if path not in sys.path]
import dill

function = dill.loads(Path(__file__).with_suffix(".dill").read_bytes())
"""
    (folder / f"{name}.py").write_text(program)
    return f"{folder / name}.py:function"


def _write_rows(path: Path, key: str, rows: Rows) -> Path:
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, default=_as_uri) + "\n")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}: row {number} is not a mapping of names to texts and numbers ({error}): {row!r:.80}") from error
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _as_uri(value: Any) -> str:
    """An image, Pillow's or as bytes, as text. Raises TypeError for anything else."""
    stream = io.BytesIO()
    if isinstance(value, bytes):
        stream.write(value)
    elif hasattr(value, "save") and hasattr(value, "mode"):
        value.save(stream, format="PNG")
    else:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _failure(run: RunDirectory, recipe: str, code: int) -> AlignerError:
    """Why a run ended, as the last of its processes that gave a reason says."""
    if code == ExitCode.stopped:
        return AlignerError(f"{recipe} was stopped before its last step: call it again with directory={str(run.path)!r} to continue")
    logs = sorted(run.logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
    texts = [f"\n{path.read_text(errors='replace')}" for path in logs]
    said = [text.rpartition("\nerror: ")[2] for text in texts if "\nerror: " in text]
    reason = "\n".join(said[-1].splitlines()[:_REASON_LINES]) if said else f"exit code {code}"
    kind = ConfigError if code == ExitCode.refused else AlignerError
    return kind(f"{reason} (logs: {run.logs})")
