"""`--resume` continues the newest run of the same data and network, with the settings of that run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from colours import QUICKEST, draw_colours
from PIL import Image
from run_holders import another
from runs import fits_in_this_process

from finetune.cli import run as run_command
from finetune.data.corrections import Correction, CorrectionsFile
from finetune.fitting import fit as fit_module
from finetune.models.backbones import build
from finetune.runs import run_lock
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.run_dir import RunDir

pytestmark = pytest.mark.slow

UNTESTED = ("--test_after_fit", "false")
UNFINISHED = ("--trainer.max_epochs", 2)
# For a network that takes images of any size.
ANY_SIZE = [*QUICKEST, "--model.backbone", "timm/test_efficientnet", *UNTESTED]


def config_of(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text("utf-8"))


def epochs_of(run: Path) -> int:
    return read_checkpoint(run / "checkpoints/last.ckpt")["loops"]["fit_loop"]["epoch_progress"][
        "current"
    ]["processed"]


@pytest.fixture
def run_to_go_on(fitted_runs: Any, cli: Callable[..., None], tmp_path: Path) -> Path:
    """A copy of a finished run of one epoch, where `finetune` in this process would have made it; to be changed."""
    return shutil.copytree(fitted_runs.single, tmp_path / "runs/fit/version_0")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Images of other classes than those of `colours`."""
    folder = draw_colours(tmp_path / "other", train=12)
    (folder / "train/blue").rename(folder / "train/sky")
    return folder


def test_a_run_of_other_data_is_passed_over(other, cli, run_to_go_on, caplog):
    before = (run_to_go_on / "checkpoints/last.ckpt").read_bytes()
    with caplog.at_level("INFO", "finetune"):
        cli("fit", other, *QUICKEST, *UNFINISHED, *UNTESTED, "--resume")
    new = run_to_go_on.with_name("version_1")
    checkpoint = read_checkpoint(new / "checkpoints/last.ckpt")
    assert checkpoint["hyper_parameters"]["class_names"] == ["green", "red", "sky"]
    assert (run_to_go_on / "checkpoints/last.ckpt").read_bytes() == before
    (line,) = [line for line in caplog.messages if "a new run begins" in line]
    assert "since runs/fit/version_0 is of other data (" in line


def test_resume_of_more_epochs_follows_another_loss(colours, cli, run_to_go_on):
    cli("fit", colours, "--resume", "--model.label_smoothing", 0.1, *UNFINISHED)
    assert (
        config_of(run_to_go_on)["model"]["label_smoothing"] == 0.1 and epochs_of(run_to_go_on) == 2
    )


def test_the_newest_run_of_these_data_continues(colours, other, cli, run_to_go_on, caplog):
    cli("fit", other, *QUICKEST, *UNTESTED)
    with caplog.at_level("INFO", "finetune"):
        cli("fit", colours, "--resume", *UNFINISHED)
    assert epochs_of(run_to_go_on) == 2 and epochs_of(run_to_go_on.with_name("version_1")) == 1
    assert "passed over: runs/fit/version_1 is of other data" in caplog.text
    assert "resuming runs/fit/version_0 from step 4" in caplog.text


def test_data_that_moved_continue_a_run_that_is_named(colours, cli, tmp_path, run_to_go_on, caplog):
    moved = Path(shutil.copytree(colours, tmp_path / "moved"))
    with caplog.at_level("INFO", "finetune"):
        cli("fit", moved, *QUICKEST, *UNTESTED, "--resume")
    new = run_to_go_on.with_name("version_1")
    assert epochs_of(new) == 1 and "version_0 is of other data" in caplog.text
    cli("fit", moved, *UNTESTED, *UNFINISHED, "--resume", run_to_go_on)
    assert epochs_of(run_to_go_on) == 2 and config_of(run_to_go_on)["data"]["init_args"][
        "root"
    ] == str(moved)
    next((moved / "train/blue").iterdir()).unlink()
    for named in ([run_to_go_on], []):  # by its name, and as the newest run of this folder
        with pytest.raises(ValueError, match="other images"):
            cli("fit", moved, *UNTESTED, "--trainer.max_epochs", 3, "--resume", *named)


@pytest.mark.parametrize("change", ["an image", "a label", "a correction"])
def test_changed_validation_images_are_not_compared_with_those_of_before(
    colours, cli, tmp_path, change
):
    """The best epoch would be chosen by accuracies on different images."""
    folder = Path(shutil.copytree(colours, tmp_path / "own"))
    fixes = CorrectionsFile(tmp_path / "fixes.csv")
    fixes.append(Correction("train/red/19.png", "red", "red", "me", "now"))
    val = folder / "val"
    for path in sorted((folder / "train").glob("*/0[0-4].png")):
        (val / path.parent.name).mkdir(parents=True, exist_ok=True)
        path.rename(val / path.parent.name / path.name)
    cli("fit", folder, *QUICKEST, *UNTESTED, "--data.corrections", fixes.path)
    run_lock.release()
    if change == "an image":
        shutil.copy(val / "red/01.png", val / "red/00.png")
    elif change == "a label":
        (val / "red/00.png").rename(val / "blue/red.png")
    else:
        fixes.append(Correction("val/red/00.png", "red", "blue", "me", "now"))
    with pytest.raises(ValueError, match="other images"):
        cli("fit", "--resume", "runs/fit/version_0", *UNFINISHED)
    run_lock.release()
    cli("fit", "--resume", "runs/fit/version_0", *UNFINISHED, "--allow_changes", "true")


def test_resume_warns_of_images_that_others_of_their_name_and_size_replaced(
    colours, cli, tmp_path, caplog
):
    for number, path in enumerate(sorted(colours.glob("train/*/*.png"))):
        bitmap = tmp_path / "own" / path.parent.name / f"{number}.bmp"
        bitmap.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).convert("RGB").save(bitmap)
    cli("fit", tmp_path / "own", *QUICKEST, *UNTESTED)
    run_lock.release()
    more = ["fit", "--resume", "runs/fit/version_0", *UNTESTED, "--trainer.max_epochs"]
    cli(*more, 2)
    assert "another content" not in caplog.text
    run_lock.release()
    content = bytearray(bitmap.read_bytes())
    content[-1] ^= 255
    bitmap.write_bytes(content)
    cli(*more, 3)
    assert "1 image has another content" in caplog.text


@pytest.fixture(scope="module")
def own_runs(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs with settings of their own, the newer one of another network."""
    own = ["--size", "40", "--lr", "0.02", "--model.label_smoothing", "0.1", "--batch", "8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("own"))
        for more in ([], ["--backbone", "small_cnn", "--size", "28"]):
            run_command(["fit", str(colours), *ANY_SIZE, *own, *more])
            run_lock.release()
        return Path("runs").absolute()


@pytest.mark.parametrize("how", ["FOLDER", "alone", "RUN", "CKPT"])
def test_a_run_continues_with_its_own_settings(colours, own_runs, cli, tmp_path, how):
    shutil.copytree(own_runs, tmp_path / "runs")
    run = tmp_path / "runs/fit/version_0"
    before = config_of(run)
    # to a newer run the one that is named is preferred
    if how not in ("RUN", "CKPT"):
        shutil.rmtree(tmp_path / "runs/fit/version_1")
    words = {
        "FOLDER": [colours],
        "alone": [],
        "RUN": [run],
        "CKPT": [run / "checkpoints/last.ckpt"],
    }[how]
    cli("fit", *words, "--resume", "--epochs", 2)
    after = config_of(run)
    assert after["trainer"].pop("max_epochs") == 2 and before["trainer"].pop("max_epochs") == 1
    assert Path(after["trainer"].pop("default_root_dir")).resolve() == tmp_path / "runs"
    before["trainer"].pop("default_root_dir")
    assert after == before and epochs_of(run) == 2


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    colours, cli, run_to_go_on, caplog
):
    """The user has begun it after the one that is finished."""
    begun = run_to_go_on.with_name("version_1")
    begun.mkdir()
    for name in ("run.json", "config.yaml"):
        shutil.copy(run_to_go_on / name, begun)
    RunDir(begun).update(ended=None)
    with caplog.at_level("INFO", "finetune"):
        cli("fit", colours, *QUICKEST, *UNTESTED, *UNFINISHED, "--resume")
    assert "version_1 ended before its first checkpoint" in caplog.text
    assert epochs_of(run_to_go_on.with_name("version_2")) == 2 and epochs_of(run_to_go_on) == 1


def test_a_run_that_another_process_has_begun_is_not_begun_twice(colours, cli, run_to_go_on):
    (run_to_go_on / "checkpoints/last.ckpt").rename(run_to_go_on / "moved.ckpt")
    (run_to_go_on / "test.json").unlink()
    RunDir(run_to_go_on).update(ended=None)
    process = another(run_to_go_on)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"another process, {process.pid}, is writing"):
        cli("fit", colours, *QUICKEST, *UNTESTED, "--resume")
    process.communicate(timeout=60)


def test_resume_begins_a_named_run_again_that_was_killed_before_its_first_checkpoint(
    colours, cli, tmp_path, caplog
):
    command = ["fit", colours, *QUICKEST, *UNTESTED, "--name", "mine"]
    cli(*command)
    run = tmp_path / "runs/fit/mine"
    (run / "checkpoints/last.ckpt").unlink()
    # as after a kill inside the first epoch, with a validation before
    RunDir(run).update(ended=None, best=None, epochs=0)
    best = run / "checkpoints/best.ckpt"
    with pytest.raises(FileNotFoundError, match="last.ckpt"):
        cli(*command, "--resume")  # best.ckpt may be of use
    # that of the weights before training is not
    torch.save({**read_checkpoint(best), "global_step": 0}, best)
    with pytest.raises(ValueError, match="two classes"):  # a refused command deletes nothing
        cli(*command, "--resume", "--threshold", "f1:red")
    assert (run / "metrics.csv").exists()
    cli(*command, "--resume")
    assert "ended before its first checkpoint" in caplog.text
    assert epochs_of(run) == 1 and RunDir(run).has_ended


@pytest.mark.parametrize("folder", ["", "train"], ids=["its test split", "a drawn one"])
def test_resume_after_a_kill_during_the_test_tests_the_same_images_and_logs_once(
    colours, cli, tmp_path, folder
):
    command = ["fit", colours / folder, *QUICKEST, "--report", "true"]
    cli(*command)
    run = tmp_path / "runs/fit/version_0"
    names = ("test.json", "test_predictions.csv", "steps.csv")
    before = [(run / name).read_bytes() for name in names]
    (run / "test.json").unlink()
    (run / "report.html").unlink()
    RunDir(run).update(ended=None, test=None)  # which are written last
    cli(*command, "--resume")
    assert [(run / name).read_bytes() for name in names] == before
    assert (run / "report.html").exists()


def test_a_finished_run_is_not_complete_while_it_is_tested_later(
    colours, cli, tmp_path, monkeypatch
):
    cli("fit", colours, *QUICKEST, *UNTESTED)
    page = tmp_path / "runs/fit/version_0/report.html"
    page.write_text("as before the test")
    again = ["fit", colours, *QUICKEST, "--resume", "--test_after_fit", "true", "--report", "true"]

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as ending, pytest.raises(KeyboardInterrupt):
        ending.setattr(fit_module, "page_of", end)
        cli(*again)
    assert not RunDir(page.parent).has_ended
    cli(*again)
    assert "<html" in page.read_text() and RunDir(page.parent).has_ended


def test_resume_takes_the_folder_of_the_run_as_out(cli, run_to_go_on):
    cli("fit", "--resume", run_to_go_on, "--out", "runs", *UNFINISHED)
    assert epochs_of(run_to_go_on) == 2


def test_an_unreadable_run_of_other_data_is_passed_over_and_a_damaged_config_reported(
    colours, other, cli, run_to_go_on
):
    (run_to_go_on / "checkpoints/last.ckpt").write_bytes(b"no checkpoint")
    cli("fit", other, *QUICKEST, *UNTESTED, "--resume")
    (run_to_go_on / "config.yaml").write_text("data: [", "utf-8")
    with pytest.raises(ValueError, match=r"version_0/config\.yaml is damaged"):
        cli("fit", colours, *QUICKEST, *UNTESTED, "--resume")


def test_a_data_folder_with_a_config_is_no_run(colours, cli, tmp_path):
    folder = Path(shutil.copytree(colours, tmp_path / "photos"))
    (folder / "config.yaml").write_text("about: my photographs", "utf-8")
    cli("fit", folder, "--resume", *QUICKEST, *UNTESTED)
    assert (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").is_file()


def test_a_run_named_from_another_folder_finds_its_data(colours, cli, tmp_path, monkeypatch):
    shutil.copytree(colours, tmp_path / "photos")
    cli("fit", "photos", *QUICKEST, *UNTESTED)
    run, elsewhere = tmp_path / "runs/fit/version_0", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    cli("fit", "--resume", run, *UNFINISHED)
    assert epochs_of(run) == 2 and not list(elsewhere.iterdir())


def test_the_complete_config_of_a_resumed_run_is_printed(colours, cli, run_to_go_on, capsys):
    cli("fit", colours, "--resume", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["init_args"]["batch_size"] == 32 and "max_epochs" in printed["trainer"]


def test_the_same_command_line_says_the_same_again(colours, cli, tmp_path):
    line = ["fit", colours, *QUICKEST, *UNTESTED, "--resume"]
    line += ["--optimizer", "AdamW", "--data.exclude", "green"]  # whose rate is settled by us
    cli(*line)
    before = config_of(tmp_path / "runs/fit/version_0")
    assert before["model"]["optimizer"]["init_args"]["lr"] == 1e-3
    cli(*line, *UNFINISHED)
    after = config_of(tmp_path / "runs/fit/version_0")
    assert after["trainer"].pop("max_epochs") == 2 and before["trainer"].pop("max_epochs") == 1
    assert after == before


def test_the_start_of_a_run_is_in_all_of_its_files(colours, cli, tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save(build("small_cnn", 3).state_dict(), weights)
    fit = ["fit", colours, *QUICKEST, *UNTESTED]
    cli(*fit, "--weights", weights)
    run = tmp_path / "runs/fit/version_0"
    licence = read_checkpoint(run / "checkpoints/last.ckpt")["finetune"]["licence_of_the_weights"]
    weights.unlink()
    at = fit.index("--model.weights")
    assert fit[at + 1] == "null"
    cli(*fit[:at], *fit[at + 2 :], *UNFINISHED, "--resume")
    with pytest.raises(ValueError, match="weights null"):  # which would be other weights
        cli(*fit, *UNFINISHED, "--resume")
    checkpoint = read_checkpoint(run / "checkpoints/last.ckpt")
    assert epochs_of(run) == 2 and checkpoint["hyper_parameters"]["weights"] == str(weights)
    assert checkpoint["finetune"]["licence_of_the_weights"] == licence
    assert config_of(run)["model"]["weights"] == str(weights)
    facts = RunDir(run).facts
    assert facts.licence_of_the_weights == licence and facts.began_from is None
    cli("export", run, "--format", "safetensors", "--out", "model.safetensors")
    exported = read_checkpoint("model.safetensors")
    assert exported["hyper_parameters"]["weights"] == "weights.pt"
    cli("report", run)
    assert "the file weights.pt: licence unknown" in (run / "report.html").read_text("utf-8")


def test_an_export_of_a_run_that_began_from_a_checkpoint_names_that(colours, cli, run_to_go_on):
    last = run_to_go_on / "checkpoints/last.ckpt"
    words = ["--ckpt_path", last, "--weights", "DEFAULT"]
    cli("fit", colours, *QUICKEST, *UNTESTED, *UNFINISHED, *words)
    cli("export", "runs/fit/version_1", "--format", "safetensors", "--out", "model.safetensors")
    assert read_checkpoint("model.safetensors")["hyper_parameters"]["weights"] == "last.ckpt"


def test_the_config_of_a_run_that_began_from_a_checkpoint_repeats_it(colours, cli, run_to_go_on):
    last = run_to_go_on / "checkpoints/last.ckpt"
    cli("fit", colours, *QUICKEST, *UNTESTED, *UNFINISHED, "--ckpt_path", last)
    first = Path("runs/fit/version_1")
    cli("fit", "--config", first / "config.yaml")
    again = Path("runs/fit/version_2")
    weights = [
        read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"] for run in (first, again)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    cli("fit", "--resume", again, "--epochs", 3)
    assert epochs_of(again) == 3 and config_of(again) == {
        **config_of(again),
        "ckpt_path": str(last),
    }


@pytest.mark.parametrize(
    ("words", "decided"),
    [
        (["--weights", "RUN"], {"trainer.gradient_clip_val": (None, 1.0)}),
        (["--members", 2], {"model.head_init": ("auto", "xavier")}),
        (["--folds", 2, "--weights", "RUN"], {"trainer.gradient_clip_val": (None, 1.0)}),
    ],
)
def test_the_same_config_says_the_same_again_where_the_run_has_decided(
    fitted_runs, colours, cli, tmp_path, capsys, caplog, words, decided
):
    """A config that `--print_config` has printed has null and auto."""
    words = [fitted_runs.single if word == "RUN" else word for word in words]
    cli("fit", colours, *QUICKEST, *words, "--print_config")
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    line = ["fit", "--config", "printed.yaml", "--name", "run"]
    with fits_in_this_process():
        cli(*line)
        run = RunDir(tmp_path / "runs/fit/run")
        asked = run.facts.asked
        before = config_of(run.path)
        for name, values in decided.items():
            section, key = name.split(".")
            assert (asked[name], before[section][key]) == values
        with caplog.at_level("INFO", "finetune"):
            cli(*line, "--resume")
    assert config_of(run.path) == before and "changed" not in caplog.text
    assert RunDir(run.path).facts.asked == asked
