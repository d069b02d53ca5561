"""A check of the built site: nothing is loaded from another host. mkdocs checks links and anchors (mkdocs.yml)."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

# elements that load what their attribute names; a link of the text (`a`) is followed only when it is clicked
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The addresses of other hosts that a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        url = values.get(LOADED.get(tag, ""), "")
        if urlsplit(url).netloc and values.get("rel") not in ("canonical", "next", "prev"):
            self.foreign.append(url)


def check(folder: Path) -> None:
    """Raise ValueError with every address of another host that the site below `folder` loads."""
    pages = [path for path in folder.rglob("*.html") if path.name != "404.html"]
    loads = {path: Page(path.read_text(encoding="utf-8")).foreign for path in pages}
    for path in folder.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        loads[path] = re.findall(r"(?:url\(|@import)[\s\"']*((?:https?:)?//[^)\"']+)", text)
    faults = [f"{path.relative_to(folder)}: loads {url} from another host" for path in loads for url in loads[path]]
    if faults:
        raise ValueError("the site has faults:\n" + "\n".join(faults))
