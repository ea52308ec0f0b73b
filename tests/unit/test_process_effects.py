"""The table of process-wide effects in docs/architecture.md and the code say the same: every patch of a foreign module, every environment
variable that is set, every signal handler, filter and timer is in the table under its file, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADING = "## What is changed in the process"
# Functions whose effect is on the whole process; a name without a dot is one of Megatron-Core's.
CALLS = set(
    """
    atexit.register faulthandler.dump_traceback_later faulthandler.enable faulthandler.register gc.disable gc.freeze logging.basicConfig
    logging.disable model_parallel_cuda_manual_seed numpy.random.seed os.chdir os.putenv os.sched_setaffinity os.setsid os.umask
    random.seed resource.setrlimit signal.setitimer signal.signal sys.meta_path.insert sys.setprofile sys.setrecursionlimit sys.settrace
    threading.setprofile torch.cuda.manual_seed torch.cuda.manual_seed_all torch.cuda.set_device torch.cuda.set_rng_state
    torch.library.Library torch.manual_seed torch.set_default_device torch.set_default_dtype torch.set_float32_matmul_precision
    torch.set_num_interop_threads torch.set_num_threads torch.set_rng_state torch.use_deterministic_algorithms
    transformers.quantizers.auto.register_quantizer warnings.filterwarnings
    warnings.simplefilter
    """.split()
)
LOGGERS = {"setLevel", "addFilter"}
MODULES = ("ModuleType", "types.ModuleType")  # annotations; attributes of such a value, and of a `type`, are somebody else's


class Effects(ast.NodeVisitor):
    """Collects the names of a module's effects: dotted for what is imported, else the attribute alone."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
        self._imported: dict[str, str] = {}
        self._others: set[str] = set()  # variables that are modules or classes of somebody else
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        loaders = {one.name for one in functions if one.returns is not None and ast.unparse(one.returns) in MODULES}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    if not name.name.startswith("aligner"):
                        self._imported[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.module and (not node.module.startswith("aligner") or "mcore" in node.module):
                self._imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) in (*MODULES, "type"):
                self._others.add(node.arg)
            elif isinstance(node, ast.Assign) and any(self._is_load(value, loaders) for value in _parts(node.value)):
                self._others |= {name.id for target in node.targets for name in _parts(target) if isinstance(name, ast.Name)}
        self._loaders = loaders
        self.visit(tree)

    @staticmethod
    def _is_load(node: ast.expr, loaders: set[str]) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in loaders

    def _dotted(self, node: ast.expr) -> str:
        """The full name of what is imported; of an attribute of somebody else's value that attribute; '' for anything of ours."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, "")
        if isinstance(node, ast.Subscript):
            return self._dotted(node.value)
        if isinstance(node, ast.Attribute):
            owner = node.value
            if (isinstance(owner, ast.Name) and owner.id in self._others) or self._is_load(owner, self._loaders):
                return node.attr
            return f"{self._dotted(owner)}.{node.attr}" if self._dotted(owner) else ""
        return ""

    def _assigned(self, targets: list[ast.expr]) -> None:
        for target in (part for one in targets for part in _parts(one)):
            if isinstance(target, (ast.Attribute, ast.Subscript)) and (name := self._dotted(target)):
                self.found.add(name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node.targets)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, (ast.Attribute, ast.Subscript)):
            self._assigned([node.target])
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._assigned(node.targets)

    def visit_Call(self, node: ast.Call) -> None:
        function, name = node.func, self._dotted(node.func)
        if isinstance(function, ast.Name) and function.id in ("setattr", "delattr"):
            self.found.add(function.id)
        elif name in CALLS or name.rpartition(".")[2] in CALLS:
            self.found.add(name if name in CALLS else name.rpartition(".")[2])
        elif name.startswith("os.environ.") and name.rpartition(".")[2] in ("update", "setdefault", "pop", "clear"):
            self.found.add("os.environ")
        elif isinstance(function, ast.Attribute) and function.attr in LOGGERS:
            self.found.add(function.attr)
        elif (
            isinstance(function, ast.Attribute) and function.attr in ("update", "setdefault") and self._dotted(function.value) == "__dict__"
        ):
            self.found.add("__dict__")
        self.generic_visit(node)


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    yield from node.elts if isinstance(node, ast.Tuple) else [node]


def in_code() -> set[tuple[str, str]]:
    files = sorted((ROOT / "aligner").rglob("*.py"))
    return {(str(file.relative_to(ROOT / "aligner")), name) for file in files for name in Effects(ast.parse(file.read_text())).found}


def in_table() -> list[tuple[str, str]]:
    section = (ROOT / "docs/architecture.md").read_text().split(f"\n{HEADING}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert all(len(row) == 5 and all(cell.strip() for cell in row) for row in rows), rows
    return [(file, name) for row in rows for file in re.findall(r"`([^`]+)`", row[1]) for name in re.findall(r"`([^`]+)`", row[0])]


def test_the_table_has_what_the_code_does_and_nothing_else() -> None:
    code, table = in_code(), in_table()
    assert len(code) > 50
    assert sorted(code - set(table)) == [], "not in the table of docs/architecture.md"
    assert sorted(set(table) - code) == [], "in the table of docs/architecture.md and not in the code"
    assert len(table) == len(set(table))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch\ntorch.Tensor.cuda = None", {"torch.Tensor.cuda"}),
        ("from torch import nn as n\ndef f(self):\n    n.Module.cuda, self.a = 1, 2", {"torch.nn.Module.cuda"}),
        ("import os\nos.environ['A'] = 'b'\nos.environ.setdefault('A', 'b')\ndel os.environ['A']\nos.environ.get('A')", {"os.environ"}),
        ("def f(optimizer: type, own: dict):\n    optimizer.step = 1\n    own.step = 1", {"step"}),
        (
            "import types\ndef load(n) -> types.ModuleType: ...\na, b = load('x'), load('y')\na.f = b.g = 1\nload('z').h = 2",
            {"f", "g", "h"},
        ),
        ("import logging\nlogging.getLogger('a').setLevel(1)", {"setLevel"}),
        ("from aligner.models import build\nbuild.x = 1\nx = y = 2\nself.z = 3", set()),
        ("import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore')", {"warnings.simplefilter"}),
        ("import torch\ntorch.manual_seed(1)\nsetattr(torch, 'a', 1)", {"torch.manual_seed", "setattr"}),
    ],
)
def test_what_is_found(text: str, names: set[str]) -> None:
    assert Effects(ast.parse(text)).found == names
