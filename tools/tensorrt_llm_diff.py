"""Compares the recorded contract with an installed TensorRT-LLM, by reading its sources: nothing of it is imported, no GPU is needed.

    python tools/tensorrt_llm_diff.py                               # the installed package against the contract of its version
    python tools/tensorrt_llm_diff.py --contract 1.2.1 --package /path/to/tensorrt_llm

Prints each difference and ends with status 1 if there is one, 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from aligner.rollout.tensorrt_llm.contract import PACKAGE, Contract, Symbol, known_versions, load

Function = ast.FunctionDef | ast.AsyncFunctionDef


def differences(contract: Contract, package: Path) -> list[str]:
    """The parts of the contract that the package in this directory breaks, one line each."""
    found = []
    for symbol in contract.symbols.values():
        file = package / Path(symbol.file).relative_to(PACKAGE)
        if not file.is_file():
            found.append(f"{symbol.file}: there is no such file ({symbol.name})")
            continue
        found += [f"{symbol.file}: {symbol.name}: {wrong}" for wrong in _compare(symbol, ast.parse(file.read_text()))]
    return found


def _compare(symbol: Symbol, tree: ast.Module) -> Iterator[str]:
    owner, _, name = symbol.name.rpartition(".")
    if symbol.signature is not None:
        yield from _compare_function(symbol, _function(tree, owner, name))
        return
    holder = _class(tree, owner if symbol.assigned else symbol.name)
    if holder is None:
        yield "there is no such class"
    elif symbol.assigned:
        if name not in _attributes(holder):
            yield "nothing is assigned to it"
    elif symbol.members is not None:
        held = _members(holder)
        yield from (
            f"member {key} is {held.get(key, 'missing')!r}, not {value!r}"
            for key, value in symbol.members.items()
            if held.get(key) != value
        )
    else:
        held = _fields(tree, holder)
        yield from (f"field {field} is missing" for field in symbol.fields or () if field not in held)


def _compare_function(symbol: Symbol, function: Function | None) -> Iterator[str]:
    if function is None:
        yield "there is no such function"
        return
    arguments = function.args
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args) if one.arg != "self"]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    keyword = dict(zip((one.arg for one in arguments.kwonlyargs), arguments.kw_defaults, strict=True))
    known = symbol.parameters().parameters
    for name, parameter in known.items():
        if parameter.kind == parameter.VAR_POSITIONAL:
            if arguments.vararg is None:
                yield f"takes no *{name}"
        elif parameter.kind == parameter.VAR_KEYWORD:
            if arguments.kwarg is None:
                yield f"takes no **{name}"
        elif name not in positional and name not in keyword:
            if arguments.kwarg is None or parameter.default is parameter.empty:
                yield f"argument {name} is missing"
    for name in positional:
        if name not in known and name not in defaults:
            yield f"argument {name} is required, and not known"
    yield from (f"argument {name} is required, and not known" for name, default in keyword.items() if default is None and name not in known)
    listed = [name for name, one in known.items() if one.kind == one.POSITIONAL_OR_KEYWORD and name in positional]
    if listed != [name for name in positional if name in listed]:
        yield f"its arguments come in the order {positional}"


def _function(tree: ast.Module, owner: str, name: str) -> Function | None:
    holder = _class(tree, owner) if owner else tree
    body = [] if holder is None else holder.body
    return next((node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name), None)


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _fields(tree: ast.Module, holder: ast.ClassDef) -> set[str]:
    """Annotated names and their aliases, of the class and of its bases in the same file."""
    names = set()
    for node in holder.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
            if isinstance(node.value, ast.Call):
                names |= {key.value.value for key in node.value.keywords if key.arg == "alias" and isinstance(key.value, ast.Constant)}
    for base in holder.bases:
        if isinstance(base, ast.Name) and (parent := _class(tree, base.id)) is not None:
            names |= _fields(tree, parent)
    return names


def _members(holder: ast.ClassDef) -> dict[str, object]:
    pairs = ((node.targets[0], node.value) for node in holder.body if isinstance(node, ast.Assign))
    return {target.id: value.value for target, value in pairs if isinstance(target, ast.Name) and isinstance(value, ast.Constant)}


def _attributes(holder: ast.ClassDef) -> set[str]:
    """Names that are assigned to `self`, and properties."""
    names = {node.name for node in holder.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(holder):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--package", type=Path, help="directory of the package's sources; default: the installed one")
    parser.add_argument("--contract", choices=known_versions(), help="default: the installed version's")
    chosen = parser.parse_args(arguments)
    try:
        wanted = chosen.contract or version(PACKAGE)
    except PackageNotFoundError:
        print(f"{PACKAGE} is not installed: say --contract and --package", file=sys.stderr)
        return 2
    spec = find_spec(PACKAGE) if chosen.package is None else None
    package = chosen.package or (Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None)
    if wanted not in known_versions() or package is None or not package.is_dir():
        print(f"nothing to compare: version {wanted} (known: {', '.join(known_versions())}), sources in {package}", file=sys.stderr)
        return 2
    contract = load(wanted)
    found = differences(contract, package)
    print("\n".join(found) if found else f"{package}: all {len(contract.symbols)} entries of the contract {wanted} hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
