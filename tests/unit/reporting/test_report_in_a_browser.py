"""The report as a browser shows it, opened from disk: its charts, its widths, and that text of models does nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium

from aligner import cli
from aligner.reporting.rollout_table import write_rows
from aligner.types import FinishReason, SampleRow

pytestmark = pytest.mark.browser

HOSTILE = [
    "<script>document.title = 'broken'</script>",
    "<img src=x onerror=\"document.title = 'broken'\">",
    "[link](javascript:document.title='broken')",
    "</script><script>document.title = 'broken'</script><!--",
    "</td></table></body>" + "wide" * 200,
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two runs whose names, metrics, settings and samples are hostile."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [folder / "<img src=x onerror=alert(1)>", folder / "second"]
    for number, run in enumerate(runs):
        (run / "validation").mkdir(parents=True)
        for step in (0, 50):
            rows = [SampleRow(prompt=text, response=text + str(step), reward=1.0, finish_reason=FinishReason.stop) for text in HOSTILE]
            write_rows(run / "validation", step, rows)
        records = [
            {
                "step": k,
                "time": 10.0 * k,
                "rollout/reward": math.sin(k / 9) + number,
                "policy/kl": k / 100,
                "time/step": 2.0,
                "time/train": 1.5,
            }
            | {"sft/loss": 3.0 - k * 1e-6, "own/" + HOSTILE[1]: k, "own/" + HOSTILE[3]: "NaN"}
            for k in range(1, 51)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (run / "config.yaml").write_text(json.dumps({"data": {"train": HOSTILE[number]}, "run": {"seed": number}}))
    output = folder / "report.html"
    assert cli.main(["report", *map(str, runs), "-o", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with chromium() as driver:
        yield driver


def show(browser: object, page: Path, *, width: int, dark: bool = False) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colours]})
    browser.get(page.as_uri())


OPEN_AND_SCROLL = """
const done = arguments[0];
document.querySelectorAll("details").forEach((one) => { one.open = true; });
const charts = [...document.querySelectorAll(".chart")];
const next = () => {
  const missing = charts.filter((chart) => !chart.querySelector("canvas"));
  if (!missing.length) { done(charts.map((chart) => chart.querySelector("canvas").width)); return; }
  missing[0].scrollIntoView();
  setTimeout(next, 50);
};
next();
"""


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_all_charts_are_drawn_and_nothing_scrolls_sideways(browser: object, page: Path, width: int, dark: bool) -> None:
    show(browser, page, width=width, dark=dark)
    browser.set_script_timeout(60)
    widths = browser.execute_async_script(OPEN_AND_SCROLL)
    assert len(widths) == 8 and min(widths) > 300  # five with a curve of each run (one all NaN), the seconds, and the phases of each
    assert browser.execute_script("const page = document.documentElement; return page.scrollWidth - page.clientWidth") == 0
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert browser.get_log("browser") == []


def test_hostile_text_does_nothing(browser: object, page: Path) -> None:
    show(browser, page, width=1400)
    browser.set_script_timeout(60)
    browser.execute_async_script(OPEN_AND_SCROLL)
    over = "const box = document.querySelectorAll('.chart')[0]; box.scrollIntoView(); return [box.clientWidth, box.clientHeight]"
    browser.execute_script(over)
    chart = browser.find_elements("css selector", ".chart")[0]
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(chart).perform()  # the tooltip is HTML with the names of the runs
    shown = browser.execute_async_script(
        "const done = arguments[0]; setTimeout(() => done(document.querySelectorAll('.chart')[0].innerText), 500)"
    )
    assert "<img src=x onerror=alert(1)>" in shown
    assert "broken" not in browser.title and "broken" not in browser.execute_script("return document.title")
    assert browser.find_elements("css selector", "img, a") == []
    cells = [cell.text for cell in browser.find_elements("css selector", "td")]
    assert all(text in cells for text in HOSTILE)
    assert browser.get_log("browser") == []


def test_without_scripts_the_figures_and_samples_are_there(browser: object, page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(browser, page, width=1400)
        text = browser.find_element("css selector", "body").text
        assert "require JavaScript" in text and "Greedy responses to the same prompts" in text and HOSTILE[0] in text
        assert browser.find_elements("css selector", "canvas") == []
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_the_logarithmic_switch(browser: object, page: Path) -> None:
    show(browser, page, width=1400)
    browser.set_script_timeout(60)
    browser.execute_async_script(OPEN_AND_SCROLL)
    browser.execute_script("document.getElementById('logarithmic').click()")
    types = browser.execute_script("return [...drawn.keys()].sort((a, b) => a - b).map((k) => drawn.get(k).getOption().yAxis[0].type)")
    assert types == ["value", "log", "log", "log", "value", "value", "log", "log"]
