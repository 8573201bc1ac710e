"""Check a built site: links and anchors lead somewhere, images exist, nothing is loaded from a network.

    python docs/scripts/check_site.py site                     links, without a browser
    python docs/scripts/check_site.py site --browser           and every page in Debian's chromium

In the browser every page is shown in a wide window, the same in dark colours, and on a phone.  Errors on its console,
requests that fail, images that are not drawn, anything wider than the window, and a search without results are failures too.
Screenshots go to site-screenshots/.
"""

import argparse
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, BrowserError, Page, Window

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
WINDOWS = (Window("light"), Window("dark", scheme="dark"), Window("phone", width=400, height=850))
SCREENSHOTS = Path("site-screenshots")
SEARCH = "StiefelSGD"
MISSING_IMAGES = "[...document.images].filter(i => !i.naturalWidth).map(i => i.getAttribute('src'))"
TOO_WIDE = """(() => {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return null;
    const wide = [...document.querySelectorAll('article *')].find(e => e.getBoundingClientRect().right > width + 1);
    return wide ? wide.tagName.toLowerCase() + ' "' + wide.textContent.trim().slice(0, 40) + '"' : 'the page';
})()"""


class PageLinks(HTMLParser):
    """The anchors of a page, what it links to and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values[LOADED[tag]])


def check_links(site: Path) -> list[str]:
    """One line for each broken link or image, and for each file that would be loaded from a network."""
    pages = {path: PageLinks(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses begin at the root of a server
            continue
        name = path.relative_to(site)
        problems += [f"{name}: loads {url} from a network" for url in page.loaded if _is_remote(url)]
        for url in page.links + page.loaded:
            if _is_remote(url) or url.startswith(("mailto:", "data:", "javascript:")):
                continue
            parts = urlsplit(url)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            if not target.exists():
                problems.append(f"{name}: {url} does not exist")
            elif anchor and target in pages and anchor not in pages[target].anchors | {"__top"}:
                problems.append(f"{name}: {url} has no such anchor")
    return problems


def _is_remote(url: str) -> bool:
    return url.startswith(("http://", "https://", "//"))


# -------------------------------------------------------------------------------------------------- in a browser


def check_in_browser(site: Path, folder: Path) -> list[str]:
    """Show every page in every window and keep a screenshot; one line for each thing that is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    names = [name for name in names if name != "404.html"]
    problems = []
    with served(site) as address, Browser() as browser:
        for i, name in enumerate(names, start=1):
            print(f"[{i}/{len(names)}] {name}", flush=True)
            for window in WINDOWS:
                with browser.open(f"{address}/{name}", window) as page:
                    page.screenshot(
                        folder / f"{name.removesuffix('.html').replace('/', '-')}-{window.name}.png"
                    )
                    problems += [f"{name}, {window.name}: {line}" for line in page_problems(page)]
        with browser.open(f"{address}/index.html") as page:
            problems += [f"index.html, search: {line}" for line in search_problems(page)]
    return problems


def page_problems(page: Page) -> list[str]:
    """What is wrong with an open page, one line each."""
    wide = page.evaluate(TOO_WIDE)
    missing = [f"{image} is not drawn" for image in page.evaluate(MISSING_IMAGES)]
    return page.problems + missing + ([f"{wide} is wider than the window"] if wide else [])


def search_problems(page: Page) -> list[str]:
    """What is wrong with the search, one line each."""
    page.click("document.querySelector('input.md-search__input')")
    page.type(SEARCH)
    try:
        page.wait_for("document.querySelectorAll('.md-search-result__item').length > 0", seconds=15)
    except BrowserError:
        return [*page.problems, f"{SEARCH!r} is not found"]
    return page.problems


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A page that is closed drops its connections; the browser reports what else fails."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; the address."""
    with Server(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", action="store_true", help="look at every page in chromium as well")
    options = parser.parse_args(arguments)
    if not (options.site / "index.html").is_file():
        print(f"error: {options.site} holds no site: run make docs first", file=sys.stderr)
        return 2
    problems = check_links(options.site)
    if options.browser:
        try:
            problems += check_in_browser(options.site, SCREENSHOTS)
        except BrowserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"screenshots are in {SCREENSHOTS}/")
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{len(problems)} problems in {options.site}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
