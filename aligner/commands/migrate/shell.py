"""Launch lines as people keep them: a script's variables, here-documents and continued lines, up to the words of each command."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

_ASSIGNMENT = re.compile(r"(?:(?:export|local|declare|readonly|typeset)\s+)?([A-Za-z_]\w*\+?)=(.*)", re.DOTALL)
_DIRECTIVE = re.compile(r"^#SBATCH\s+(?:-N\s*|--nodes[=\s])(\d+)\s*(?:#.*)?$", re.MULTILINE)
_PIECE = re.compile(
    r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\$\(.*?\)|\\.|(?<!&)&(?!&)|[^"'\\&;]|(?<=\\);)+""", re.DOTALL
)  # up to && or ; outside of quotes
_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_IS_EMPTY = re.compile(r'if\s+\[+\s+(?:-z\s+"?\$\{?(\w+)\}?"?|"?\$\{?(\w+)\}?"?\s+==?\s+"")\s+\]+')
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|([A-Za-z_]\w*|[@*#?0-9]))")
UNREAD = "\x00"  # begins a first word that says why a command could not be cut into words
_OPEN, _CLOSE = "\x01", "\x02"  # around a variable that is not known, while others are filled in
_ARRAY = re.compile(r"\s*(?:export\s+|local\s+|declare\s+-a\s+)?(\w+\+?)=\((.*)", re.DOTALL)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_OPERATORS |= {ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv}


def commands(text: str, folder: Path, variables: dict[str, str] | None = None) -> Iterator[list[str]]:
    """The words of each command of a script, in order, with its variables filled in; an unknown one stays (`${HOME}/x`, `${1}`), `"$@"` is
    empty. Among branches only `if [ -z "$NAME" ]` (also `"$NAME" == ""`) is followed; other branches count as taken. Commands of
    `bash -c`, and of a script in `folder` that this one sources or runs, count as if they were written here; if there is no such script,
    the words are `source NAME`."""
    variables = {} if variables is None else variables
    if nodes := _DIRECTIVE.search(text):
        variables |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes[1])
    skipping = 0  # depth of branches that are not taken
    for line in _logical_lines(text):
        stripped = line.strip()
        if re.match(r"if\b", stripped) and (skipping or _not_taken(stripped, variables)):
            skipping += not re.search(r"\bfi\s*$", stripped)
        elif skipping:
            skipping -= bool(re.match(r"fi\b", stripped))
        elif not re.match(r"(?:if|then|else|elif|fi|for|while|do|done|case|esac|function|set|echo|cd|mkdir)(?:\b|\s|$)|[{}]", stripped):
            for words in _one(stripped, variables):
                yield from _within(words, folder, variables)


def _within(words: list[str], folder: Path, variables: dict[str, str]) -> Iterator[list[str]]:
    """The commands of a shell or a script that these words start; the words themselves if they start none."""
    shell = next((place for place, word in enumerate(words) if re.fullmatch(r"(\S*/)?(ba|z)?sh", word)), None)
    if shell is not None and len(words) > shell + 2 and re.fullmatch(r"-\w*c", words[shell + 1]):
        yield from commands("\n".join(_PIECE.findall(words[shell + 2])), folder, variables)
        return
    sourced = words[0] in ("source", ".")
    start = 0 if sourced else shell
    name = words[start + 1] if start is not None and len(words) > start + 1 else ""
    if not (name and (sourced or name.endswith(".sh"))):
        yield words
    elif os.path.isfile(folder / name) and name not in variables:
        variables[name] = ""  # is being read: a script that runs itself is read once
        yield from commands((folder / name).read_text(), folder, variables if sourced else dict(variables))
    else:
        yield ["source", name]


def _one(line: str, variables: dict[str, str]) -> Iterator[list[str]]:
    found = _ASSIGNMENT.fullmatch(_with_sums(line, variables))
    if found and (value := _single_word(found[2])) is not None:
        name = found[1].rstrip("+")
        variables[name] = (f"{variables.get(name, '')} " if name != found[1] else "") + filled(value, variables)
        return
    if line.startswith("export "):
        return
    if re.match(r'\w+="?\$\(|"?\$\(', line):
        return  # a program's output, which is not known here
    words = _split(filled(line, variables))
    if words:
        yield words


def filled(text: str, variables: Mapping[str, str]) -> str:
    """The text with `$NAME`, `${NAME:-else}` and `$((arithmetic))` filled in; an unknown variable stays, as `${NAME}`."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name in variables and (variables[name] or found[2] is None):
            return filled(variables[name], {}) if variables[name] != found[0] else f"{_OPEN}{name}{_CLOSE}"
        if found[2] is not None:
            return found[2].strip("\"'")
        return "" if name in ("@", "*", "#", "?") else f"{_OPEN}{name}{_CLOSE}"

    text = re.sub(r"\$\{(?:\w+:?\+[^{}]*|[@*]:[^{}]*)\}", "", re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text))
    text = _with_sums(text, variables)
    while (done := _VARIABLE.sub(value, text)) != text:  # from the inside out
        text = done
    return text.replace(_OPEN, "${").replace(_CLOSE, "}")


def _with_sums(text: str, variables: Mapping[str, str]) -> str:
    """The text with the results of `$((arithmetic))`, as far as they are known."""

    def calculated(found: re.Match[str]) -> str:
        expression = _VARIABLE.sub(lambda name: variables.get(name[1] or name[3], name[0]), found[1])
        expression = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), expression)
        try:
            return str(_number(ast.parse(expression.strip(), mode="eval").body))
        except (SyntaxError, KeyError, TypeError, ValueError, ZeroDivisionError):
            return found[0]

    return _ARITHMETIC.sub(calculated, text)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"{ast.dump(node)} is not a whole number")


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with their continuations, without comments; the text of a here-document is one line."""
    lines = iter(text.replace("\\\r\n", "\\\n").splitlines())
    for line in lines:
        if (line.lstrip().startswith("#")) or not line.strip():
            continue
        if (found := _HERE_DOCUMENT.search(line)) is not None:
            body = [_open_end(other) for other in takewhile(lambda other, end=found[1]: other.strip() != end, lines)]
            if (name := re.search(r"\bread\b.*?(\w+)\s*<<", line)) is not None:
                yield f"{name[1]}={shlex.quote(_without_comments(body))}"
            continue
        if (array := _ARRAY.match(line)) is not None:
            body = [array[2]]
            while sum(part.count("(") - part.count(")") for part in body) >= 0:
                if (following := next(lines, None)) is None:
                    break
                body.append(_open_end(following))
            body[-1] = re.sub(r"\)\s*(#.*)?$", "", body[-1])
            yield f"{array[1]}={shlex.quote(_without_comments(body))}"
            continue
        while line.rstrip().endswith("\\") or not _is_closed(line):
            if (following := next(lines, None)) is None:
                break
            line = _open_end(line) + " " + ("\\" if following.lstrip().startswith("#") else following)
        parts = _PIECE.findall(_open_end(line)) if _is_closed(line) and "$(" not in line and "&&" in line else [line]
        yield from filter(None, map(str.strip, parts))


def _open_end(line: str) -> str:
    """A line without the backslash that continues it."""
    return line.rstrip().removesuffix("\\")


def _without_comments(lines: Sequence[str]) -> str:
    return " ".join(re.sub(r"(^|\s)#.*", "", line) for line in lines)


def _is_closed(line: str) -> bool:
    try:
        shlex.split(_open_end(line), comments=True)
    except ValueError:
        return False
    return True


def _split(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        return [f"{UNREAD}{error}", *line.split()]
    words = [word for word in words if word.strip()]
    for number, word in enumerate(words):
        if re.fullmatch(r"&?>{1,2}.*|2>.*|\||&|;|[12]?>&[12]|tee", word):
            return words[:number]  # the redirection of its output is not a setting
    return words


def _single_word(text: str) -> str | None:
    """The assigned value, if it is the rest of the line; None for `NAME=value command`."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return text.strip("'\"")
    if text.lstrip().startswith("("):
        return text.strip()
    return "" if not words else words[0].rstrip(";") if len(words) == 1 else None


def _not_taken(line: str, variables: Mapping[str, str]) -> bool:
    """Whether the line begins a branch that is not taken: arguments of the script are empty."""
    found = _IS_EMPTY.match(line)
    return bool(found) and bool(re.sub(r"\$\{\d+\}", "", variables.get(found[1] or found[2], "")))
