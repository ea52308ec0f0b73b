"""Launch lines as people keep them: a script's variables, here-documents and continued lines, up to the words of each command."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
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
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def commands(text: str, folder: Path, variables: dict[str, str] | None = None) -> Iterator[list[str]]:
    """The words of each command of a script, in order, with its variables filled in; `export` and assignments are no commands.

    A variable that the script does not set stays (`${HOME}/x`), as does an argument (`${1}`); `"$@"` is empty. Of branches
    only `if [ -z "$NAME" ]` (also `"$NAME" == ""`) is followed; other assignments in branches count as if the branch were taken.
    What `bash -c "..."` runs counts as written here, and so does a script in `folder` that this one sources or runs; of a script
    that is not there the words are `source NAME`.
    """
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
    """What a shell or a script that these words start does; the words themselves where they start none."""
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
        return  # what a program prints, which nobody knows here
    words = _split(filled(line, variables))
    if words:
        yield words


def filled(text: str, variables: Mapping[str, str]) -> str:
    """`$NAME`, `${NAME:-else}` and `$((arithmetic))` in a text; what is not known stays, as `${NAME}`."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name in variables and (variables[name] or found[2] is None):
            return filled(variables[name], {}) if variables[name] != found[0] else _hidden(name)
        if found[2] is not None:
            return found[2].strip("\"'")
        return "" if name in ("@", "*", "#", "?") else _hidden(name)

    text = re.sub(r"\$\{(?:\w+:?\+[^{}]*|[@*]:[^{}]*)\}", "", re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text))
    text = _with_sums(text, variables)
    while (done := _VARIABLE.sub(value, text)) != text:  # from the inside out
        text = done
    return text.replace(_OPEN, "${").replace(_CLOSE, "}")


def _hidden(name: str) -> str:
    return f"{_OPEN}{name}{_CLOSE}"


def _with_sums(text: str, variables: Mapping[str, str]) -> str:
    return _ARITHMETIC.sub(
        lambda found: _calculated(_VARIABLE.sub(lambda name: variables.get(name[1] or name[3], name[0]), found[1]), found[0], variables),
        text,
    )


def _calculated(expression: str, written: str, variables: Mapping[str, str]) -> str:
    names = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found[0], found[0]), expression)
    try:
        return str(_number(ast.parse(names.strip(), mode="eval").body))
    except (SyntaxError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return written


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"{ast.dump(node)} is no whole number")


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with what continues them, without comments; the text of a here-document is one line."""
    lines = iter(text.replace("\\\r\n", "\\\n").splitlines())
    for line in lines:
        if (line.lstrip().startswith("#")) or not line.strip():
            continue
        if (found := _HERE_DOCUMENT.search(line)) is not None:
            body = []
            for other in lines:
                if other.strip() == found[1]:
                    break
                body.append(other.rstrip().removesuffix("\\"))
            if (name := re.search(r"\bread\b.*?(\w+)\s*<<", line)) is not None:
                yield f"{name[1]}={shlex.quote(_without_comments(body))}"
            continue
        if (array := _ARRAY.match(line)) is not None:
            body = [array[2]]
            while sum(part.count("(") - part.count(")") for part in body) >= 0:
                if (following := next(lines, None)) is None:
                    break
                body.append(following.rstrip().removesuffix("\\"))
            body[-1] = re.sub(r"\)\s*(#.*)?$", "", body[-1])
            yield f"{array[1]}={shlex.quote(_without_comments(body))}"
            continue
        while line.rstrip().endswith("\\") or not _is_closed(line):
            following = next(lines, None)
            if following is None:
                break
            joined = line.rstrip().removesuffix("\\") + " "
            line = joined if following.lstrip().startswith("#") else joined + following
            if following.lstrip().startswith("#"):
                line += "\\"
        for part in _PIECE.findall(line.rstrip().removesuffix("\\")) if _is_closed(line) and "$(" not in line and "&&" in line else [line]:
            if part.strip():
                yield part.strip()


def _without_comments(lines: Sequence[str]) -> str:
    return " ".join(re.sub(r"(^|\s)#.*", "", line) for line in lines)


def _is_closed(line: str) -> bool:
    try:
        shlex.split(line.rstrip().removesuffix("\\"), comments=True)
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
            return words[:number]  # where its output goes is no setting
    return words


def _single_word(text: str) -> str | None:
    """What is assigned, if that is all of the line; None for `NAME=value command`."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return text.strip("'\"")
    if text.lstrip().startswith("("):
        return text.strip()
    return "" if not words else words[0].rstrip(";") if len(words) == 1 else None


def _not_taken(line: str, variables: Mapping[str, str]) -> bool:
    """An argument that the script was not given is empty."""
    found = _IS_EMPTY.match(line)
    return bool(found) and bool(re.sub(r"\$\{\d+\}", "", variables.get(found[1] or found[2], "")))
