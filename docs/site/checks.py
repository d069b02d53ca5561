"""Checks of the built site: every link and anchor leads somewhere, and nothing is loaded from another host."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# elements that load what their attribute names; a link of the text (`a`) is followed only when it is clicked
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The anchors of a page, its links, and the addresses that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "__skip"}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(values[LOADED[tag]])


def check(folder: Path) -> None:
    """Raise ValueError with every fault of the site below `folder`."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    faults = [
        f"{path.relative_to(folder)}: {fault}"
        for path, page in pages.items()
        if path.name != "404.html"
        for fault in _faults(path, page, pages)
    ]
    for style in folder.rglob("*.css"):
        foreign = re.findall(r"(?:url\(|@import)[\s\"']*((?:https?:)?//[^)\"']+)", style.read_text(encoding="utf-8"))
        faults += [f"{style.relative_to(folder)}: loads {url} from another host" for url in foreign]
    if faults:
        raise ValueError("the site has faults:\n" + "\n".join(faults))


def _faults(path: Path, page: Page, pages: dict[Path, Page]) -> list[str]:
    faults = [f"loads {url} from another host" for url in page.loads if urlsplit(url).netloc]
    for link in [*page.links, *page.loads]:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.exists():
            faults.append(f"link to {link}, which does not exist")
        elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
            faults.append(f"link to {link}, a heading that does not exist")
    return faults
