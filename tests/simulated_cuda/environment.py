"""Makes a virtual environment in which torch's CUDA build finds a simulated GPU: `python environment.py DIRECTORY`; standard library only.

torch and triton come from the package index as they are (three quarters of a gigabyte). NVIDIA's libraries (several gigabytes) do not:
stand-ins are compiled in their place (build_libraries.py). Needs gcc and binutils. Exit code 3: it cannot be made here, and the last line
says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))
# The version of the GPU machines that the project was given to run on, and its CUDA's headers.
TORCH, RUNTIME = "torch==2.11.0", "nvidia-cuda-runtime==13.0.96"
REPLACED = ("cuda-", "nvidia-")
CANNOT = 3


def main(directory: Path) -> None:
    """Make the environment, or leave it if it is complete."""
    python, done = directory / "bin" / "python", directory / ".complete"
    if done.exists() and done.read_text(encoding="utf-8") == _version():
        return
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            _cannot(f"{tool} is not installed")
    print(f"creating {directory} with {TORCH} of CUDA and a simulated GPU (three quarters of a gigabyte to fetch, once)", flush=True)
    _run(sys.executable, "-m", "venv", str(directory))
    _pip(python, "--no-deps", TORCH, RUNTIME)
    packages = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    forget_requirements(packages)
    from simulated_cuda.build_libraries import build_libraries

    build_libraries(packages / "torch" / "lib", packages / "nvidia" / "cu13" / "include", packages / "nvidia" / "cu13" / "lib")
    _pip(python, "--editable", f"{TESTS.parent}[servers,mpi,dev]")
    (packages / "simulated_cuda.pth").write_text(f"{TESTS}\nimport simulated_cuda.startup\n", encoding="utf-8")
    _run(str(python), "-c", "import torch; assert (torch.ones(2, device='cuda') + 1).tolist() == [2, 2]")
    done.write_text(_version(), encoding="utf-8")


def forget_requirements(packages: Path) -> None:
    """Take what is replaced out of torch's requirements, or pip would bring it with the next package."""
    metadata = next(packages.glob("torch-*.dist-info")) / "METADATA"
    lines = metadata.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(tuple(f"Requires-Dist: {name}" for name in REPLACED))]
    metadata.write_text("\n".join(kept) + "\n", encoding="utf-8")


def _version() -> str:
    """What the environment was made from."""
    sources = sorted((TESTS / "simulated_cuda").glob("*.c")) + [TESTS / "simulated_cuda" / "build_libraries.py", TESTS.parent / "setup.py"]
    return "\n".join([TORCH, RUNTIME, *(path.read_text(encoding="utf-8") for path in sources)])


def _pip(python: Path, *arguments: str) -> None:
    # What an index beside the ordinary one or a folder of wheels offers is a CPU build, if it is torch.
    ordinary = {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""} if TORCH in arguments else {}
    _run(str(python), "-m", "pip", "install", "--quiet", *arguments, environment=ordinary)


def _run(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})}, check=False)
    if done.returncode:
        _cannot(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _cannot(why: str) -> None:
    print(f"error: the environment with a simulated GPU cannot be made here: {why}", file=sys.stderr)
    raise SystemExit(CANNOT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
