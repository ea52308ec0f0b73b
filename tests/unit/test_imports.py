"""The pins fit: everything that a run may need imports in one process, and the config module stays light."""

import ast
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HEAVY = ["megatron", "tensorrt_llm", "pytriton", "tritonclient", "mpi4py", "transformers", "datasets"]


def major(package: str) -> int:
    return int(version(package).split(".")[0])


@pytest.mark.pytriton
def test_versions_fit_pytriton():
    assert major("numpy") < 2, "nvidia-pytriton 0.7 was built against numpy 1"
    assert major("pyarrow") < 26, "pyarrow 26 needs numpy 2"


@pytest.mark.pytriton
def test_everything_imports_together():
    program = """
import numpy, pyarrow, datasets, transformers, tokenizers, safetensors, rich, hydra, omegaconf
import aligner.parallel.mcore
import megatron.core
import pytriton.triton, pytriton.client, tritonclient.http
import torch
assert torch.from_numpy(numpy.arange(3)).sum() == 3  # torch and numpy agree on the ABI
assert pyarrow.array(numpy.arange(3)).sum().as_py() == 3
print("together")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "together" in done.stdout


def test_a_cuda_build_of_torch_without_a_gpu_is_no_news(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    pretends = "torch.cuda._is_compiled = lambda: True; torch.cuda.is_available = lambda: False; torch.version.cuda = '13.0'"
    program = f"import torch; {pretends}; import aligner.parallel.mcore; print(torch.utils.cpp_extension.CUDA_HOME)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("/nowhere\n", "")


def test_config_module_loads_nothing_heavy():
    program = f"import json, sys, aligner.settings; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_files_that_are_no_python_are_packaged():
    root = Path(__file__).parents[2]
    (call,) = (
        node for node in ast.walk(ast.parse((root / "setup.py").read_text())) if getattr(getattr(node, "func", None), "id", "") == "setup"
    )
    declared = next(ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == "package_data")
    packaged = {file for package, globs in declared.items() for name in globs for file in (root / package.replace(".", "/")).glob(name)}
    files = {file for file in (root / "aligner").rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert packaged == files
