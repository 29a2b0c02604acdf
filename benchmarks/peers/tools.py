"""How each tool is called, with what it does by itself and the best it offers on a CPU, and where its result is."""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BATCH_SIZE, IMAGE_SIZE = 64, 128

# tool: (how a table calls it, its settings)
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
# Asked for and not offered: said in the table instead of a number.
CANNOT = {("head", "timm"): "`train.py` has no option that freezes"}
_BEST = {
    "plain": "--best",
    "fastai": "--best",
    "transformers": "--best",
    "timm": "--amp --amp-dtype bfloat16 --channels-last --workers 2 --warmup-epochs 1",
    "ultralytics": "cache=ram workers=2",  # its bf16 is for CUDA only, and it has no channels last
}
_HEAD = {
    "plain": "--head",
    "fastai": "--head",
    "transformers": "--head",
    "ultralytics": "freeze=1 erasing=0 auto_augment=none scale=0 fliplr=0 hsv_h=0 hsv_s=0 hsv_v=0",
}
_SEED = {"finetune": "--seed_everything {}", "ultralytics": "seed={}"}  # the others: --seed
_CONFIGS = {
    "throughput": "--config image_folder.yaml",
    "job": "--config image_folder.yaml",
    "head": "--config hotdog_frozen.yaml --data.crop_and_flip false",
}


@dataclass(frozen=True)
class Place:
    """Where everything is that a command names."""

    data: Path  # train/CLASS and val/CLASS
    out: Path  # of this run alone
    weights: Path  # the file as given
    forms: Path  # the same weights as the peers read them, by materials.write_weights
    environments: Path
    timm: Path | None  # a checkout of timm with train.py and inference.py

    def python(self, tool: str) -> str:
        return sys.executable if tool in OF_OURS else str(self.environments / tool / "bin/python")

    def hidden(self, text: str) -> str:
        """Return a text without the names of this machine's folders."""
        names = {self.python(tool): "python" for tool in TOOLS}
        names |= {
            str(Path(sys.executable).with_name("finetune")): "finetune",
            str(HERE): "benchmarks/peers",
        }
        for name in ("data", "out", "weights", "forms", "environments", "timm"):
            if path := getattr(self, name):
                names[str(path)] = name.upper()
        for path in sorted(names, key=len, reverse=True):
            text = text.replace(path, names[path])
        return text


def variables(place: Place) -> dict[str, str]:
    """Return the environment of a run: nothing is fetched, nothing kept by an earlier run is found."""
    # what a program writes at its first start: a list of fonts, a settings file
    home = place.environments / "home"
    offline = dict.fromkeys(
        ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "YOLO_OFFLINE", "NO_ALBUMENTATIONS_UPDATE"), "1"
    )
    return {
        **offline,
        "TORCH_HOME": str(place.forms / "torch"),
        "FINETUNE_CACHE": str(place.out / "cache"),
        "HF_HOME": str(place.out / "hf"),
        "FASTAI_HOME": str(home / "fastai"),
        "YOLO_CONFIG_DIR": str(home / "ultralytics"),
        "MPLCONFIGDIR": str(home / "matplotlib"),
        "WANDB_MODE": "disabled",
    }


def fit(
    tool: str, setting: str, experiment: str, epochs: int, place: Place, seed: int | None = None
) -> list[str]:
    """Return the command that trains, with the tool's own seed where none is given."""
    more = [] if seed is None else _SEED.get(tool, "--seed {}").format(seed).split()
    if tool == "finetune":
        program = [
            str(Path(sys.executable).with_name("finetune")),
            "fit",
            *_CONFIGS[experiment].split(),
        ]
        common = (
            f"--data.image_size {IMAGE_SIZE} --data.batch_size {BATCH_SIZE} --test_after_fit false"
        )
        common += f" --trainer.max_epochs {epochs}"
        places = [
            "--data.root",
            place.data,
            "--model.weights",
            place.weights,
            "--trainer.default_root_dir",
            place.out,
        ]
        return [*program, *common.split(), *more, *map(str, places)]
    more += _BEST[tool].split() if setting == "best" else []
    if experiment == "head":
        more += _HEAD[tool].split()
    return fit_peer(tool, epochs, BATCH_SIZE, more, place)


def fit_peer(
    tool: str, epochs: int, batch_size: int, more: Sequence[str], place: Place
) -> list[str]:
    """Return the command by which a peer trains ResNet-18 from the same weights; `more` are options of its own."""
    if tool == "timm":
        num_classes = len(list((place.data / "train").iterdir()))
        common = f"--model resnet18 --pretrained --num-classes {num_classes} --device cpu "
        common += f"--input-size 3 {IMAGE_SIZE} {IMAGE_SIZE} --batch-size {batch_size} "
        common += f"--epochs {epochs} --experiment run"
        weights = place.forms / "torch/hub/checkpoints/resnet18-f37072fd.pth"
        places = ["--data-dir", place.data, "--output", place.out, "--pretrained-path", weights]
        return [
            place.python(tool),
            f"{place.timm}/train.py",
            *common.split(),
            *more,
            *map(str, places),
        ]
    if tool == "ultralytics":
        common = f"classify train model=yolo11-cls-resnet18.yaml imgsz={IMAGE_SIZE} batch={batch_size} epochs={epochs}"
        yolo = str(Path(place.python(tool)).with_name("yolo"))
        return [
            yolo,
            *common.split(),
            "device=cpu",
            f"data={place.data}",
            f"project={place.out}",
            "name=run",
            *more,
        ]
    common = f"--epochs {epochs} --batch_size {batch_size} --image_size {IMAGE_SIZE}"
    places = ["--data", place.data, "--out", place.out]
    if tool == "transformers":
        places += ["--weights", place.forms / "hub_model"]
    return [
        place.python(tool),
        str(HERE / f"{tool}_peer.py"),
        *common.split(),
        *more,
        *map(str, places),
    ]


def predict(tool: str, pictures: Path, model: Path, place: Place) -> list[str]:
    """Return the command that classifies a folder of pictures with what `fit` wrote to `model`."""
    if tool == "finetune":
        program = [str(Path(sys.executable).with_name("finetune")), "predict", "--ckpt_path"]
        checkpoint = next(model.glob("fit/version_0/checkpoints/last.ckpt"))
        return [
            *program,
            *map(
                str,
                [checkpoint, "--data.predict", pictures, "--trainer.default_root_dir", place.out],
            ),
        ]
    if tool == "timm":
        common = f"--model resnet18 --num-classes 2 --input-size 3 {IMAGE_SIZE} {IMAGE_SIZE} --device cpu --fullname"
        places = [
            "--data-dir",
            pictures,
            "--checkpoint",
            model / "run/last.pth.tar",
            "--results-dir",
            place.out,
        ]
        return [
            place.python(tool),
            f"{place.timm}/inference.py",
            *common.split(),
            *map(str, places),
        ]
    return [
        place.python(tool),
        str(HERE / "fastai_peer.py"),
        "--predict",
        str(pictures),
        "--out",
        str(model),
    ]


def accuracy(tool: str, out: Path, output: str) -> float:
    """Return the accuracy of the last epoch as the tool itself measured it."""
    column = {
        "finetune": "val/accuracy",
        "timm": "eval_top1",
        "ultralytics": "metrics/accuracy_top1",
    }.get(tool)
    if column is None:
        return json.loads(output.strip().splitlines()[-1])["accuracy"]
    file = {
        "finetune": "fit/version_0/metrics.csv",
        "timm": "run/summary.csv",
        "ultralytics": "run/results.csv",
    }[tool]
    last = _column(out / file, column)[-1]
    return last / 100 if tool == "timm" else last


def _column(file: Path, name: str) -> list[float]:
    with open(file, newline="") as lines:
        rows = [{key.strip(): value for key, value in row.items()} for row in csv.DictReader(lines)]
    return [float(row[name]) for row in rows if row[name].strip()]
