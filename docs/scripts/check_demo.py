"""Use the demo in Debian's chromium as a visitor would, and check what it shows: python docs/scripts/check_demo.py

Screenshots go to site-screenshots/.  `--keep FILE` also writes the one that the documentation shows.
"""

import argparse
import contextlib
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, BrowserError, Page, Window

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = Path("site-screenshots")
DOCUMENTATION = Window("documentation", width=900)  # legible in the column of a page
WINDOWS = (Window("light"), Window("dark", scheme="dark"), Window("phone", width=400, height=850))
STARTS_IN = 300  # seconds, on a busy machine
INPUT = "document.querySelector('#file input[type=file]')"
EXAMPLES = "document.querySelectorAll('#examples button.thumbnail-lg')"
OTHER = "ortho_vit_nano.cifar10_within_stiefel_sgd"


class Failure(Exception):
    """The demo did not show what it should."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise Failure(sentence)


# ----------------------------------------------------------------------------------------------- the command


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "train.py", "demo", "--port", str(port)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def running(port: int) -> Iterator[subprocess.Popen[str]]:
    """The demo, once it says where it is."""
    process = start(port)
    try:
        ready = select.select([process.stdout], [], [], STARTS_IN)[0]
        line = process.stdout.readline() if ready else ""
        if f"http://127.0.0.1:{port}" not in line:
            process.kill()
            raise Failure(f"the demo did not start: {line}{process.communicate()[1].strip()}")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def check_taken_port(port: int) -> None:
    process = start(port)
    try:
        _, errors = process.communicate(timeout=STARTS_IN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Failure(f"a taken port: no answer within {STARTS_IN} s") from None
    expected = f"error: cannot listen on 127.0.0.1, port {port}; try another --port\n"
    require((process.returncode, errors) == (1, expected), f"a taken port: {process.returncode}, {errors!r}")


def check_ctrl_c(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    require(process.returncode == 130, f"Ctrl-C: exit code {process.returncode}")
    require(errors == "\nthe demo has ended\n", f"Ctrl-C: {errors!r}")


# -------------------------------------------------------------------------------------------------- the page


def classes(page: Page) -> list[str]:
    """The classes with their probabilities, as shown."""
    text = page.evaluate("document.querySelector('#classes').innerText")
    return re.findall(r"\S+\n\d+%", text)


def sources(page: Page, gallery: str) -> list[str]:
    """The addresses of the images in a gallery; an image that is not drawn is a failure."""
    images = page.evaluate(
        f"[...document.querySelectorAll('#{gallery} img')].map(i => [i.src, i.complete && i.naturalWidth > 0])"
    )
    require(all(drawn for _, drawn in images), f"{gallery}: an image is not drawn")
    return [source for source, _ in images]


def changed(page: Page, gallery: str, before: list[str], count: int) -> list[str]:
    """The images of a gallery, as soon as there are `count` and not the same as before."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(Failure):
            found = sources(page, gallery)
            if len(found) == count and found != before:
                return found
        page.browser.receive(0.1)
    raise Failure(f"{gallery}: {len(sources(page, gallery))} images, not {count} new ones")


def visit(page: Page, folder: Path) -> None:
    """Look at the first example, pick another, move the slider, choose a model, upload images and something else."""
    page.wait_for(f"{EXAMPLES}.length === 8")
    heads, grams = changed(page, "heads", [], 2), changed(page, "grams", [], 2)  # of ortho_vit_compact
    require(len(classes(page)) == 5, f"classes of the first example: {classes(page)}")

    page.click(f"{EXAMPLES}[1]")
    heads = changed(page, "heads", heads, 2)
    page.wait_for("document.querySelector('#classes').innerText.match(/ship\\n\\d+%/)")

    page.evaluate("document.querySelector('#block input[type=range]').focus()")
    page.press("ArrowLeft", 37)
    heads, grams = changed(page, "heads", heads, 2), changed(page, "grams", grams, 2)

    page.click("document.querySelector('#model input')")
    page.evaluate("document.querySelector('#model input').select()")
    page.type(OTHER)
    page.press("Enter", 13)
    heads, grams = changed(page, "heads", heads, 6), changed(page, "grams", grams, 4)
    require(any("cat" in line for line in classes(page)), f"classes of {OTHER}: {classes(page)}")
    page.click(f"{EXAMPLES}[0]")
    time.sleep(1)  # until the images have been drawn
    page.screenshot(SCREENSHOTS / "demo.png")

    Image.new("RGB", (300, 200), (40, 120, 200)).save(folder / "blue.png")
    page.upload(INPUT, folder / "blue.png")
    heads = changed(page, "heads", heads, 6)
    require(len(classes(page)) == 5, f"classes of an uploaded image: {classes(page)}")


def visit_with_a_bad_file(page: Page, folder: Path) -> None:
    page.wait_for(f"{EXAMPLES}.length === 8")
    (folder / "notes.png").write_text("not an image")
    page.upload(INPUT, folder / "notes.png")
    page.wait_for(
        "document.querySelector('.toast-body, .toast-wrap')?.innerText.includes('cannot read notes.png')"
    )
    text = page.evaluate("document.body.innerText")
    require("not an image in a known format" in text, "a file that is not an image gets no sentence")
    require("Traceback" not in text, "a file that is not an image gets a stack trace")


def check_page(port: int, keep: Path | None) -> None:
    address = f"http://127.0.0.1:{port}"
    SCREENSHOTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        folder = Path(name)
        for window in WINDOWS:
            with browser.open(address, window) as page:
                page.wait_for(f"{EXAMPLES}.length === 8")
                changed(page, "heads", [], 2)
                page.click(f"{EXAMPLES}[3]")
                page.wait_for("document.querySelector('#classes').innerText.match(/frog\\n\\d+%/)")
                time.sleep(1)  # until the images have been drawn
                page.screenshot(SCREENSHOTS / f"demo-{window.name}.png")
                require(not page.problems, f"{window.name}: {'; '.join(page.problems)}")
                width = page.evaluate("document.documentElement.scrollWidth")
                require(width <= window.width, f"{window.name}: {width} pixels wide")
        with browser.open(address, DOCUMENTATION) as page:
            visit(page, folder)
            require(not page.problems, "; ".join(page.problems))
        with browser.open(address) as page:
            visit_with_a_bad_file(page, folder)
    if keep:
        with Image.open(SCREENSHOTS / "demo.png") as image:
            shown = image.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        shown.save(keep, optimize=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where the documentation's screenshot goes")
    options = parser.parse_args(arguments)
    port = free_port()
    try:
        with running(port) as process:
            check_page(port, options.keep)
            check_taken_port(port)
            check_ctrl_c(process)
    except (BrowserError, Failure) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"the demo does what it should; screenshots are in {SCREENSHOTS}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
