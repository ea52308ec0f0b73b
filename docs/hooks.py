"""What mkdocs.yml cannot say of the site: pages from outside docs/, the reference of packages, links to source files, llms.txt.

A link is written as it works on a code host: relative to the file that it stands in. On the site a link to a file that is no page leads to
a page with that file's text. mkdocs calls the functions named `on_...`; the others need no mkdocs.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markdown_it import MarkdownIt

from aligner import PUBLIC

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation, Section
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages from outside docs/, by their place on the site.
ELSEWHERE = {
    "overview.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "tools.md": "tools/README.md",
}
REFERENCE = re.compile(r"reference/(aligner[\w.]*)\.md")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
MENTION = re.compile(r"(?<!\[)`(docs/\w+\.md)`")  # of a page, in running text
OUTSIDE = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")

log = logging.getLogger("mkdocs.hooks.aligner")
_nav: list[Navigation] = []  # of the build that is under way


def source_of(uri: str) -> str | None:
    """The file of the repository that a page of the site is written in; None for a page that is made here."""
    if uri.startswith(("reference/", "source/")):
        return None
    return ELSEWHERE.get(uri, f"docs/{uri}")


def page_of(path: str) -> str | None:
    """The page of the site that shows a file of the repository, given relative to its root; None where there is no such file."""
    by_source = {source: uri for uri, source in ELSEWHERE.items()}
    if path in by_source:
        return by_source[path]
    if not (ROOT / path).is_file():
        return None
    return path.removeprefix("docs/") if path.startswith("docs/") and path.endswith(".md") else f"source/{path}.md"


def prose(text: str) -> Iterator[int]:
    """Numbers (from 0) of the lines of a Markdown text that are no code blocks."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "inline" and token.map:
            yield from range(*token.map)


def targets(text: str, source: str) -> list[str]:
    """The files, relative to the repository's root, that the links of a Markdown text lead to. `source`: the file that it is in."""
    lines = text.split("\n")
    return [posixpath.normpath(posixpath.join(posixpath.dirname(source), link)) for n in prose(text) for link in LINK.findall(lines[n])]


def for_the_site(text: str, uri: str) -> str:
    """The text of the page `uri` with its links to files, and its mentions of pages as `docs/x.md`, leading to pages of the site.

    A link that leads nowhere stays as it is; mkdocs reports it.
    """
    source = source_of(uri)
    if source is None:
        return text

    def relative(page: str) -> str:
        return posixpath.relpath(page, posixpath.dirname(uri) or ".")

    def link(match: re.Match[str]) -> str:
        page = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1])))
        return match[1] if page is None else relative(page)

    def mention(match: re.Match[str]) -> str:
        page = page_of(match[1])
        return match[0] if page is None else f"[{match[0]}]({relative(page)})"

    lines = text.split("\n")
    for number in sorted(set(prose(text))):
        lines[number] = MENTION.sub(mention, LINK.sub(link, lines[number]))
    return "\n".join(lines)


def shown_source(path: str) -> str:
    """A page with the text of a file, which the search leaves out."""
    language = {".py": "python", ".yaml": "yaml", ".sub": "bash", ".c": "c", ".h": "c"}.get(Path(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n~~~~~~{language}\n{(ROOT / path).read_text()}\n~~~~~~\n"


def outside_assets(html: str) -> list[str]:
    """What a page would load from another host."""
    return OUTSIDE.findall(html)


def read_differently(text: str, html: str) -> list[str]:
    """The kinds of blocks of which a code host sees another number in a Markdown text than the site, which made `html` of it.

    The site's Markdown wants a blank line before a list, and four spaces before what belongs to an item.
    """
    on_host = MarkdownIt("commonmark").enable("table").render(text)
    return [tag for tag in ("li", "pre", "table", "h2") if len(re.findall(f"<{tag}\\b", on_host)) != len(re.findall(f"<{tag}\\b", html))]


def on_config(config: MkDocsConfig) -> None:
    """Fill the navigation's section of the reference."""
    config.nav = with_reference(config.nav or [])


def with_reference(nav: list[Any]) -> list[Any]:
    """The navigation, with a page for each public module."""
    pages = [{name: f"reference/{name}.md"} for name in PUBLIC]
    return [{"Reference": pages} if section == {"Reference": []} else section for section in nav]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for uri, source in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    for uri in uris(config.nav or []):
        if match := REFERENCE.fullmatch(uri):
            files.append(File.generated(config, uri, content=f"# {match[1]}\n\n::: {match[1]}\n"))
    for file in list(files.documentation_pages()):
        if source := source_of(file.src_uri):
            for path in targets(file.content_string, source):
                page = page_of(path)
                if page and page.startswith("source/") and page not in files.src_uris:
                    files.append(File.generated(config, page, content=shown_source(path)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Keep it for llms.txt."""
    _nav[:] = [nav]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site."""
    return for_the_site(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Say where a page looks otherwise than on a code host; with `strict` that ends the build."""
    if source_of(page.file.src_uri) and (kinds := read_differently(page.markdown or "", html)):
        log.warning("%s: a code host sees another number of %s", source_of(page.file.src_uri), ", ".join(f"<{kind}>" for kind in kinds))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse what would be loaded from another host."""
    from mkdocs.exceptions import PluginError

    if found := outside_assets(output):
        raise PluginError(f"{page.file.src_uri} would load {found[0]}; the site must work without a network")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt (llmstxt.org), and beside each page that is not made from docstrings its Markdown."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in _nav[0].items:
        lines += [f"## {section.title}", ""] + [_entry(page, Path(config.site_dir)) for page in _pages(section)] + [""]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines))


def _entry(page: Page, site: Path) -> str:
    """A line of llms.txt: the page, and what its sections are called."""
    uri = page.file.src_uri
    if source_of(uri) is None:
        return f"- [{page.title}]({page.url})"
    (site / uri).write_text(page.markdown or "")
    sections = "; ".join(section.title for top in page.toc for section in top.children)
    return f"- [{page.title}]({uri})" + (f": {sections}" if sections else "")


def _pages(item: Section | Page) -> Iterator[Page]:
    if item.is_page:
        yield item
    for child in item.children or ():
        yield from _pages(child)


def uris(nav: Any) -> Iterator[str]:
    """The pages that a `nav` of mkdocs.yml names."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from uris(item)
