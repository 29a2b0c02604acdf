"""Pack a million images, and walk through one epoch of them.

    python -m benchmarks.data.packed_million

1,000,000 files in 10 class folders: 2,000 drawn PNG files of 8x8 pixels, each under 500 names (hard links), so that the
disk holds few bytes. Two steps, each in its own process: `finetune pack`; and an epoch of the training images through
the data module, at 28 pixels, without augmentation and network, in batches of 256, decoded by 2 workers. The second
begins with reading the index and splitting, whose seconds are measured, too. The disk is that of the temporary folder
(TMPDIR). The results go to benchmarks/data/packed_million.json and into benchmarks/NOTEBOOK.md. It takes about half an
hour on two busy cores.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from benchmarks.common.documents import ROOT, markdown, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when

_NUM_CLASSES = 10
_NAMES_OF_A_FILE = 500  # file systems limit the number of links to one file
# Each step prints the seconds of its parts, without imports; then its peak memory in MB, and other numbers.
_STEPS = {
    "pack": """
run(["pack", *sys.argv[1:]])
seconds = [time.monotonic() - began]
numbers = []
""",
    "epoch": """
data = ImageFolderData(sys.argv[2], image_size=28, batch_size=256, num_workers=2, augmentations=None)
data.read()
seconds = [time.monotonic() - began]
num_images = 0
num_open = 0
for i, batch in enumerate(data.loader("train", train=True)):
    num_images += len(batch["index"])
    if i % 100 == 0:
        processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        num_open = max(num_open, *(len(os.listdir(f"/proc/{pid}/fd")) for pid in processes))
assert num_images == len(data.splits["train"])
seconds.append(time.monotonic() - began - seconds[0])
numbers = [num_images, num_open]
""",
}
_SCRIPT = """
import json, multiprocessing, os, resource, sys, time
from finetune import ImageFolderData
from finetune.cli import run
import finetune.commands.pack
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
began = time.monotonic()
{step}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({{"seconds": seconds, "megabytes": [before, peak], "numbers": numbers}}))
"""


class Run(NamedTuple):
    """What identifies a record."""

    step: str
    num_images: int


def plan(records: Sequence[dict]) -> Iterator[Run]:
    yield Run("pack", 1_000_000)
    yield Run("epoch", 1_000_000)


def draw_images(root: Path, num_images: int) -> None:
    """Write small PNG files, and name each of them many times."""
    rng = np.random.default_rng(0)
    num_files = -(-num_images // _NAMES_OF_A_FILE)
    for i in range(num_files):
        folder = root / "train" / f"class{i % _NUM_CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        first = folder / f"{i:06}_000.png"
        cv2.imwrite(str(first), rng.integers(0, 256, (8, 8, 3)).astype(np.uint8))
        for k in range(1, _NAMES_OF_A_FILE):
            os.link(first, folder / f"{i:06}_{k:03}.png")


def measure(run: Run, folder: Path) -> dict:
    """Measure a step on the images in a folder, which are drawn, and packed, if they are not there yet."""
    images = folder / "images"
    packed = folder / "packed"
    if run.step == "pack":
        shutil.rmtree(packed, ignore_errors=True)
    if not images.exists():
        draw_images(images, run.num_images)
    if not packed.exists() and run.step == "epoch":
        _run("pack", images, packed)
    measured = _run(run.step, images, packed)
    shards = [file.stat().st_size for file in packed.glob("*.tar")]
    return {
        **measured,
        "num_shards": len(shards),
        "packed_mb": sum(shards) / 1e6,
        **where_and_when(),
    }


def _run(step: str, images: Path, packed: Path) -> dict:
    """Run a step in a process; return what it measured."""
    script = _SCRIPT.format(step=_STEPS[step])
    result = subprocess.run(
        [sys.executable, "-c", script, str(images), str(packed)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(result.stdout.strip().splitlines()[-1])


def table(records: Sequence[dict]) -> str:
    """Return the seconds and the peak memory of each step."""
    texts = {"pack": ["pack"], "epoch": ["read the index, and split", "an epoch"]}
    rows = []
    for record in records:
        before, peak = record["megabytes"]
        for text, seconds in zip(texts[record["step"]], record["seconds"], strict=True):
            num = f"{record['num_images']:,}"
            rows.append([text, num, f"{seconds:,.0f}", f"{peak:,.0f}", f"{before:,.0f}"])
    head = [
        "step",
        "images",
        "seconds",
        "peak memory of the main process, MB",
        "memory after the imports, MB",
    ]
    return markdown(head, rows)


def main() -> None:
    benchmark = Benchmark(
        ROOT / "benchmarks/data/packed_million.json",
        Run,
        plan,
        lambda records: publish({"packed_million": table(records)}),
        named=("step",),
    )
    parser = benchmark.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="keep the images here; by default a temporary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        benchmark.main(args, lambda run: measure(run, folder))


if __name__ == "__main__":
    main()
