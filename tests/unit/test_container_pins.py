"""The versions of the images, all in docker/versions.txt: exact, allowed by setup.py. No network, no Docker."""

import ast
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu", "Dockerfile.vllm")
PINS, OF_VLLM = ROOT / "docker" / "versions.txt", ROOT / "docker" / "versions-vllm.txt"
ON_GPUS = ("Dockerfile", "Dockerfile.vllm")
# What the GPU image takes from its base image instead of a pin.
FROM_THE_BASE = set(
    "aiohttp click datasets filelock huggingface-hub jinja2 numpy pillow psutil pyarrow rich safetensors".split()
    + "tokenizers torch transformers".split()
)


def installations(name: str) -> list[list[str]]:
    """The words of every `pip install` of a Dockerfile."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    found = re.findall(r"^RUN pip install (.*)$|&& pip install (.*)$", text, re.MULTILINE)
    return [shlex.split("".join(line).split("&&")[0]) for line in found]


def packages(words: list[str]) -> set[str]:
    """What a `pip install` names, without extras; not the checkout."""
    options = {"--constraint", "--extra-index-url"}
    named = [word for i, word in enumerate(words) if not word.startswith("-") and (i == 0 or words[i - 1] not in options) and word != "."]
    return {canonicalize_name(word.partition("[")[0]) for word in named}


def pins(name: str) -> dict[str, str]:
    """The versions that an image pins: those of its packages."""
    every = runpy.run_path(str(ROOT / "docker" / "image.py"))["pinned"]()
    if name == "Dockerfile.vllm":
        every |= {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines_of(OF_VLLM)}
    return {one: every[one] for words in installations(name) for one in packages(words)}


def requirements(file: str) -> dict[str, Requirement]:
    """What setup.py requires, the extra that the image is for included, by name."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setup"
    )
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    lines = (
        ast.literal_eval(arguments["install_requires"])
        + ast.literal_eval(arguments["extras_require"])["vllm" if file == "Dockerfile.vllm" else "servers"]
    )
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_installation_is_pinned_within_the_bounds_of_setup(name):
    """A name alone, under the file of versions or what docker/image.py makes of it; and everything that setup.py requires is there."""
    needed, pinned = requirements(name), pins(name)
    assert len(pinned) >= 6
    outside = {pin: number for pin, number in pinned.items() if pin in needed and not needed[pin].specifier.contains(number)}
    assert not outside, {pin: str(needed[pin]) for pin in outside}
    assert needed.keys() - pinned.keys() <= (FROM_THE_BASE if name == "Dockerfile" else set())
    for words in installations(name):
        named = packages(words)
        assert not named or "/constraints.txt" in " ".join(words) or "docker/versions.txt" in " ".join(words), words
        assert not any("==" in word for word in words), words
        assert named <= pinned.keys()
    assert not re.search(r"[=<>]=\d", (ROOT / name).read_text())


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def test_every_version_is_pinned_once_and_installed_somewhere():
    installed = set().union(*(pins(name) for name in DOCKERFILES))
    for path in (PINS, OF_VLLM):
        lines = lines_of(path)
        assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==\d[\w.]*", line) for line in lines)
        names = [line.partition("==")[0] for line in lines]
        assert names == sorted(set(names))
        assert {canonicalize_name(name) for name in names} <= installed
    gpu, vllm = pins("Dockerfile"), pins("Dockerfile.vllm")
    assert "megatron-core" in gpu and "torch" not in gpu
    assert "nvidia-pytriton" not in vllm and vllm["numpy"].startswith("2.")
    assert "grep '^torch==' docker/versions.txt" in (ROOT / "Makefile").read_text()


def test_in_vllms_image_its_own_versions_count_before_those_of_all():
    (command,) = re.findall(r"^RUN (sort .*) > /opt/constraints.txt$", (ROOT / "Dockerfile.vllm").read_text(), re.MULTILINE)
    done = subprocess.run(shlex.split(command.replace("/opt/aligner", str(ROOT))), capture_output=True, text=True, check=True)
    found = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    own = dict(line.split("==") for line in lines_of(OF_VLLM))
    assert sorted(found) == sorted(
        f"{name}=={number}" for name, number in (dict(line.split("==") for line in lines_of(PINS)) | own).items()
    )


@pytest.mark.parametrize("name", ON_GPUS)
def test_images_for_gpus_set_what_their_bases_would(name):
    text = (ROOT / name).read_text()
    before = text[: text.index("RUN pip install")]
    for setting in ("PIP_CONSTRAINT=", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0"):
        assert re.search(rf"^ENV (\S+ )*{setting}( \S+)*$", before, re.MULTILINE), setting
    assert "docker/image.py imports torch transformer_engine.pytorch " in text
    assert "docker/image.py environment PIP_CONSTRAINT= TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0" in text


def test_what_is_copied_into_the_image_exists():
    for name in DOCKERFILES:
        for line in re.findall(r"^COPY (?:--\S+ )?(.*)$", (ROOT / name).read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists(), source
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / path).exists() for path in kept)


@pytest.fixture(scope="module")
def image():
    return runpy.run_path(str(ROOT / "docker" / "image.py"))


def test_requirements_and_constraints_of_the_image_script(image, tmp_path, monkeypatch, capsys):
    unmet = image["unmet"]
    assert unmet(["pytest>=1", "torch>=2; extra == 'gpu'"], "x", ()) == unmet(["no-such-package>=1; extra == 'gpu'"], "x", ()) == []
    assert unmet(["no-such-package>=1; extra == 'gpu'"], "x", ("gpu",))[0].startswith("no-such-package is not installed, x needs")
    assert "x needs pytest<1" in unmet(["pytest<1"], "x", ())[0]
    assert image["main"](["constraints", "Pytest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
    assert "pytest==9.2.0" in lines and any(line.startswith("packaging==") for line in lines)  # free of what is installed, and pinned
    assert not any(line.startswith("packaging==") for line in image["constraints"](["packaging"]))  # free, and not pinned
    assert image["main"](["needs", "pytest"]) == 0
    assert image["main"](["nonsense"]) == 2
    (tmp_path / "versions.txt").write_text("# why\npytest==0.1\nno_such.package==7.5\npackaging==0.2  # of old\n")
    monkeypatch.setitem(image["constraints"].__globals__, "PINS", tmp_path / "versions.txt")
    lines = image["constraints"](["packaging"])
    assert "no-such-package==7.5" in lines and "packaging==0.2" in lines and "pytest==0.1" not in lines


def test_imports_are_tried_and_a_missing_driver_is_no_fault(image, tmp_path, monkeypatch, capsys):
    (tmp_path / "wants_gpu.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    (tmp_path / "damaged.py").write_text("__version__ = '2'\nimport no_such_module")
    (tmp_path / "good.py").write_text("__version__ = '3.1'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert image["main"](["imports", "good", "wants_gpu"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "good 3.1"
    assert image["main"](["imports", "good", "damaged", "no_such_module"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].split()[0] for line in errors] == ["damaged", "no_such_module"]


def test_the_environment_is_recorded_and_held(image, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("NVTE_FRAMEWORK", "pytorch")
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    assert image["main"](["environment", "PIP_CONSTRAINT="]) == 0
    assert {"NVTE_FRAMEWORK=pytorch", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"} <= set(capsys.readouterr().out.splitlines())
    assert image["main"](["environment", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0", "PIP_CONSTRAINT="]) == 1
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is '1', and has to be '0'" in capsys.readouterr().err
    monkeypatch.setenv("PIP_CONSTRAINT", "/etc/pip/constraint.txt")
    assert image["main"](["environment", "PIP_CONSTRAINT="]) == 1
