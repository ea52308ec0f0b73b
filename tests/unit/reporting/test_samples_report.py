"""The report of a run: its curves, its samples before and after, and that nothing in it can be more than text."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from aligner import cli
from aligner.data.vision import ImageStore
from aligner.errors import DataError
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.rollout_table import read_rows, write_rows
from aligner.reporting.run_view import RunView, Samples
from aligner.reporting.samples_report import MAX_POINTS, chart, render, text_of
from aligner.types import FinishReason, SampleRow


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
    """The tags of a page, and the texts of its heading and table cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.heading = ""
        self.cells: list[str] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag in ("h1", "td"):
            self._open = tag
            self.cells += [""] * (tag == "td")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "h1":
            self.heading += data
        elif self._open == "td":
            self.cells[-1] += data


def test_the_command_writes_one_page_with_curves_and_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"reward +0\.100 +0\.400", out) and "before (step 0) and after (step 3)" in out
    page = (run / "report.html").read_text(encoding="utf-8")
    read = Texts(page)
    assert read.tags.count("svg") == 3  # rollout reward, validation reward, KL: the run has no other
    assert "script" not in read.tags and "b" not in read.tags and "link" not in read.tags and "\x1b" not in page
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
    assert "data.validation" in (run / "other.html").read_text() and "<table" not in (run / "other.html").read_text()


def test_what_is_no_run_is_refused(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: has no metrics.jsonl" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--output", str(tmp_path / "no" / "such.html")]) == 2
    assert "the report could not be written" in capsys.readouterr().err


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [row("a\u2028b\x85", "c\nd", math.inf), row("", "", -1.0, FinishReason.length)]
    path = write_rows(tmp_path, 1, rows)
    assert read_rows(path) == rows
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match=r"step_000001.jsonl:1: not a sample rollout"):
        read_rows(path)


def points(values: list[tuple[int, float]]) -> list[list[tuple[float, float]]]:
    """The coordinates of each line of a chart of (step, value)."""
    return [[tuple(float(x) for x in pair.split(",")) for pair in line.split()] for line in chart("", values).lines]


def test_charts_span_their_frame_and_break_where_there_is_no_number() -> None:
    # 62 to 508 pixels across, 148 (lowest) up to 12 (highest): step 5 of 0..10 is half way, value 3 of 1..5 too.
    assert points([(0, 1.0), (5, 3.0), (10, 5.0)]) == [[(62.0, 148.0), (285.0, 80.0), (508.0, 12.0)]]
    broken = points([(0, 1.0), (1, 2.0), (2, math.nan), (4, 5.0)])
    assert [len(line) for line in broken] == [2, 2] and broken[1][0] == broken[1][1]  # the point alone is drawn as a dot
    assert points([(7, 2.0)]) == [[(285.0, 80.0)] * 2]
    assert points([(1, math.nan)]) == []


def test_long_curves_are_thinned() -> None:
    (line,) = points([(step, float(step)) for step in range(10 * MAX_POINTS)])
    assert len(line) == MAX_POINTS
    assert line[0][0] == 62.0


def test_a_chart_is_an_svg_with_its_scale() -> None:
    records = [StepMetrics(step=step, time=0.0, values={"rollout/reward": value}) for step, value in enumerate((0.5, math.nan, 2.5))]
    page = render("run", records, None, None)
    assert "<span>0.500 to 2.500</span>" in page
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL)[0])
    assert svg.attrib["viewBox"] == "0 0 520 170"
    assert [line.attrib["points"] for line in svg.iter("polyline")] == ["62.0,148.0 62.0,148.0", "508.0,12.0 508.0,12.0"]
    assert [text.text for text in svg.iter("text")] == ["2.500", "0.500", "step 0", "2"]


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
    page = render(text, [], before, Samples(step=1, rows=[row(text, text), row("new" + text, text)]))
    clean = render("name", [], Samples(step=0, rows=[row("a", "b")]), Samples(step=1, rows=[row("a", "b"), row("c", "d")]))
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


def test_control_characters_are_shown_as_such() -> None:
    page = render("a\x00b\x1b[2J\u2028c", [], None, None)
    assert "a\ufffdb\ufffd[2J\ufffdc" in page and not {"\x00", "\x1b", "\u2028"} & set(page)


def test_a_run_that_has_just_begun() -> None:
    assert "no steps yet" in render("name & <co>", [], None, None)
    assert "name &amp; &lt;co&gt;" in render("name & <co>", [], None, None)
