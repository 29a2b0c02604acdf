"""The plan of a fit: what it starts or continues from. `settle` makes it once, and the steps of the command use it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.runs.resume import Changes, Start


@dataclass(frozen=True)
class Plan:
    """What a fit starts or continues from, and what was decided for the user.

    Attributes:
        arguments: The command line; if the fit continues a run, with that run's settings inserted before it.
        run: The folder of the run that continues; None for a new run.
        settings: The content of that run's config.yaml.
        start: The checkpoint from which training starts: that of the run, or of `--ckpt_path`; None for none.
        newer: Newer runs in other folders, where `--resume` does not look.
        changes: The settings of the run that continues, and of this command; None for a new run.
        ranking: How the network was chosen among several, for about.json; None if it was not.
        messages: What to report before training, in the order in which it was decided.
    """

    arguments: Sequence[str]
    run: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    start: Start | None = None
    newer: tuple[Path, ...] = ()
    changes: Changes | None = None
    ranking: dict[str, Any] | None = None
    messages: tuple[str, ...] = ()

    @property
    def has_config(self) -> bool:
        """Whether the run that continues has a config.yaml; else its checkpoint gives settings of data and model."""
        return self.run is not None and (self.run / "config.yaml").exists()

    def with_messages(self, *messages: str) -> "Plan":
        """Return the plan with more to report; empty messages are dropped."""
        return replace(self, messages=(*self.messages, *filter(None, messages)))
