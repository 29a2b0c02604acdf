"""The command line as a user meets it: help, mistakes, run folders, predictions, real processes."""

import contextlib
import csv
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import torch
import yaml
from colours import QUICKEST
from processes import finetune, run_script, start

from finetune import __version__
from finetune.cli import LIGHTNING, OWN, main, run
from finetune.commands.all_options import HIDDEN
from finetune.commands.options import OPTIONS
from finetune.runs.metrics_csv import read_metrics


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("predict", {}, {"OMP_WAIT_POLICY": "passive"}),
        ("test", {}, {"OMP_WAIT_POLICY": "passive"}),
        ("fit", {}, {"GOMP_SPINCOUNT": "10000"}),
        *[
            (command, environment, environment)
            for command, environment in (
                ("predict", {"OMP_WAIT_POLICY": "active"}),
                ("fit", {"OMP_WAIT_POLICY": "active"}),
                ("fit", {"GOMP_SPINCOUNT": "7"}),
            )
        ],
    ],
)
def test_waiting_threads_leave_the_cores_to_others(
    monkeypatch, tmp_path, command, environment, expected
):
    monkeypatch.chdir(tmp_path)
    Path("x.ckpt").touch()
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(
        sys.modules,
        "finetune.commands.lightning_cli",
        SimpleNamespace(run_lightning=lambda arguments, **_: None),
    )
    # as at the start of a process: torch reads them when it is imported
    monkeypatch.delitem(sys.modules, "torch")
    arguments = {"fit": ["--data.root", "x"], "predict": ["x.ckpt", "x.ckpt"]}
    run([command, *arguments.get(command, ["x.ckpt"])])
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


# A process of a group of one; NCCL, which needs GPUs, is gloo under its name, and leaving it takes for ever.
FAILING = """
import sys, time
import torch.distributed as dist
from finetune import cli
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
dist.get_backend = lambda: sys.argv[2]
dist.destroy_process_group = lambda: print("left", flush=True) or time.sleep(600 if sys.argv[2] == "nccl" else 0)
def run(*_):
    raise {"line": OSError("no image"), "traceback": KeyError("ours"), "signal": SystemExit(143)}[sys.argv[3]]
cli.run = run
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("failure", "code", "reported"),
    [
        ("line", 1, "finetune: error: no image\n"),
        ("traceback", 1, "open an issue with the lines above\n"),
        ("signal", 143, ""),
    ],
)
def test_a_failing_process_waits_for_no_other_at_its_end(
    tmp_path, backend, failure, code, reported
):
    (tmp_path / "failing.py").write_text(FAILING)
    done = run_script(tmp_path / "failing.py", tmp_path / "meeting", backend, failure, cwd=tmp_path)
    assert done.returncode == code and done.stderr.endswith(reported), done.stderr
    assert done.stdout == ("left\n" if backend == "gloo" else "")


def console_script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Start the script that `pip install` puts next to the interpreter."""
    command = [str(Path(sys.executable).with_name("finetune")), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_help_lists_everything_and_version_and_help_are_quick(tmp_path):
    seconds = []
    for option in ("--version", "--help"):
        before = os.times()
        result = console_script(option, cwd=tmp_path)
        after = os.times()  # processor time: on a busy machine the clock also counts waiting
        user = after.children_user - before.children_user
        seconds.append(user + after.children_system - before.children_system)
        assert result.returncode == 0
        if option == "--version":
            assert result.stdout == f"finetune {__version__}\n"
    for name, text in {**LIGHTNING, **{name: text for name, (_, text) in OWN.items()}}.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", result.stdout, re.M)
    assert min(seconds) < 0.5  # half of what importing torch alone takes


@pytest.mark.parametrize("command", list(LIGHTNING))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: finetune {command} " in shown and shown.count("\n") < 60
    assert "--devices" in shown and "--trainer.accumulate_grad_batches" not in shown
    with pytest.raises(SystemExit) as caught:
        main([command, "--help", "all"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    titles = re.findall(r"^(\S.*):$", shown, re.M)
    assert titles == [
        "the run",
        "data",
        "network and training",
        "Lightning's Trainer, in its own words",
    ]
    lines = shown.splitlines()
    listed = [name for line in lines for name in re.findall(r"^  --.*?([\w.]+)(?: \S+)?$", line)]
    assert len(listed) == len(set(listed)) > 70 and max(map(len, lines)) <= 180
    options = {
        name for name in OPTIONS[command] if name.startswith(("data.", "trainer.", "model."))
    }
    assert sorted(options - {*listed, *HIDDEN}) == []


@pytest.mark.slow
def test_a_config_works_from_any_folder(cli, colours, tmp_path, capsys):
    cli(
        "fit",
        "--config",
        "image_folder.yaml",
        "--data.root",
        colours,
        *QUICKEST,
        "--test_after_fit",
        "false",
    )
    assert (tmp_path / "runs/fit/version_0/checkpoints/best.ckpt").exists()
    assert "test/accuracy" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def fitted(colours, tmp_path_factory) -> Path:
    """A folder in which `finetune fit` has run twice."""
    from finetune.cli import run

    folder = tmp_path_factory.mktemp("fitted")
    here = Path.cwd()
    os.chdir(folder)
    try:
        for _ in range(2):
            run(["fit", "--data.root", str(colours), *QUICKEST])
    finally:
        os.chdir(here)
    return folder


def test_every_run_has_a_folder_of_its_own(fitted):
    for version in ("version_0", "version_1"):
        run = fitted / "runs/fit" / version
        files = sorted(
            str(path.relative_to(run))
            for path in run.rglob("*")
            if path.is_file() and path.name != ".lock"
        )
        assert files == [
            *(
                "about.json",
                "checkpoints/best.ckpt",
                "checkpoints/last.ckpt",
                "config.yaml",
                "metrics.csv",
            ),
            *("seconds.json", "steps.csv", "test.json", "test_predictions.csv"),
        ]
    rows = read_metrics(fitted / "runs/fit/version_0/steps.csv")
    assert {
        "step",
        "epoch",
        "train/loss_epoch",
        "val/accuracy",
        "test/accuracy",
        "lr-AdamW/head",
    } <= set(rows[0])
    result = json.loads((fitted / "runs/fit/version_0/test.json").read_text())
    assert sum(map(sum, result["confusion_matrix"])) == 30
    epochs = read_metrics(fitted / "runs/fit/version_0/metrics.csv")
    assert [row["epoch"] for row in epochs] == [str(i + 1) for i in range(len(epochs))] != []
    for row in epochs:
        # of a class that is never predicted
        empty = [name for name, value in row.items() if not value]
        assert (
            all(name.startswith("val/precision/") for name in empty) and float(row["seconds"]) > 0
        )
        assert {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "lr-AdamW/head"} <= set(
            row
        )
    assert any(
        row["test/accuracy"] and float(row["test/accuracy"]) == result["test/accuracy"]
        for row in rows
    )


@pytest.mark.slow
def test_the_saved_config_can_be_run_again(fitted, cli, tmp_path):
    saved = fitted / "runs/fit/version_0/config.yaml"
    cli(
        "fit",
        "--config",
        saved,
        "--trainer.default_root_dir",
        tmp_path / "again",
        "--test_after_fit",
        "false",
    )
    a, b = (
        yaml.safe_load(saved.read_text()),
        yaml.safe_load((tmp_path / "again/fit/version_0/config.yaml").read_text()),
    )
    assert a["model"] == b["model"]
    assert a["data"] == b["data"]
    weights = [
        torch.load(root / "fit/version_0/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for root in (fitted / "runs", tmp_path / "again")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_checkpoint_alone_predicts(fitted, colours, cli, tmp_path, capsys):
    shutil.copy(fitted / "runs/fit/version_0/checkpoints/best.ckpt", tmp_path / "only.ckpt")
    images = tmp_path / "photos"
    shutil.copytree(colours / "test", images)
    (images / "broken.jpg").write_text("no image")
    cli(
        "predict",
        "--ckpt_path",
        "only.ckpt",
        "--data.predict",
        "photos",
        "--trainer.accelerator",
        "cpu",
    )
    with open(tmp_path / "runs/predict/version_0/predictions.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == sorted(
        str(p.relative_to(tmp_path)) for p in images.rglob("*.*")
    )
    assert list(rows[0]) == ["path", "class", "probability", "p_blue", "p_green", "p_red", "error"]
    bad = [row for row in rows if row["error"]]
    assert [row["path"] for row in bad] == ["photos/broken.jpg"]
    assert bad[0]["class"] == ""
    for row in rows:
        if not row["error"]:
            by_class = {name: float(row[f"p_{name}"]) for name in ("blue", "green", "red")}
            assert sum(by_class.values()) == pytest.approx(1, abs=1e-6)
            assert row["class"] == max(by_class, key=lambda name: by_class[name])
    assert re.search(r"31 images: .*1 unreadable", capsys.readouterr().out)


@pytest.mark.slow
def test_a_run_and_images_named_by_position(fitted, colours, cli, tmp_path, capsys):
    one = colours / "test/red/00.png"
    two = colours / "test/red/01.png"
    more = colours / "test/blue"
    cli(
        "predict",
        fitted / "runs/fit/version_0",
        one,
        two,
        more / "*.png",
        "--out",
        "new/o.csv",
        "--devices",
        "1",
    )
    with open(tmp_path / "new/o.csv") as file:
        rows = [row["path"] for row in csv.DictReader(file)]
    assert rows == [str(path) for path in (one, two, *sorted(more.glob("*.png")))]
    capsys.readouterr()
    cli("predict", fitted / "runs/fit/version_0", one, "--out", "one.csv")
    with open(tmp_path / "one.csv") as file:
        (row,) = csv.DictReader(file)
    reported = f"{one}: {row['class']}, probability {float(row['probability']):.4f}\npredictions in one.csv\n"
    assert capsys.readouterr().out == reported
    expected = json.loads((fitted / "runs/fit/version_0/test.json").read_text())["test/accuracy"]
    cli("test", fitted / "runs/fit/version_0", colours, "--workers", "0")
    assert f"test/accuracy {expected:.4f}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_many_images_reach_the_processes_of_other_devices(fitted, colours, tmp_path):
    """The system takes no argument of more than 128 KiB; a shell's glob can be longer."""
    folder = tmp_path / ("a" * 200) / ("b" * 200)
    shutil.copytree(colours / "test/red", folder)
    names = sorted(map(str, folder.iterdir())) * 32
    assert len(" ".join(names)) > 2**17
    line = [
        "predict",
        fitted / "runs/fit/version_0",
        *names,
        "--devices",
        2,
        "--workers",
        0,
        "--out",
        "o.csv",
    ]
    result = finetune(*line, "--trainer.accelerator", "cpu", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("320 images: ")


@pytest.mark.slow
def test_a_fit_in_short_words_is_that_in_full_ones(colours, cli, tmp_path):
    """On two devices, whose processes are started with the words in full."""
    short = [
        "--size",
        28,
        "--batch",
        16,
        "--workers",
        0,
        "--weights",
        "null",
        "--backbone",
        "small_cnn",
    ]
    short += [
        "--epochs",
        1,
        "--precision",
        "32-true",
        "--devices",
        2,
        "--out",
        "short",
        "--seed",
        3,
    ]
    rest = ["--trainer.accelerator", "cpu", "--report", "false", "--model.scheduler", "null"]
    typed = ["fit", colours, *short, *rest]
    result = finetune(*typed, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    about = json.loads((tmp_path / "short/fit/version_0/about.json").read_text())
    assert about["command"] == " ".join(map(str, ["finetune", *typed]))
    more = ["--config", "image_folder.yaml", "--trainer.devices", 2, "--seed_everything", 3]
    full = ["fit", "--data.root", colours, *QUICKEST, *more, "--trainer.default_root_dir", "full"]
    assert finetune(*full, cwd=tmp_path).returncode == 0
    a, b = (
        yaml.safe_load((tmp_path / name / "fit/version_0/config.yaml").read_text())
        for name in ("short", "full")
    )
    assert (
        a["trainer"].pop("default_root_dir") == "short"
        and b["trainer"].pop("default_root_dir") == "full"
    )
    assert a == b
    last = [
        torch.load(tmp_path / name / "fit/version_0/checkpoints/last.ckpt", weights_only=True)[
            "state_dict"
        ]
        for name in ("short", "full")
    ]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.slow
def test_test_and_validate_print_their_result(fitted, colours, cli, tmp_path, capsys):
    checkpoint = fitted / "runs/fit/version_0/checkpoints/best.ckpt"
    expected = json.loads((fitted / "runs/fit/version_0/test.json").read_text())["test/accuracy"]
    # the data it was trained on
    cli("test", "--ckpt_path", checkpoint, "--trainer.accelerator", "cpu")
    assert f"\ntest/accuracy {expected:.4f}\n" in "\n" + capsys.readouterr().out
    cli("validate", "--ckpt_path", checkpoint, "--trainer.accelerator", "cpu")
    assert re.search(r"^val/accuracy \d\.\d{4}$", capsys.readouterr().out, re.M)
    # A config that says otherwise does not change what the checkpoint is; its data may be elsewhere.
    Path("other.yaml").write_text(
        "model: {backbone: resnet50}\ndata: {class_path: finetune.ImageFolderData}\n"
    )
    moved = tmp_path / "moved"
    shutil.copytree(colours / "test", moved / "test")
    cli(
        "test",
        "--config",
        "other.yaml",
        "--ckpt_path",
        checkpoint,
        "--data.root",
        moved,
        "--trainer.accelerator",
        "cpu",
    )
    assert f"\ntest/accuracy {expected:.4f}\n" in "\n" + capsys.readouterr().out


@pytest.mark.slow
def test_resume_starts_afresh_continues_and_knows_the_end(colours, cli, tmp_path, capsys, caplog):
    fit = ["fit", "--resume", "--data.root", colours, *QUICKEST]
    cli(*fit)
    first = (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").read_bytes()
    cli(*fit)
    assert "is finished" in caplog.text
    assert (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").read_bytes() == first
    cli(*fit, "--trainer.max_epochs", "2")  # the command line wins over the checkpoint
    assert [path.name for path in (tmp_path / "runs/fit").iterdir()] == ["version_0"]
    last = torch.load(tmp_path / "runs/fit/version_0/checkpoints/last.ckpt", weights_only=True)
    assert last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 2


@pytest.mark.slow
def test_a_profile_is_shown(colours, tmp_path):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--trainer.profiler", "simple"]
    result = finetune(*fit, cwd=tmp_path)
    # of the fit and of its test
    assert result.returncode == 0 and result.stderr.count("Profiler Report") == 2, result.stderr


@pytest.mark.slow
def test_patience_ends_two_processes_where_it_ends_one(colours, tmp_path):
    """One process: test_fit.py."""
    fit = [
        "fit",
        "--data.root",
        colours,
        *QUICKEST,
        "--trainer.max_epochs",
        "9",
        "--data.val_fraction",
        "0.3",
    ]
    fit += ["--patience", "2", "--lr", "1e-12"]  # the first accuracy stays the highest
    result = finetune(*fit, "--devices", 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    reported = "stopped after epoch 3: val/accuracy did not improve in --patience 2 validations"
    assert result.stderr.count(reported) == 1 and result.stdout.count("test/accuracy") == 1


@pytest.mark.slow
def test_ctrl_c_ends_interpreters_in_one_line(colours, tmp_path):
    """As test_promises.py has it of forked processes; test_child_process.py has a fit of two that ends by itself.

    Ranks of another job, which a shell may have, neither silence the run nor let it wait for other processes: Lightning
    reads RANK when it is imported, which is why these are new interpreters.
    """
    arguments = [
        str(a) for a in ("fit", "--data.root", colours, *QUICKEST, "--trainer.max_epochs", 500)
    ]
    # which may be reported in a line
    arguments += ["--trainer.devices", "2", "--data.cache_limit_gb", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": "1", "LOCAL_RANK": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.rglob("last.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
        _, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    reported = ("images: ", "network: ", "training: ", "epoch ", "val has ")
    lines = [line for line in err.splitlines() if line and not line.startswith(reported)]
    assert lines == [
        "stopping after this step; Ctrl-C again ends it at once",
        "stopped by SIGINT; continue with the same command and --resume",
    ]


@pytest.mark.slow
def test_ctrl_c_outside_training_ends_at_once(fitted, colours, tmp_path):
    """During a prediction, when there is nothing to save."""
    many = tmp_path / "list.txt"
    many.write_text("\n".join(str(path) for path in colours.rglob("*.png")) * 200)
    checkpoint = fitted / "runs/fit/version_0/checkpoints/best.ckpt"
    arguments = [
        "predict",
        "--ckpt_path",
        str(checkpoint),
        "--data.predict",
        str(many),
        "--output",
        "out.csv",
    ]
    process = start(*arguments, "--trainer.accelerator", "cpu", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.csv.*.part0")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
    assert process.returncode == 130
    num = len(many.read_text().splitlines())
    assert process.stderr == f"predicting {num:,} images\nstopped by SIGINT\n"
    assert list(tmp_path.glob("*out.csv*")) + list(tmp_path.glob(".out.csv*")) == []


@pytest.mark.slow
def test_two_runs_at_once_get_a_folder_each(colours, tmp_path):
    both = [start("fit", "--data.root", colours, *QUICKEST, cwd=tmp_path) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    runs = sorted((tmp_path / "runs/fit").iterdir())
    assert [run.name for run in runs] == ["version_0", "version_1"]
    assert all((run / "test.json").exists() for run in runs)


@pytest.mark.slow
def test_a_full_disk_is_reported_in_one_line_and_loses_nothing(
    colours, cli, tmp_path, monkeypatch, capsys
):
    fit = ["fit", "--resume", "--data.root", str(colours), *QUICKEST]
    monkeypatch.chdir(tmp_path)
    cli(*fit)
    before = (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").read_bytes()

    def full(checkpoint: object, file: BinaryIO) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit) as caught:
        main([*fit, "--trainer.max_epochs", "2"])
    err = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert caught.value.code == 1
    assert len(err) == 1
    assert "could not be written" in err[0]
    assert "No space left on device" in err[0]
    files = sorted(path.name for path in (tmp_path / "runs/fit/version_0/checkpoints").iterdir())
    assert files == ["best.ckpt", "last.ckpt"]
    assert (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").read_bytes() == before


def test_sigterm_ends_it_from_the_first_moment(monkeypatch):
    """By default, Linux ignores SIGTERM for the first process of a container."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "finetune.cli.run", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(9)
    )
    with pytest.raises(SystemExit) as caught:
        main(["fit"])
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_list_of_which_no_image_can_be_read_is_a_failure(fitted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.png").write_text("no image")
    Path("list.txt").write_text("a.png\nb.png\n")
    checkpoint = fitted / "runs/fit/version_0/checkpoints/best.ckpt"
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "predict",
                "--ckpt_path",
                str(checkpoint),
                "--data.predict",
                "list.txt",
                "--output",
                "out.CSV",
            ]
        )
    shown = capsys.readouterr()
    assert caught.value.code == 1 and "2 images: 2 unreadable" in shown.out
    assert shown.err.endswith(
        "finetune: error: none of the images can be read: out.CSV has the reason for each\n"
    )
    with open("out.CSV") as file:
        assert [row["path"] for row in csv.DictReader(file) if row["error"]] == ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("module", "signum"),
    [
        ("numpy.linalg", signal.SIGINT),
        ("numpy.dtypes", signal.SIGTERM),
        ("torch", signal.SIGINT),
        ("torch", signal.SIGTERM),
        ("torch", signal.SIGHUP),
    ],
)
def test_a_signal_while_libraries_are_imported_ends_it(tmp_path, signum, module):
    """If an exception is raised during their import, numpy and torch swallow it or break."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), {int(signum)})
sys.meta_path.insert(0, Finder())
""")
    # Another sitecustomize may stand in the way of this one.
    code = f"exec(open({str(tmp_path / 'sitecustomize.py')!r}).read()); from finetune.cli import main; main()"
    command = [sys.executable, "-c", code, "fit", "--data.root", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (128 + signum, "")


def test_output_that_is_closed_is_no_failure(tmp_path):
    command = f"{sys.executable} -m finetune --version >&-"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
