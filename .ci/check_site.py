"""check_site.py FOLDER: every link in a site of HTML files leads somewhere in it, and nothing is fetched from elsewhere.

Links to elsewhere are for people to follow; they are not followed here.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors in it."""

    def __init__(self, file: Path) -> None:
        """Read the file."""
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag has."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name == "href" and value:
                (self.links if tag == "a" else self.loads).append(value)
            elif name == "src" and value:
                self.loads.append(value)


def problems(site: Path) -> list[str]:
    """Return what is wrong, a line each."""
    found: list[str] = []
    pages = {file: Page(file) for file in sorted(site.rglob("*.html")) if file.name not in ("404.html", "toc.html")}
    for file, page in pages.items():
        name = file.relative_to(site)
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    found.append(f"{name}: loads {link}")
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if target.is_dir() and (target / "index.html").exists():
                target = target / "index.html"
            if not target.exists():
                found.append(f"{name}: there is no {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: there is no anchor {link}")
    return found if pages else [f"{site} has no pages"]


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]).resolve())
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(1 if wrong else 0)
