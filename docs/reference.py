"""For the reference of the site (mkdocs.yml): the comment on a field's line, or an enum member's, is its description, as in `--help`."""

from __future__ import annotations

import contextlib
import io
import tokenize
from typing import Any

import griffe


class Comments(griffe.Extension):
    """Gives attributes of classes that have no docstring the comment on their (last) line."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class and attr.endlineno is not None:
            line = attr.lines_collection[attr.filepath][attr.endlineno - 1]
            if comment := comment_of(line):
                attr.docstring = griffe.Docstring(comment, lineno=attr.endlineno, endlineno=attr.endlineno, parent=attr)


def comment_of(line: str) -> str:
    """The comment at the end of a line of Python, without its mark; empty where there is none."""
    with contextlib.suppress(tokenize.TokenError, IndentationError):  # a line may be the end of what began before it
        for token in tokenize.generate_tokens(io.StringIO(line.strip()).readline):
            if token.type == tokenize.COMMENT:
                return token.string.lstrip("# ")
    return ""
