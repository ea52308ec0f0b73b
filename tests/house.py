"""Measures of the package's structure, for `make house`: what a reader has to find their way through. Fails where one is above its limit.

python tests/house.py [--grpo]     --grpo also runs three steps of GRPO and counts what they import and enter

The limits are in tests/house.yaml: a change may lower one; one above its aim needs a line that gives the reason.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import networkx  # of torch's requirements
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "aligner"
LIMITS = ROOT / "tests" / "house.yaml"
TRACER = """
import inspect, runpy, sys, threading
entered = set()
def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function: no module, no body of a class
        entered.add((frame.f_code.co_filename, frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name))
threading.setprofile(profile); sys.setprofile(profile)
output, sys.argv = sys.argv[1], sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    sys.setprofile(None)
    with open(output, "w") as file:
        file.writelines(f"{name}\\t{function}\\n" for name, function in sorted(entered))
    with open(output + ".modules", "w") as file:
        file.writelines(f"{name}\\n" for name in sorted(sys.modules) if name.partition(".")[0] == "aligner")
"""


def trees() -> dict[str, ast.Module]:
    """Every module of the package, by dotted name."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        str(file.relative_to(ROOT).with_suffix("")).replace(os.sep, ".").removesuffix(".__init__"): ast.parse(file.read_text())
        for file in files
    }


def imports_of(name: str, tree: ast.Module, names: Iterable[str], *, later: bool = False) -> set[str]:
    """The modules of the package that this one imports; with `later` also those imported in functions and for type checking."""
    known, found = set(names), set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        is_later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        )
        if later or not is_later:
            waiting += ast.iter_child_nodes(node)
    return (found & known) - {name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other."""
    groups = networkx.strongly_connected_components(networkx.from_dict_of_lists(graph, networkx.DiGraph))
    return [sorted(group) for group in groups if len(group) > 1]


def depth(graph: Mapping[str, set[str]]) -> int:
    """Modules on the longest chain of imports (of a graph without circles)."""
    return 1 + networkx.dag_longest_path_length(networkx.from_dict_of_lists(graph, networkx.DiGraph))


def functions(modules: Mapping[str, ast.Module]) -> list[tuple[int, str]]:
    """(lines, name) of every function."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ((name, node) for name, tree in modules.items() for node in ast.walk(tree) if isinstance(node, kinds))
    return [((node.end_lineno or 0) - node.lineno + 1, f"{name}.{node.name}") for name, node in nodes]


def config_depth(modules: Mapping[str, ast.Module]) -> tuple[int, str]:
    """How many bases of the package stand above the deepest class that is named ...Config, ...Run, or Train..., and its name."""
    classes = {node.name: node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def of(name: str) -> int:
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
        return max((1 + of(base) for base in bases), default=0)

    configs = [name for name in classes if name.endswith(("Config", "Run")) or name.startswith("Train")]
    return max((of(name), name) for name in configs if any("dataclass" in ast.dump(one) for one in classes[name].decorator_list))


def files_of_a_recipe(modules: Mapping[str, ast.Module]) -> tuple[int, str]:
    """(median over recipes of the files that one consists of, the recipe with most): modules that name its settings, its config, its
    program in examples/nlp, and a test."""
    counts = []
    names = [{node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} for tree in modules.values()]
    for tree in modules.values():
        calls = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPE"]
        settings = {one.arg: ast.unparse(one.value) for call in calls if isinstance(call, ast.Call) for one in call.keywords}
        if "config" in settings:
            named = sum(settings["config"] in named_there for named_there in names)
            counts.append((named + 3, settings["name"].strip("'")))
    return (sorted(counts)[len(counts) // 2][0], f"(most: {max(counts)[1]}, {max(counts)[0]})") if counts else (0, "")


def entered_by_grpo() -> tuple[int, int, int]:
    """(modules imported, files entered, functions entered) of the package by three steps of GRPO in one process."""
    sys.path.insert(0, str(ROOT / "tests"))
    from same_numbers import CASES, MODEL, write_data

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_data(folder)
        settings = [setting.format(data=folder, runs=folder) for setting in (*MODEL, *CASES["grpo"].settings)]
        command = [sys.executable, "-c", TRACER, str(folder / "entered"), str(ROOT / "examples" / "nlp" / "train_grpo.py"), *settings]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, f"run.directory={folder / 'run'}"], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"GRPO ended with {done.returncode}: {done.stderr[-2000:]}")
        entered = [line.split("\t") for line in (folder / "entered").read_text().splitlines()]
        imported = len((folder / "entered.modules").read_text().splitlines())
    own = {(file, function) for file, function in entered if file.startswith(f"{PACKAGE}{os.sep}")}
    return imported, len({file for file, _ in own}), len(own)


def measures(*, grpo: bool) -> dict[str, tuple[int, str]]:
    """By name the number and a remark."""
    modules = trees()
    graph = {name: imports_of(name, tree, modules) for name, tree in modules.items()}
    sizes = {name: len(ast.unparse(tree).splitlines()) for name, tree in modules.items()}
    lines = {file: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    longest, config = max(functions(modules)), config_depth(modules)
    found = circles({name: imports_of(name, tree, modules, later=True) for name, tree in modules.items()})
    importers = {name: sum(name in others for others in graph.values()) for name in graph}
    small = [name for name, count in importers.items() if count == 1 and sizes[name] < 60]
    result = {
        "files": (len(lines), ""),
        "lines": (sum(lines.values()), ""),
        "loose top-level modules": (sum(file.parent == PACKAGE for file in lines), ""),
        "longest function": longest,
        "largest file": max((count, file.name) for file, count in lines.items()),
        "import depth": (depth(graph), "") if not circles(graph) else (0, "unknown: there are circles"),
        "circles": (len(found), "; ".join(" <-> ".join(group) for group in found)),
        "deepest config": config,
        "small modules with one importer": (len(small), ""),
        "files of a recipe": files_of_a_recipe(modules),
    }
    if grpo:
        imported, files, count = entered_by_grpo()
        result |= {
            "modules imported by GRPO": (imported, ""),
            "files entered by GRPO": (files, ""),
            "functions entered by GRPO": (count, ""),
        }
    return result


def limits() -> dict[str, int]:
    """The most that each measure may be. Raises ValueError for a limit above its aim without a reason, or for an unknown entry."""
    read: dict[str, dict[str, Any]] = yaml.safe_load(LIMITS.read_text())
    for name, entry in read.items():
        if entry.keys() - {"limit", "aim", "why"} or "limit" not in entry:
            raise ValueError(f"{LIMITS.name}: {name}: {sorted(entry)}; allowed: limit, and aim with why")
        if entry["limit"] > entry.get("aim", entry["limit"]) and not entry.get("why"):
            raise ValueError(f"{LIMITS.name}: {name}: limit={entry['limit']} is above aim={entry['aim']}: `why` must give the reason")
    return {name: entry["limit"] for name, entry in read.items()}


def main(argv: list[str]) -> int:
    allowed, failed = limits(), []
    for name, (number, remark) in measures(grpo="--grpo" in argv).items():
        limit = f"(at most {allowed[name]:,})" if name in allowed else ""
        print(f"{name:<32} {number:>8,}  {limit} {remark}".rstrip())
        if number > allowed.get(name, number):
            failed.append(f"{name}: {number:,} is above its limit of {allowed[name]:,} in {LIMITS.relative_to(ROOT)}")
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
