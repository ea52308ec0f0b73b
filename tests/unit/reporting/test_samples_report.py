"""The report of runs: figures, curves, differences, samples, and that nothing in it can be more than text."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from aligner import cli
from aligner.data.vision import ImageStore
from aligner.reporting.formats import Column, Goal
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.rollout_table import write_rows
from aligner.reporting.run_view import RunView, Samples
from aligner.reporting.samples_report import Reported, fragment, render, text_of
from aligner.types import FinishReason, SampleRow

LIBRARY_SHA256 = "61f13280aba3161f77fc801bf5f9c786f55f10432153a0683fc5cc0700b013d5"  # of echarts 6.1.0's dist/echarts.common.min.js
COLUMNS = (Column("reward", "rollout/reward", ".3f", Goal.highest), Column("KL", "policy/kl"))


def row(prompt: str, response: str, reward: float = 0.5, finish_reason: FinishReason = FinishReason.stop) -> SampleRow:
    return SampleRow(prompt=prompt, response=response, reward=reward, finish_reason=finish_reason)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of three steps, with validations after steps 0, 2 and 3."""
    directory = tmp_path / "run"
    (directory / "validation").mkdir(parents=True)
    write_rows(directory / "validation", 0, [row("one <b>", "old 1", 0.0), row("two", "old 2", finish_reason=FinishReason.length)])
    write_rows(directory / "validation", 2, [row("one <b>", "middle"), row("two", "middle")])
    write_rows(directory / "validation", 3, [row("two", "new 2", 1.0), row("one <b>", "<script>alert(1)</script>\x1b[2J", 1.0)])
    steps = [{"validation/reward": 0.25}, *({"rollout/reward": reward, "policy/ref_kl": reward / 10} for reward in (0.1, 0.2, 0.4))]
    lines = [json.dumps({"step": step, "time": 100.0 + step, **values}) for step, values in enumerate(steps)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


class Texts(HTMLParser):
    """The tags of a page, and the texts of its heading, of its tables' cells, and of those of the samples, the last table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.heading = ""
        self.tables: list[list[str]] = []
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag == "table":
            self.cells = []
            self.tables.append(self.cells)
        if tag in ("h1", "td", "script"):
            self._open = tag
            self.cells += [""] * (tag == "td")
            self.scripts += [""] * (tag == "script")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "h1":
            self.heading += data
        elif self._open == "td":
            self.cells[-1] += data
        elif self._open == "script":
            self.scripts[-1] += data


def test_the_command_writes_one_page_with_curves_and_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run)]) == 0
    assert "<script" not in fragment(RunView(run), COLUMNS)  # for a notebook
    out = capsys.readouterr().out
    assert re.search(r"reward +0\.100 +0\.400", out) and "before (step 0) and after (step 3)" in out
    page = (run / "report.html").read_text(encoding="utf-8")
    read = Texts(page)
    titles = re.findall("<figcaption>(.*)</figcaption>", page)
    assert titles == ["reward of the rollouts", "reward on validation prompts", "KL to the start or reference, nats per token"]
    assert read.tags.count("script") == 3 and "b" not in read.tags and "link" not in read.tags and "\x1b" not in page
    assert [option["series"][0]["data"] for option in json.loads(read.scripts[0])][0] == [[1, 0.1], [2, 0.2], [3, 0.4]]
    assert read.tables[0][:4] == ["reward", "0.100", "0.400", "0.400 @ 3"]
    # In the order of the later validation, each prompt with its own responses.
    assert read.cells == [
        *("two", "reward 0.500, ended by lengthold 2", "reward 1.000new 2"),
        *("one <b>", "reward 0.000old 1", "reward 1.000<script>alert(1)</script>\N{REPLACEMENT CHARACTER}[2J"),
    ]


def test_a_run_without_validations_has_a_page_too(run: Path) -> None:
    for path in (run / "validation").iterdir():
        path.unlink()
    assert RunView(run).before_and_after() == (None, None)
    assert text_of(None, None) == ""
    assert cli.main(["report", str(run), "--output", str(run / "other.html")]) == 0
    page = (run / "other.html").read_text()
    assert "data.validation" in page and "Greedy responses" not in page
    page = render([Reported(name="name & <co>\x00b\x1b[2J\u2028c")], COLUMNS)  # it has just begun
    assert "no steps yet" in page and "name &amp; &lt;co&gt;\ufffdb\ufffd[2J\ufffdc" in page and "<script" not in page
    assert not {"\x00", "\x1b", "\u2028"} & set(page)


def test_what_is_no_run_is_refused(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: has no metrics.jsonl" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--output", str(tmp_path / "no" / "such.html")]) == 2
    assert "the report could not be written" in capsys.readouterr().err


def test_several_runs_are_set_side_by_side(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    (other / "validation").mkdir(parents=True)
    write_rows(other / "validation", 3, [row("two", "other 2"), row("three", "other 3")])
    (other / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "rollout/reward": 0.7}\n{"step": 2, "time": 2.0, "rollout/reward": 0.6}\n'
    )
    (run / "config.yaml").write_text(
        f"run: {{directory: a, seed: 1}}\noptimizer: {{lr: 0.1}}\nold: [1]\nlong: {'a' * 200 + 'b' + 'a' * 200}\n"
    )
    (other / "config.yaml").write_text(f"run: {{directory: b, seed: 1}}\noptimizer: {{lr: 0.2}}\nlong: {'a' * 401}\n")
    assert cli.main(["report", str(run), str(other), "-o", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out.startswith(f"\n{run}\nsteps 0 to 3")
    page = (tmp_path / "both.html").read_text()
    read = Texts(page)
    assert read.heading == "run, other"
    assert read.tables[0] == ["reward", "0.400 (0.400)", "0.600 (0.700)", "KL", "0.0400", "", "val reward", "0.250 (0.250)", ""]
    assert read.tables[1][:6] == ["optimizer.lr", "0.1", "0.2", "old", "[1]", ""]
    assert read.tables[1][6] == "long" and len(read.tables[1]) == 9  # cut, but they differ
    assert "<th>run before (step 0)</th><th>run after (step 3)</th><th>other after (step 3)</th>" in page
    assert read.cells[:4] == ["two", "reward 0.500, ended by lengthold 2", "reward 1.000new 2", "reward 0.500other 2"]
    assert read.cells[-4:-2] == ["one <b>", "reward 0.000old 1"]
    assert [line["name"] for line in json.loads(read.scripts[0])[0]["series"]] == ["run", "other"]
    (other / "config.yaml").write_text("- no\n")
    assert cli.main(["report", str(run), str(other)]) == 2
    assert "config.yaml: not the configuration of a run" in capsys.readouterr().err


def test_only_the_scripts_of_the_page_may_run() -> None:
    """The policy names the two scripts by their digests, and the drawing one is the published file."""
    page = render([Reported(name="run", records=[StepMetrics(step=1, time=0.0, values={"a/</script>\u2028<!--": 1.0})])], COLUMNS)
    read = Texts(page)
    allowed = re.search("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src ([^\"]+)", page)[1].split()
    digests = [hashlib.sha256(script.encode()).digest() for script in read.scripts[1:]]
    assert allowed == [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    assert digests[0].hex() == LIBRARY_SHA256
    assert len(read.scripts) == 3 and "<" not in read.scripts[0] and read.scripts[0].isascii()
    assert json.loads(read.scripts[0])[0]["series"][0]["name"] == "a/</script>\u2028<!--"


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "</td></table></body>",
        "\"'>&amp;",
        "{{ 7 * 7 }}{% raw %}",
        "]]><!--",
        "</style></title>",
        "  a\n\tb  ",
    ],
)
def test_every_text_of_a_run_stays_text(text: str) -> None:
    before = Samples(step=0, rows=[row(text, text)])
    after = Samples(step=1, rows=[row(text, text), row("new" + text, text)])
    records = [StepMetrics(step=1, time=0.0, values={"rollout/reward": 1.0, text: 2.0})]
    page = render([Reported(name=text, records=records, before=before, after=after)], COLUMNS)
    before, after = Samples(step=0, rows=[row("a", "b")]), Samples(step=1, rows=[row("a", "b"), row("c", "d")])
    clean = render(
        [Reported(name="name", records=[replace(records[0], values={"rollout/reward": 1.0, "x": 2.0})], before=before, after=after)],
        COLUMNS,
    )
    read = Texts(page)
    assert read.tags == Texts(clean).tags  # no tag more
    responses = ["reward 0.500" + text] * 2
    assert (read.heading, read.cells) == (text, [text, *responses, "new" + text, "", responses[0]])


def test_prompts_of_one_text_are_told_apart_by_their_images(run: Path) -> None:
    store = ImageStore(run / "images")
    red, blue = (io.BytesIO() for _ in range(2))
    Image.new("RGB", (400, 20), "red").save(red, "PNG")
    Image.new("L", (8, 8)).save(blue, "JPEG")
    digests = [store.put(red.getvalue()), store.put(blue.getvalue()), "f" * 64, "../../etc/passwd"]
    for step, said in ((0, "old"), (3, "new")):
        rows = [replace(row("What?", f"{said} {number}"), images=(digest,)) for number, digest in enumerate(digests)]
        write_rows(run / "validation", step, [*rows, replace(row("What?", said), images=tuple(digests[:2]))])
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    read = Texts(page)
    assert read.tags.count("img") == 4 and page.count("its file is missing") == 2
    assert [cell.rpartition("0.500")[2] for cell in read.cells if "reward" in cell][:4] == ["old 0", "new 0", "old 1", "new 1"]
    sources = [base64.b64decode(found) for found in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert [Image.open(io.BytesIO(source)).size for source in sources] == [(160, 8), (8, 8)] * 2
