"""How soon a review shows wrong labels.

    python -m benchmarks.check.review --sets FOLDER --weights resnet18.pt --lite0 FOLDER

30 labels of a set are changed to a similar class, anew with each seed. Then a program reviews the images through the
session of `finetune review`, and always decides rightly. Counted is how many of the 30 are among the first 100 images,
by `finetune check`, by a review that keeps its first order, and by a review that ranks again. Results go to
benchmarks/check/review.json, the table to benchmarks/NOTEBOOK.md.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.check.plant import SIMILAR
from benchmarks.common.documents import ROOT, markdown, mean_and_spread, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when

RECORDS = ROOT / "benchmarks/check/review.json"
SETS = ("clothing", "trash")
NETWORKS = ("resnet18", "lite0")
NUM_MOVED = 30
NUM_SHOWN = 100
NUM_SEEDS = 3
SIZES = {"resnet18": 96, "lite0": 224}  # pixels; the first is the default of the review
ORDERS = ("check", "first order", "ranked again")


class Run(NamedTuple):
    """What identifies a record."""

    set: str
    network: str
    seed: int


def plan(records: list[dict]) -> Iterator[Run]:
    for seed in range(NUM_SEEDS):
        for set_name in SETS:
            yield from (Run(set_name, network, seed) for network in NETWORKS)


def changed_labels(labels: np.ndarray, names: list[str], seed: int) -> Any:
    """Return labels with 30 of them changed to a similar class, and whether each is changed."""
    rng = np.random.default_rng(seed)
    is_moved = np.isin(np.arange(len(labels)), rng.permutation(len(labels))[:NUM_MOVED])
    changed = labels.copy()
    changed[is_moved] = [names.index(SIMILAR[names[label]]) for label in labels[is_moved]]
    return changed, is_moved


@cache
def network_of(network: str, weights: str) -> Any:
    from finetune.features.image_features import FeatureNetwork, Features
    from finetune.models.timm_backbones import describe

    preparation: dict[str, Any] = {"image_size": SIZES[network]}
    backbone = "resnet18"
    if network == "lite0":
        backbone = "timm/tf_efficientnet_lite0"
        about = describe(backbone, weights)
        names = ("resize", "interpolation", "crop_share")
        preparation |= {name: getattr(about, name) for name in names}
    return FeatureNetwork(network, Features(backbone, weights, SIZES[network]), preparation)


@cache
def facts_of(folder: Path, network: str, weights: str) -> Any:
    """Return the images of a folder and what their pixels tell; computed once, because labels do not matter."""
    from finetune.data.corrections import CorrectionsFile
    from finetune.review.review_images import list_images
    from finetune.review.review_session import ReviewSession

    images = list_images(folder)
    session = ReviewSession(images, CorrectionsFile(Path("none.csv")), "", {})
    return images, job_of(session, network, weights).inspect()


def job_of(session: Any, network: str, weights: str) -> Any:
    from finetune.review.ranking_job import RankingJob

    return RankingJob(
        data=session.images,
        labels_now=session.labels_now,
        network=network_of(network, weights),
        on_ready=session.put_ranking,
        outdated=session.outdated,
    )


def review(images: Any, job_facts: Any, truth: np.ndarray, file: Path, how: dict) -> list[int]:
    """Decide rightly about the first 100 images. Returns their indices.

    Args:
        images: The images with wrong labels.
        job_facts: What their pixels tell.
        truth: The right labels.
        file: The file of corrections to write.
        how: `network`, `weights`, and `is_again`: whether the labels are ranked again.
    """
    from finetune.data.corrections import CorrectionsFile
    from finetune.review.review_session import ReviewSession

    session = ReviewSession(images, CorrectionsFile(file), "oracle", {})
    job = job_of(session, how["network"], how["weights"])
    job.facts = job_facts
    job.rank()
    assert not job.error, job.error
    shown: list[int] = []
    while len(shown) < NUM_SHOWN:
        i = session.state()["next"]
        shown.append(i)
        is_right = session.item(i)["labels"] == [truth[i]]
        action = "right" if is_right else "change"
        session.decide(i, action, None if is_right else [int(truth[i])], 0)
        if how["is_again"] and session.outdated.is_set():
            session.outdated.clear()
            job.rank()
    return shown


def with_labels(images: Any, labels: np.ndarray) -> Any:
    samples = images.splits["all"]
    targets = replace(samples.targets, labels=labels)
    return replace(images, splits={"all": replace(samples, targets=targets)})


def found(run: Run, folder: Path, weights: str) -> dict:
    """Return how many of the moved labels are among the first 100, by each order."""
    from finetune.features.label_errors import out_of_fold, rank_labels

    images, job_facts = facts_of(folder, run.network, weights)
    truth = images.targets.labels
    labels, is_moved = changed_labels(truth, images.class_names, run.seed)
    rows = job_facts.measured
    p = out_of_fold(job_facts.coordinates, labels[rows], rows, len(images.class_names))
    first = rows[rank_labels(p, labels[rows], rows)[:NUM_SHOWN]]
    result = {"check": int(is_moved[first].sum())}
    for order, is_again in (("first order", False), ("ranked again", True)):
        how = {"network": run.network, "weights": weights, "is_again": is_again}
        with tempfile.TemporaryDirectory() as place:
            file = Path(place, "corrections.csv")
            shown = review(with_labels(images, labels), job_facts, truth, file, how)
        result[order] = int(is_moved[shown].sum())
    return {**result, "num_images": len(truth)}


def table(records: list[dict]) -> str:
    """Return the table of benchmarks/NOTEBOOK.md."""
    rows = []
    for set_name in SETS:
        for network in NETWORKS:
            runs = [r for r in records if (r["set"], r["network"]) == (set_name, network)]
            cells = [mean_and_spread([r[name] for r in runs], 1) for name in ORDERS]
            rows.append([set_name, network, str(len(runs)), *cells])
    return markdown(["set", "network", "seeds", *ORDERS], rows)


def write(records: list[dict]) -> None:
    """Write the table."""
    publish({"review_found": table(records)})


def main() -> None:
    benchmark = Benchmark(RECORDS, Run, plan, write, ("set", "network"))
    parser = benchmark.parser(__doc__)
    parser.add_argument("--sets", type=Path, help="folder that holds clothing and trash")
    parser.add_argument("--weights", help="state dict of ResNet-18")
    parser.add_argument("--lite0", help="folder with the weights of tf_efficientnet_lite0")
    args = parser.parse_args()
    weights = {"resnet18": args.weights, "lite0": args.lite0}

    def measure(run: Run) -> dict:
        result = found(run, args.sets / run.set, weights[run.network])
        return {**result, **where_and_when()}

    benchmark.main(args, measure, lambda run: bool(args.sets and weights[run.network]))


if __name__ == "__main__":
    main()
