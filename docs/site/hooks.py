"""Hooks of the site: generated pages, links that leave docs/, figures, and checks of the built HTML.

mkdocs calls the functions `on_...` by their names. A link of a page to a file of the repository leads to a page with
that file's text, so the site is whole without a network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checks
import figures
import reference
import tutorials
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# documents beside docs/, and the pages that they become
BESIDE = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#\s])")
# the first page takes the place of the README and has other headings
README_HEADING = re.compile(r"(?<=README\.md)#[\w-]+(?=\))")
REFERENCE: dict[str, Callable[[], str]] = {
    **{name: partial(reference.api, name) for name in reference.API},
    "command": reference.command,
    "errors": reference.errors,
}
# weight of a page among the results of a search, by the beginning of its name: records after pages for users
SEARCH = {"start/": 2.0, "log.md": 0.05, "changes.md": 0.05}
# <!-- figure: name | what it shows -->
FIGURE = re.compile(r"<!-- figure: (\w+) \| (.+?) -->")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of other things than Markdown below docs/."""
    for name, uri in BESIDE.items():
        if name != "README.md":
            files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    for name, write in REFERENCE.items():
        files.append(File.generated(config, f"reference/{name}.md", content=write()))
    for script in sorted(tutorials.SCRIPTS.glob("*.py")):
        text = tutorials.page(script)
        files.append(File.generated(config, f"tutorials/{script.stem}.md", content=text))
        for picture in (tutorials.PAGES / script.stem).glob("*.png"):
            files.append(File.generated(config, f"tutorials/{picture.name}", abs_src_path=str(picture)))
    drawn = {name for file in files.documentation_pages() for name, _ in FIGURE.findall(file.content_string)}
    for name in sorted(drawn):
        for scheme in ("light", "dark"):
            svg = figures.draw(name, dark=scheme == "dark")
            files.append(File.generated(config, f"figures/{name}-{scheme}.svg", content=svg))
    targets = {target for file in files.documentation_pages() for target in _outside(file)}
    for target in sorted(targets):
        files.append(File.generated(config, _source_uri(target), content=_source_page(target)))
    return files


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    """List pages that mkdocs.yml does not name at the end of the section How-to."""
    listed = {page.file.src_uri for page in nav.pages}
    section = next(item for item in nav.items if item.title == "How-to")
    for file in files.documentation_pages():
        if file.src_uri not in listed and not file.src_uri.startswith("source/"):
            file.inclusion = file.inclusion.__class__.INCLUDED
            section.children.append(file.page)
            file.page.parent = section
            nav.pages.append(file.page)
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that leave docs/ into links within the site, and weigh the page for the search."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    for beginning, boost in SEARCH.items():
        if page.file.src_uri.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    if page.file.src_uri == "recipe.md":
        markdown = _with_types(markdown)
    markdown = LINK.sub(lambda link: _within(link[1], page.file), README_HEADING.sub("", markdown))
    return FIGURE.sub(lambda figure: _figure(figure[1], figure[2], page.file), markdown)


def on_post_build(config: Any) -> None:
    """Refuse a site with scripts, styles, fonts or images of other hosts."""
    checks.check(Path(config["site_dir"]))


def _figure(name: str, shows: str, file: File) -> str:
    """A figure in both schemes; the theme hides one of them."""
    root = "../" * file.src_uri.count("/")
    images = (f"![{shows}]({root}figures/{name}-{scheme}.svg#only-{scheme})" for scheme in ("light", "dark"))
    return f"<figure markdown>\n{chr(10).join(images)}\n</figure>"


def _with_types(markdown: str) -> str:
    """The page of keys with a column of types, which the program's own classes say."""
    types = reference.key_types()
    markdown = markdown.replace("| key | default | |\n|---|---|---|", "| key | type | default | |\n|---|---|---|---|")
    row = re.compile(r"^\| `([\w.]+)` \| ", re.MULTILINE)
    return row.sub(lambda match: f"{match[0]}{types.get(match[1], '')} | ", markdown)


def _origin(file: File) -> Path:
    """The document that a page is made of."""
    beside = {uri: ROOT / name for name, uri in BESIDE.items() if name != "README.md"}
    return beside.get(file.src_uri, DOCS / file.src_uri)


def _target(link: str, file: File) -> Path:
    return Path(os.path.normpath(_origin(file).parent / link))


def _outside(file: File) -> list[Path]:
    """Files and folders of the repository, outside docs/, to which a page links."""
    targets = (_target(link, file) for link in LINK.findall(file.content_string))
    return [path for path in targets if _leaves(path) and path.exists()]


def _leaves(path: Path) -> bool:
    return ROOT in path.parents and DOCS not in (path, *path.parents) and path.name not in BESIDE


def _within(link: str, file: File) -> str:
    """A link as the site has it, relative to the page."""
    path = _target(link, file)
    if path.parent == ROOT and path.name in BESIDE:
        uri = BESIDE[path.name]
    elif _leaves(path):
        uri = _source_uri(path)
    elif DOCS in path.parents:
        # a tutorial is a script in the repository and a page of the site
        uri = path.relative_to(DOCS).as_posix().replace(".py", ".md")
    else:
        return link
    return os.path.relpath(uri, os.path.dirname(file.src_uri) or ".")


def _source_uri(path: Path) -> str:
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def _source_page(path: Path) -> str:
    """A page with the text of a file, or with the names of a folder."""
    title = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if child.suffix in LANGUAGES)
        return title + "\n".join(f"- `{name}`" for name in names) + "\n"
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n````\n"
