"""Check a built site: links and anchors lead somewhere, images exist, nothing is loaded from a network.

    python docs/scripts/check_site.py site                     links, without a browser
    python docs/scripts/check_site.py site --browser           and screenshots by Debian's chromium, if it is installed

With a browser, errors on a page's console are failures too.  Screenshots go to site-screenshots/.
"""

import argparse
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PAGES = (
    "index.html",
    "concepts.html",
    "table1.html",
    "choosing.html",
    "reference/optim.html",
    "reference/configuration.html",
)
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
SCHEMES = ("light", "dark")


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


def check_in_browser(browser: str, site: Path, folder: Path) -> list[str]:
    """Take screenshots of the main pages in both colour schemes; one line for each error on their consoles."""
    folder.mkdir(exist_ok=True)
    problems = []
    for page in PAGES:
        for scheme in SCHEMES:
            image = folder / f"{page.removesuffix('.html').replace('/', '-')}-{scheme}.png"
            errors = screenshot(browser, (site / page).resolve(), image, scheme)
            problems += [f"{page}, {scheme}: {line}" for line in errors]
    return problems


def screenshot(browser: str, page: Path, image: Path, scheme: str) -> list[str]:
    """The errors on the console of a page, which is drawn into `image`."""
    image.unlink(missing_ok=True)
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,2400",
        "--enable-logging=stderr", "--virtual-time-budget=5000", f"--screenshot={image.resolve()}",
        *(["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
        page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # The search index is fetched, which browsers refuse for pages that are opened from the disk.
    errors = [
        line for line in done.stderr.splitlines() if re.search(r"CONSOLE.*(Error|Failed|Uncaught)", line)
    ]
    errors = [line for line in errors if "search" not in line]
    return (
        errors if image.exists() else [*errors, f"{browser} made no screenshot (exit code {done.returncode})"]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", action="store_true", help="take screenshots as well")
    options = parser.parse_args(arguments)
    if not (options.site / "index.html").is_file():
        print(f"{options.site} holds no site: run make docs first", file=sys.stderr)
        return 2
    problems = check_links(options.site)
    if options.browser:
        browser = shutil.which("chromium")
        if browser is None:
            print("chromium is not installed, so no page was looked at: apt install chromium")
        else:
            folder = Path("site-screenshots")
            problems += check_in_browser(browser, options.site, folder)
            print(f"screenshots are in {folder}/")
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{len(problems)} problems in {options.site}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
