"""Names are text, also if they are words or numbers of YAML."""

import json

import cv2
import pytest
from colours import QUICKEST
from command_lines import parse_typed
from image_files import random_image

import finetune

NAMES = ("null", "no", "007", "cat", "dog")
NUMBER_LIKE = "[no, 007]"


@pytest.fixture
def images(tmp_path):
    for name in NAMES:
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for i in range(8):
            cv2.imwrite(str(folder / f"{i}.png"), random_image(32, 32))
    return tmp_path / "images"


@pytest.mark.parametrize(
    ("flags", "config", "excluded"),
    [
        (["--data.exclude", "null"], "", ["null"]),
        (["--data.exclude", NUMBER_LIKE], "", ["no", "007"]),
        (["--data.exclude=1e5"], "", ["1e5"]),
        (["--data.exclude", "a: b"], "", ["a: b"]),
        (["--data", f"{{init_args: {{exclude: {NUMBER_LIKE}}}}}"], "", ["no", "007"]),
        ([], f"data: {{init_args: {{exclude: {NUMBER_LIKE}}}}}", ["no", "007"]),
        ([], f"epochs: 3\ndata.exclude: {NUMBER_LIKE}", ["no", "007"]),
        ([], "data: {init_args: {exclude: null}}", None),
    ],
)
def test_excluded_classes_are_text(flags, config, excluded, tmp_path):
    if config:
        (tmp_path / "some.yaml").write_text(config)
        flags = ["--config", str(tmp_path / "some.yaml")]
    assert parse_typed(["fit", str(tmp_path), *flags]).data.init_args.exclude == excluded


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("merge", "[no,007:c]", ["no", "007:c"]),
        ("merge", "12:30", ["12:30"]),
        ("class_names", "[yes, no]", ["yes", "no"]),
        ("columns", "{label: 007}", {"label": "007"}),
        ("columns", "label:007", "label:007"),
    ],
)
def test_other_names_are_text(name, text, value, tmp_path):
    parsed = parse_typed(["fit", str(tmp_path), f"--data.{name}", text])
    assert getattr(parsed.data.init_args, name) == value


def test_the_names_of_class_weights_are_text(tmp_path):
    (tmp_path / "some.yaml").write_text("model: {class_weights: {no: 2, 007: 3}}")
    parsed = parse_typed(["fit", str(tmp_path), "--config", str(tmp_path / "some.yaml")])
    assert parsed.model.class_weights == {"no": 2, "007": 3}


def test_a_fit_leaves_them_out_and_its_run_keeps_them(images, cli):
    cli("fit", images, *QUICKEST, "--data.exclude", NUMBER_LIKE, "--test_after_fit", "false")
    run = finetune.load("runs/fit/version_0")
    assert run.class_names == ["cat", "dog", "null"]
    cli("fit", "--resume", "--epochs", "2", "--test_after_fit", "false")
    assert finetune.load("runs/fit/version_0").class_names == ["cat", "dog", "null"]


def test_python_has_names_and_none(images, tmp_path, monkeypatch):
    from finetune.api.command_words import command_line

    line = command_line(images, {}, {"data.exclude": ["no", "007"]})
    assert json.loads(line[line.index("--data.exclude") + 1]) == ["no", "007"]
    assert parse_typed(
        command_line(images, {}, {"data.exclude": "null"})
    ).data.init_args.exclude == ["null"]
    assert (
        parse_typed(command_line(images, {}, {"data.exclude": None})).data.init_args.exclude == []
    )
