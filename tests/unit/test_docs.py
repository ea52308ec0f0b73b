"""The docs, without mkdocs: links and anchors lead somewhere, what is named exists, every page is in the site's navigation."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

import aligner

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(ROOT / folder / "README.md" for folder in ("benchmarks", "tools")))
)
WRITTEN = {"tests/mutants.md"}  # by `make mutants`: may be absent
# A file of this repository: in a folder of it, or of the package.
NAMED = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|sub|c|h|toml|cff)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def tokens(source: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / source).read_text())


def inline(source: str) -> Iterator[Token]:
    for token in tokens(source):
        yield from token.children or ()


def anchors(source: str) -> set[str]:
    """As code hosts make them of headings."""
    found, stream = set(), tokens(source)
    for before, after in zip(stream, stream[1:], strict=False):
        if before.type == "heading_open":
            text = "".join(child.content for child in after.children or ())
            found.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return found


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load("hooks")


def site() -> dict:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def defined(path: str) -> set[str]:
    """Top-level functions and classes of a module, and `Class.method`."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_links_lead_to_files_and_headings_and_files_that_are_named_exist(source: str):
    """`docs/running.md`, `aligner/cli.py`, and modules as `modules/heads.py`: below the repository, the package or the page itself."""
    folders = (ROOT, ROOT / "aligner", (ROOT / source).parent)
    for token in inline(source):
        target = token.attrGet("href") if token.type == "link_open" else None
        if target is not None and not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            file = (ROOT / source).parent / path if path else ROOT / source
            assert file.is_file(), f"{source}: {target}"
            assert not anchor or anchor in anchors(str(file.resolve().relative_to(ROOT))), f"{source}: {target}"
        span = token.content if token.type == "code_inline" else ""
        if span not in WRITTEN and NAMED.fullmatch(span) and any((folder / span.split("/")[0]).is_dir() for folder in folders):
            assert any((folder / span).is_file() for folder in folders), f"{source}: `{span}`"


def tour() -> dict[str, list[str]]:
    """The tables of the tour: file -> names."""
    rows = re.findall(r"^\| \[([^\]]+)\]\(\.\./([^)]+)\) \| (.+) \|$", (ROOT / "docs/tour.md").read_text(), re.MULTILINE)
    assert all(shown == path for shown, path, _ in rows)
    return {path: re.findall(r"`([^`]+)`", names) for _, path, names in rows}


def test_what_the_tour_names_is_in_the_files_that_it_says():
    files = tour()
    assert len(files) > 30
    for path, names in files.items():
        assert names and set(names) <= defined(path), f"docs/tour.md: {path} does not define {set(names) - defined(path)}"
    listed = [name for names in files.values() for name in names]
    text, _ = (ROOT / "docs/tour.md").read_text().split("## Where it is")
    told = {span for span in re.findall(r"`([^`]+)`", text) if NAME.fullmatch(span)} - {"group_size"}
    assert told == set(listed), "the tables have all names of the text"
    assert len(listed) == len(set(listed)), "a name is in two files"


def test_the_front_door_is_short():
    pages = list((ROOT / "docs").glob("**/*.md"))
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len(pages) <= 35 and max((len(page.read_text().splitlines()), page.name) for page in pages)[0] <= 300
    index = (ROOT / "docs" / "index.md").read_text()
    assert [page.name for page in pages if page.name != "index.md" and f"]({page.name})" not in index] == []


def test_every_page_is_in_the_navigation_once():
    named = list(HOOKS.uris(site()["nav"]))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")} | set(HOOKS.ELSEWHERE)
    assert len(named) == len(set(named))
    assert {uri for uri in named if not HOOKS.REFERENCE.fullmatch(uri)} == pages


def test_the_reference_is_of_the_public_modules():
    named = [match[1] for uri in HOOKS.uris(HOOKS.with_reference(site()["nav"])) if (match := HOOKS.REFERENCE.fullmatch(uri))]
    assert named == list(aligner.PUBLIC)
    for name in named:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name


def test_the_reference_reads_the_comment_of_a_line(monkeypatch: pytest.MonkeyPatch):
    griffe = ModuleType("griffe")  # only the site's environment has the real one
    griffe.Extension = object
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    module = load("reference")
    assert module.comment_of('    name: str = "a # b"  # what it is  \n') == "what it is"
    assert module.comment_of("    )  # of several lines") == "of several lines"
    assert module.comment_of("    group_size: int = 8") == ""


@pytest.mark.parametrize(
    ("uri", "written", "shown"),
    [
        ("running.md", "[x](slurm.md#a)", "[x](slurm.md#a)"),
        ("running.md", "[x](../README.md)", "[x](overview.md)"),
        ("running.md", "[x](../aligner/cli.py)", "[x](source/aligner/cli.py.md)"),
        ("running.md", "[x](#here) [y](https://a.b/c)", "[x](#here) [y](https://a.b/c)"),
        ("running.md", "see `docs/slurm.md`, `docs/no.md`", "see [`docs/slurm.md`](slurm.md), `docs/no.md`"),
        ("overview.md", "[x](docs/slurm.md)", "[x](slurm.md)"),
        ("benchmarks.md", "[x](servers.py)", "[x](source/benchmarks/servers.py.md)"),
        ("running.md", "    [x](../README.md)  `docs/slurm.md`", "    [x](../README.md)  `docs/slurm.md`"),  # a code block
        ("running.md", "[x](nowhere.md)", "[x](nowhere.md)"),  # mkdocs reports it
        ("reference/aligner.losses.md", "::: [x](../README.md)", "::: [x](../README.md)"),
    ],
)
def test_links_for_the_site(uri: str, written: str, shown: str):
    assert HOOKS.for_the_site(written, uri) == shown


def test_a_page_that_loads_from_another_host_is_found():
    assert HOOKS.outside_assets('<a href="https://a.b">x</a> <script src="assets/x.js"></script>') == []
    assert HOOKS.outside_assets('<link rel="stylesheet" href="https://a.b/c.css"><img src=//a.b/d.png>') == [
        "https://a.b/c.css",
        "//a.b/d.png",
    ]


def test_a_list_that_only_code_hosts_see_is_found():
    html = "<p>one:\n- two</p>"  # what Python-Markdown makes of it
    assert HOOKS.read_differently("one:\n- two\n", html) == ["li"]
    assert HOOKS.read_differently("one:\n\n- two\n", "<p>one:</p><ul><li>two</li></ul>") == []


def test_llms_txt_lists_pages_with_their_sections(tmp_path: Path):
    def page(uri: str, url: str, title: str, sections: list[str]) -> SimpleNamespace:
        toc = [SimpleNamespace(children=[SimpleNamespace(title=name) for name in sections])]
        return SimpleNamespace(
            is_page=True, children=None, file=SimpleNamespace(src_uri=uri), url=url, title=title, markdown="text", toc=toc
        )

    pages = [page("slurm.md", "slurm.html", "Slurm", ["A", "B"]), page("reference/aligner.x.md", "reference/aligner.x.html", "x", [])]
    HOOKS.on_nav(SimpleNamespace(items=[SimpleNamespace(title="Start", is_page=False, children=pages)]), None, None)
    HOOKS.on_post_build(SimpleNamespace(site_name="name", site_description="what", site_dir=str(tmp_path)))
    written = (tmp_path / "llms.txt").read_text()
    assert written == "# name\n\n> what\n\n## Start\n\n- [Slurm](slurm.md): A; B\n- [x](reference/aligner.x.html)\n"
    assert (tmp_path / "slurm.md").read_text() == "text"
