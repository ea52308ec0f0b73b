"""A real browser for tests of pages: the system's Chromium, headless, driven by Selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
