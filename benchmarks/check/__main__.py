"""Plant faults in copies of data sets, let `finetune check` look for them, and write what it found.

    python -m benchmarks.check --hotdog FOLDER --sets FOLDER --weights resnet18.pt

30 faults of each kind go into a copy of the hotdog photographs, each into a picture of its own; 30 labels of clothing
and of trash are changed to a similar class, anew with each seed. Planting is seeded. Then the sets as they are, and the
search among 100,000 hashes. The results go to benchmarks/check/check.json and into benchmarks/NOTEBOOK.md.
"""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.check.plant import COPIES, FAULTS, SIMILAR, copied
from benchmarks.common.documents import ROOT, markdown, publish
from benchmarks.common.driver import command_line
from benchmarks.common.records import PROGRAM, keep, load
from finetune.data.checking.duplicates import RADIUS
from finetune.data.checking.perceptual_hash import MAX_EXACT, near_pairs

RECORDS = ROOT / "benchmarks/check/check.json"
NUM_RUNS, NUM_SEEDS = 3, 8
# In which finding each fault is to be.
WHERE = {
    "truncated": ("unreadable",),
    "empty": ("unreadable",),
    "web page": ("unreadable",),
    "PNG named .jpg": ("other_type",),
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


def check(folder: Path, *options: str) -> tuple[dict, float, float]:
    """Return the result of a check, its seconds, and those of the processor."""
    with tempfile.TemporaryDirectory() as output:
        command = [PROGRAM, "check", str(folder), "--output", output, *options]
        before = processor_seconds()
        began = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        spent = processor_seconds() - before
        if done.returncode not in (0, 1):
            raise RuntimeError(f"finetune check ended with {done.returncode}")
        result = json.loads(Path(output, "check.json").read_text("utf-8"))
    return result, seconds, spent


def processor_seconds() -> float:
    """Return the processor seconds of all subprocesses that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def sets_of(found: dict, kinds: tuple[str, ...]) -> list[set[str]]:
    return [{*row["files"]} for f in found["findings"] if f["kind"] in kinds for row in f["rows"]]


def faults(source: Path, num: int, seed: int) -> list[dict]:
    """Return for each kind how many are planted and found, and how many other pictures are named."""
    with tempfile.TemporaryDirectory() as folder:
        planted = copied(source, Path(folder, "set"), num, seed)
        found, seconds, spent = check(Path(folder, "set"))
    rows = []
    for kind in (*FAULTS, *COPIES):
        where = WHERE.get(kind, NEAR)
        sets = sets_of(found, where)
        num_found = sum(any({*files} <= s for s in sets) for files in planted[kind])
        meant = {
            file
            for other in planted
            if WHERE.get(other, NEAR) == where
            for files in planted[other]
            for file in files
        }
        others = len(set().union(*sets) - meant)
        rows.append({"what": kind, "planted": num, "found": num_found, "others": others})
    about = {
        "num_pictures": found["num_pictures"],
        "seconds": round(seconds, 1),
        "processor": round(spent, 1),
    }
    return [{"about": "faults", **row, **about} for row in rows]


def labels(source: Path, weights: str, num: int, size: int) -> dict:
    """Return how well the ranking finds moved labels: over all pictures, and among the first 100, for each seed."""
    from finetune.data.datasets.listing import list_pictures
    from finetune.features.label_errors import out_of_fold
    from finetune.features.picture_features import Features, picture_features

    listing = list_pictures(source)
    before = time.process_time()
    features = np.stack(
        [*picture_features(Features("resnet18", weights), listing.paths[:], size)]
    ).astype(float)
    spent = time.process_time() - before
    names, every = listing.class_names, np.arange(len(listing.paths))
    auroc, in_first_100 = [], []
    for seed in range(NUM_SEEDS):
        is_moved = np.isin(every, np.random.default_rng(seed).permutation(len(every))[:num])
        y = listing.class_of.copy()
        y[is_moved] = [names.index(SIMILAR[names[label]]) for label in y[is_moved]]
        given = out_of_fold(features, y, every, len(names))[every, y]
        auroc.append(round(float((given[is_moved][:, None] < given[~is_moved]).mean()), 3))
        in_first_100.append(int(is_moved[np.argsort(given)[:100]].sum()))
    what = {
        "about": "labels",
        "what": f"{source.name} at {size} pixels",
        "num_pictures": len(every),
        "moved": num,
    }
    return {**what, "auroc": auroc, "in_first_100": in_first_100, "processor": round(spent, 1)}


def search(num: int) -> dict:
    """Return the seconds to find all near pairs, of pictures and of mirror images, among random hashes."""
    values = np.random.default_rng(0).integers(0, 2**63, num).astype(np.uint64)
    seconds, spent = [], []
    for _ in range(NUM_RUNS):
        began, before = time.perf_counter(), time.process_time()
        for others in (values, values[::-1].copy()):
            near_pairs(values, others, RADIUS, 64)
        seconds.append(round(time.perf_counter() - began, 1))
        spent.append(round(time.process_time() - before, 1))
    return {"about": "search", "what": f"{num:,} hashes", "seconds": seconds, "processor": spent}


def tables(records: list[dict]) -> dict[str, str]:
    """Return the Markdown tables of benchmarks/NOTEBOOK.md."""
    planted = []
    moved = []
    timed = []
    for r in records:
        if r["about"] == "faults":
            others = f"{r['others']} of {r['num_pictures']:,}"
            planted.append([r["what"], str(r["planted"]), str(r["found"]), others])
        elif r["about"] == "labels":
            figures = [_spread(r["auroc"]), _spread(r["in_first_100"]), str(r["processor"])]
            moved.append([r["what"], str(r["num_pictures"]), str(r["moved"]), *figures])
        else:
            timed.append([r["what"], _spread(r["seconds"]), _spread(r["processor"])])
    head = ["set", "images", "labels moved", "AUROC", "moved ones among the first 100"]
    return {
        "check_faults": markdown(
            ["fault", "planted", "found", "others with this finding"], planted
        ),
        "check_labels": markdown([*head, "CPU seconds"], moved),
        "check_seconds": markdown(["what", "seconds", "CPU seconds"], timed),
    }


def _spread(values: list[float]) -> str:
    return f"{round(median(values), 3):g} ({min(values)} to {max(values)})"


def measure_seconds(root: Path, weights: str | None) -> None:
    """Measure and record the seconds of a check, without weights and with them."""
    kinds: dict[str, tuple[str, ...]] = {"the check": ()}
    if weights:
        kinds["the check with weights"] = ("--weights", weights)
    for kind, options in kinds.items():
        runs = [check(root, *options) for _ in range(NUM_RUNS)]
        what = f"{kind} of {runs[0][0]['num_pictures']:,} photographs"
        seconds, spent = ([round(run[k], 1) for run in runs] for k in (1, 2))
        keep(RECORDS, {"about": "time", "what": what, "seconds": seconds, "processor": spent})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hotdog", type=Path, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--sets", type=Path, help="folder that holds clothing and trash likewise")
    parser.add_argument("--weights", help="state dict of ResNet-18")
    parser.add_argument("--num", type=int, default=30, help="faults of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--document", action="store_true", help="only write the document")
    args = parser.parse_args()
    if not args.document:
        if args.hotdog:
            for record in faults(args.hotdog, args.num, args.seed):
                keep(RECORDS, record)
            measure_seconds(args.hotdog, args.weights)
        for name in ("clothing", "trash") if args.sets and args.weights else ():
            for size in (96, 128):
                keep(RECORDS, labels(args.sets / name, args.weights, args.num, size))
        keep(RECORDS, search(MAX_EXACT))
    publish(tables(load(RECORDS)))


if __name__ == "__main__":
    main()
