"""Files for people: HTML pages of one file each, with templates/style.html in it, and nothing from elsewhere.

Jinja2 escapes everything that models, data and configs wrote: a response that is HTML is shown, not run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from aligner.errors import AlignerError, describe_os_error
from aligner.files import publish
from aligner.reporting.charts import Panel
from aligner.reporting.formats import number


def render_page(template: str, **values: Any) -> str:
    """The page of a template in templates/, with these values."""
    environment = Environment(
        loader=PackageLoader("aligner.reporting"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = number
    return environment.get_template(template).render(values)


def drawing(charts: Sequence[Panel]) -> dict[str, Any]:
    """The values with which a page that includes templates/charts.html draws these."""
    (library, of_library), (program, of_program) = (_script(name) for name in ("echarts.common.min.js", "charts.js"))
    options = [panel.option for panel in charts]
    return {"options": options, "allowed": Markup(f"{of_library} {of_program}"), "library": library, "program": program}


def _script(name: str) -> tuple[Markup, Markup]:
    """A file of static/ as it is, and as the page's policy names what may run."""
    text = (files("aligner.reporting") / "static" / name).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(text), Markup(f"'sha256-{digest}'")


def publish_text(path: Path, text: str, what: str, use: str = "") -> None:
    """Write a file, and print that it is there and its `use`. Raises AlignerError if it cannot be written."""
    try:
        publish(path, lambda new: new.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise AlignerError(f"{what} could not be written: {describe_os_error(error, path)}") from error
    print(f"written to {path}{use}")


def _visible(value: Any) -> Any:
    """A value as shown on a page: text without control characters other than line ends and tabs."""
    if type(value) is not str:  # numbers, and what the page's own macros made
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value)
