"""How long a data set of very many files takes to scan and fingerprint, and what its index costs.

    python -m benchmarks.data.indexing [--num 1000000] [--folder FOLDER]

Makes empty files in 1,000 classes, a tenth of them in test, beneath a temporary folder, and removes them. Nothing is
read of a file here but its name, size and time, so that empty ones do. The results go to benchmarks/data/indexing.json
and into benchmarks/NOTEBOOK.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.documents import ROOT, markdown, publish, spread
from benchmarks.common.driver import command_line
from finetune.system.machine import processor

RECORDS = ROOT / "benchmarks/data/indexing.json"
_CLASSES = 1000


def make(root: Path, num: int) -> None:
    """Write `num` empty files."""
    for split, share in (("train", 0.9), ("test", 0.1)):
        for c in range(_CLASSES):
            folder = root / split / f"class_{c:04d}"
            folder.mkdir(parents=True)
            for i in range(round(num * share / _CLASSES)):
                (folder / f"picture_{i:06d}.jpg").touch()


def measure(root: str) -> dict[str, float]:
    """Return seconds, and bytes a file that stay in memory, of one scan in this process."""
    from finetune import ImageFolderData
    from finetune.data.storage import concatenate_stats, files_digest

    before, began = _resident(), time.perf_counter()
    data = ImageFolderData(root, val_fraction=0)
    scanned, after = time.perf_counter(), _resident()
    paths = [path for split in data.splits.values() for path in split.paths]
    digested = time.perf_counter()
    stats = concatenate_stats([split.load_stats() for split in data.splits.values()])
    files_digest(paths, stats, root)
    return {
        "files": len(paths),
        "scan": scanned - began,
        "fingerprint": time.perf_counter() - digested,
        "bytes": (after - before) / len(paths),
    }


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text("utf-8").split()[1])


def table(found: list[dict[str, float]]) -> str:
    """Return medians, smallest and largest value."""
    seconds = [spread([r[name] for r in found], 1) for name in ("scan", "fingerprint")]
    row = [f"{found[0]['files']:,}", *seconds, f"{max(r['bytes'] for r in found):.0f}"]
    head = ["files", "seconds to scan", "seconds to fingerprint", "largest index, bytes a file"]
    return markdown(head, [row])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--num", type=int, default=1_000_000)
    parser.add_argument(
        "--folder", help="where to make them; by default the system's temporary folder"
    )
    parser.add_argument("--repeats", type=int, default=5)
    # one measurement, in a process of its own
    parser.add_argument("--scan", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.scan:
        print(json.dumps(measure(args.scan)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        make(Path(folder), args.num)
        command = [sys.executable, "-m", "benchmarks.data.indexing", "--scan", folder]
        found = [
            json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            for _ in range(args.repeats)
        ]
    RECORDS.write_text(
        json.dumps({"machine": processor(), "seconds": found}, indent=1) + "\n", "utf-8"
    )
    publish({"many_files": table(found)})
    print(
        table(found), statistics.median(r["scan"] + r["fingerprint"] for r in found), "s together"
    )


if __name__ == "__main__":
    main()
