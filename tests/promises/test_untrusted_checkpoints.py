"""What a checkpoint of somebody else could do in each way of reading it, shown by a module that is imported or not.

test_hostile_checkpoint.py has the quick core of this; the values of a checkpoint: tests/unit/test_checkpoint_values.py.
"""

import os
import pickle
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from colours import QUICKEST
from promise import promise
from tiers import sweep

from finetune import Classifier, load
from finetune.cli import main
from finetune.data.datasets.fashion_mnist import FashionMNIST
from finetune.demo.sample_data import SampleData
from finetune.serving import http_server

CPU = "--workers 0 --trainer.accelerator cpu"


@pytest.fixture(scope="module")
def fitted(fitted_runs: Any) -> Path:
    """A finished run; to be read only."""
    return fitted_runs.single


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
MODEL, DATA = "hyper_parameters", "datamodule_hyper_parameters"
# what is written where, in which of the checkpoint's parts
HOSTILE: dict[str, tuple[str | None, dict[str, Any]]] = {
    "data class": ("finetune", {"data_class": "hostile.Data"}),
    "data class beneath ours": ("finetune", {"data_class": "finetune.hostile.Data"}),
    "data class that is none": ("finetune", {"data_class": ["hostile.Data"]}),
    "transform": (DATA, {"augmentations": [TRANSFORM]}),
    "transform inside another": (
        DATA,
        {"augmentations": [{"class_path": "OneOf", "init_args": {"transforms": [TRANSFORM]}}]},
    ),
    "transform in text": (DATA, {"augmentations": '[{"class_path": "hostile.Transform"}]'}),
    "transform in text in a list": (
        DATA,
        {"augmentations": ['{"class_path": "hostile.Transform"}']},
    ),
    "another argument of the data": (DATA, {"root": {"class_path": "hostile.Data"}}),
    "optimizer": (MODEL, {"optimizer": OBJECT}),
    "scheduler": (MODEL, {"scheduler": OBJECT}),
    "another argument of the model": (MODEL, {"class_weights": OBJECT}),
    "instantiator": (MODEL, {"_instantiator": "hostile.scheduler"}),
    "Lightning's instantiator": (MODEL, {**BY_LIGHTNING, "scheduler": OBJECT}),
}


@pytest.fixture
def altered(fitted: Path, tmp_path: Path) -> Callable[[str | None, dict[str, Any]], Path]:
    """Writes a copy of a checkpoint with other values in one of its parts."""

    def changed(part: str | None, values: dict[str, Any], name: str = "hostile") -> Path:
        path = tmp_path / f"{name}.ckpt"
        checkpoint = torch.load(
            path if path.exists() else fitted / "checkpoints/last.ckpt", weights_only=True
        )
        (checkpoint[part] if part else checkpoint).update(values)
        torch.save(checkpoint, path)
        return path

    return changed


FIT = f"fit {' '.join(QUICKEST)} --data.root ROOT --trainer.max_epochs 2"
OF_DATA, OF_MODEL = {"data class", "transform"}, {"Lightning's instantiator"}
# how a checkpoint is read: the command line, and what it reads of HOSTILE's places, and so refuses
WAYS = {
    "test": (f"test CKPT ROOT {CPU}", OF_DATA | OF_MODEL),
    "validate": (f"validate CKPT ROOT {CPU}", OF_DATA | OF_MODEL),
    "predict": (f"predict CKPT ROOT/test {CPU}", OF_DATA | OF_MODEL),
    "report": ("report RUN", OF_MODEL),
    "check": ("check ROOT/test --ckpt_path CKPT", OF_MODEL),
    "fit --ckpt_path": (f"{FIT} --ckpt_path CKPT", OF_MODEL),
    "fit --resume": (f"{FIT} --resume", OF_MODEL),
    "fit --weights": (f"{FIT} --weights CKPT", OF_MODEL),
    "export": ("export CKPT --format safetensors --out out.safetensors", OF_MODEL),
    "serve": ("serve CKPT --port 0", OF_MODEL),
    "load": ("", OF_MODEL),
}


@pytest.fixture
def read(fitted, colours, tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """Reads a checkpoint in one of WAYS, and returns the line with which it is refused, "" where it is not."""
    monkeypatch.chdir(tmp_path)

    def ends_at_once(
        app: Any, listener: Any, timeout: float, announce: Any, stop: Callable[[], None]
    ) -> None:
        (tmp_path / "listened").touch()
        stop()

    monkeypatch.setattr(http_server, "serve_until_stopped", ends_at_once)

    def reads(way: str, ckpt: Path, *more: str, root: Path = colours) -> str:
        if way == "load":
            try:
                load(ckpt, "cpu").predict(str(root / "test"))
            except ValueError as error:
                return str(error)
            return ""
        if way in ("fit --resume", "report"):
            name = "last" if way == "fit --resume" else "best"
            run = shutil.copytree(fitted, tmp_path / "runs/fit/version_0")
            ckpt.rename(run / f"checkpoints/{name}.ckpt")
        places = {"CKPT": str(ckpt), "ROOT": str(root), "RUN": "runs/fit/version_0"}
        words = [
            places.get(word, word.replace("ROOT/", f"{root}/")) for word in WAYS[way][0].split()
        ]
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        error = capsys.readouterr().err
        prefix = "finetune: error: "
        errors = [line.removeprefix(prefix) for line in error.splitlines() if prefix in line]
        # it found something in the images
        is_finding = way == "check" and ended.value.code == 1 and not errors
        assert is_finding or bool(ended.value.code) == len(errors)
        assert "Traceback" not in error and "\x1b" not in error
        return "".join(errors)

    return reads


def is_refusal(line: str) -> bool:
    words = ("would import", "is not as `finetune fit`", "not a valid checkpoint", "finetune only")
    return any(word in line for word in words)


QUICK_PLACES = ["transform inside another", "transform in text", "optimizer"]


@promise("no-code")
@pytest.mark.parametrize("place", sweep(HOSTILE, quick=QUICK_PLACES))
def test_predict_with_an_untrusted_checkpoint_imports_nothing(altered, has_run, read, place):
    line = read("predict", altered(*HOSTILE[place]))
    assert is_refusal(line) and not has_run(), line
    assert "import hostile" not in line or "--data" in line


QUICK_WAYS = [(way, min(refused)) for way, (_, refused) in WAYS.items() if way != "validate"]
WAYS_AND_PLACES = [(way, place) for way, (_, refused) in WAYS.items() for place in sorted(refused)]


@promise("no-code")
@pytest.mark.parametrize(("way", "place"), sweep(WAYS_AND_PLACES, quick=QUICK_WAYS))
def test_no_way_of_reading_a_checkpoint_imports_anything(
    altered, tmp_path, has_run, read, way, place
):
    line = read(way, altered(*HOSTILE[place]))
    assert is_refusal(line) and not has_run(), line
    assert not (tmp_path / "listened").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way, (_, refused) in WAYS.items() if OF_DATA - refused])
def test_what_a_way_does_not_read_it_does_not_import(altered, tmp_path, has_run, read, way):
    for place in sorted(OF_DATA):
        ckpt = altered(*HOSTILE[place])
    assert read(way, ckpt) == "" and not has_run()
    assert (tmp_path / "listened").exists() == (way == "serve")


QUICK_PICKLES = [("load", True), ("predict", True), ("fit --resume", True), ("load", False)]
PICKLES = [*((way, True) for way in WAYS), *((w, False) for w in ("load", "test", "fit --weights"))]


@promise("no-code")
@pytest.mark.parametrize(("way", "is_archive"), sweep(PICKLES, quick=QUICK_PICKLES))
def test_no_way_of_reading_a_checkpoint_runs_what_is_pickled(
    altered, tmp_path, read, way, is_archive
):
    ran = tmp_path / "ran"
    ckpt = altered(None, {"callbacks": {"Checkpoints": Code(ran)}})
    if not is_archive:
        ckpt.write_bytes(pickle.dumps({"state_dict": Code(ran)}))
    shutil.copy(ckpt, tmp_path / "control.ckpt")
    line = read(way, ckpt)
    assert line and not ran.exists() and not (tmp_path / "listened").exists()
    with suppress(Exception):  # the control
        torch.load(tmp_path / "control.ckpt", weights_only=False)
    assert ran.exists()


def test_export_does_not_look_where_lightning_would(altered, read, has_run):
    # Lightning 0.7's place of arguments
    older = {**BY_LIGHTNING, "scheduler": OBJECT, "class_names": ["a", "b"]}
    ckpt = altered(None, {"hparams": older})
    assert read("export", ckpt) == "" and not has_run()
    with suppress(Exception):  # the control: whatever comes of it, the module runs
        Classifier.load_from_checkpoint(ckpt, map_location="cpu")
    assert has_run()


def test_a_data_class_that_the_user_names_is_imported_however_it_is_named(
    altered, tmp_path, read, has_run
):
    ckpt = altered(*HOSTILE["data class"])
    for given in ("hostile.Data", '{"class_path": "hostile.Data"}'):
        assert read("test", ckpt, "--data", given) == "" and has_run(), given
    for given in ("finetune.Hotdog", "{init_args: {batch_size: 4}}"):
        assert is_refusal(read("test", ckpt, "--data", given)) and not has_run(), given


@promise("no-code")
@pytest.mark.parametrize("data_class", [FashionMNIST, SampleData])
def test_a_checkpoint_fetches_no_data_set_unless_the_user_names_it(
    altered, colours, tmp_path, monkeypatch, capsys, data_class
):
    def fetched(*_: object) -> None:
        raise OSError("fetched")

    def line(*more: str) -> str:
        with pytest.raises(SystemExit):
            main(["test", str(ckpt), *CPU.split(), *more])
        return capsys.readouterr().err

    monkeypatch.setattr(data_class, "place_in", fetched)
    name = f"finetune.{data_class.__name__}"
    gone = tmp_path / "elsewhere/source"
    ckpt = altered("finetune", {"data_class": name})
    place = ("--data.root", str(colours if data_class is FashionMNIST else gone))
    assert "fetched" not in (said := line(*place)) and name in said
    assert "fetched" in line(*place, "--data", name)  # the control
    altered(DATA, {"root": str(gone)})
    assert "no longer in" in line() and not gone.parent.exists()


# texts and values that no run of ours has written: the part, its values, and words of the line
INVALID: dict[str, tuple[str, dict[str, Any], str]] = {
    "class name": (MODEL, {"class_names": ["blue", "green", "\x1b[2Jred"]}, "class_names"),
    "number": (DATA, {"crop_share": 1e-9}, "crop_share is 1e-09"),
    "setting": (DATA, {"num_workers": 1}, "num_workers is an unknown key"),
    "tensors": ("finetune", {"seen": {"train": torch.zeros(2), "val": 2}}, "seen"),
    "callback": ("callbacks", {"Checkpoints": {"highest": "1"}}, "highest is '1'"),
    "key": ("finetune", {"x\x1b[2J": 1}, "finetune.x\\x1b"),
    "data class": ("finetune", {"data_class": "mine\x1b[2J.Data"}, "import mine\\x1b"),
    "network": (MODEL, {"backbone": "x\x1b[2J"}, "x\\x1b"),
    "precision": ("finetune", {"precision": "transformer-engine"}, "precision is"),
}


@pytest.mark.parametrize("name", sweep(INVALID, quick=["class name", "callback", "key"]))
def test_an_invalid_value_of_a_checkpoint_is_named_and_cannot_clear_a_terminal(altered, read, name):
    *changes, word = INVALID[name]
    assert word in read("test", altered(*changes))


NESTED = r"(\w+)+$"  # busy with a name of 60 letters for ever


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_regular_expression_of_a_checkpoint_groups_no_image_unless_the_user_names_it(
    altered, colours, read, tmp_path, is_named
):
    root = Path(shutil.copytree(colours, tmp_path / "images"))
    image = next((root / "test/red").iterdir())
    image.rename(image.with_name(f"{'a' * 60}.png"))
    ckpt = altered(DATA, {"group_by": NESTED, "root": str(root)})
    if is_named:
        line = read("test", ckpt, root=root)
    else:
        with pytest.raises(ValueError, match="--data.group_by") as caught:
            load(ckpt, "cpu").test(str(root))
        line = str(caught.value)
    assert line.endswith(f"--data.group_by {shlex.quote(NESTED)}")
    assert read("test", ckpt, "--data.group_by", "red|blue", root=root) == ""
    # the images of another folder have no groups
    assert read("test", ckpt, root=root / "test") == ""


# What training needs to continue, and measuring does not.
PROGRESS = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


@pytest.mark.parametrize("part", sweep(PROGRESS, quick=["optimizer_states"]))
@pytest.mark.parametrize("way", ["fit --resume", "fit --ckpt_path"])
def test_training_does_not_continue_without_a_part_of_its_progress(
    fitted, tmp_path, read, way, part
):
    checkpoint = torch.load(fitted / "checkpoints/last.ckpt", weights_only=True)
    del checkpoint[part]
    torch.save(checkpoint, tmp_path / "weights.ckpt")
    line = read(way, tmp_path / "weights.ckpt")
    assert f"ckpt, which has no {part}" in line and "begin a new run" in line
