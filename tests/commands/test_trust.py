"""Which modules a hostile checkpoint would have imported, shown by a module that writes a file when it is imported."""

import os
import pickle
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from colours import QUICKEST, draw_colours
from promise import promise
from tiers import sweep

from finetune import Classifier, load
from finetune.cli import main
from finetune.commands.explicit_settings import read_explicit_settings
from finetune.commands.lightning_cli import run_lightning
from finetune.commands.trust import data_settings
from finetune.data.datasets.fashion_mnist import FashionMNIST
from finetune.demo.sample_data import SampleData
from finetune.serving import http_server


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with test images and `good.ckpt`."""
    folder = tmp_path_factory.mktemp("trust")
    root = draw_colours(folder / "colours", train=2, test=1)
    transforms = [
        "--data.augmentations",
        '[{"class_path": "albumentations.InvertImg", "init_args": {"p": 0.1}}]',
    ]
    places = ["--data.root", str(root), "--trainer.default_root_dir", str(folder / "runs")]
    run = run_lightning(["fit", *QUICKEST, *places, *transforms]).run
    run.checkpoint("last").rename(folder / "good.ckpt")
    return folder


@pytest.fixture
def has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether the hostile module was imported since it was last asked."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path/hostile.py").write_text(f"""
from pathlib import Path
import albumentations as A
from finetune import ImageFolderData
Path({str(tmp_path / "ran")!r}).touch()
class Data(ImageFolderData): pass
class Transform(A.InvertImg): pass
def scheduler(optimizer): pass
""")
    monkeypatch.syspath_prepend(tmp_path / "path")

    sys.modules.pop("hostile", None)

    def asked() -> bool:
        found = (tmp_path / "ran").exists()
        (tmp_path / "ran").unlink(missing_ok=True)
        sys.modules.pop("hostile", None)
        return found

    return asked


class Code:
    """Unpickled, it would leave a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


TRANSFORM = {"class_path": "hostile.Transform", "init_args": {}}
OBJECT = {"class_path": "hostile.scheduler"}
BY_LIGHTNING = {"_instantiator": "pytorch_lightning.cli.instantiate_module"}
BY_LIGHTNING |= {"_class_path": "finetune.training.classifier.Classifier"}
# what is written where, in which of the checkpoint's parts
HOSTILE: dict[str, tuple[str | None, dict[str, Any]]] = {
    "data class": ("finetune", {"data_class": "hostile.Data"}),
    "data class beneath ours": ("finetune", {"data_class": "finetune.hostile.Data"}),
    "data class that is none": ("finetune", {"data_class": ["hostile.Data"]}),
    "transform": ("datamodule_hyper_parameters", {"augmentations": [TRANSFORM]}),
    "transform inside another": (
        "datamodule_hyper_parameters",
        {"augmentations": [{"class_path": "OneOf", "init_args": {"transforms": [TRANSFORM]}}]},
    ),
    "transform in text, which a parser reads": (
        "datamodule_hyper_parameters",
        {"augmentations": '[{"class_path": "hostile.Transform"}]'},
    ),
    "transform in text in a list": (
        "datamodule_hyper_parameters",
        {"augmentations": ['{"class_path": "hostile.Transform"}']},
    ),
    "another argument of the data": (
        "datamodule_hyper_parameters",
        {"root": {"class_path": "hostile.Data"}},
    ),
    "optimizer": ("hyper_parameters", {"optimizer": OBJECT}),
    "scheduler": ("hyper_parameters", {"scheduler": OBJECT}),
    "another argument of the model": ("hyper_parameters", {"class_mapping": OBJECT}),
    "instantiator": ("hyper_parameters", {"_instantiator": "hostile.scheduler"}),
    "Lightning's instantiator": ("hyper_parameters", {**BY_LIGHTNING, "scheduler": OBJECT}),
}


def altered(fitted: Path, path: Path, part: str | None, values: dict[str, Any]) -> Path:
    checkpoint = torch.load(fitted / "good.ckpt", weights_only=True)
    (checkpoint[part] if part else checkpoint).update(values)
    torch.save(checkpoint, path)
    return path


def measured(ckpt: Path, folder: Path | None, tmp_path: Path) -> list[str]:
    """Return the options of a command that measures a checkpoint, on its own images without a folder."""
    place = [] if folder is None else ["--data.root", str(folder)]
    machine = ["--data.num_workers", "0", "--trainer.accelerator", "cpu"]
    runs = ["--trainer.default_root_dir", str(tmp_path / "runs")]
    return ["--ckpt_path", str(ckpt), *place, *machine, *runs]


def predict(ckpt: Path, fitted: Path, *more: str) -> None:
    options = [
        "--ckpt_path",
        str(ckpt),
        "--data.predict",
        str(fitted / "colours/test"),
        "--data.num_workers",
        "0",
    ]
    run_lightning(["predict", *options, "--trainer.accelerator", "cpu", *more])


@promise("no-code")
@pytest.mark.parametrize(
    "place",
    sweep(
        HOSTILE,
        quick=[
            "data class",
            "transform inside another",
            "transform in text, which a parser reads",
            "optimizer",
            "Lightning's instantiator",
        ],
    ),
)
def test_an_untrusted_checkpoint_imports_nothing(fitted, tmp_path, monkeypatch, has_run, place):
    monkeypatch.chdir(tmp_path)
    ckpt = altered(fitted, tmp_path / "hostile.ckpt", *HOSTILE[place])
    with pytest.raises(
        ValueError, match="would import|is not as `finetune fit` writes them|is not a valid"
    ) as caught:
        predict(ckpt, fitted)
    assert "\n" not in str(caught.value) and not has_run()
    if "hostile" in str(caught.value) and "import" in str(caught.value):
        assert "--data CLASS" in str(caught.value)


def test_export_does_not_look_where_lightning_would(fitted, cli, tmp_path, has_run):
    # Lightning 0.7's place of arguments
    older = {**BY_LIGHTNING, "scheduler": OBJECT, "class_names": ["a", "b"]}
    ckpt = altered(fitted, tmp_path / "hostile.ckpt", None, {"hparams": older})
    cli("export", "--ckpt_path", ckpt, "--format", "safetensors")
    assert not has_run()
    with suppress(Exception):  # the control: whatever comes of it, the module runs
        Classifier.load_from_checkpoint(ckpt, map_location="cpu")
    assert has_run()


@pytest.mark.parametrize("part", ["hyper_parameters", "datamodule_hyper_parameters", "finetune"])
def test_objects_among_the_settings_are_never_unpickled(fitted, tmp_path, monkeypatch, part):
    monkeypatch.chdir(tmp_path)
    ckpt = altered(
        fitted, tmp_path / "hostile.ckpt", part, {"class_names": Code(tmp_path / "unpickled")}
    )
    with pytest.raises(ValueError, match="holds posix.mkdir"):
        predict(ckpt, fitted)
    assert not (tmp_path / "unpickled").exists()
    torch.load(ckpt, weights_only=False)  # the control
    assert (tmp_path / "unpickled").exists()


def test_a_class_path_on_the_command_line_is_the_users_own_however_it_is_given(fitted, tmp_path):
    path = altered(fitted, tmp_path / "own.ckpt", "finetune", {"data_class": "mine.Data"})
    checkpoint = torch.load(path, weights_only=True)
    (tmp_path / "data.yaml").write_text("class_path: mine.Data\n")
    (tmp_path / "other.yaml").write_text("init_args: {batch_size: 4}\n")
    for given in ("mine.Data", '{"class_path": "mine.Data"}', str(tmp_path / "data.yaml")):
        assert (
            data_settings(checkpoint, read_explicit_settings(["test", "--data", given]))[
                "class_path"
            ]
            == "mine.Data"
        )
    renamed = read_explicit_settings(["test", "--data", "mine.Renamed"])
    assert data_settings(checkpoint, renamed)["class_path"] == "mine.Renamed"
    for given in ("yours.Data", str(tmp_path / "other.yaml")):
        with pytest.raises(ValueError, match="would import mine"):
            data_settings(checkpoint, read_explicit_settings(["test", "--data", given]))


@promise("no-code")
@pytest.mark.slow
@pytest.mark.parametrize("command", ["test", "validate"])
def test_a_checkpoint_does_not_choose_where_data_is_fetched_to(fitted, cli, tmp_path, command):
    checkpoint = torch.load(fitted / "good.ckpt", weights_only=True)
    checkpoint["datamodule_hyper_parameters"]["root"] = str(tmp_path / "elsewhere/source")
    checkpoint["finetune"]["data_class"] = "finetune.SampleData"
    torch.save(checkpoint, tmp_path / "stranger.ckpt")
    given = [command, "--ckpt_path", "stranger.ckpt", "--trainer.accelerator", "cpu"]
    place = rf"are no longer in .*/elsewhere/source: .*: finetune {command} CKPT FOLDER \(--data\.root\)$"
    with pytest.raises(ValueError, match=place):
        cli(*given)
    assert not (tmp_path / "elsewhere").exists()
    made = patch.object(SampleData, "source_in", side_effect=ValueError("fetched"))
    root = tmp_path / "elsewhere/source"
    with (
        made,
        pytest.raises(
            ValueError,
            match="--data finetune.SampleData",
        ),
    ):
        cli(*given, "--data.root", root)
    # where the user names the class, it is fetched
    with made, pytest.raises(ValueError, match="fetched"):
        cli(*given, "--data.root", root, "--data", "finetune.SampleData")


@pytest.mark.parametrize("command", sweep(["test", "validate"], quick=["test"]))
def test_a_checkpoint_downloads_no_data_set_into_a_folder_that_exists(
    fitted, cli, tmp_path, command
):
    ckpt = altered(
        fitted, tmp_path / "hostile.ckpt", "finetune", {"data_class": "finetune.FashionMNIST"}
    )
    given = [command, ckpt, fitted / "colours", "--workers", 0, "--trainer.accelerator", "cpu"]
    with patch.object(FashionMNIST, "source_in", side_effect=ValueError("fetched")):
        with pytest.raises(ValueError, match="FashionMNIST, and a checkpoint"):
            cli(*given)
        with pytest.raises(ValueError, match="fetched"):  # the control
            cli(*given, "--data", "finetune.FashionMNIST")
    if command == "test":
        cli(*given, "--data", "finetune.ImageFolderData")  # as the message says


FIT = f"fit {' '.join(QUICKEST)} --data.root ROOT --trainer.max_epochs 2"
MEASURE = "--ckpt_path CKPT --data.root ROOT --data.num_workers 0 --trainer.accelerator cpu"
OF_DATA, OF_MODEL = {"data class", "transform"}, {"Lightning's instantiator"}
# how else a checkpoint is read: the command line, and what it reads of HOSTILE's places, and so refuses
WAYS = {
    "test": (f"test {MEASURE}", OF_DATA | OF_MODEL),
    "validate": (f"validate {MEASURE}", OF_DATA | OF_MODEL),
    "predict": (
        "predict CKPT ROOT/test --data.num_workers 0 --trainer.accelerator cpu",
        OF_DATA | OF_MODEL,
    ),
    "report": ("report RUN", OF_MODEL),
    "check": ("check ROOT/test --ckpt_path CKPT", OF_MODEL),
    "fit --ckpt_path": (f"{FIT} --ckpt_path CKPT", OF_MODEL),
    "fit --resume": (f"{FIT} --resume", OF_MODEL),
    "fit --model.weights": (f"{FIT} --model.weights CKPT", OF_MODEL),
    "export": ("export --ckpt_path CKPT --format safetensors --output out.safetensors", OF_MODEL),
    "serve": ("serve --ckpt_path CKPT --port 0", OF_MODEL),
    "load": ("", OF_MODEL),
}


@pytest.fixture
def read(fitted, tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """Reads a checkpoint in one of WAYS, and returns the line with which it is refused, "" where it is not."""
    monkeypatch.chdir(tmp_path)

    def ends_at_once(
        app: Any, listener: Any, timeout: float, announce: Any, stop: Callable[[], None]
    ) -> None:
        (tmp_path / "listened").touch()
        stop()

    monkeypatch.setattr(http_server, "serve_until_stopped", ends_at_once)

    def reads(way: str, ckpt: Path, *more: str) -> str:
        if way == "load":
            try:
                load(ckpt, "cpu").predict(str(fitted / "colours/test"))
            except ValueError as error:
                return str(error)
            return ""
        if way in ("fit --resume", "report"):
            name = "last" if way == "fit --resume" else "best"
            shutil.copytree(fitted / "runs/fit/version_0", run := tmp_path / "runs/fit/version_0")
            (run / "checkpoints").mkdir(exist_ok=True)
            ckpt.rename(run / f"checkpoints/{name}.ckpt")
        places = {"CKPT": str(ckpt), "ROOT": str(fitted / "colours"), "RUN": "runs/fit/version_0"}
        words = [
            places.get(word, word.replace("ROOT/", f"{fitted / 'colours'}/"))
            for word in WAYS[way][0].split()
        ]
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        lines = capsys.readouterr().err.splitlines()
        errors = [
            line.removeprefix("finetune: error: ")
            for line in lines
            if line.startswith("finetune: error: ")
        ]
        # it found something in the images
        is_finding = way == "check" and ended.value.code == 1 and not errors
        assert is_finding or bool(ended.value.code) == len(errors)
        assert not any("Traceback" in line for line in lines)
        return "".join(errors)

    return reads


# What each way reads, and so refuses.
REFUSED = sweep(
    [(way, place) for way, (_, refused) in WAYS.items() for place in sorted(refused)],
    quick=[
        ("test", "data class"),
        ("predict", "transform"),
        ("report", "Lightning's instantiator"),
        ("check", "Lightning's instantiator"),
        ("fit --ckpt_path", "Lightning's instantiator"),
        ("export", "Lightning's instantiator"),
        ("serve", "Lightning's instantiator"),
        ("load", "Lightning's instantiator"),
    ],
)


@pytest.mark.parametrize(("way", "place"), REFUSED)
def test_no_other_way_of_reading_it_imports_anything_either(
    fitted, tmp_path, has_run, read, way, place
):
    line = read(way, altered(fitted, tmp_path / "hostile.ckpt", *HOSTILE[place]))
    assert not has_run() and line and "\n" not in line
    refusals = (
        "would import hostile",
        "is not a valid checkpoint: hyper_",
        "data modules of finetune only, and the checkpoint is of a hostile.Data",
    )
    assert any(refusal in line for refusal in refusals), line
    assert not (tmp_path / "listened").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way, (_, refused) in WAYS.items() if OF_DATA - refused])
def test_what_a_way_does_not_read_it_does_not_import(fitted, tmp_path, has_run, read, way):
    ckpt = tmp_path / "hostile.ckpt"
    shutil.copy(fitted / "good.ckpt", ckpt)
    for place in sorted(OF_DATA - WAYS[way][1]):
        part, values = HOSTILE[place]
        checkpoint = torch.load(ckpt, weights_only=True)
        checkpoint[part].update(values)
        torch.save(checkpoint, ckpt)
    assert read(way, ckpt) == "" and not has_run()
    assert (tmp_path / "listened").exists() == (way == "serve")


# A value of each section that no run of ours has written.
INVALID: dict[str, tuple[str, dict[str, Any], str]] = {
    "model": (
        "hyper_parameters",
        {"class_names": ["blue", "green", "\x1b[2Jred"]},
        "class_names is ",
    ),
    "data": (
        "datamodule_hyper_parameters",
        {"crop_share": 1e-9},
        "crop_share is 1e-09, expected a number",
    ),
    "machine": ("datamodule_hyper_parameters", {"num_workers": 1}, "num_workers is an unknown key"),
    "run": (
        "finetune",
        {"seen": {"names": torch.zeros(2), "num_train": 2}},
        "seen is of type dict, expected tensors",
    ),
    "callbacks": (
        "callbacks",
        {"Checkpoints": {"highest": "1"}},
        "highest is '1', expected a number",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_value_out_of_range_is_refused(fitted, tmp_path, read, name):
    """However it is read: each way refuses Lightning's instantiator above, by the same function."""
    part, values, reported = INVALID[name]
    line = read("load", altered(fitted, tmp_path / "hostile.ckpt", part, values))
    assert f"is not a valid checkpoint: {part}." in line and reported in line and "\x1b" not in line


NESTED = r"(\w+)+$"  # busy with a name of 60 letters for ever


@pytest.fixture
def with_long_name(fitted, tmp_path) -> Path:
    """The images, one of them with a name of 60 letters."""
    folder = Path(shutil.copytree(fitted / "colours", tmp_path / "images"))
    image = next((folder / "test/red").iterdir())
    image.rename(image.with_name(f"{'a' * 60}.png"))
    return folder


@pytest.mark.timeout(120)
def test_a_regular_expression_of_a_checkpoint_groups_no_other_folder(
    fitted, tmp_path, with_long_name
):
    values = {"group_by": NESTED}
    hostile = altered(fitted, tmp_path / "hostile.ckpt", "datamodule_hyper_parameters", values)
    done = run_lightning(["test", *measured(hostile, with_long_name / "test", tmp_path)])
    assert len(done.datamodule.splits["test"]) == 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", sweep(["test", "validate"], quick=["test"]))
@pytest.mark.parametrize("is_named", sweep([True, False], quick=[False]))
def test_a_regular_expression_of_a_checkpoint_groups_no_image_unless_the_user_names_it(
    fitted, tmp_path, with_long_name, command, is_named
):
    values = {"group_by": NESTED, "root": str(with_long_name)}
    hostile = altered(fitted, tmp_path / "hostile.ckpt", "datamodule_hyper_parameters", values)
    words = [command, *measured(hostile, with_long_name if is_named else None, tmp_path)]
    with pytest.raises(ValueError, match="if you trust it, pass it as --data.group_by ") as caught:
        run_lightning(words)
    assert str(caught.value).endswith(shlex.quote(NESTED))
    if command == "test":
        done = run_lightning([*words, "--data.group_by", r"red|blue"])
        assert len(done.datamodule.splits["test"]) == 3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_fit_that_continues_a_checkpoint_alone_does_not_run_its_regular_expression(
    fitted, tmp_path, with_long_name
):
    """A run without its config.yaml has the settings of its checkpoint."""
    run = Path(shutil.copytree(fitted / "runs/fit/version_0", tmp_path / "runs/fit/version_0"))
    (run / "config.yaml").unlink()
    (run / "checkpoints").mkdir(exist_ok=True)
    values = {"group_by": NESTED, "root": str(with_long_name)}
    last = run / "checkpoints/last.ckpt"
    altered(fitted, last, "datamodule_hyper_parameters", values)
    options = ["--trainer.max_epochs", "2", "--allow_changes", "true"]
    done = run_lightning(["fit", *QUICKEST, f"--resume={run}", *options])
    assert done.datamodule.splitting.group_by is None
    assert done.trainer.current_epoch == 2


# What training needs to continue, and measuring does not.
PROGRESS = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


@pytest.mark.parametrize(
    ("way", "part"),
    [
        ("fit --resume", "optimizer_states"),
        *sweep(
            [("fit --ckpt_path", part) for part in PROGRESS],
            quick=[("fit --ckpt_path", "optimizer_states")],
        ),
    ],
)
def test_training_does_not_continue_without_a_part_of_its_progress(
    fitted, tmp_path, read, way, part
):
    checkpoint = torch.load(fitted / "good.ckpt", weights_only=True)
    del checkpoint[part]
    torch.save(checkpoint, tmp_path / "weights.ckpt")
    line = read(way, tmp_path / "weights.ckpt")
    assert (
        "training cannot continue from " in line
        and f"ckpt, which has no {part}: begin a new run with" in line
    )


@pytest.mark.parametrize("way", sweep(["test", "validate"], quick=["test"]))
def test_a_precision_whose_package_is_missing_is_one_line(fitted, tmp_path, read, way):
    line = read(
        way, altered(fitted, tmp_path / "gpu.ckpt", "finetune", {"precision": "transformer-engine"})
    )
    assert line.startswith("precision transformer-engine needs") and line.endswith(
        "pass --precision 32-true"
    )


ESCAPE = "\x1b[2J"  # clears a terminal
TEXTS = {
    "data class": ("finetune", {"data_class": f"mine{ESCAPE}.Data"}, "would import mine\\x1b"),
    "folder": (
        "datamodule_hyper_parameters",
        {"root": f"/gone{ESCAPE}"},
        "are no longer in /gone\\x1b",
    ),
    "network": ("hyper_parameters", {"backbone": f"x{ESCAPE}"}, "x\\x1b"),
    "key": ("finetune", {f"x{ESCAPE}": 1}, "finetune.x\\x1b"),
}


@pytest.mark.parametrize("name", sweep(TEXTS, quick=["data class", "key"]))
def test_text_of_a_checkpoint_reaches_the_terminal_as_escapes(
    fitted, tmp_path, monkeypatch, capsys, name
):
    monkeypatch.chdir(tmp_path)
    part, values, reported = TEXTS[name]
    ckpt = altered(fitted, tmp_path / "hostile.ckpt", part, values)
    with pytest.raises(SystemExit):
        main(
            [
                "test",
                "--ckpt_path",
                str(ckpt),
                "--data.num_workers",
                "0",
                "--trainer.accelerator",
                "cpu",
            ]
        )
    err = capsys.readouterr().err
    assert reported in err and "\x1b" not in err


@pytest.mark.parametrize("way", ["load", "predict"])
def test_a_checkpoint_names_no_other_file_that_answers_for_it(fitted, tmp_path, read, way):
    """The mark of an exported file was once a key that any checkpoint could hold."""
    other = str(tmp_path / "other.onnx")
    assert "other.onnx" not in read(
        way, altered(fitted, tmp_path / "hostile.ckpt", None, {"exported": other})
    )


PICKLES = [
    *((way, True) for way in WAYS),
    ("load", False),
    ("test", False),
    ("fit --model.weights", False),
]


@pytest.mark.parametrize(
    ("way", "is_archive"),
    sweep(
        PICKLES,
        quick=[
            ("load", True),
            ("predict", True),
            ("serve", True),
            ("fit --resume", True),
            ("export", True),
            ("load", False),
            ("fit --model.weights", False),
        ],
    ),
)
def test_no_way_of_reading_it_runs_what_is_pickled(fitted, tmp_path, read, way, is_archive):
    ckpt = altered(
        fitted,
        tmp_path / "hostile.ckpt",
        None,
        {"callbacks": {"Checkpoints": Code(tmp_path / "ran")}},
    )
    if not is_archive:
        ckpt.write_bytes(pickle.dumps({"state_dict": Code(tmp_path / "ran")}))
    content = ckpt.read_bytes()
    line = read(way, ckpt)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "listened").exists()
    assert (
        ("posix.mkdir" in line or "Python objects" in line)
        if is_archive
        else line and "\n" not in line
    )
    (tmp_path / "control.ckpt").write_bytes(content)
    with suppress(Exception):
        torch.load(tmp_path / "control.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()
