"""Short words, positional arguments, runs, `~` and globs become full flags before torch is imported."""

import os
from pathlib import Path

import pytest

from finetune.commands.command_line import in_full_spelling, with_images

BEST = "run/checkpoints/best.ckpt"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with images, a run, and a run without a best checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    images = ("photos/cat/a.jpg", "photos/cat/b.jpg", "photos/dog/-c.jpg")
    for name in (*images, BEST, "early/checkpoints/last.ckpt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("-x.jpg").touch()
    Path("[a]").touch()
    Path("labels.csv").touch()
    Path("labels.xlsx").touch()


IN_FULL = {
    "test run": f"test --ckpt_path {BEST}",
    "validate --ckpt_path run photos": f"validate --ckpt_path {BEST} --data.root photos",
    "predict run photos/*/*.jpg": f"predict --ckpt_path {BEST} -- photos/*/*.jpg",
    "fit photos": "fit --data.root photos",
    "fit labels.csv": "fit --data.table labels.csv",
    "fit --resume ./labels.csv --data.root photos": (
        "fit --resume --data.root photos --data.table ./labels.csv"
    ),
    "fit --data.table ~/labels.csv": "fit --data.table HOME/labels.csv",
    "test run labels.csv": f"test --ckpt_path {BEST} --data.table labels.csv",
    "predict run labels.csv": f"predict --ckpt_path {BEST} -- labels.csv",
    "check labels.csv": "check -- labels.csv",
    "fit --epochs 3 photos": "fit --trainer.max_epochs 3 --data.root photos",
    "fit --resume photos": "fit --resume --data.root photos",
    "fit photos --config hotdog.yaml": "fit --config hotdog.yaml --data.root photos",
    "fit absent -c hotdog.yaml": "fit --config hotdog.yaml --data.root absent",  # which it makes
    "fit photos --data finetune.SampleData": "fit --data finetune.SampleData --data.root photos",
    "fit --data.root photos": "fit --data.root photos",
    "fit photos --data.root photos": "fit --data.root photos",
    "fit photos --lr 1 --model.optimizer.lr 2": (
        "fit --model.optimizer.lr 1 --model.optimizer.lr 2 --data.root photos"
    ),
    "fit photos --weights ./run --ckpt_path run": (
        f"fit --model.weights {BEST} --ckpt_path {BEST} --data.root photos"
    ),
    "fit photos --weights DEFAULT": "fit --model.weights DEFAULT --data.root photos",
    "fit --out=~/runs --data.root ~/photos": "fit --trainer.default_root_dir HOME/runs --data.root HOME/photos",
    "fit photos --resume --ckpt_path x": "fit --resume --ckpt_path x --data.root photos",
    "fit photos --ckpt_path null --weights ./gone.pt": (
        "fit --ckpt_path null --model.weights ./gone.pt --data.root photos"
    ),
    "fit --resume": "fit --resume",
    "fit --resume early": "fit --resume=early",
    "fit --resume early/checkpoints/last.ckpt": "fit --resume=early",
    "fit photos --epochs 2 --resume early": "fit --trainer.max_epochs 2 --resume=early --data.root photos",
    "fit --print_config": "fit --print_config",
    "fit --trainer.callbacks.help EarlyStopping": "fit --trainer.callbacks.help EarlyStopping",
    "benchmark photos --devices 1,2 --out x.json": (
        "benchmark --devices 1,2 --output x.json --data.root photos"
    ),
    "test run photos --batch 3": f"test --ckpt_path {BEST} --data.batch_size 3 --data.root photos",
    "test run/checkpoints": f"test --ckpt_path {BEST}",
    f"predict {BEST} photos": f"predict --ckpt_path {BEST} -- photos",
    "predict run photos/cat/a.jpg --out o.csv photos/cat/b.jpg": (
        f"predict --ckpt_path {BEST} --output o.csv -- photos/cat/a.jpg photos/cat/b.jpg"
    ),
    "predict ~/run ~/photos": "predict --ckpt_path HOME/run/checkpoints/best.ckpt -- HOME/photos",
    "predict --ckpt_path run --data.predict photos": f"predict --ckpt_path {BEST} --data.predict photos",
    "predict run --pictures photos": f"predict --ckpt_path {BEST} --data.predict photos",
    "predict run -- -x.jpg": f"predict --ckpt_path {BEST} -- -x.jpg",
    "export run --out s.onnx": f"export --ckpt_path {BEST} --output s.onnx",
    "export --config e.yaml": "export --config e.yaml",
    "fit photos --weights run": f"fit --model.weights {BEST} --data.root photos",
    "check photos --size 3": "check --image_size 3 -- photos",
    "check": "check",
    "review photos run --port 3": "review --port 3 --run run -- photos",
    "review photos --run run": "review --run run -- photos",
    "fit --help all": "fit --help",
}


@pytest.mark.parametrize("typed", IN_FULL)
def test_what_is_typed_is_what_full_flags_say_and_comes_out_of_itself(typed, tmp_path):
    expected = [word.replace("HOME", str(tmp_path)) for word in IN_FULL[typed].split()]
    expected = [f"run{os.sep}checkpoints/best.ckpt" if word == BEST else word for word in expected]
    once = in_full_spelling(typed.split())
    assert once == expected
    assert in_full_spelling(once) == once


def test_a_run_without_a_best_checkpoint_says_so_once(capsys, monkeypatch):
    assert in_full_spelling(["test", "early"]) == [
        "test",
        "--ckpt_path",
        "early/checkpoints/last.ckpt",
    ]
    assert (
        capsys.readouterr().err
        == "early has no best checkpoint: taking early/checkpoints/last.ckpt\n"
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    in_full_spelling(["test", "early"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("images", "value"),
    [
        (["a.jpg"], "a.jpg"),
        (["a.jpg", "b, c.jpg"], '["a.jpg", "b, c.jpg"]'),
        (["[a]"], '["[a]"]'),
        (["-x.jpg"], '["-x.jpg"]'),
    ],
)
def test_images_become_one_flag_of_the_parser(images, value):
    line = with_images(["predict", "--ckpt_path", "x", "--", *images])
    assert line == ["predict", "--ckpt_path", "x", "--data.predict", value]
    assert with_images(line) == line
