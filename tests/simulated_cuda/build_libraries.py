"""Builds stand-ins for NVIDIA's libraries, which torch's CUDA build is linked with: a runtime without a GPU, and everything else an error.

What a stand-in has to export is read from torch's own libraries (`nm`), so that any version of torch can be served.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
WRITTEN = {"libcudart.so": HERE / "runtime.c", "libcuda.so": HERE / "driver.c"}
# Libraries whose symbols carry no version, by how those begin. `libcuda.so.1` is loaded by name, never linked.
PREFIXES = {
    "nccl": "libnccl.so",
    "cuFile": "libcufile.so",
    "cusparseLt": "libcusparseLt.so",
    "curand": "libcurand.so",
    "nvshmem": "libnvshmem_host.so",
    "nvrtc": "libnvrtc.so",
    "cupti": "libcupti.so",
    "cu": "libcuda.so",
}
OF_NVIDIA = re.compile(r"^lib(cu|nccl|nv)\w*\.so")
# By the first two torch chooses between its attention kernels; the third is cudaErrorNoDevice, where no runtime is written.
ANSWERS = {"cudnnGetVersion": 91900, "cudnnGetCudartVersion": 13000, "cudaGetDeviceCount": 100}
NOT_SUPPORTED = 801  # cudaErrorNotSupported; not 0 and so an error to every other library's callers too
TEXT = re.compile(
    r"(cuda|cudnn|nccl|nvrtc|cublas|cusparse)\w*Get(Error|Status)(String|Name)"
)  # answers with a text, of which errors are made


def build_libraries(torch_libraries: Path, include: Path | None, into: Path) -> list[Path]:
    """Compiles a stand-in for every library of NVIDIA's that `torch_libraries` need into `into`; returns their paths.

    `include` holds the headers of NVIDIA's cuda-runtime package; None: no GPU is simulated, torch finds none.
    Raises CalledProcessError if `gcc` or `nm` fails.
    """
    needed, symbols = _needed(torch_libraries)
    into.mkdir(parents=True, exist_ok=True)
    return [_compile(soname, symbols[soname], include, into) for soname in sorted(needed | {"libcuda.so.1"})]


def _needed(torch_libraries: Path) -> tuple[set[str], dict[str, dict[str, str]]]:
    """The sonames to make, and for each its symbols with their version or ''."""
    sonames: set[str] = set()
    undefined: dict[str, str] = {}
    for library in sorted(torch_libraries.glob("*.so")):
        dynamic = _output("readelf", "-d", str(library))
        sonames |= {name for name in re.findall(r"Shared library: \[(.*?)\]", dynamic) if OF_NVIDIA.match(name)}
        for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            undefined[name] = version.lstrip("@")
    sonames.discard("libnvToolsExt.so.1")
    by_stem = {name.split(".so")[0] + ".so": name for name in sonames} | {"libcuda.so": "libcuda.so.1"}
    symbols: dict[str, dict[str, str]] = defaultdict(dict)
    for name, version in undefined.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        soname = version if version in sonames else by_stem.get(PREFIXES[prefix]) if prefix else None
        if soname is not None:
            symbols[soname][name] = version
    return sonames, symbols


def _compile(soname: str, symbols: dict[str, str], include: Path | None, into: Path) -> Path:
    written = WRITTEN.get(soname.split(".so")[0] + ".so") if include else None
    text = written.read_text(encoding="utf-8") if written else ""
    present = set(re.findall(r"\b(\w+)\(", text))
    stubs = "".join(map(_stub, sorted(symbols.keys() - present)))
    target = into / soname
    target.unlink(missing_ok=True)  # a package's own file may be a link into a cache
    source, versions = into / f"{soname}.c", into / f"{soname}.map"
    source.write_text(text + stubs, encoding="utf-8")
    named = sorted({version for version in symbols.values() if version})
    versions.write_text("".join(f"{version} {{ global: *; }};\n" for version in named), encoding="utf-8")
    script = [f"-Wl,--version-script={versions}"] if named else []
    command = [
        "gcc",
        "-w",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{HERE / 'include'}",
        f"-I{include}",
        f"-Wl,-soname,{soname}",
        "-Wl,-rpath,$ORIGIN",
        *script,
    ]
    subprocess.run([*command, "-o", str(target), str(source), "-ldl", "-lpthread"], check=True)
    source.unlink()
    versions.unlink()
    return target


def _stub(name: str) -> str:
    if TEXT.fullmatch(name):
        return f'const char *{name}() {{ return "not supported: this is a stand-in"; }}\n'
    return f"int {name}() {{ return {ANSWERS.get(name, NOT_SUPPORTED)}; }}\n"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
