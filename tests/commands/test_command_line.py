"""Short words, positional arguments, runs, `~` and globs become full flags before torch is imported."""

import os
from pathlib import Path

import pytest

from finetune.commands.command_line import in_full_spelling, with_images
from finetune.system.messages import WrongUsage

BEST = "run/checkpoints/best.ckpt"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with images, a run, and a run without a best checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    images = ("pictures/cat/a.jpg", "pictures/cat/b.jpg", "pictures/dog/-c.jpg")
    for name in (*images, BEST, "early/checkpoints/last.ckpt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("-x.jpg").touch()
    Path("[a]").touch()
    Path("labels.csv").touch()
    Path("labels.xlsx").touch()


IN_FULL = {
    "test run": f"test --ckpt_path {BEST}",
    "validate --ckpt_path run pictures": f"validate --ckpt_path {BEST} --data.root pictures",
    "predict run pictures/*/*.jpg": f"predict --ckpt_path {BEST} -- pictures/*/*.jpg",
    "sheet --ckpt_path run --pictures pictures": f"sheet --ckpt_path {BEST} --pictures pictures",
    "fit pictures": "fit --data.root pictures",
    "fit labels.csv": "fit --data.table labels.csv",
    "fit --resume ./labels.csv --data.root pictures": (
        "fit --resume --data.root pictures --data.table ./labels.csv"
    ),
    "fit --data.table ~/labels.csv": "fit --data.table HOME/labels.csv",
    "test run labels.csv": f"test --ckpt_path {BEST} --data.table labels.csv",
    "predict run labels.csv": f"predict --ckpt_path {BEST} -- labels.csv",
    "check labels.csv": "check -- labels.csv",
    "fit --epochs 3 pictures": "fit --trainer.max_epochs 3 --data.root pictures",
    "fit --resume pictures": "fit --resume --data.root pictures",
    "fit pictures --config hotdog.yaml": "fit --config hotdog.yaml --data.root pictures",
    "fit absent -c hotdog.yaml": "fit --config hotdog.yaml --data.root absent",  # which it makes
    "fit pictures --data finetune.SampleData": "fit --data finetune.SampleData --data.root pictures",
    "fit --data.root pictures": "fit --data.root pictures",
    "fit pictures --data.root pictures": "fit --data.root pictures",
    "fit pictures --lr 1 --model.optimizer.lr 2": (
        "fit --model.optimizer.lr 1 --model.optimizer.lr 2 --data.root pictures"
    ),
    "fit pictures --weights ./run --ckpt_path run": (
        f"fit --model.weights {BEST} --ckpt_path {BEST} --data.root pictures"
    ),
    "fit pictures --weights DEFAULT": "fit --model.weights DEFAULT --data.root pictures",
    "fit --out=~/runs --data.root ~/pictures": "fit --trainer.default_root_dir HOME/runs --data.root HOME/pictures",
    "fit pictures --resume --ckpt_path x": "fit --resume --ckpt_path x --data.root pictures",
    "fit pictures --ckpt_path null --weights ./gone.pt": (
        "fit --ckpt_path null --model.weights ./gone.pt --data.root pictures"
    ),
    "fit --resume": "fit --resume",
    "fit --resume early": "fit --resume=early",
    "fit --resume early/checkpoints/last.ckpt": "fit --resume=early",
    "fit pictures --epochs 2 --resume early": "fit --trainer.max_epochs 2 --resume=early --data.root pictures",
    "fit --print_config": "fit --print_config",
    "fit --trainer.callbacks.help EarlyStopping": "fit --trainer.callbacks.help EarlyStopping",
    "benchmark pictures --devices 1,2 --out x.json": (
        "benchmark --devices 1,2 --output x.json --data.root pictures"
    ),
    "test run pictures --batch 3": f"test --ckpt_path {BEST} --data.batch_size 3 --data.root pictures",
    "test run/checkpoints": f"test --ckpt_path {BEST}",
    f"predict {BEST} pictures": f"predict --ckpt_path {BEST} -- pictures",
    "predict run pictures/cat/a.jpg --out o.csv pictures/cat/b.jpg": (
        f"predict --ckpt_path {BEST} --output o.csv -- pictures/cat/a.jpg pictures/cat/b.jpg"
    ),
    "predict ~/run ~/pictures": "predict --ckpt_path HOME/run/checkpoints/best.ckpt -- HOME/pictures",
    "predict --ckpt_path run --data.predict pictures": f"predict --ckpt_path {BEST} --data.predict pictures",
    "predict run --pictures pictures": f"predict --ckpt_path {BEST} --data.predict pictures",
    "predict run -- -x.jpg": f"predict --ckpt_path {BEST} -- -x.jpg",
    "sheet run pictures --out s.png": f"sheet --ckpt_path {BEST} --output s.png -- pictures",
    "export run --out s.onnx": f"export --ckpt_path {BEST} --output s.onnx",
    "export --config e.yaml": "export --config e.yaml",
    "fit pictures --weights run": f"fit --model.weights {BEST} --data.root pictures",
    "check pictures --size 3": "check --image_size 3 -- pictures",
    "check": "check",
    "review pictures run --port 3": "review --port 3 --run run -- pictures",
    "review pictures --run run": "review --run run -- pictures",
    "fit --help all": "fit --help",
}


@pytest.mark.parametrize("typed", IN_FULL)
def test_what_is_typed_is_what_full_flags_say_and_comes_out_of_itself(typed, tmp_path):
    expected = [word.replace("HOME", str(tmp_path)) for word in IN_FULL[typed].split()]
    expected = [f"run{os.sep}checkpoints/best.ckpt" if word == BEST else word for word in expected]
    once = in_full_spelling(typed.split())
    assert once == expected
    assert in_full_spelling(once) == once


WRONG = {
    "fit pictures --data.init_args.root run": "(--data.root) is given twice: 'pictures' and 'run'",
    "test run pictres": "the data folder 'pictres' does not exist; did you mean 'pictures'?",
    "test run pictures pictures": "one folder is needed, not 2",
    "predict run/checkpoints": "finetune predict needs images, folders, globs or a LIST.txt",
    "sheet run": "finetune sheet needs images",
    "fit": "no data: give the folder of your images, as in finetune fit FOLDER; or a shipped",
    "fit --resume=pictures": "--resume pictures: that is not the folder of a run",
    "fit --resume nowhere": "--resume: 'nowhere' does not exist; give the folder of a run",
    "fit pictures --resume early2": "a run or a folder of images; did you mean 'early'?",
    "fit early early --resume": "one folder is needed, not 2 ('early' 'early'): finetune fit --resume RUN",
    "fit pictres": "the data folder 'pictres' does not exist; did you mean 'pictures'?",
    "fit -- -x.jpg": "'-x.jpg' is a file: give a folder of images",
    "fit label.csv": "the table 'label.csv' does not exist; did you mean 'labels.csv'?",
    "fit labels.xlsx": "'labels.xlsx': .xlsx tables are unsupported; save it as one of .csv",
    "fit labels.csv --data.table x.csv": "--data.table is given twice: 'labels.csv' and 'x.csv'",
    "fit hotdog.yaml": "hotdog.yaml is a config, not a folder of images: finetune fit --config hotdog.yaml",
    "fit hotdog": "hotdog is a config, not a folder of images: finetune fit --config hotdog",
    "fit pictures run": "one folder is needed, not 2 ('pictures' 'run'): finetune fit FOLDER",
    "fit pictures --data.root run": "finetune fit FOLDER (--data.root) is given twice: 'pictures' and 'run'",
    "fit pictures --config hotdg.yaml": "there is no config 'hotdg.yaml', and none of that name is shipped; did you",
    "fit pictures --weights ./pictures": "the folder ./pictures is not a run",
    "fit pictures --ckpt_path gone.ckpt": "there is no checkpoint 'gone.ckpt': give the folder of a run, or a file",
    "test": "finetune test needs a checkpoint, or a run's folder: finetune test CKPT (--ckpt_path)",
    "test rum": "there is no checkpoint 'rum'; did you mean 'run'?",
    "test run/checkpoints/bets.ckpt": "did you mean 'run/checkpoints/best.ckpt'?",
    "test pictures run": "the folder pictures is not a run",
    "predict run": "finetune predict needs images, folders, globs or a LIST.txt: finetune predict CKPT IMAGES",
    "predict pictures/cat/a.jpg": "the checkpoint, or a run's folder, comes first: finetune predict CKPT IMAGES",
    "predict run pictures/cat/d.jpg": "no image, folder, list or glob 'pictures/cat/d.jpg'; did you mean 'pictu",
    "predict run pictures/*.gif": "there is no image, folder, list or glob 'pictures/*.gif'",
    "predict run pictures --data.predict pictures": "images are given twice: by --data.predict, and 'pictures'",
    "predict pictures/cat/a.jpg run": "'pictures/cat/a.jpg' is an image: a checkpoint, or a run's folder, comes",
    "fit pictures --out [a]": "/[a] is a file, not a folder",
    "export": "finetune export needs a checkpoint",
    "export run pictures": "finetune export takes one checkpoint, and no 'pictures'",
    "check a b": "one folder is needed, not 2",
}


@pytest.mark.parametrize("typed", WRONG)
def test_a_mistake_is_reported_in_a_line(typed):
    with pytest.raises((WrongUsage, FileNotFoundError)) as caught:
        in_full_spelling(typed.split())
    assert WRONG[typed] in str(caught.value) and caught.value.exit_code == 2


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
    assert with_images(["sheet", "--", *images])[1:] == ["--pictures", value]
    assert with_images(line) == line
