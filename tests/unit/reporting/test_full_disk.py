"""A full disk costs lines and tables, never the run; what is on disk stays readable."""

from __future__ import annotations

import errno
import io
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aligner.cluster.run_directory import RunDirectory
from aligner.errors import describe_os_error
from aligner.reporting import reporter as reporting
from aligner.reporting.config import LoggingConfig
from aligner.reporting.jsonl import MetricsFile, read_metrics
from aligner.reporting.reporter import Reporter
from aligner.types import FinishReason, SampleRow


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within the block the kernel refuses to let a file of this process grow beyond `size` bytes (EFBIG)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_line_that_did_not_fit_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(1, {"a/x": 1.0})
    with largest_file(path.stat().st_size + 10):  # ten bytes of the next line could be written
        with pytest.raises(OSError) as raised:
            file.write(2, {"a/x": 2.0})
    assert raised.value.errno == errno.EFBIG
    assert [record.step for record in read_metrics(path)] == [1]
    file.write(3, {"a/x": 3.0})
    file.write(3, {"a/y": 4.0})
    file.close()
    assert [(record.step, record.values) for record in read_metrics(path)] == [(1, {"a/x": 1.0}), (3, {"a/x": 3.0, "a/y": 4.0})]


def test_the_run_goes_on_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, stream = RunDirectory(tmp_path / "run").create(), io.StringIO()
    row = SampleRow(prompt="p", response="r", reward=1.0, finish_reason=FinishReason.stop)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = LoggingConfig(tensorboard=False)
    with Reporter(config, run_directory=run, columns=(), total_steps=3, stream=stream) as reporter:
        reporter.log(1, {"a/x": 1.0})
        with largest_file(run.metrics.stat().st_size):
            reporter.log(2, {"a/x": 2.0})
        monkeypatch.setattr(reporting, "write_rows", full)
        reporter.table(2, [row])
        reporter.log(3, {"a/x": 3.0})
    said = stream.getvalue()
    assert "warning: the metrics of step 2 could not be written, the run continues: the file would be larger" in said
    assert f"warning: the rollouts of step 2 could not be written, the run continues: the file system is full: {run.rollouts}" in said
    assert [record.step for record in read_metrics(run.metrics)] == [1, 3]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EDQUOT, "?", "f"), "the quota of this user or project is used up: f (EDQUOT: Disk quota exceeded)"),
        (OSError(errno.ENOTDIR, "?"), "Not a directory: given (ENOTDIR)"),
        (OSError("odd"), "given: odd"),
    ],
)
def test_what_an_error_number_means(error: OSError, text: str) -> None:
    assert describe_os_error(error, "given") == text
