"""The inputs of the measured programs: an environment each, the same folder of images, the same weights."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements")
TORCH_HOME = "torch"  # as torchvision looks for weights: TORCH_HOME/hub/checkpoints


def pins(name: str) -> dict[str, str]:
    """Return the packages that a peer's environment has of its own, and their versions."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def environment(name: str, folder: Path) -> Path:
    """Return the Python of a peer's environment, which is made where it is not there or its pins have changed.

    Torch and torchvision are ours, by a line in a .pth file: all are measured with the same, and it is not installed
    five times. A peer's own packages stand before ours on its path. Without dependencies, since pip would bring others.
    """
    home = folder / name
    python = home / "bin/python"
    done = home / "installed.txt"
    wanted = json.dumps(pins(name), indent=1)
    if not (done.exists() and done.read_text("utf-8") == wanted):
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], check=True
        )
        own = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        Path(own.strip(), "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
        install = "-m pip --disable-pip-version-check install --quiet --no-deps --ignore-installed --requirement"
        subprocess.run([python, *install.split(), str(REQUIREMENTS / f"{name}.txt")], check=True)
        code = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        found = json.loads(subprocess.check_output([python, "-c", code, *pins(name)], text=True))
        if found != pins(name):
            raise RuntimeError(f"the environment of {name} has {found}, wanted {pins(name)}")
        done.write_text(wanted, "utf-8")
    return python


def turn_loggers_off(python: str, variables: Mapping[str, str]) -> None:
    """Let Ultralytics log nowhere, like the others: it takes what loggers it finds, and ours are on its path."""
    names = ("clearml", "comet", "dvc", "mlflow", "raytune", "tensorboard", "wandb")
    code = f"from ultralytics import settings; settings.update({dict.fromkeys(names, False)})"
    subprocess.run(
        [python, "-c", code], env={**os.environ, **variables}, check=True, stdout=subprocess.DEVNULL
    )


def write_folder(root: Path, to: Path) -> Path:
    """Link the images of a set as the peers read it: train/CLASS as it is, test/CLASS as val/CLASS."""
    for split, name in (("train", "train"), ("test", "val")):
        for image in sorted((root / split).glob("*/*")):
            link = to / name / image.parent.name / image.name
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(image.resolve(), link)
    return to


def write_weights(weights: Path, to: Path) -> Path:
    """Write the state dict of a torchvision ResNet-18 in the forms that the peers read; return the folder.

    `torch/hub/checkpoints/…`: where torchvision would have put a download, with a head of 1,000 classes, as it must be
    for what takes ImageNet's head off. `hub_model`: the same for transformers, through timm, which names the same.
    """
    import torch
    from safetensors.torch import save_file

    state = {
        name: t.float() if t.is_floating_point() else t for name, t in torch.load(weights).items()
    }
    for name in ("fc.weight", "fc.bias"):
        rows = state[name][:1000]
        state[name] = torch.cat([rows, rows.new_zeros(1000 - len(rows), *rows.shape[1:])])
    path = pretrained(to)
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    hub = to / "hub_model"
    hub.mkdir()
    save_file(
        {name: t.contiguous() for name, t in state.items()},
        hub / "model.safetensors",
        {"format": "pt"},
    )
    config = {
        "architecture": "resnet18",
        "num_classes": 1000,
        "num_features": 512,
        "model_type": "timm_wrapper",
    }
    cfg = {"input_size": [3, 224, 224], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    cfg |= {
        "interpolation": "bilinear",
        "crop_pct": 0.875,
        "first_conv": "conv1",
        "classifier": "fc",
    }
    (hub / "config.json").write_text(
        json.dumps({**config, "pretrained_cfg": cfg}, indent=1), "utf-8"
    )
    return to


def write_hub_model(weights: Path, to: Path) -> None:
    """Write a network of timm as transformers reads it, into `hub_model`.

    Its class sets the number of classes itself, and fails if `model_args` of config.json has it as well.
    """
    hub = to / "hub_model"
    hub.mkdir(parents=True)
    os.symlink(weights / "model.safetensors", hub / "model.safetensors")
    config = json.loads((weights / "config.json").read_text("utf-8"))
    config.pop("model_args", None)
    (hub / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


def pretrained(folder: Path) -> Path:
    """Return where `write_weights` puts the file of torchvision's name."""
    return folder / TORCH_HOME / "hub/checkpoints/resnet18-f37072fd.pth"
