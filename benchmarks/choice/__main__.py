"""How far the network that `--backbone auto` chooses is behind the best one, measured by heads on frozen features.

    python -m benchmarks.choice SET ... --weights A,B,C [--size 128] [--splits 12] [--features FOLDER]

Each SET has train/CLASS and test/CLASS. Networks are ranked on train as the command ranks them; a head on each
network's features of train is then measured on test. With `--splits N` this is repeated on N random splits of all
images of a set (70 % train). Prints a row for each set: the accuracies, and by how much the chosen network's mean over
the splits is below the mean of the best one.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from finetune.commands.backbone_choice import candidates_of
from finetune.features.backbone_ranking import fitted_head, rank, stratified_order
from finetune.features.picture_features import Features, picture_features
from finetune.models.candidates import Candidate, names
from finetune.models.timm_backbones import describe, is_timm

_TRAIN_SHARE = 0.7


def files_of(folder: Path) -> tuple[list[str], np.ndarray]:
    """Return the images of class folders and their labels."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [
        (str(file), label) for label, path in enumerate(classes) for file in sorted(path.iterdir())
    ]
    return [file for file, _ in files], np.array([label for _, label in files])


def features(
    candidate: Candidate, folder: Path, size: int, kept: Path | None
) -> dict[str, np.ndarray]:
    """Return features and labels of train and test; from a file if they were computed before."""
    file = (
        None
        if kept is None
        else kept / f"{candidate.backbone.replace('/', '_')}-{folder.name}-{size}.npz"
    )
    if file is not None and file.is_file():
        return dict(np.load(file))
    about = {}
    if is_timm(candidate.backbone):
        told = describe(candidate.backbone, candidate.weights)
        about = {name: getattr(told, name) for name in ("resize", "interpolation", "crop_share")}
    network = Features(candidate.backbone, candidate.weights, size)
    found = {}
    for split in ("train", "test"):
        paths, found[f"{split}_y"] = files_of(folder / split)
        found[split] = np.stack([*picture_features(network, paths, size, **about)])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, **found)
    return found


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
        weight, bias = fitted_head(x[train], labels[train], num_classes)
        accuracies.append(
            float(((x[test] @ weight.T + bias).argmax(axis=1) == labels[test]).mean())
        )
    return chosen, accuracies


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.choice")
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--splits", type=int, default=0)
    parser.add_argument("--features", type=Path)
    options = parser.parse_args()
    candidates = candidates_of("auto", options.weights)
    listed = names(candidates)
    print(f"| set | {' | '.join(listed)} | chosen | its mean | behind the best mean |")
    for folder in options.sets:
        found = [
            features(candidate, folder, options.size, options.features) for candidate in candidates
        ]
        table = {
            name: np.concatenate([one["train"], one["test"]])
            for name, one in zip(listed, found, strict=True)
        }
        labels = np.concatenate([found[0]["train_y"], found[0]["test_y"]])
        num_train = len(found[0]["train_y"])
        splits = [np.split(np.arange(len(labels)), [num_train])]
        if options.splits:
            orders = [stratified_order(labels, 1000 + i) for i in range(options.splits)]
            splits = [np.split(order, [int(_TRAIN_SHARE * len(labels))]) for order in orders]
        results = [
            trial(table, labels, train, test, seed) for seed, (train, test) in enumerate(splits)
        ]
        means = np.mean([accuracies for _, accuracies in results], axis=0)
        own = np.mean([accuracies[listed.index(chosen)] for chosen, accuracies in results])
        counts = ", ".join(
            f"{name} {num}x" for name, num in Counter(chosen for chosen, _ in results).most_common()
        )
        cells = " | ".join(f"{mean:.3f}" for mean in means)
        print(
            f"| {folder.name} | {cells} | {counts} | {own:.3f} | {100 * (means.max() - own):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
