"""Make the screenshots of docs/gallery.md: fits on generated images, whose pages Chromium opens.

    python tools/gallery.py build/gallery

`make gallery` runs it in some minutes, and `make docs` puts the screenshots into the site.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

PROGRAM = str(Path(sys.executable).with_name("finetune"))
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SOURCE = "source/fit/version_0"
FINETUNED = "runs/fit/finetuned"
FROZEN = "runs/fit/frozen"
WIDTH = 1000  # pixels
LOAD_IMAGES = """Promise.all([...document.images].map(image => {
    image.loading = "eager";
    return image.decode().catch(() => {});
}))"""


def run(folder: Path, command: str, exit_code: int = 0) -> None:
    """Run a command of finetune in a folder."""
    done = subprocess.run([PROGRAM, *command.split()], cwd=folder, stdout=subprocess.DEVNULL)
    if done.returncode != exit_code:
        sys.exit(f"finetune {command}: exit code {done.returncode}")


@contextmanager
def served(folder: Path, command: str) -> Iterator[str]:
    """Yield the address that a command prints, and stop it afterwards."""
    words = [PROGRAM, *command.split(), "--port", "0"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            addresses = (re.search(r"http://\S+", line) for line in process.stdout)
            address = next(filter(None, addresses), None)
            if address is None:
                sys.exit(f"finetune {command} ended without an address")
            yield address[0]
        finally:
            process.terminate()


def make_runs(folder: Path) -> None:
    """Train a source network, fine-tune it, fit a head on it, and compare the last two."""
    run(folder, "fit --config sample_source.yaml --epochs 3 --out source --report false")
    options = "--epochs 8 --coverage 0.9 --name finetuned"
    run(folder, f"fit --config sample.yaml --weights {SOURCE} {options}")
    head = "--backbone resnet18 --size 48 --freeze backbone --name frozen"
    run(folder, f"fit data/sample/target --weights {SOURCE} {head}")
    run(folder, f"compare {FROZEN} {FINETUNED}")


def make_faulty(folder: Path) -> None:
    """Check a copy of the images with a copied image in another class, one in another split, and a truncated file."""
    images = folder / "dishes"
    shutil.copytree(folder / "data/sample/target", images)
    hotdogs = images / "train/hotdog"
    shutil.copy(hotdogs / "0003.png", images / "train/not-hotdog/copy.png")
    shutil.copy(hotdogs / "0005.png", images / "test/hotdog/copy.png")
    (hotdogs / "0007.png").write_bytes((hotdogs / "0007.png").read_bytes()[:2000])
    run(folder, f"check dishes --ckpt_path {FINETUNED}", exit_code=1)


def take(browser: Browser, folder: Path, out: Path) -> None:
    """Take all screenshots."""

    def opened(address: str, height: int = 760) -> Page:
        page = browser.new_page(viewport={"width": WIDTH, "height": height})
        page.goto(address)
        return page

    def shoot(page: Page, name: str) -> None:
        page.evaluate(LOAD_IMAGES)  # those above a section move it
        page.evaluate("document.querySelector(location.hash || 'body').scrollIntoView()")
        page.wait_for_timeout(300)
        page.screenshot(path=out / f"{name}.png")
        page.close()

    report = (folder / FINETUNED / "report.html").as_uri()
    shoot(opened(report, 760), "report")
    shoot(opened(f"{report}#classes", 580), "classes")
    shoot(opened(f"{report}#sets", 230), "sets")
    shoot(opened(f"{report}#images", 720), "mistakes")
    shoot(opened(f"{report}#calibration", 600), "calibration")
    shoot(opened((folder / "comparison.html").as_uri()), "comparison")
    shoot(opened((folder / "check.html").as_uri()), "check")
    with served(folder, f"review dishes {FINETUNED}") as address:
        page = opened(address)
        page.locator("#neighbours img").first.wait_for()
        shoot(page, "review")
    (folder / "new").mkdir()
    for number, image in enumerate(sorted((folder / "data/sample/target/val").glob("*/*"))):
        shutil.copy(image, folder / f"new/{number:04}{image.suffix}")
    with served(folder, f"review new {FINETUNED} --labels hotdog,not-hotdog") as address:
        page = opened(address)
        page.locator("#neighbours img").first.wait_for()
        shoot(page, "labels")
    with served(folder, f"serve {FINETUNED}") as address:
        page = opened(address, 940)
        test = folder / "data/sample/target/test"
        files = [test / "hotdog/0001.png", test / "not-hotdog/0002.png"]
        page.locator("#files").set_input_files(files)
        page.locator("#results li").nth(1).wait_for()
        shoot(page, "serve")


def main(out: Path) -> None:
    if CHROMIUM is None:
        sys.exit("The screenshots need Chromium: apt install chromium")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        make_runs(Path(place))
        make_faulty(Path(place))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        screenshots = Path(place, "gallery")
        screenshots.mkdir()
        take(browser, Path(place), screenshots)
        browser.close()
        shutil.copytree(screenshots, out, dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
