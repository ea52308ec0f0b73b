"""Files for people: HTML pages of one file each, with templates/style.html in it, and nothing from elsewhere.

Jinja2 escapes everything that models, data and configs wrote: a response that is HTML is shown, not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from aligner.errors import AlignerError, describe_os_error
from aligner.files import publish
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
