"""The command of each tool with its own recipe, and where its accuracy is."""

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.records import PROGRAM

HERE = Path(__file__).parent
IMAGE_SIZE = 128
OURS = "finetune"

# tool: its name in the table, its numbers of epochs (the first is short), and its own batch size. None is the default.
TOOLS: dict[str, tuple[str, tuple[int | None, ...], int]] = {
    OURS: ("finetune fit", (5, None), 32),
    "plain": ("plain PyTorch", (5, 20), 64),
    "timm": ("timm train.py", (5, 20), 128),
    "fastai": ("fastai", (5, 20), 64),
    "transformers": ("transformers Trainer", (3, 20), 8),
}
IN_OUR_ENVIRONMENT = (OURS, "plain")
# Workers where there is an option, two for two cores. timm: a tenth of the rate from scratch, as its author advises for
# a new head (huggingface/pytorch-image-models#25), and a warm-up that is shorter than the shortest run.
_OPTIONS = {
    "plain": "--seed {}",
    "timm": "--lr-base 0.01 --warmup-epochs 1 --workers 2 --seed {}",
    "fastai": "--seed {}",
    "transformers": "--workers 2 --seed {}",
}


@dataclass(frozen=True)
class Place:
    """Paths that a command names."""

    data: Path  # train/CLASS and, for the peers, val/CLASS
    out: Path  # of this run alone
    weights: Path  # the folder of a network of timm
    hub_model: Path  # the same weights as transformers reads them
    environments: Path
    timm: Path | None  # a checkout of timm with train.py
    backbone: str  # timm/NAME

    def python(self, tool: str) -> str:
        if tool in IN_OUR_ENVIRONMENT:
            return sys.executable
        return str(self.environments / tool / "bin/python")

    def hidden(self, text: str) -> str:
        """Return a text without the names of this machine's folders."""
        names = {self.python(tool): "python" for tool in TOOLS}
        names |= {PROGRAM: "finetune", str(HERE): "benchmarks/peers"}
        for name in ("data", "out", "weights", "hub_model", "environments", "timm"):
            if path := getattr(self, name):
                names[str(path)] = name.upper()
        for path in sorted(names, key=len, reverse=True):
            text = text.replace(path, names[path])
        return text


def variables(place: Place) -> dict[str, str]:
    """Return the environment of a run: it downloads nothing and finds nothing of an earlier run."""
    # what a program writes when it first starts: a list of fonts, a settings file
    home = place.environments / "home"
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "NO_ALBUMENTATIONS_UPDATE")
    return {
        **dict.fromkeys(offline, "1"),
        "FINETUNE_CACHE": str(place.out / "cache"),
        "HF_HOME": str(place.out / "hf"),
        "FASTAI_HOME": str(home / "fastai"),
        "MPLCONFIGDIR": str(home / "matplotlib"),
        "WANDB_MODE": "disabled",
    }


def command(tool: str, epochs: int | None, seed: int, place: Place) -> list[str]:
    """Return the command by which a tool trains the network from the weights."""
    if tool == OURS:
        words = [PROGRAM, "fit", place.data, "--size", IMAGE_SIZE, "--seed", seed]
        words += ["--epochs", epochs] if epochs else []
        words += ["--backbone", place.backbone, "--weights", place.weights, "--out", place.out]
        return [str(word) for word in words]
    more = _OPTIONS[tool].format(seed).split()
    python = place.python(tool)
    batch_size = TOOLS[tool][2]
    if tool == "timm":
        num_classes = len(list((place.data / "train").iterdir()))
        common = f"--model {place.backbone.removeprefix('timm/')} --pretrained --device cpu "
        common += f"--num-classes {num_classes} --input-size 3 {IMAGE_SIZE} {IMAGE_SIZE} "
        common += f"--batch-size {batch_size} --epochs {epochs} --experiment run"
        weights = place.weights / "model.safetensors"
        places = ["--data-dir", place.data, "--output", place.out, "--pretrained-path", weights]
        return [python, f"{place.timm}/train.py", *common.split(), *more, *map(str, places)]
    common = f"--epochs {epochs} --batch_size {batch_size} --image_size {IMAGE_SIZE}"
    weights = place.hub_model if tool == "transformers" else place.weights
    places = ["--data", place.data, "--out", place.out, "--weights", weights]
    return [python, str(HERE / f"{tool}_peer.py"), *common.split(), *more, *map(str, places)]


def accuracy(tool: str, out: Path, output: str) -> float:
    """Return the accuracy on the test images: ours of the kept checkpoint, a peer's of its last epoch."""
    if tool == OURS:
        test = json.loads((out / "fit/version_0/test.json").read_text("utf-8"))
        return test["test/accuracy"]
    if tool != "timm":
        return json.loads(output.strip().splitlines()[-1])["accuracy"]
    with open(out / "run/summary.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return float(rows[-1]["eval_top1"]) / 100
