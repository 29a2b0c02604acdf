"""What is run on which set with which seed, in which order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from finetune.training.run_length import usual_epochs

# set: training images, for the order alone
SETS = {
    "satellite": 273,
    "flowers": 295,
    "clothing": 331,
    "trash": 404,
    "hotdog": 2000,
    "fashion": 2000,
}
SMALL = tuple(SETS)[:4]
SEEDS = range(3)
LONG = 120.0  # seconds from which on there is one seed
# tool: its settings. Of fastai's epochs the first trains the head alone.
SETTINGS = {
    "finetune": (
        "default",
        *(f"epochs_{n}" for n in (3, 5, 20)),
        *(f"minutes_{m}" for m in ("0.5", "0.75", "1", "2", "4", "5", "10")),
    ),
    "plain": ("epochs_5", "epochs_20"),
    "timm": ("epochs_5", "epochs_20"),
    "fastai": ("epochs_5", "epochs_20"),
    "ultralytics": ("epochs_5", "epochs_20", "epochs_100"),
    "transformers": ("epochs_3", "epochs_20"),
}
IMAGENET = "timm/tf_efficientnet_lite0"  # has ImageNet weights; Ultralytics does not have it
IMAGENET_SETTINGS = {
    "finetune": ("default", "epochs_5"),
    **{tool: SETTINGS[tool] for tool in ("plain", "timm", "fastai", "transformers")},
}
ON_ONE_SET = {("ultralytics", "epochs_100"): "satellite"}  # its default, so long that one must do


class Run(NamedTuple):
    """What identifies a record."""

    set: str
    tool: str
    setting: str
    seed: int
    machine: str


def number(setting: str) -> float:
    """Return how many epochs or minutes a setting is about."""
    return float(setting.partition("_")[2])


def expected_seconds(run: Run) -> float:
    """Return a guess of how long a run takes, which decides about its turn and nothing else."""
    if run.setting.startswith("minutes"):
        return 60 * number(run.setting)
    num = SETS[run.set]
    passes = num * (usual_epochs(num) if run.setting == "default" else number(run.setting))
    return 10 + passes / (60 if run.tool == "finetune" else 30)


def first_round(machine: str, all_settings: Mapping[str, Sequence[str]]) -> list[Run]:
    """Return all runs of the first seed, the shortest first."""
    everything = (
        Run(name, tool, setting, SEEDS[0], machine)
        for tool, settings in all_settings.items()
        for setting in settings
        for name in SETS
        if ON_ONE_SET.get((tool, setting), name) == name
    )
    return sorted(everything, key=expected_seconds)


def plan(
    records: Sequence[dict],
    machine: str,
    all_settings: Mapping[str, Sequence[str]] = SETTINGS,
) -> Iterator[Run]:
    """Yield all runs of a machine in their order: the first seed of everything, the others of runs under `LONG`."""
    first = first_round(machine, all_settings)
    yield from first
    seconds = {
        Run(*(r[name] for name in Run._fields)): r["seconds"] for r in records if "accuracy" in r
    }
    for seed in SEEDS[1:]:
        yield from (run._replace(seed=seed) for run in first if seconds.get(run, LONG) < LONG)
