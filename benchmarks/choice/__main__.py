"""How far the network that `--backbone auto` chooses is behind the best one, measured by heads on frozen features.

    python -m benchmarks.choice SET ... --weights A,B,C [--size 128] [--splits 12] [--features FOLDER]

Each SET has train/CLASS and test/CLASS. Networks are ranked on train as the command ranks them; a head on each
network's features of train is then measured on test. With `--splits N` this is repeated on N random splits of all
images of a set (70 % train). Prints a row for each set: the accuracies, and by how much the chosen network's mean over
the splits is below the mean of the best one.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.driver import command_line
from finetune.features.backbone_ranking import cross_validated_scores, rank, stratified_order
from finetune.features.image_features import Features, image_features
from finetune.features.logistic_regression import fit_head
from finetune.fitting.network_choice import candidates_of
from finetune.models.candidates import Candidate, candidate_names
from finetune.models.timm_backbones import describe, is_timm

_TRAIN_SHARE = 0.7

# Shapes: N images, D features.


def files_of(folder: Path) -> tuple[list[str], np.ndarray]:
    """Return the images of class folders and their labels."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [
        (str(file), label) for label, path in enumerate(classes) for file in sorted(path.iterdir())
    ]
    return [file for file, _ in files], np.array([label for _, label in files])


def features_of(candidate: Candidate, paths: Sequence[str], size: int) -> np.ndarray:
    """Return the features of images, prepared as the network needs them, (N, D)."""
    preparation: dict[str, Any] = {"image_size": size}
    if is_timm(candidate.backbone):
        description = describe(candidate.backbone, candidate.weights)
        settings = ("resize", "interpolation", "crop_share")
        preparation |= {name: getattr(description, name) for name in settings}
    network = Features(candidate.backbone, candidate.weights, size)
    return np.stack([*image_features(network, paths, preparation)])


def features(
    candidate: Candidate, folder: Path, size: int, cache: Path | None
) -> dict[str, np.ndarray]:
    """Return features and labels of train and test; from a file of the cache if they were computed before."""
    file = None
    if cache is not None:
        file = cache / f"{candidate.backbone.replace('/', '_')}-{folder.name}-{size}.npz"
        if file.is_file():
            return dict(np.load(file))
    arrays = {}
    for split in ("train", "test"):
        paths, arrays[f"{split}_y"] = files_of(folder / split)
        arrays[split] = features_of(candidate, paths, size)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, **arrays)
    return arrays


def trial(
    table: dict[str, np.ndarray], labels: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int
) -> tuple[str, list[float]]:
    """Return the chosen network and the test accuracy of each."""
    num_classes = int(labels.max()) + 1
    networks = {
        name: lambda x=x: lambda chosen, deadline: x[train][chosen] for name, x in table.items()
    }
    chosen = rank(networks, labels[train], num_classes, float("inf"), seed).standings[0].name
    accuracies = []
    for x in table.values():
        _, _, strength = cross_validated_scores(x[train], labels[train], num_classes)
        weight, bias = fit_head(x[train].astype(np.float64), labels[train], num_classes, strength)
        predicted = (x[test] @ weight.T + bias).argmax(axis=1)
        accuracies.append(float((predicted == labels[test]).mean()))
    return chosen, accuracies


def row(folder: Path, candidates: Sequence[Candidate], args: argparse.Namespace) -> list[str]:
    """Return the table's row of a set."""
    arrays = [features(candidate, folder, args.size, args.features) for candidate in candidates]
    listed = candidate_names(candidates)
    table = {
        name: np.concatenate([one["train"], one["test"]])
        for name, one in zip(listed, arrays, strict=True)
    }
    labels = np.concatenate([arrays[0]["train_y"], arrays[0]["test_y"]])
    splits = [np.split(np.arange(len(labels)), [len(arrays[0]["train_y"])])]
    if args.splits:
        orders = [stratified_order(labels, 1000 + i) for i in range(args.splits)]
        splits = [np.split(order, [int(_TRAIN_SHARE * len(labels))]) for order in orders]
    results = [trial(table, labels, train, test, seed) for seed, (train, test) in enumerate(splits)]
    means = np.mean([accuracies for _, accuracies in results], axis=0)
    own = np.mean([accuracies[listed.index(chosen)] for chosen, accuracies in results])
    counts = Counter(chosen for chosen, _ in results).most_common()
    shown = ", ".join(f"{name} {num}x" for name, num in counts)
    behind = f"{100 * (means.max() - own):.1f}"
    return [folder.name, *(f"{mean:.3f}" for mean in means), shown, f"{own:.3f}", behind]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("sets", nargs="+", type=Path, metavar="SET")
    parser.add_argument("--weights", required=True, help="networks, separated by commas")
    parser.add_argument("--size", type=int, default=128, help="pixels a side")
    parser.add_argument("--splits", type=int, default=0, help="random splits of each set")
    parser.add_argument("--features", type=Path, help="folder in which features are kept")
    args = parser.parse_args()
    candidates = candidates_of("auto", args.weights)
    head = [
        "set",
        *candidate_names(candidates),
        "chosen",
        "mean of the chosen",
        "points behind the best mean",
    ]
    print(f"| {' | '.join(head)} |")
    for folder in args.sets:
        print(f"| {' | '.join(row(folder, candidates, args))} |", flush=True)


if __name__ == "__main__":
    main()
