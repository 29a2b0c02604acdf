"""`--minutes`: a fit ends in time, what is chosen is in config.yaml, and the run can be repeated and resumed."""

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from colours import QUICKEST
from processes import run_script, start

from finetune.fitting import minutes
from finetune.fitting.time_budget import Costs

SHORT = [option for option in QUICKEST if option not in ("--trainer.max_epochs", "1")]
SHORT += ["--test_after_fit", "false"]


@pytest.fixture
def tried(monkeypatch):
    """A machine on which a batch takes so many seconds at 224 pixels, and the sizes that were measured."""
    sizes = []

    def measure(model, data, trainer, *seconds):
        sizes.append(data.image_size)
        batch = tried.seconds * (data.image_size / 224) ** 2
        return Costs(
            start=1.0, train=batch / data.batch_size, evaluate=0.0, decode=0.0, between=0.0
        )

    def tried(seconds: float) -> list[int]:
        tried.seconds = seconds
        return sizes

    monkeypatch.setattr(minutes, "measure", measure)
    return tried


def config_of(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text("utf-8"))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
def test_minutes_are_kept(colours, tmp_path):
    """The fit uses most of its time and is over by then, or a little later on a machine that has become slower.

    It may also take twice the time longer that it waits for a core. Other programs slow it down by more than that,
    because they use the caches and the disk, too.
    """
    began = time.monotonic()
    fit = start("fit", colours, *SHORT, "--minutes", "0.5", cwd=tmp_path)
    waited = 0.0
    while fit.poll() is None:
        with suppress(OSError):  # it has just ended
            waited = int(Path(f"/proc/{fit.pid}/schedstat").read_text().split()[1]) / 1e9
        time.sleep(0.05)
    assert fit.returncode == 0, fit.stderr
    seconds = time.monotonic() - began
    assert seconds > 10 and seconds - 2 * waited < 1.25 * 30


def test_minutes_are_written_as_epochs_that_repeat_the_run(colours, cli, tmp_path, tried, caplog):
    tried(600.0)
    with caplog.at_level("INFO", "finetune"):
        cli("fit", "--data.root", colours, *SHORT, "--minutes", "2")
    first, second = (tmp_path / f"runs/fit/version_{i}" for i in range(2))
    chosen = config_of(first)
    assert chosen["minutes"] is None and chosen["trainer"]["max_epochs"] >= 1
    (message,) = [text for text in caplog.messages if "on this machine" in text]
    assert message.startswith(f"{chosen['trainer']['max_epochs']} epochs")
    cli("fit", "--config", first / "config.yaml")
    assert config_of(second)["trainer"] == chosen["trainer"]
    again = weights_of(second)
    assert all(torch.equal(value, again[name]) for name, value in weights_of(first).items())


@pytest.mark.slow
def test_epochs_are_the_most_that_minutes_choose_and_a_resumed_run_keeps_its_own(
    colours, cli, tmp_path, tried, caplog
):
    """There is time for more than a hundred."""
    sizes = tried(0.01)
    (tmp_path / "most.yaml").write_text("trainer: {max_epochs: 3}")
    fit = ["fit", "--data.root", colours, *SHORT, "--config", "most.yaml", "--minutes"]
    with caplog.at_level("INFO", "finetune"):
        cli(*fit, 2)
    run = tmp_path / "runs/fit/version_0"
    before = config_of(run)["trainer"]
    assert before["max_epochs"] == 3 and "3 epochs at most" in caplog.text
    cli(*fit, 50, "--resume")
    assert len(sizes) == 1 and config_of(run)["trainer"] == before
    assert not (tmp_path / "runs/fit/version_1").exists()
    cli(*fit, 2, "--epochs", 2, "--batch", 8)
    assert config_of(tmp_path / "runs/fit/version_1")["trainer"]["max_epochs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("options", "size"), [([], 128), (["--size", "224"], 224)])
def test_minutes_make_images_smaller_unless_their_size_is_set(
    colours, cli, tmp_path, tried, options, size
):
    """60 images in batches of 8 take 300 s an epoch at 224 pixels."""
    sizes = tried(40.0)
    words = ["--backbone", "resnet18", "--weights", "null", "--workers", "0", "--batch", "8"]
    words += ["--trainer.accelerator", "cpu", "--test_after_fit", "false", "--minutes", "2"]
    cli("fit", "--data.root", colours, *words, *options)
    assert sizes == [224]
    config = config_of(tmp_path / "runs/fit/version_0")
    assert config["data"]["init_args"]["image_size"] == size


def test_the_most_epochs_that_minutes_may_choose_do_not_lengthen_a_resumed_run(
    colours, cli, tmp_path, tried
):
    tried(20_000.0)
    fit = ["fit", "--data.root", colours, *SHORT, "--minutes", "1", "--epochs", "3"]
    cli(*fit)
    run = tmp_path / "runs/fit/version_0"
    before = config_of(run)
    assert before["trainer"]["max_epochs"] == 1
    cli(*fit, "--resume")
    assert config_of(run) == before
    cli(*fit[:-4], "--resume", "--epochs", "3")  # without --minutes it is a length
    assert config_of(run)["trainer"]["max_epochs"] == 3


def test_a_fit_without_time_trains_one_step_and_says_how_late_it_ends(
    colours, cli, tmp_path, tried, caplog
):
    tried(20_000.0)
    with caplog.at_level("INFO", "finetune"):
        cli("fit", "--data.root", colours, *SHORT, "--minutes", "1", "--batch", "8")
    trainer = config_of(tmp_path / "runs/fit/version_0")["trainer"]
    assert trainer["max_epochs"] == trainer["limit_train_batches"] == 1
    assert "for all else" in caplog.text and "minutes late" in caplog.text


TWO_PROCESSES = """
import json, os
from pathlib import Path

from finetune.cli import main
from finetune.fitting import fit, minutes
from finetune.fitting.time_budget import Costs
from forked import fork_devices


def recorded(parts, changed, train=fit.train):
    trainer = parts.trainer
    values = [trainer.max_epochs, trainer.limit_train_batches, parts.plan.settings.resume]
    Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(values))
    train(parts, changed)


def measure(model, data, *_):
    assert os.environ.get("LOCAL_RANK", "0") == "0"
    with open("trials", "a") as file:
        file.write("one\\n")
    return Costs(0.0, 1.5 / data.batch_size, 0.0, 0.0, 0.0)


if __name__ == "__main__":
    fit.train = recorded
    minutes.measure = measure
    fork_devices(main)
    main()
"""


@pytest.mark.slow
def test_minutes_are_the_same_length_on_two_processes_and_resume(colours, tmp_path):
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    fit = ["fit", "--data.root", colours, *SHORT, "--trainer.devices", 2]
    fit += ["--minutes"]

    def ranks() -> list:
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    first = run_script(tmp_path / "two.py", *fit, 0.5, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    chosen = config_of(tmp_path / "runs/fit/version_0")["trainer"]
    length = [chosen["max_epochs"], chosen["limit_train_batches"]]
    assert ranks() == [[*length, False]] * 2 and length != [None, None]
    again = run_script(tmp_path / "two.py", *fit, 9, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "is finished" in again.stderr + again.stdout
    assert (tmp_path / "trials").read_text() == "one\n"
    (tmp_path / "rank1.json").unlink()
    last = tmp_path / "runs/fit/version_0/checkpoints/last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == length[0]
    # An interrupted run continues in both processes.
    text = (tmp_path / "runs/fit/version_0/config.yaml").read_text()
    longer = text.replace(f"max_epochs: {length[0]}", f"max_epochs: {length[0] + 1}")
    (tmp_path / "runs/fit/version_0/config.yaml").write_text(longer)
    again = run_script(tmp_path / "two.py", *fit, 9, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert ranks() == [[length[0] + 1, length[1], "runs/fit/version_0"]] * 2
    checkpoint = torch.load(last, weights_only=True)
    processed = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    assert processed == length[0] + 1 and (tmp_path / "trials").read_text() == "one\n"
