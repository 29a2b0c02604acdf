"""Measure how well scores tell images of other classes from those of the classes that a network was trained on.

    python -m benchmarks.strangers SET ... --weights TIMM_FOLDER [--seeds 3] [--freeze backbone] [--epochs 5]

Each SET has train/CLASS and test/CLASS. A third of the classes, drawn for each seed, is left out of training.
The table has the AUROC of each score against the images of these classes (near), and against the test images of the
other sets (far): mean ± standard deviation over seeds.
"""

import argparse
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

import finetune
from benchmarks.accuracy import networks
from benchmarks.common.tables import markdown, mean_and_spread

NEIGHBOURS = 5

# Shapes: N images, D features, K classes.

Array = np.ndarray
Scores = dict[str, Array]


def leave_out(folder: Path, seed: int, target: Path) -> list[str]:
    """Link a set into `target` without a third of its classes, and return the names of these."""
    names = sorted(path.name for path in (folder / "train").iterdir())
    left = random.Random(f"{folder.name}{seed}").sample(names, round(len(names) / 3))
    for part in ("train", "test"):
        (target / part).mkdir()
        for name in set(names) - set(left):
            (target / part / name).symlink_to((folder / part / name).resolve())
    return left


def scores_of(model: finetune.LoadedModel, folder: Path) -> Callable[[Sequence[str]], Scores]:
    """Return a function from images to their scores, of which higher ones are of stranger images, (N,) each."""
    x, labels = features(model, sorted(map(str, folder.glob("train/*/*"))))
    classes = range(len(model.class_names))
    means = np.stack([x[labels == k].mean(0) for k in classes])
    whiten = np.linalg.inv(np.linalg.cholesky(shrunk_covariance(x - means[labels])))

    def scores(paths: Sequence[str]) -> Scores:
        z, _ = features(model, paths)
        p = np.array([[*one.probabilities.values()] for one in model.predict(list(paths))])
        directions = means / np.linalg.norm(means, axis=1, keepdims=True)
        offsets = [(((z - mean) @ whiten.T) ** 2).sum(1) for mean in means]
        return {
            "maximum probability": -p.max(1),
            "cosine with the nearest class mean": -(z @ directions.T).max(1),
            "Mahalanobis": np.min(offsets, axis=0),
            f"{NEIGHBOURS} nearest neighbours": -np.sort(z @ x.T, axis=1)[:, -NEIGHBOURS],
        }

    return scores


def features(model: finetune.LoadedModel, paths: Sequence[str]) -> tuple[Array, Array]:
    """Return the features of images, of length 1 (N, D), and the indices of their classes (N,), -1 for other ones."""
    names = {name: k for k, name in enumerate(model.class_names)}
    x = model.embed(list(paths)).astype(np.float64)
    labels = np.array([names.get(Path(path).parent.name, -1) for path in paths])
    return x / np.linalg.norm(x, axis=1, keepdims=True), labels


def shrunk_covariance(x: Array) -> Array:
    """Return the covariance of centred rows (N, D), shrunk to a multiple of the identity (Ledoit and Wolf 2004)."""
    num, num_features = x.shape
    covariance = x.T @ x / num
    target = np.trace(covariance) / num_features * np.eye(num_features)
    spread = ((x**2).sum(1) ** 2).sum() / num**2 - (covariance**2).sum() / num
    share = min(1.0, spread / ((covariance - target) ** 2).sum())
    return (1 - share) * covariance + share * target


def auroc(known: Array, strange: Array) -> float:
    """Return the share of pairs in which the strange image has the higher score."""
    ranks = rankdata([*known, *strange])[len(known) :]
    return float((ranks.sum() - len(strange) * (len(strange) + 1) / 2) / len(known) / len(strange))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--weights", required=True, help="a folder of timm's, or NAME=FILE")
    parser.add_argument("--freeze")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    (network,) = networks(args.weights)
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for folder in args.sets:
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as out:
                left = leave_out(folder, seed, Path(place))
                run = finetune.fit(
                    place,
                    backbone=network.backbone,
                    weights=network.weights,
                    freeze=args.freeze,
                    epochs=args.epochs,
                    size=128,
                    seed=seed,
                    out=out,
                    options={"report": False},
                )
                scores = scores_of(finetune.load(run.best), Path(place))
                near = [path for name in left for path in folder.glob(f"*/{name}/*")]
                others = [other for other in args.sets if other != folder]
                far = [path for other in others for path in other.glob("test/*/*")]
                known = scores([*map(str, Path(place).glob("test/*/*"))])
                for kind, paths in (("near", near), ("far", far)):
                    for name, values in scores([*map(str, paths)]).items():
                        cells[name, f"{folder.name}, {kind}"].append(auroc(known[name], values))
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = [
        [name, *(mean_and_spread(cells[name, column], 3) for column in columns)]
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    print(markdown(["score", *columns], rows))


if __name__ == "__main__":
    main()
