"""The inputs of the measured programs: an environment each, the same folder of images, the same weights."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements")


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


def write_folder(root: Path, to: Path) -> Path:
    """Link the images of a set as the peers read it: train/CLASS as it is, test/CLASS as val/CLASS."""
    for split, name in (("train", "train"), ("test", "val")):
        for image in sorted((root / split).glob("*/*")):
            link = to / name / image.parent.name / image.name
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(image.resolve(), link)
    return to


def write_hub_model(weights: Path, to: Path) -> None:
    """Write a network of timm into a folder as transformers reads it.

    Its class sets the number of classes itself, and fails if `model_args` of config.json has it as well.
    """
    to.mkdir()
    os.symlink(weights / "model.safetensors", to / "model.safetensors")
    config = json.loads((weights / "config.json").read_text("utf-8"))
    config.pop("model_args", None)
    (to / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
