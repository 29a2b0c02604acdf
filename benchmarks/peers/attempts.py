"""One run of a tool: its inputs, its result or why it failed, and the versions."""

import argparse
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.documents import ROOT
from benchmarks.common.records import where_and_when
from benchmarks.peers import materials, measure, tools


def workplace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a workplace."""
    parser.add_argument("--weights", type=Path, help="state dict of ResNet-18 to start from")
    parser.add_argument(
        "--timm", type=Path, help="checkout of timm with its scripts; without it timm is skipped"
    )
    parser.add_argument("--environments", type=Path, default=ROOT / "benchmarks/.environments")


class Workplace(NamedTuple):
    """What is the same for all runs."""

    weights: Path  # state dict of ResNet-18, or the folder of a network of timm
    environments: Path
    timm: Path | None  # a checkout with its scripts
    folder: Path  # temporary
    backbone: str = tools.RESNET

    @classmethod
    def of(cls, args: argparse.Namespace, folder: str, backbone: str = tools.RESNET) -> "Workplace":
        """Return the workplace of a command's options."""
        timm = args.timm and args.timm.resolve()
        weights = args.weights.resolve()
        return cls(weights, args.environments.resolve(), timm, Path(folder), backbone)

    def place(self, tool: str, data: Path) -> tools.Place:
        """Return where a tool finds everything, with a new folder for its output; makes what is missing."""
        forms = self.folder / "weights"
        if not forms.exists():
            if self.backbone == tools.RESNET:
                materials.write_weights(self.weights, forms)
            else:
                materials.write_hub_model(self.weights, forms)
        if tool not in tools.OF_OURS:
            materials.environment(tool, self.environments)
        (self.environments / "home").mkdir(parents=True, exist_ok=True)
        out = Path(tempfile.mkdtemp(dir=self.folder))
        place = tools.Place(
            data=data,
            out=out,
            weights=self.weights,
            forms=forms,
            environments=self.environments,
            timm=self.timm,
            backbone=self.backbone,
        )
        if tool == "ultralytics":
            materials.turn_loggers_off(place.python(tool), tools.variables(place))
        return place


def attempt(place: tools.Place, work: Callable[[tools.Place], dict]) -> dict:
    """Return what a run gave, or as `failed` why it gave nothing, without the names of this machine's folders."""
    try:
        result = work(place)
    except (measure.Failed, subprocess.TimeoutExpired, OSError, LookupError, ValueError) as error:
        # A tool that ends without an error and leaves no result has failed as well.
        result = {"failed": place.hidden(str(error))[:200]}
    finally:
        shutil.rmtree(place.out)
    if "command" in result:
        result["command"] = place.hidden(result["command"])
    return result


def circumstances(tool: str, timm: Path | None) -> dict:
    """Return the versions, machine, commit and day that each record states."""
    about = where_and_when()
    versions = {"torch": about.pop("torch")}
    if tool not in tools.OF_OURS:
        versions[tool] = materials.pins(tool)[tool]
    if tool == "timm" and timm:
        digest = hashlib.sha256((timm / "train.py").read_bytes()).hexdigest()
        versions["its train.py, sha256"] = digest[:12]
    return {"versions": versions, **about}
