"""The packages that `gpu_check.py` brings to a GPU machine that reaches no network: fetched beforehand, installed there beside its own.

The machine has Python 3.12, torch with CUDA, transformers and what these need; its own packages stay. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

LIMIT_MIB = 60
SERVERS = "servers"  # the folder of OF_SERVERS
PYTHON = "3.12"
NEEDED = (
    *("megatron-core==0.19.2", "hydra-core==1.3.*", "omegaconf==2.3.*", "datasets", "dill", "multiprocess"),
    *("nvidia-pytriton==0.7.0", "tritonclient==2.*", "gevent", "geventhttpclient", "greenlet", "zope.event", "zope.interface", "brotli"),
    *("python-rapidjson", "pyzmq", "sh", "wrapt", "typing_inspect", "mypy_extensions", "importlib_metadata"),
    "trl==1.16.0",
)
OF_SERVERS = ("numpy==1.26.4",)  # PyTriton's stubs read arrays of text as numpy 1 writes them; in an environment of the servers' own
FROM_SOURCE = "antlr4-python3-runtime==4.9.3"  # omegaconf's; there is no wheel
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17)
# Triton's stubs for other Pythons, and the Python library that one of them brings: a third of the package.
LEFT_OUT = re.compile(rf"python_backend_stubs/(?!{re.escape(PYTHON)}/)|/libpython3-")


def fetch(folder: Path) -> None:
    """Download the wheels into `folder`. Raises RuntimeError where one is not to be had or they are larger than LIMIT_MIB."""
    servers = folder / SERVERS
    servers.mkdir(parents=True, exist_ok=True)
    for old in folder.rglob("*.whl"):
        old.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + [
        "--platform=manylinux2014_x86_64",
        "--platform=manylinux1_x86_64",
    ]
    chosen = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    for package in (*NEEDED, *OF_SERVERS):  # one by one: pip would want those of one call to fit together with what they need
        _pip("download", *chosen, f"--dest={servers if package in OF_SERVERS else folder}", package)
    _pip("wheel", "--no-deps", f"--wheel-dir={folder}", FROM_SOURCE)
    wheels = sorted(folder.rglob("*.whl"))
    for wheel in wheels:
        _slim(wheel)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{total:6.1f} MiB  in {folder}, of at most {LIMIT_MIB}")
    if total > LIMIT_MIB:
        raise RuntimeError(f"{folder}: {total:.1f} MiB of wheels, more than {LIMIT_MIB} MiB")


def _slim(wheel: Path) -> None:
    """Take LEFT_OUT out of a wheel, out of its record too, and pack it tighter."""
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(smaller, "w", zipfile.ZIP_LZMA) as target:
        for member in source.infolist():
            content = source.read(member)
            if LEFT_OUT.search(member.filename):
                continue
            if member.filename.endswith(".dist-info/RECORD"):
                content = b"".join(line for line in content.splitlines(keepends=True) if not LEFT_OUT.search(line.decode()))
            target.writestr(member, content, zipfile.ZIP_LZMA)
    smaller.replace(wheel)


def install(folder: Path, into: Path) -> tuple[Path, list[str]]:
    """Make two virtual environments beside this interpreter's packages: `into/venv` with the wheels of `folder` that it has not, and
    `into/servers` with these and the servers' own. Returns the first one's interpreter and the names and versions of the wheels.

    PyTriton's stubs start isolated and do not see what only PYTHONPATH shows, and it looks for its libraries in its interpreter's own
    environment alone.
    """
    ours = [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_here(wheel.name.split("-")[0])]
    own = sorted((folder / SERVERS).glob("*.whl"))
    first, second = _environment(into / "venv"), _environment(into / SERVERS)
    _pip_install(ours, first)
    shutil.copytree(first, second, copy_function=os.link, dirs_exist_ok=True, ignore=shutil.ignore_patterns("beside.pth"))
    _pip_install(own, second)
    return into / "venv" / "bin" / "python", ["-".join(wheel.name.split("-")[:2]) for wheel in ours + own]


def _environment(directory: Path) -> Path:
    """Its folder of packages, which come before those of this interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    site = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "beside.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    return site


def _pip_install(wheels: list[Path], site: Path) -> None:
    if wheels:
        _pip("install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", f"--target={site}", *map(str, wheels))


def _is_here(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)}:\n{(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    try:
        fetch(Path(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
