"""The versions in the Dockerfiles: exact, allowed by setup.py, and the same in both where both have them. No network, no Docker."""

import ast
import re
import runpy
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu", "Dockerfile.vllm")
PIN = re.compile(r'"([A-Za-z0-9_.-]+)(?:\[[a-z,]+\])?==([^"\s]+)"')
# What the GPU image takes from its base image instead of a pin.
FROM_THE_BASE = {
    "torch",
    "numpy",
    "pyarrow",
    "datasets",
    "filelock",
    "huggingface-hub",
    "transformers",
    "tokenizers",
    "safetensors",
    "rich",
    "psutil",
    "jinja2",
    "aiohttp",
    "click",
}


def pins(name: str) -> dict[str, str]:
    return {canonicalize_name(match[1]): match[2] for match in PIN.finditer((ROOT / name).read_text())}


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
def test_pins_are_within_the_bounds_of_setup(name):
    needed, pinned = requirements(name), pins(name)
    assert len(pinned) >= 6
    outside = {pin: number for pin, number in pinned.items() if pin in needed and not needed[pin].specifier.contains(number)}
    assert not outside, {pin: str(needed[pin]) for pin in outside}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_everything_that_setup_requires_is_there(name):
    from_the_base = FROM_THE_BASE if name == "Dockerfile" else set()
    assert requirements(name).keys() - pins(name).keys() <= from_the_base


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_installation_is_pinned(name):
    text = (ROOT / name).read_text().replace("\\\n", " ")
    for line in re.findall(r"^RUN pip install (.*)$|&& pip install (.*)$", text, re.MULTILINE):
        words = re.sub(r'"\$\{TORCH_INDEX\}"', "", "".join(line)).split("&&")[0].split()
        options = {"--constraint", "--extra-index-url"}
        packages = [word for i, word in enumerate(words) if not word.startswith("-") and (i == 0 or words[i - 1] not in options)]
        assert all(PIN.fullmatch(word) or word == "." for word in packages), packages


def test_all_images_have_the_same_versions():
    gpu, cpu, vllm = map(pins, DOCKERFILES)
    with_numpy_2 = {"numpy", "pyarrow", "transformers"}  # vLLM bounds the last
    for one, other in ((gpu, cpu), (gpu, vllm), (cpu, vllm)):
        shared = one.keys() & other.keys() - (with_numpy_2 if other is vllm else set())
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}
    assert "megatron-core" in gpu and "torch" not in gpu
    assert "nvidia-pytriton" not in vllm and vllm["numpy"].startswith("2.")


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


def test_requirements_that_are_not_met(image):
    unmet = image["unmet"]
    assert unmet(["pytest>=1", "torch>=2; extra == 'gpu'"], "x", ()) == []
    assert unmet(["no-such-package>=1; extra == 'gpu'"], "x", ()) == []
    assert unmet(["no-such-package>=1; extra == 'gpu'"], "x", ("gpu",))[0].startswith("no-such-package is not installed, x needs")
    assert "x needs pytest<1" in unmet(["pytest<1"], "x", ())[0]


def test_the_commands_of_the_image_script(image, capsys):
    assert image["main"](["constraints", "Pytest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
    assert not any(line.startswith("pytest==") for line in lines) and any(line.startswith("packaging==") for line in lines)
    assert image["main"](["needs", "pytest"]) == 0
    assert image["main"](["nonsense"]) == 2
