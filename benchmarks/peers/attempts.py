"""One run of a tool: what it is given, what it gave or why it failed, and with which versions."""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.records import where_and_when
from benchmarks.peers import materials, measure, tools


class Given(NamedTuple):
    """What is the same for all runs."""

    weights: Path  # state dict of ResNet-18
    environments: Path
    timm: Path | None  # a checkout with its scripts
    folder: Path  # for all that is made, and deleted at the end

    def place(self, tool: str, data: Path) -> tools.Place:
        """Return where a tool finds everything, which is made when it is first wanted, and a folder for its output."""
        forms = self.folder / "weights"
        if not forms.exists():
            materials.write_weights(self.weights, forms)
        if tool not in tools.OF_OURS:
            materials.environment(tool, self.environments)
        (self.environments / "home").mkdir(parents=True, exist_ok=True)
        out = Path(tempfile.mkdtemp(dir=self.folder))
        place = tools.Place(data, out, self.weights, forms, self.environments, self.timm)
        if tool == "ultralytics":
            materials.leave_loggers_out(place.python(tool), tools.variables(place))
        return place


def attempt(place: tools.Place, work: Callable[[tools.Place], dict]) -> dict:
    """Return what a run gave, or as `failed` why it gave nothing, without names of this machine's folders."""
    try:
        result = work(place)
    except (measure.Failed, subprocess.TimeoutExpired, OSError, LookupError, ValueError) as error:
        # A tool that ends well and leaves no result has failed as well.
        result = {"failed": place.hidden(str(error))[:200]}
    finally:
        shutil.rmtree(place.out)
    if "command" in result:
        result["command"] = place.hidden(result["command"])
    return result


def circumstances(tool: str, timm: Path | None) -> dict:
    """Return what each record says of versions, machine, commit and day."""
    about = where_and_when()
    versions = {"torch": about.pop("torch")}
    if tool not in tools.OF_OURS:
        versions[tool] = materials.pins(tool)[tool]
    if tool == "timm" and timm:
        versions["its train.py, sha256"] = hashlib.sha256(
            (timm / "train.py").read_bytes()
        ).hexdigest()[:12]
    return {"versions": versions, **about}
