"""The facts of run.json. They are checked when they are read and before they are written."""

from datetime import datetime
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta, Struct, field

from finetune.runs.headline import Best, Count, Headline, Share

_NumFits = Annotated[int, Meta(ge=1, le=1000)]  # far above those of any command
_Seconds = Annotated[float, Meta(ge=0, le=1e10)]


class Identity(Struct, frozen=True):
    """What a run is of; in a search None and "" stand for any.

    Attributes:
        place: Real path or address of the folder or table of images.
        data_class: Class path of the data module.
        network: The network as the user asked for it, such as `auto`.
        chosen: The network that was trained.
        folds: Number of folds of a cross-validation; None for another fit.
        members: Number of members of an ensemble; None for another fit.
    """

    place: str = ""
    data_class: str = ""
    network: str = ""
    chosen: str = ""
    folds: _NumFits | None = None
    members: _NumFits | None = None

    @property
    def kind(self) -> str:
        """What it is in words."""
        if self.folds is not None:
            return "cross-validation"
        return "fit" if self.members is None else "ensemble"

    def difference(self, wanted: "Identity") -> str:
        """Return how a run of this identity differs from the data and the network that a command names; "" if not."""
        if wanted.network and wanted.network not in (self.network, self.chosen):
            return f"of another network ({self.chosen}, not {wanted.network})"
        if wanted.data_class and wanted.data_class != self.data_class:
            return f"of other data ({self.data_class}, not {wanted.data_class})"
        if wanted.place and wanted.place != self.place:
            return f"of other data ({self.place}, not {wanted.place})"
        return ""


class Split(Struct):
    """The images of a split: where they are from, the number of each class, and of several labels their own number."""

    counts: dict[str, Count]
    origin: str = ""
    num_images: Count | None = None

    @property
    def num(self) -> int:
        """The number of images."""
        return sum(self.counts.values()) if self.num_images is None else self.num_images


# Facts that only pages show.


class _Example(TypedDict):
    files: list[str]
    note: str


class _Finding(TypedDict):
    level: str
    title: str
    is_judged: bool
    rows: list[_Example]


class _Corrected(TypedDict):
    changed: Count
    excluded: Count
    confirmed: Count
    pairs: list[tuple[str, str, Count]]


class Corrections(TypedDict):
    """What a file of corrections has changed."""

    file: str
    splits: dict[str, _Corrected]
    in_test: Count
    unknown: Count


class _Standing(TypedDict):
    name: str
    loss: float
    accuracy: Share
    num_images: Count
    seconds: float


class _Ranking(TypedDict):
    seconds: float
    rows: list[_Standing]
    metric: NotRequired[str]
    unusable: dict[str, str]
    untried: list[str]


class Facts(Struct, kw_only=True, omit_defaults=True):
    """The content of run.json.

    Attributes:
        finetune: The version that began the run.
        kind: The command that makes the run: `fit`, `test`, `validate` or `predict`.
        command: The command line that began it.
        began: The time at which it began.
        ended: The time at which its test and its report were complete.
        folder: The working directory of the command.
        data: The folder or the table of images, as the user named it; None for that of the data class.
        root: The folder of images.
        network: The backbone.
        identity: The data and the network of a fit.
        asked: Settings of the command that began it which were decided otherwise, such as `auto`, by full name.
            A command that continues it and has the same values changes nothing.
        went_on_by: The command lines that continued it.
        fingerprint: That of the images.
        began_from: The checkpoint of another run that training started from.
        licence_of_the_weights: What training started from, and its licence.
        splits: The images of each split.
        first_look: What was found before training.
        backbone_ranking: The networks of `--model.backbone auto`, the best one first.
        corrections: What a file of corrections has changed.
        lines: The data, the network and the device in words.
        doubts: Why its result may be unreliable.
        seconds: The time of all commands that have written it.
        epochs: Number of epochs that have ended.
        loggers: The ID under which each logger logs the run.
        best: The weights of best.ckpt and their validation. It is written after that file, and removed before another
            one is written. A run that was killed in between has no value.
        test: The result of the test, written after test.json.
        test_by_group: The same with groups of images counted instead of images.
    """

    finetune: str = ""
    kind: str = ""
    command: str = ""
    began: datetime | None = None
    ended: str | None = None
    folder: str = ""
    data: str | None = None
    root: str | None = None
    network: str = ""
    identity: Identity | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    went_on_by: list[str] = field(default_factory=list)
    fingerprint: str | None = None
    began_from: str | None = None
    licence_of_the_weights: str | None = None
    splits: dict[str, Split] = field(default_factory=dict)
    first_look: list[_Finding] | None = None
    backbone_ranking: _Ranking | None = None
    corrections: Corrections | None = None
    lines: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    seconds: _Seconds = 0.0
    epochs: Count = 0
    loggers: dict[str, str] = field(default_factory=dict)
    best: Best | None = None
    test: Headline | None = None
    test_by_group: Headline | None = None

    @property
    def result(self) -> Headline | None:
        """The result of the test, or else of best.ckpt on the validation images; None without both."""
        if self.test is not None:
            return self.test
        return None if self.best is None else self.best.result
