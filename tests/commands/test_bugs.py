"""Bugs of finetune are shown as such, with the place; only errors that were raised for the user are one line."""

import math

import pytest
from colours import QUICKEST

import finetune
from finetune.cli import main
from finetune.training.classifier import Classifier

IS_BUG = "This is a bug of finetune"


def fails(*_: object) -> None:
    math.sqrt(-1.0)


def fails_later(self: Classifier) -> None:
    if self.current_epoch == 1:
        fails()


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("finetune.commands.cache.cache_dir", ["cache"]),
        ("finetune.commands.config_files._check_text", ["fit", "--config", "some.yaml"]),
        (
            "finetune.data.dataset.ImageDataset._load",
            ["fit", "{images}", *QUICKEST, "--workers", "1"],
        ),
    ],
)
def test_a_bug_is_a_traceback_and_a_line(place, arguments, colours, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.yaml").write_text("epochs: 1\n")
    monkeypatch.setattr(place, fails)
    with pytest.raises(SystemExit) as ended:
        main([argument.format(images=colours) for argument in arguments])
    error = capsys.readouterr().err
    *_, last = error.strip().splitlines()
    assert ended.value.code == 1
    assert "math domain error" in last and IS_BUG in last
    assert "Traceback" in error and "math.sqrt(-1.0)" in error


def test_a_fit_that_a_bug_has_ended_can_be_resumed(colours, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit = ["fit", str(colours), *QUICKEST, "--epochs", "2", "--test_after_fit", "false"]
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "on_train_epoch_start", fails_later)
        with pytest.raises(SystemExit) as ended:
            main(fit)
    error = capsys.readouterr().err
    assert ended.value.code == 1 and IS_BUG in error and "Traceback" in error
    with pytest.raises(SystemExit) as ended:
        main([*fit, "--resume"])
    assert ended.value.code == 0
    assert "epoch 2/2" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs/fit").iterdir()] == ["version_0"]


def test_python_gets_the_error_as_it_is(colours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Classifier, "on_train_epoch_start", fails)
    with pytest.raises(ValueError, match="^math domain error$"):
        finetune.fit(colours, size=28, backbone="small_cnn", weights=None, workers=0, epochs=1)
