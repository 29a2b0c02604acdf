"""The plan of a fit: its decided settings, and what it continues from. In a file, other processes start by it."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from finetune.data.datamodule import ImageDataModule
from finetune.fitting.resume import Changes, Start, changes_between, read_start
from finetune.runs.facts import Identity
from finetune.runs.local_copies import shown_place
from finetune.settings.configs import config_text, to_config
from finetune.settings.layers import Layer, Layers, read_values, replaced
from finetune.settings.schema import FitSettings


@dataclass(frozen=True)
class Plan:
    """What a fit does.

    Attributes:
        settings: All settings, decided.
        command: What the user typed, for run.json.
        identity: The data and the network, for run.json.
        run: The folder of the run that continues; None for a new run.
        start: The checkpoint from which training starts: that of the run, or of `--ckpt_path`; None for none.
        changes: The settings that differ from those of the run that continues.
        asked: What the user has set when the run began, by full name.
        ranking: How the network was chosen among several, for run.json; None if it was not.
        is_part: Whether it is one of several fits that are joined, whose results are used together.
        begins_again: Whether it replaces the run of its name, which ended before its first checkpoint.
        notes: What to report before training, in the order in which it was decided.
        data: The images, if they were read for a decision; not in the file.
    """

    settings: FitSettings
    command: str
    identity: Identity = field(default_factory=Identity)
    run: Path | None = None
    start: Start | None = None
    changes: Changes = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    ranking: dict[str, Any] | None = None
    is_part: bool = False
    begins_again: bool = False
    notes: tuple[str, ...] = ()
    data: ImageDataModule | None = None

    def put(self, values: Mapping[str, Any], *notes: str) -> "Plan":
        """Return the plan with other values of some settings, by full name, and with more to report."""
        settings = replaced(self.settings, values) if values else self.settings
        return replace(self, settings=settings, notes=(*self.notes, *filter(None, notes)))

    @property
    def asked_otherwise(self) -> dict[str, Any]:
        """What the user has set and was decided otherwise, such as `auto`."""
        changes = changes_between(self.asked, self.settings)
        return {name: asked for name, (asked, _) in changes.items()}

    @property
    def config(self) -> str:
        """The content of config.yaml, with which `fit` starts a new run."""
        of_command = {"resume": False, "allow_changes": False, "name": None}
        root = {"trainer.default_root_dir": shown_place(self.settings.trainer.default_root_dir)}
        return config_text(replaced(self.settings, {**of_command, **root}))


def write_plan(plan: Plan, file: Path) -> None:
    """Write a plan to a file, from which another process on this machine starts."""
    content = {
        "settings": to_config(plan.settings),
        "command": plan.command,
        "identity": structs.asdict(plan.identity),
        "run": None if plan.run is None else str(plan.run),
        "start": None if plan.start is None else str(plan.start.path),
        "changes": plan.changes,
        "asked": plan.asked_otherwise,
        "ranking": plan.ranking,
        "is_part": plan.is_part,
        "begins_again": plan.begins_again,
        "notes": plan.notes,
    }
    file.write_text(json.dumps(content), "utf-8")


def read_plan(file: Path) -> Plan:
    """Read a plan that `write_plan` has written."""
    content = json.loads(file.read_text("utf-8"))
    layer = read_values("fit", Layer(str(file), "decided"), content["settings"])
    start = content["start"]
    return Plan(
        settings=Layers("fit", (layer,)).parse(FitSettings),
        command=content["command"],
        identity=Identity(**content["identity"]),
        run=None if content["run"] is None else Path(content["run"]),
        start=None if start is None else read_start(start),
        changes={name: tuple(pair) for name, pair in content["changes"].items()},
        asked=content["asked"],
        ranking=content["ranking"],
        is_part=content["is_part"],
        begins_again=content["begins_again"],
        notes=tuple(content["notes"]),
    )


@contextmanager
def plan_file(plan: Plan) -> Iterator[Path]:
    """Write a plan to a temporary file, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="finetune-plan-") as folder:
        file = Path(folder, "plan.json")
        write_plan(plan, file)
        yield file


def answer(file: Path, what: Literal["run", "error"], text: str) -> None:
    """Report the run or the error of a plan to the process that has written its file."""
    with suppress(FileNotFoundError):  # it has ended
        file.with_suffix(f".{what}").write_text(text, "utf-8", "surrogateescape")


def read_answer(file: Path, what: Literal["run", "error"]) -> str | None:
    """Return the run or the error of the plan in a file; None if there is none."""
    try:
        return file.with_suffix(f".{what}").read_text("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
