"""The command of each tool, with its defaults and with the best that it offers on a CPU, and where its result is."""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.records import PROGRAM

HERE = Path(__file__).parent
BATCH_SIZE, IMAGE_SIZE = 64, 128
RESNET = "resnet18"

# tool: (its name in a table, its settings)
TOOLS = {
    # chooses precision, layout, workers and cache by itself
    "finetune": ("finetune fit", ("default",)),
    "plain": ("plain PyTorch", ("default", "best")),
    "timm": ("timm train.py", ("default", "best")),
    "fastai": ("fastai", ("default", "best")),
    "ultralytics": ("Ultralytics classify", ("default", "best")),
    "transformers": ("transformers Trainer", ("default", "best")),
}
PEERS = tuple(TOOLS)[1:]
OF_OURS = ("finetune", "plain")  # run in our own environment
PREDICTING = ("finetune", "timm", "fastai")
_BEST = {
    "plain": "--best",
    "fastai": "--best",
    "transformers": "--best",
    "timm": "--amp --amp-dtype bfloat16 --channels-last --workers 2 --warmup-epochs 1",
    "ultralytics": "cache=ram workers=2",  # its bf16 is for CUDA only, and it has no channels last
}
_SEED = {"finetune": "--seed_everything {}", "ultralytics": "seed={}"}  # the others: --seed
# tool: (file, column) of the accuracy of each epoch; the others print it
_ACCURACIES = {
    "finetune": ("fit/version_0/metrics.csv", "val/accuracy"),
    "timm": ("run/summary.csv", "eval_top1"),
    "ultralytics": ("run/results.csv", "metrics/accuracy_top1"),
}


@dataclass(frozen=True)
class Place:
    """Paths that a command names."""

    data: Path  # train/CLASS and val/CLASS
    out: Path  # of this run alone
    weights: Path  # a state dict of ResNet-18, or the folder of a network of timm
    forms: Path  # the same weights as the peers read them, by materials.write_weights
    environments: Path
    timm: Path | None  # a checkout of timm with train.py and inference.py
    backbone: str = RESNET  # or timm/NAME

    @property
    def is_resnet(self) -> bool:
        return self.backbone == RESNET

    def python(self, tool: str) -> str:
        return sys.executable if tool in OF_OURS else str(self.environments / tool / "bin/python")

    def hidden(self, text: str) -> str:
        """Return a text without the names of this machine's folders."""
        names = {self.python(tool): "python" for tool in TOOLS}
        names |= {PROGRAM: "finetune", str(HERE): "benchmarks/peers"}
        for name in ("data", "out", "weights", "forms", "environments", "timm"):
            if path := getattr(self, name):
                names[str(path)] = name.upper()
        for path in sorted(names, key=len, reverse=True):
            text = text.replace(path, names[path])
        return text


class Training(NamedTuple):
    """A training run; without a seed the tool takes its own."""

    tool: str
    setting: str
    num_epochs: int
    seed: int | None = None


def variables(place: Place) -> dict[str, str]:
    """Return the environment of a run: it downloads nothing and finds nothing of an earlier run."""
    # what a program writes when it first starts: a list of fonts, a settings file
    home = place.environments / "home"
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "YOLO_OFFLINE", "NO_ALBUMENTATIONS_UPDATE")
    return {
        **dict.fromkeys(offline, "1"),
        "TORCH_HOME": str(place.forms / "torch"),
        "FINETUNE_CACHE": str(place.out / "cache"),
        "HF_HOME": str(place.out / "hf"),
        "FASTAI_HOME": str(home / "fastai"),
        "YOLO_CONFIG_DIR": str(home / "ultralytics"),
        "MPLCONFIGDIR": str(home / "matplotlib"),
        "WANDB_MODE": "disabled",
    }


def fit(training: Training, place: Place) -> list[str]:
    """Return the command that trains."""
    tool = training.tool
    more: list[str] = []
    if training.seed is not None:
        more += _SEED.get(tool, "--seed {}").format(training.seed).split()
    if tool == "finetune":
        common = f"fit --config image_folder.yaml --data.image_size {IMAGE_SIZE} "
        common += f"--data.batch_size {BATCH_SIZE} --test_after_fit false "
        common += f"--trainer.max_epochs {training.num_epochs}"
        places = ["--data.root", place.data, "--model.weights", place.weights]
        places += ["--trainer.default_root_dir", place.out]
        return [PROGRAM, *common.split(), *more, *map(str, places)]
    if training.setting == "best":
        more += _BEST[tool].split()
    return fit_peer(tool, training.num_epochs, BATCH_SIZE, more, place)


def fit_peer(
    tool: str, epochs: int, batch_size: int, more: Sequence[str], place: Place
) -> list[str]:
    """Return the command by which a peer trains the same network from the same weights.

    `more` are further options. Ultralytics has ResNet-18 only.
    """
    python = place.python(tool)
    if tool == "timm":
        num_classes = len(list((place.data / "train").iterdir()))
        network = place.backbone.removeprefix("timm/")
        common = f"--model {network} --pretrained --num-classes {num_classes} --device cpu "
        common += f"--input-size 3 {IMAGE_SIZE} {IMAGE_SIZE} --batch-size {batch_size} "
        common += f"--epochs {epochs} --experiment run"
        if place.is_resnet:
            weights = place.forms / "torch/hub/checkpoints/resnet18-f37072fd.pth"
        else:
            weights = place.weights / "model.safetensors"
        places = ["--data-dir", place.data, "--output", place.out, "--pretrained-path", weights]
        return [python, f"{place.timm}/train.py", *common.split(), *more, *map(str, places)]
    if tool == "ultralytics":
        common = "classify train model=yolo11-cls-resnet18.yaml device=cpu name=run "
        common += f"imgsz={IMAGE_SIZE} batch={batch_size} epochs={epochs}"
        yolo = str(Path(python).with_name("yolo"))
        return [yolo, *common.split(), f"data={place.data}", f"project={place.out}", *more]
    common = f"--epochs {epochs} --batch_size {batch_size} --image_size {IMAGE_SIZE}"
    places = ["--data", place.data, "--out", place.out]
    if tool == "transformers":
        places += ["--weights", place.forms / "hub_model"]
    elif not place.is_resnet:
        places += ["--weights", place.weights]
    return [python, str(HERE / f"{tool}_peer.py"), *common.split(), *more, *map(str, places)]


def predict(tool: str, images: Path, model: Path, place: Place) -> list[str]:
    """Return the command that classifies a folder of images by what `fit` wrote to `model`."""
    if tool == "finetune":
        checkpoint = next(model.glob("fit/version_0/checkpoints/last.ckpt"))
        places = ["--ckpt_path", checkpoint, "--data.predict", images]
        return [PROGRAM, "predict", *map(str, places), "--trainer.default_root_dir", str(place.out)]
    if tool == "timm":
        common = f"--model resnet18 --num-classes 2 --input-size 3 {IMAGE_SIZE} {IMAGE_SIZE} --device cpu --fullname"
        places = ["--data-dir", images, "--checkpoint", model / "run/last.pth.tar"]
        program = [place.python(tool), f"{place.timm}/inference.py", *common.split()]
        return [*program, *map(str, places), "--results-dir", str(place.out)]
    script = str(HERE / "fastai_peer.py")
    return [place.python(tool), script, "--predict", str(images), "--out", str(model)]


def accuracy(tool: str, out: Path, output: str) -> float:
    """Return the accuracy of the last epoch as the tool itself measured it."""
    if tool not in _ACCURACIES:
        return json.loads(output.strip().splitlines()[-1])["accuracy"]
    file, column = _ACCURACIES[tool]
    with open(out / file, newline="") as lines:
        rows = [{key.strip(): value for key, value in row.items()} for row in csv.DictReader(lines)]
    last = [float(row[column]) for row in rows if row[column].strip()][-1]
    return last / 100 if tool == "timm" else last
