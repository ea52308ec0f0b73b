"""The studio in a real browser: runs that go on, curves, samples that attack the page, comparisons; what it writes, and what it fetches."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import browser
import pytest
from browser import Page, studio
from training_jobs import run_aligner

from aligner.cluster.lease import LeaseRecord
from aligner.cluster.run_directory import RunDirectory
from aligner.reporting.jsonl import MetricsFile
from aligner.reporting.rollout_table import write_rows
from aligner.types import FinishReason, SampleRow, SampleTurn, TokenTable

pytestmark = pytest.mark.browser
HOSTILE = (
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "<svg onload=window.hacked=1>",
    "[a](javascript:window.hacked=1)",
    '"><iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>',
    "{{ constructor.constructor('window.hacked = 1')() }}",
    "${window.hacked = 1}",
    "$$\\href{javascript:window.hacked=1}{x}$$",
    "</script><script>window.hacked = 1</script>",
    "\u202eevil\u2028line\x00\x1b[31mred",
)


def _rows(response: str, reward: float = 0.5) -> list[SampleRow]:
    kinds = (FinishReason.stop, FinishReason.length)
    return [
        SampleRow(prompt=f"prompt {i // 2}", response=f"{response} {i}", reward=reward + i, finish_reason=kinds[i % 2]) for i in range(6)
    ]


def _sessions() -> list[SampleRow]:
    """A session of two branches, and one without."""
    common = {"prompt": "Use the tool.", "finish_reason": FinishReason.stop}
    turns = (
        SampleTurn(number=0, heard="", text="look", reward=0.25),
        SampleTurn(number=2, heard="the tool says 4", text="it is 4", reward=0.0),
    )
    table = TokenTable(texts=("look", "it is 4"), numbers={"sampler": (-1.0, -2.0), "entropy": (0.5, 0.25), "turn": (0.0, 2.0)})
    return [
        SampleRow(**common, response="look[[the tool says 4]]it is 4", reward=1.0, episode=0, turns=turns, tokens=table),
        SampleRow(
            **common, response="forget it", reward=1.0, episode=0, turns=(replace(turns[0], number=1, text="forget it", reward=0.0),)
        ),
        SampleRow(**common, response="another session", reward=0.0),
    ]


def _make(folder: Path, name: str, *, steps: int, recipe: str = "grpo", lr: float = 0.1, done: bool = True) -> RunDirectory:
    run = RunDirectory(folder / name).create()
    run.record(recipe=recipe)
    run.config.write_text(f"loop: {{max_steps: 100}}\noptimizer: {{lr: {lr}}}\n")
    with_metrics(run, 1, steps)
    write_rows(run.rollouts, 1, _rows("first"))
    write_rows(run.rollouts, steps, _rows("last"))
    run.validation.mkdir()
    write_rows(run.validation, steps, [SampleRow(prompt="what?", response=f"of {name}", reward=1.0, finish_reason=FinishReason.stop)])
    run.log("actor", 0).write_text("step 1\nstep 2 \x1b[31mred\x1b[0m\n")
    if done:
        run.done.write_text(json.dumps({"step": steps}))
    else:
        lease = LeaseRecord(job="local-1", attempt="local-1.0", host="here", pid=os.getpid(), valid_seconds=3600.0)
        run.lease.write_text(json.dumps(asdict(lease)))
    return run


def with_metrics(run: RunDirectory, first: int, last: int) -> None:
    metrics = MetricsFile(run.metrics, resumed_step=first - 1)
    for step in range(first, last + 1):
        values = {"rollout/reward": 1 - 1 / step, "policy/loss": 1 / step, "policy/entropy": 0.5, "time/step": 1.0, "time/train": 0.6}
        metrics.write(step, values | {"optim/grad_norm": float("nan") if step == 3 else 1.0})
    metrics.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("studio")
    _make(root, "first", steps=20)
    _make(root, "group/second", steps=30, lr=0.2)
    _make(root, "live", steps=5, done=False)
    write_rows(RunDirectory(root / "first").rollouts, 20, [*_rows("last"), *_sessions()])
    hostile = _make(root, "<img src=x onerror='window.hacked = 1'>", steps=4, recipe="{{ constructor.constructor('window.hacked=1')() }}")
    write_rows(
        hostile.rollouts, 4, [SampleRow(prompt=text, response=text, reward=0.0, finish_reason=FinishReason.stop) for text in HOSTILE]
    )
    hostile.log("actor", 0).write_text("\n".join(HOSTILE))
    hostile.config.write_text(json.dumps({"loop": {"max_steps": 9}, "data": {"train": HOSTILE[0]}}))
    return root


@pytest.fixture(scope="module")
def seen(folder: Path) -> Iterator[Page]:
    with studio(folder) as url, browser.chromium() as driver:
        page = Page(driver, url)
        assert "token" not in driver.current_url  # neither the address bar nor the history keeps it
        yield page


def _rows_shown(seen: Page) -> list[str]:
    """The text of each line of the table of runs; one read, because the page changes meanwhile."""
    return list(seen.driver.execute_script("return [...document.querySelectorAll('tbody tr')].map(row => row.innerText)"))


def test_all_runs_are_listed_and_a_live_one_goes_on(seen: Page, folder: Path) -> None:
    seen.open("/")
    assert len(seen.until(lambda: len(_rows_shown(seen)) == 4 and _rows_shown(seen))) == 4
    live = next(text for text in _rows_shown(seen) if text.startswith("\tlive") or "\nlive" in text or "live\t" in text)
    assert "running" in live and "5 of 100" in live and "grpo" in live
    with_metrics(RunDirectory(folder / "live"), 6, 9)
    seen.wait_for("9 of 100")
    search = seen.all("input[type=text], input:not([type])")[0]
    search.send_keys("second")
    seen.until(lambda: len(_rows_shown(seen)) == 1)
    search.clear()


def test_curves_are_drawn_and_grow(seen: Page, folder: Path) -> None:
    seen.open("/run/live")
    seen.until(lambda: seen.all("canvas"))
    assert "step 9 of 100" in seen.text or "step 5 of 100" in seen.text
    with_metrics(RunDirectory(folder / "live"), 10, 14)
    seen.wait_for("step 14 of 100")
    seen.click("all")
    seen.until(lambda: len(seen.all("canvas")) >= 4)
    assert "norm of the gradient" in seen.text  # which is NaN at step 3: a gap
    assert not browser.errors(seen.driver)


def test_samples_by_step_and_filter(seen: Page) -> None:
    seen.open("/run/first?part=samples")
    seen.wait_for("last 0", "last 5")
    from selenium.webdriver.common.keys import Keys

    search = next(one for one in seen.all("input") if one.get_attribute("aria-label") == "Search")
    search.send_keys("last 4")
    seen.until(lambda: "prompt 2" in seen.text and "prompt 0" not in seen.text)
    seen.click("Validation")
    search.send_keys(Keys.CONTROL, "a")
    search.send_keys("of first")
    seen.wait_for("what?")


def test_sessions_with_their_turns_and_branches(seen: Page) -> None:
    seen.open("/run/first?part=samples")
    seen.wait_for("session 0 of 2 branches")
    (group,) = [card.text for card in seen.all("main .q-card") if card.text.startswith("Use the tool.")]
    expected = ("branch 1", "turn 1, reward +0.25", "look", "the tool says 4", "turn 3", "it is 4", "branch 2", "turn 2", "forget it")
    places = [group.index(text) for text in expected]
    assert places == sorted(places) and group.index("+1.000") < places[0] and "another session" in group


def test_before_and_after(seen: Page) -> None:
    """The same prompts at the first and the last step, and no other prompt."""
    seen.open("/run/first?part=samples")
    seen.wait_for("last 0")
    seen.choose("Step", "before and after")
    seen.wait_for("first, step 1", "first, step 20", "first 0")
    assert "last 0" in seen.text and "Use the tool." not in seen.text


def test_a_long_response_is_colored_token_by_token(seen: Page, folder: Path) -> None:
    long = RunDirectory(folder / "first")
    texts = tuple("<b>" if i % 7 == 0 else f"w{i} " for i in range(32_000))
    numbers = {"sampler": tuple(-i / 1000 for i in range(32_000)), "trainer": tuple(-i / 1001 for i in range(32_000))}
    row = SampleRow(
        prompt="long?",
        response="".join(texts),
        reward=1.0,
        finish_reason=FinishReason.length,
        tokens=TokenTable(texts=texts, numbers=numbers),
    )
    write_rows(long.rollouts, 99, [row])
    seen.open("/run/first?part=samples")
    seen.click("Tokens")
    colored = "return [...document.querySelectorAll('[aria-label=Tokens] span')].map(one => [one.innerText, one.style.backgroundColor])"
    first = seen.until(lambda: seen.driver.execute_script(colored))
    assert first[0][0] == "<b>" and len({color for _, color in first}) > 1 and len(first) < 8000  # what is out of sight is not in the page
    assert first[1] == ["w1 ", first[1][1]] and "orange -32 to blue" in seen.text
    seen.driver.execute_script("document.querySelector('[aria-label=Tokens]').scrollTop = 1e7")
    seen.until(lambda: any(text == "w31999 " for text, _ in seen.driver.execute_script(colored)))
    (long.rollouts / "step_000099.jsonl").unlink()


def test_a_comparison(seen: Page) -> None:
    seen.open("/compare?run=first&run=group/second")
    seen.wait_for("optimizer.lr", "0.2")
    seen.wait_for("of first", "of group/second")
    assert seen.all("canvas")
    seen.open("/compare?run=first&run=nothing")
    seen.wait_for("There is no run 'nothing'")


def test_hostile_text_is_shown_and_does_nothing(seen: Page) -> None:
    name = "%3Cimg%20src%3Dx%20onerror%3D'window.hacked%20%3D%201'%3E"
    for path in (
        "/",
        f"/run/{name}",
        f"/run/{name}?part=samples",
        f"/run/{name}?part=logs",
        f"/run/{name}?part=settings",
        f"/compare?run={name}",
    ):
        seen.open(path)
        seen.wait_for("<img src=x")
        if "samples" in path or "logs" in path:
            seen.wait_for("<script>window.hacked = 1</script>", "{{ constructor")
        time.sleep(0.5)
        assert seen.driver.execute_script("return window.hacked === undefined"), path
        assert not seen.all("iframe") and not seen.all("img[src=x]")


PAGES = {
    "/": "group/second",
    "/run/first": "Logarithmic",
    "/run/first?part=time": "phases of a step",
    "/run/first?part=samples": "turn 3",
    "/run/first?part=findings": "Nothing found.",
    "/run/first?part=settings": "config.yaml",
    "/run/first?part=logs": "step 2 red",
    "/run/first?part=files": "aligner launch local grpo",
    "/compare?run=first&run=group/second": "optimizer.lr",
    "/new": "Plan",
    "/chat": "Ctrl+Enter sends",
}


@pytest.mark.parametrize("path", PAGES)
def test_nothing_comes_from_elsewhere_and_pages_are_accessible(seen: Page, path: str) -> None:
    """On light and on dark ground."""
    seen.open(path)
    seen.until(lambda: PAGES[path] in seen.text)
    time.sleep(0.5)
    assert [url for url in browser.fetched(seen.driver) if not url.startswith((seen.url, "data:", "blob:"))] == []
    assert not browser.axe(seen.driver)
    with browser.dark(seen.driver):
        seen.until(lambda: seen.all("body.body--dark"))
        time.sleep(0.5)  # colors fade
        assert not browser.axe(seen.driver)


def test_the_keyboard_is_enough(seen: Page) -> None:
    """Tab reaches everything in the order of the page, and shows where it is; Enter and arrows do what a click does."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> tuple[str, bool]:
        """What has the focus then, by its name, and whether a line is around it."""
        ActionChains(seen.driver).send_keys(*keys).perform()
        name = "document.activeElement.ariaLabel || document.activeElement.innerText"
        line = "(({outlineStyle, boxShadow}) => outlineStyle == 'solid' || boxShadow != 'none')(getComputedStyle(document.activeElement))"
        return tuple(seen.driver.execute_script(f"return [{name}, {line}]"))

    seen.open("/")
    seen.wait_for("group/second")
    found = [press(Keys.TAB) for _ in range(5)]
    assert [name for name, _ in found] == ["Runs", "New run", "Chat", "Filter by name, recipe or state", "Show archived runs"]
    assert all(is_framed for name, is_framed in found if "Filter" not in name)  # a field has a frame of its own
    names: list[str] = []
    while "first" not in names and len(names) < 60:
        names.append(press(Keys.TAB)[0])
    press(Keys.ENTER)
    seen.until(lambda: seen.driver.current_url.endswith("/run/first") and seen.all("canvas"))
    names = []
    while "curves" not in names and len(names) < 20:
        names.append(press(Keys.TAB)[0].strip())
    press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    press(Keys.ENTER)
    seen.wait_for("Truncated only")


def test_archived_runs_leave_the_list(seen: Page, folder: Path) -> None:
    seen.open("/")
    seen.until(lambda: len(_rows_shown(seen)) == 4)
    seen.driver.execute_script("document.querySelector('[aria-label=\"Select group/second\"]').click()")  # rows are drawn anew meanwhile
    seen.until(lambda: seen.driver.execute_script("return !document.querySelector('button[aria-label=Archive]').disabled"))
    seen.driver.execute_script("document.querySelector('button[aria-label=Archive]').click()")
    seen.until(lambda: len(_rows_shown(seen)) == 3)
    assert json.loads((folder / ".aligner_studio.json").read_text()) == {"archived": ["group/second"]}
    (folder / ".aligner_studio.json").unlink()


NAMES = "--host-resolver-rules=MAP portal.test 127.0.0.1"
PROXY = """
import sys
from aiohttp import ClientSession, WSMsgType, web
from yarl import URL
import asyncio
port, strips, root = int(sys.argv[1]), sys.argv[2] == "strips", sys.argv[3]
OWN = {"host", "connection", "upgrade", "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions"}

async def copy(source, target):
    async for message in source:
        await (target.send_str(message.data) if message.type is WSMsgType.TEXT else target.send_bytes(message.data))
    await target.close()

async def passed_on(request):
    path = request.raw_path.removeprefix(root) if strips else request.raw_path
    headers = {name: value for name, value in request.headers.items() if name.lower() not in OWN}
    async with ClientSession(f"http://127.0.0.1:{port}", auto_decompress=False) as session:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            front = web.WebSocketResponse()
            await front.prepare(request)
            async with session.ws_connect(path or "/", headers=headers) as back:
                await asyncio.gather(copy(front, back), copy(back, front))
            return front
        target = URL(path or "/", encoded=True)
        async with session.request(request.method, target, headers=headers, data=await request.read(), allow_redirects=False) as answer:
            kept = [(k, v) for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "content-length", "connection")]
            return web.Response(status=answer.status, body=await answer.read(), headers=kept)

app = web.Application()
app.router.add_route("*", root + "{tail:.*}", passed_on)
async def main():
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["strips", "keeps"])
def test_behind_a_proxy_s_path(folder: Path, kind: str) -> None:
    root = "/node/n1/8080"
    with studio(folder, "--root-path", root, "--allow-host", "portal.test") as url, browser.chromium(NAMES) as driver:
        port = url.split(":")[2].split("/")[0]
        with subprocess.Popen([sys.executable, "-c", PROXY, port, kind, root], stdout=subprocess.PIPE, text=True) as proxy:
            try:
                assert proxy.stdout is not None
                front = f"http://portal.test:{int(proxy.stdout.readline())}{root}"
                page = Page(driver, f"{front}/?{url.partition('?')[2]}")
                page.until(lambda: len(_rows_shown(page)) == 4)
                driver.execute_script("[...document.querySelectorAll('tbody tr a')].find(link => link.innerText == 'first').click()")
                page.until(lambda: page.all("canvas"))
                assert driver.current_url == f"{front}/run/first"
                page.click("Runs")
                page.until(lambda: len(_rows_shown(page)) == 4)
            finally:
                proxy.kill()


def test_read_only_writes_nothing_and_a_taken_port_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(folder / "first", copy / "first")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    with studio(copy, "--read-only") as url, browser.chromium() as driver:
        page = Page(driver, url)
        page.wait_for("first")
        assert not re.search(r"archive\n", page.text, re.IGNORECASE)
        page.open("/run/first")
        page.until(lambda: page.all("canvas"))
        port = url.split(":")[2].split("/")[0]
        code, said = run_aligner("studio", copy, "--port", port)
        assert code and f"--port {port}" in said
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    code, said = run_aligner("studio", "nowhere", cwd=tmp_path)
    assert code == 2 and "nowhere: is not a directory" in said
