"""A real browser for tests of pages: the system's Chromium, headless, driven by Selenium; and the studio's pages in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def missing() -> str | None:
    """Why pages cannot be looked at here; None if they can."""
    for package in ("selenium", "nicegui", "axe_core_python"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    programs = (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",))
    return next((f"there is no {names[0]} on PATH" for names in programs if not any(map(shutil.which, names))), None)


@contextmanager
def chromium(*arguments: str, width: int = 1400, height: int = 1000) -> Iterator[Any]:
    """A driver of a window of this size, in CSS pixels, with more of Chromium's arguments."""
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--window-size={width},{height}",
        *arguments,
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def dark(driver: Any) -> Iterator[None]:
    """Pages are shown as to somebody who prefers a dark ground."""
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def errors(driver: Any) -> list[str]:
    """What the page complained of since the last call."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def fetched(driver: Any) -> list[str]:
    """The addresses of everything that the page has loaded."""
    return list(driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)"))


def axe(driver: Any) -> list[str]:
    """Violations that axe-core finds in the page, the serious and critical ones: contrast, labels, keyboard."""
    import axe_core_python

    driver.execute_script((Path(axe_core_python.__file__).parent / "axe.min.js").read_text())
    found = driver.execute_async_script("const done = arguments[0]; axe.run(document, {resultTypes: ['violations']}).then(done)")
    return [
        f"{one['id']}: {one['help']}: {node['html'][:200]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]


class Page:
    """A page of a studio, used as a person does: by labels of fields, names of buttons and what can be read."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url.partition("/?")[0]
        driver.get(url)

    def open(self, path: str) -> None:
        self.driver.get(self.url + path)

    @property
    def text(self) -> str:
        return str(self.driver.execute_script("return document.body.innerText"))

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        """What the condition gives once it is true. Looks seldom: to read a page costs the browser time, which on a busy machine the studio
        needs."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited {seconds:g} s; the page says {self.text[:2000]!r}"
            time.sleep(0.2)
        return found

    def wait_for(self, *texts: str, seconds: float = 60.0) -> None:
        self.until(lambda: all(text in self.text for text in texts), seconds)

    def named(self, name: str) -> list[Any]:
        """The buttons, tabs, links and switches with this text that can be seen."""
        same = f"normalize-space()='{name}'"
        path = f"//button[{same}] | //a[{same}] | //*[@role='tab'][{same}] | //label[{same}] | //*[@role='switch'][{same}]"
        return [one for one in self.driver.find_elements("xpath", path) if one.is_displayed()]

    def click(self, name: str) -> None:
        self.until(lambda: self.named(name))[0].click()

    def field(self, label: str) -> Any:
        return self.all(f'input[aria-label="{label}"], textarea[aria-label="{label}"]')[0]

    def choose(self, label: str, option: str) -> None:
        """An option of a list."""
        self.all(f'[aria-label="{label}"]')[0].click()
        path = f"//*[@role='option'][normalize-space()='{option}']"
        self.until(lambda: self.driver.find_elements("xpath", path))[0].click()


@contextmanager
def studio(folder: Path, *options: str, end: int = signal.SIGTERM, **variables: str) -> Iterator[str]:
    """The address, with the token, of `aligner studio` over the folder, which is ended by this signal."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-u", "-m", "aligner.cli", "studio", str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root) as server:
        try:
            yield next(line.split()[1] for line in server.stdout or () if line.startswith("open: "))
        finally:
            server.send_signal(end)
            assert server.wait(30) in (0, -end)
