"""The settings of a fit: every spelling is the same setting, and what nobody sets has its usual value.

config.yaml of a run says what holds. What `--print_config` prints is what was understood.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import pytest
import timm
import torch
import yaml
from colours import QUICKEST
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_files import random_image

import finetune
from finetune.cli import run as run_command
from finetune.fitting.plan import Plan
from finetune.runs import run_lock
from finetune.settings.fields import settings_of, words_of
from finetune.settings.schema import FitSettings

# a fit of one step, of which nothing is drawn below
ONE_STEP = [
    *("--backbone", "small_cnn", "--weights", "null", "--workers", "0", "--precision", "32-true"),
    *("--trainer.accelerator", "cpu", "--trainer.max_steps", "1", "--data.val_fraction", "0"),
    *("--report", "false", "--test_after_fit", "false"),
]
SIZE = ("--size", "28")
SMALL = (*SIZE, "--batch", "8")
VALUES: dict[str, Any] = {
    "data.batch_size": 8,
    "data.min_crop": 0.5,
    "data.mixup": 0.25,
    "model.label_smoothing": 0.125,
    "model.optimizer.class_path": "torch.optim.SGD",
    "model.optimizer.lr": 0.25,
    "model.optimizer.weight_decay": 0.5,
    "trainer.log_every_n_steps": 7,
    "seed_everything": 5,
    "checkpoint_every_n_steps": 3,
}
CLASS = "model.optimizer.class_path"
WORDS = words_of(FitSettings)
WORD_OF = {full: word for word, full in WORDS.items()} | {CLASS: "optimizer"}


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by their names as in VALUES."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix if key == "init_args" else f"{prefix}.{key}".lstrip(".")
        found |= flat(value, name) if isinstance(value, dict) and value else {name: value}
    return found


@pytest.fixture(scope="module")
def decide(colours: Path) -> Callable[..., Plan]:
    """Decides a fit with such words, up to its first step. That a run has these settings: the first test."""

    def decided(*words: object, step: list[str] = ONE_STEP) -> Plan:
        plans: list[Plan] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("finetune.fitting.decide.carry_out", plans.append)
            run_command(["fit", str(colours), *step, *map(str, words)])
        return plans[0]

    return decided


def settings_in(plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan as config.yaml has them."""
    return flat(yaml.safe_load(plan.config))


@pytest.fixture(scope="module")
def usual(decide: Callable[..., Plan]) -> dict[str, Any]:
    """The settings of a fit where nobody sets any."""
    return settings_in(decide(*SIZE))


@pytest.fixture
def printed(cli: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What `finetune fit … --print_config` prints."""

    def understood(*words: object) -> dict[str, Any]:
        cli("fit", *words, "--print_config")
        return flat(yaml.safe_load(capsys.readouterr().out))

    return understood


@pytest.mark.parametrize("words", [(), ("--freeze", "backbone"), ("--optimizer", "SGD")])
def test_a_printed_config_is_the_same_fit(cli, capsys, decide, colours, tmp_path, words):
    """A default that depends on other settings is not among what it sets."""
    cli("fit", *SIZE, *ONE_STEP, *words, "--print_config")
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    cli("fit", colours, "--config", "printed.yaml", "--out", "elsewhere")
    by_config = flat(yaml.safe_load(Path("elsewhere/fit/version_0/config.yaml").read_text()))
    expected = settings_in(decide(*SIZE, *words))
    differing = {name for name in expected if by_config[name] != expected[name]}
    assert differing == {"trainer.default_root_dir"}


class Spelled:
    """Some settings, each in a spelling of its own: as flags, and in two configs."""

    def __init__(self, data: st.DataObject, folder: Path) -> None:
        self.names = data.draw(st.sets(st.sampled_from(sorted(VALUES)), min_size=4))
        self.words: list[str] = []
        configs: list[dict[str, Any]] = [{}, {}]
        of_class = ""
        for name in sorted(self.names):
            place = data.draw(st.sampled_from(["flag", "first", "second"]))
            if name == CLASS:
                of_class = place
            elif name.startswith("model.optimizer.") and place != "flag":
                place = of_class or place  # arguments in a config are those of the optimizer there
            if place == "flag":
                self._add_flag(data, name)
            else:
                self._put(data, configs[place == "second"], name)
        for i, content in enumerate(configs):
            if content:
                path = folder / f"{i}.yaml"
                path.write_text(yaml.safe_dump(content))
                self.words += ["--config", str(path)]

    def _add_flag(self, data: st.DataObject, name: str) -> None:
        group = "data" if name.startswith("data.") else "model.optimizer"
        spellings = [name, name.replace(f"{group}.", f"{group}.init_args.")]
        if name == CLASS:
            spellings = [name, "model.optimizer"]
        typed = data.draw(st.sampled_from([*spellings, WORD_OF.get(name, name)]))
        text = str(VALUES[name])
        is_joined = data.draw(st.booleans())
        self.words += [f"--{typed}={text}"] if is_joined else [f"--{typed}", text]

    def _put(self, data: st.DataObject, content: dict[str, Any], name: str) -> None:
        if name in WORD_OF and data.draw(st.booleans()):
            content[WORD_OF[name]] = VALUES[name]
            return
        *groups, last = name.split(".")
        table = content
        for group in groups:
            table = table.setdefault(group, {})
        if groups in (["data"], ["model", "optimizer"]) and name != CLASS:
            table = table.setdefault("init_args", {})
        table[last] = VALUES[name]


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_setting_is_the_same_in_every_spelling(decide, usual, tmp_path_factory, data):
    spelled = Spelled(data, tmp_path_factory.mktemp("spelled"))
    found = settings_in(decide(*SIZE, *spelled.words))
    expected = {name: usual[name] for name in VALUES}
    if CLASS in spelled.names:  # the rate and the decay that are usual for SGD
        expected |= {"model.optimizer.lr": 0.03, "model.optimizer.weight_decay": 0.002}
    expected |= {name: VALUES[name] for name in spelled.names}
    assert {name: found[name] for name in VALUES} == expected, spelled.words


def test_short_words_are_those_of_full_options(printed, colours):
    values = {
        **{"epochs": 3, "lr": 0.02, "optimizer": "AdamW", "size": 64, "batch": 7, "workers": 2},
        **{"backbone": "resnet50", "weights": None, "freeze": "layer2"},
        **{"class_weights": "blue:2", "devices": 2, "precision": "bf16-mixed", "seed": 5},
        **{"out": "elsewhere", "logger": ["mlflow"]},
    }
    assert values.keys() == WORDS.keys() - {"images"}
    texts = {word: json.dumps(value).strip('"[]') for word, value in values.items()}
    short = [part for word, text in texts.items() for part in (f"--{word}", text)]
    full = [part for word, text in texts.items() for part in (f"--{WORDS[word]}", text)]
    found = printed(colours, *short)
    assert found == printed("--data.root", colours, *full)
    assert found != printed(colours)


@pytest.mark.parametrize(
    ("typed", "config", "expected"),
    [
        (
            ["--optimizer", "adamw", "--logger", "wandb"],
            "",
            {
                CLASS: "torch.optim.AdamW",
                "trainer.logger": ["wandb"],
            },
        ),
        (
            ["--out", "~/runs", "--data.table", "~/a.csv"],
            "",
            {"trainer.default_root_dir": "HOME/runs", "data.table": "HOME/a.csv"},
        ),
        (["--logger", "null"], "", {"trainer.logger": None}),
        (
            ["--data.exclude", "no", "--data.merge", "12:30"],
            "",
            {"data.exclude": ["no"], "data.merge": ["12:30"]},
        ),
        (
            ["--data.exclude", "[no, 007]", "--data.merge", "[no,007:c]"],
            "",
            {"data.exclude": ["no", "007"], "data.merge": ["no", "007:c"]},
        ),
        (
            [
                "--data.exclude=1e5",
                "--data.class_names",
                "[yes, no]",
                "--data.columns",
                "{label: 007}",
            ],
            "",
            {
                "data.exclude": ["1e5"],
                "data.class_names": ["yes", "no"],
                "data.columns.label": "007",
            },
        ),
        (
            [],
            "data: {init_args: {exclude: [no, 007]}}\nmodel: {class_weights: {no: 2, 007: 3}}",
            {"data.exclude": ["no", "007"], "model.class_weights.007": 3.0},
        ),
        (
            [],
            "epochs: 3\ndata.exclude: [no, 007]",
            {"data.exclude": ["no", "007"], "trainer.max_epochs": 3},
        ),
        ([], "data: {init_args: {exclude: null}}", {"data.exclude": None}),
        (
            ["--keep_last", "False", "--test_after_fit", "false", "--allow_changes"],
            "report: false\ndata: {crop_and_flip: True, label_separator: '~'}\nname: 007",
            {
                **{"keep_last": False, "test_after_fit": False, "allow_changes": True},
                **{"report": False, "data.crop_and_flip": True, "data.label_separator": "~"},
                "name": "007",
            },
        ),
        (
            ["--model.optimizer.maximize", "False", "--model.optimizer.x", "[0.9, 1e-3]"],
            "model.optimizer: {class_path: SGD, init_args: {y: '1', z: 1e-3}}",
            {
                **{"model.optimizer.maximize": False, "model.optimizer.x": [0.9, 0.001]},
                **{"model.optimizer.y": "1", "model.optimizer.z": 0.001},
            },
        ),
        (["--class_weights", "null"], "class_weights: balanced", {"model.class_weights": None}),
        ([], "model:\nepochs: 3", {"trainer.max_epochs": 3, "model.backbone": "resnet18"}),
        (
            ["--epochs", "4"],
            "epochs: 3\nlr: 1e-3",
            {"trainer.max_epochs": 4, "model.optimizer.lr": 0.001},
        ),
    ],
)
def test_what_is_plainly_meant(printed, tmp_path, monkeypatch, typed, config, expected):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photos").mkdir()
    if config:
        (tmp_path / "own.yaml").write_text(config)
        typed = [*typed, "--config", "own.yaml"]
    found = printed("photos", *typed)
    home = {name: str(value).replace("HOME", str(tmp_path)) for name, value in expected.items()}
    assert {name: str(found[name]) for name in expected} == home


@pytest.mark.parametrize(
    ("typed", "config"),
    [
        (["--logger", "tensorboard,mlflow"], ""),
        ([], "logger: tensorboard,mlflow"),
        ([], "trainer: {logger: [tensorboard, mlflow]}"),
    ],
)
def test_loggers_by_name(printed, tmp_path, typed, config):
    (tmp_path / "own.yaml").write_text(config or "seed_everything: 0")
    found = printed("--data.root", ".", "--config", "own.yaml", *typed)
    assert found["trainer.logger"] == ["tensorboard", "mlflow"]


def test_each_choice_of_an_option_is_taken(printed):
    options = settings_of(FitSettings).values()
    for i in (0, -1):
        chosen = {one.name: one.choices[i] for one in options if one.choices}
        found = printed("--data.root", ".", *(f"--{name}={word}" for name, word in chosen.items()))
        assert {name: str(found[name]).strip("[']") for name in chosen} == chosen


OWN_DATA = """
from finetune import ImageFolderData
class OwnData(ImageFolderData):
    def __init__(self, root: str | None = None, batch_size: int = 5, image_size: int = 64, stripes: int = 2):
        super().__init__(root, batch_size=batch_size, image_size=image_size)
"""


@pytest.mark.parametrize("is_in_config", [False, True])
def test_a_data_class_of_the_user_has_its_own_options_and_defaults(
    printed, tmp_path, monkeypatch, is_in_config
):
    (tmp_path / "own_data.py").write_text(OWN_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.yaml").write_text("data: {class_path: own_data.OwnData, country: 'no'}")
    named = ["--config", "own.yaml"] if is_in_config else ["--data", "own_data.OwnData"]
    found = printed(*named, "--data.root", ".", "--data.image_size", 48, "--data.stripes", 7)
    data = {name.removeprefix("data."): value for name, value in found.items() if "data." in name}
    own = {"root": ".", "image_size": 48, "stripes": 7}
    if is_in_config:
        own["country"] = "no"
    assert data == {"class_path": "own_data.OwnData", **own}


def of_adam(arguments: str) -> str:
    return f"{{class_path: torch.optim.Adam, init_args: {{{arguments}}}}}"


def rate(text: str) -> str:
    return f"model: {{optimizer: {text}}}"


HOTDOG = rate("{class_path: torch.optim.SGD, init_args: {lr: 0.01}}")
ADAM = rate("{class_path: torch.optim.Adam}")
OF_ADAM = rate(of_adam("lr: 0.3"))
RATE = rate("{init_args: {lr: 0.4}}")


RATES = [
    ([], [HOTDOG, ADAM], 1e-3, "0.01 is for SGD"),
    (["--optimizer", "SGD"], [OF_ADAM], 0.03, "0.3 is for Adam"),
    (["--optimizer", "Adam", "--lr", "0.02"], [HOTDOG], 0.02, ""),
    ([], [ADAM, RATE], 0.4, ""),
    ([], [HOTDOG, OF_ADAM], 0.3, ""),
    (["--optimizer", "Adam"], [RATE], 1e-3, "0.4 is for AdamW"),
    (["--model.optimizer", of_adam("betas: [0.8, 0.9]")], [HOTDOG], 1e-3, "0.01 is for SGD"),
    (["--model.optimizer", of_adam("lr: 0.02")], [HOTDOG], 0.02, ""),
]
RARER = [pytest.param(*row, marks=pytest.mark.slow) for row in RATES[4:]]


@pytest.mark.parametrize(("typed", "configs", "expected", "said"), [*RATES[:4], *RARER])
def test_another_optimizer_has_its_usual_rate(decide, tmp_path, typed, configs, expected, said):
    words = [*SMALL, *typed]
    for i, text in enumerate(configs):
        (tmp_path / f"{i}.yaml").write_text(text)
        words += ["--config", tmp_path / f"{i}.yaml"]
    plan = decide(*words)
    lines = [line for line in plan.notes if line.startswith("learning rate")]
    assert settings_in(plan)["model.optimizer.lr"] == expected
    assert (len(lines), said in "".join(lines)) == (bool(said), True)


def test_another_optimizer_says_which_arguments_of_a_config_do_not_hold(decide, tmp_path):
    (tmp_path / "own.yaml").write_text(rate("{init_args: {weight_decay: 0.3, lr: 0.4}}"))
    plan = decide(*SMALL, "--config", tmp_path / "own.yaml", "--optimizer", "SGD")
    assert settings_in(plan)["model.optimizer.weight_decay"] == 0.002
    assert any("weight_decay 0.3" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            ["SGD", "--model.optimizer.momentum", "0.8"],
            {"momentum": 0.8, "nesterov": True, "weight_decay": 2e-3},
        ),
        (["SGD", "--model.optimizer.momentum", "0"], {"momentum": 0, "nesterov": False}),
        (["Adam", "--lr", "0.001"], {"weight_decay": 0}),  # where 0.05 would be added to the loss
    ],
)
def test_another_optimizer_takes_no_argument_of_the_default_one(decide, typed, expected):
    found = settings_in(decide(*SMALL, "--optimizer", *typed))
    assert {name: found.get(f"model.optimizer.{name}", 0) for name in expected} == expected


def test_a_fit_from_a_fitted_head_has_a_lower_rate_and_clips_gradients(decide, fitted_runs):
    weights = ("--weights", fitted_runs.single)
    found = settings_in(decide(*SMALL, *weights))
    assert (found["model.optimizer.lr"], found["trainer.gradient_clip_val"]) == (1e-4, 1.0)
    chosen = (*weights, "--trainer.gradient_clip_val", 0, "--optimizer", "SGD")
    own = settings_in(decide(*SMALL, *chosen))
    assert (own["model.optimizer.lr"], own["trainer.gradient_clip_val"]) == (3e-3, 0)
    assert settings_in(decide(*SMALL))["trainer.gradient_clip_val"] is None


def test_a_fit_trains_at_the_usual_rate(colours, cli, tmp_path):
    # Of 7 steps one is the warm-up, at the full rate already.
    seen = ("--size", 28, "--batch", 8, "--trainer.log_every_n_steps", 1, "--epochs", 1)
    cli("fit", colours, *ONE_STEP[:10], *seen, "--optimizer", "SGD", "--test_after_fit", "false")
    with open(tmp_path / "runs/fit/version_0/steps.csv", newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    assert float(first["lr-SGD/head"]) == float(first["lr-SGD/backbone"]) == 0.03


@pytest.mark.parametrize(
    "words",
    ["StepLR --model.scheduler.step_size 3", "MultiStepLR --model.scheduler.milestones [1,2]"],
)
def test_a_scheduler_by_name(decide, words):
    found = settings_in(decide(*SMALL, "--model.scheduler", *words.split()))
    assert words.startswith(found["model.scheduler.class_path"].rpartition(".")[2])


PREPARED = {"image_size": 40, "resize": "whole", "interpolation": "bicubic", "crop_share": 1.0}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small network of timm's, whose config.json says how images are prepared."""
    folder = tmp_path_factory.mktemp("timm") / "network"
    torch.manual_seed(0)
    timm.models.save_for_hf(timm.create_model("test_resnet", num_classes=5), folder)
    about = json.loads((folder / "config.json").read_text())
    about["pretrained_cfg"] |= {"input_size": [3, 40, 40], "interpolation": "bicubic"}
    about["pretrained_cfg"] |= {"crop_pct": 1.0, "crop_mode": "squash"}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def preparation(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[f"data.{name}"] for name in PREPARED}


@pytest.mark.parametrize(
    ("typed", "config", "changes"),
    [
        ([], "", {}),
        (
            ["--data.init_args.interpolation=bilinear", "--size", "32"],
            "",
            {"interpolation": "bilinear", "image_size": 32},
        ),
        (
            [],
            "data: {class_path: finetune.ImageFolderData, init_args: {image_size: 48, crop_share: 0.5}}",
            {"image_size": 48, "crop_share": 0.5},
        ),
    ],
)
def test_images_are_prepared_as_the_weights_of_timm_say_unless_it_is_set(
    decide, weights, tmp_path, typed, config, changes
):
    words = ["--backbone", "timm/test_resnet", "--weights", weights, *typed]
    if config:
        (tmp_path / "own.yaml").write_text(config)
        words += ["--config", tmp_path / "own.yaml"]
    plan = decide(*words)
    assert preparation(settings_in(plan)) == {**PREPARED, **changes}
    (line,) = [text for text in plan.notes if text.startswith("images are prepared as")]
    assert all((f"{name} {PREPARED[name]}" in line) == (name not in changes) for name in PREPARED)
    own, _ = line.rsplit(": ", 1)  # what the weights do not define
    assert all(f"{name} {value}" in own for name, value in changes.items())


def test_resume_prepares_images_as_before_though_the_weights_are_gone(
    colours, cli, weights, tmp_path
):
    weights = weights.rename(tmp_path / "network")
    words = ["fit", colours, *ONE_STEP, "--backbone", "timm/test_resnet", "--weights", weights]
    cli(*words)
    run_lock.release()
    weights.rename(weights.with_name("moved"))
    cli(*words, "--trainer.max_steps", 2, "--resume")
    config = yaml.safe_load((tmp_path / "runs/fit/version_0/config.yaml").read_text())
    assert preparation(flat(config)) == PREPARED


def test_a_class_may_be_called_null_or_007(cli, tmp_path):
    for name in ("null", "no", "007", "cat"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(8):
            cv2.imwrite(str(tmp_path / f"images/{name}/{i}.png"), random_image(32, 32))
    untested = ("--test_after_fit", "false")
    cli("fit", "images", *QUICKEST, *untested, "--data.exclude", "[no, 007]")
    cli("fit", "--resume", "--epochs", "2", *untested)
    assert finetune.load("runs/fit/version_0").class_names == ["cat", "null"]


def test_files_and_folders_may_have_any_name(cli, colours, run, tmp_path):
    image = next(colours.rglob("*.png"))
    names = ["🌭.png", "Scene 2: beach.png", "1e5"]
    for name in names:
        (tmp_path / name).symlink_to(colours if name == "1e5" else image)
    cli("predict", run(), *names[:2], "--out", "found.csv")
    with open("found.csv", encoding="utf-8") as file:
        assert [row["path"] for row in csv.DictReader(file)] == names[:2]
    cli("fit", "1e5", *ONE_STEP, *SMALL)
    run_lock.release()
    config = Path("runs/fit/version_1/config.yaml")
    assert yaml.safe_load(config.read_text())["data"]["init_args"]["root"] == "1e5"
    cli("fit", "--config", config)
    assert Path("runs/fit/version_2/checkpoints/last.ckpt").exists()


def test_a_run_a_folder_and_a_file_name_its_checkpoint(cli, run, capsys):
    folder = run()
    cpu = ("--trainer.accelerator", "cpu", "--workers", 0)
    for place in (folder / "checkpoints", folder / "checkpoints/best.ckpt"):
        cli("test", place, *cpu)
    (folder / "checkpoints/best.ckpt").unlink()
    assert "last.ckpt" not in capsys.readouterr().err
    cli("test", "--ckpt_path", folder, *cpu)
    assert "checkpoints/last.ckpt" in capsys.readouterr().err
    cli("fit", "--resume", folder / "checkpoints/last.ckpt", "--epochs", 2)
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3


def test_a_checkpoint_decides_over_a_config(cli, run, tmp_path):
    folder = run()
    (tmp_path / "other.yaml").write_text(
        "model: {backbone: lenet}\ndata: {init_args: {image_size: 64}}"
    )
    words = ("--trainer.accelerator", "cpu", "--data.num_workers", 0)
    for config in ([], ["--config", "other.yaml"]):
        cli("test", folder, *words, *config)
    results = [(tmp_path / f"runs/test/version_{i}/test.json").read_text() for i in range(2)]
    assert results[0] == results[1]
