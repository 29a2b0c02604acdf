"""Plant faults in a copy of a data set, and count what `finetune check` finds.

    python -m benchmarks.check --hotdog FOLDER

30 faults of each kind go into a copy of the hotdog photographs, each into an image of its own. The result goes to
benchmarks/check/check.json and into benchmarks/NOTEBOOK.md.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.check.plant import COPIES, FAULTS, copied
from benchmarks.common.documents import ROOT, markdown, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import PROGRAM, where_and_when

# The findings that are to name each fault.
FINDINGS = {
    "truncated": ("unreadable",),
    "empty": ("unreadable",),
    "web page": ("unreadable",),
    "one colour": ("blank",),
    "nearly black": ("blank",),
    "3 times as wide or tall": ("wide_or_tall",),
    "CMYK": ("odd_mode",),
    "16 bits": ("odd_mode",),
    "equal in both splits": ("leak_exact",),
    "equal in two classes": ("two_classes_exact",),
    "equal in one class": ("copies_exact",),
}
NEAR = ("leak_near", "two_classes_near", "copies_near")


class Run(NamedTuple):
    """What identifies a record."""

    seed: int


def check(folder: Path) -> dict:
    """Return the result of `finetune check`."""
    with tempfile.TemporaryDirectory() as output:
        command = [PROGRAM, "check", str(folder), "--output", output]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode not in (0, 1):  # 1: it found something
            raise subprocess.CalledProcessError(done.returncode, command)
        return json.loads(Path(output, "check.json").read_text("utf-8"))


def measure(run: Run, source: Path, num: int) -> dict:
    """Return for each kind of fault how many are planted and found, and how many other images have the finding."""
    with tempfile.TemporaryDirectory() as folder:
        planted = copied(source, Path(folder, "set"), num, run.seed)
        result = check(Path(folder, "set"))
    faults = {}
    for kind in (*FAULTS, *COPIES):
        kinds = FINDINGS.get(kind, NEAR)
        rows = [row for f in result["findings"] if f["kind"] in kinds for row in f["rows"]]
        sets = [set(row["files"]) for row in rows]
        num_found = sum(any(set(files) <= found for found in sets) for files in planted[kind])
        expected: set[str] = set()
        for other, groups in planted.items():
            if FINDINGS.get(other, NEAR) == kinds:
                expected.update(*groups)
        others = len(set().union(*sets) - expected)
        faults[kind] = {"planted": num, "found": num_found, "others": others}
    return {"faults": faults, "num_images": result["num_pictures"], **where_and_when()}


def table(records: Sequence[dict]) -> str:
    """Return the table of benchmarks/NOTEBOOK.md."""
    rows = [
        [kind, str(r["planted"]), str(r["found"]), f"{r['others']} of {record['num_images']:,}"]
        for record in records
        for kind, r in record.get("faults", {}).items()
    ]
    return markdown(["fault", "planted", "found", "others with this finding"], rows)


BENCHMARK = Benchmark(
    ROOT / "benchmarks/check/check.json",
    Run,
    lambda records: [Run(0)],
    lambda records: publish({"check_faults": table(records)}),
)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--hotdog", type=Path, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--num", type=int, default=30, help="faults of each kind")
    args = parser.parse_args()
    if not args.document and args.hotdog is None:
        parser.error("--hotdog is needed to measure")
    BENCHMARK.main(args, lambda run: measure(run, args.hotdog, args.num))


if __name__ == "__main__":
    main()
