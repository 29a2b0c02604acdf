"""`--minutes`: the chosen settings are in config.yaml, and the run can be repeated and resumed."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from colours import QUICKEST
from command_lines import ParseOnly
from data_files import nowhere
from jsonargparse import Namespace
from processes import run_script

from finetune.commands import minutes
from finetune.commands.explicit_settings import read_explicit_settings
from finetune.commands.minutes import settle_minutes
from finetune.profiling import fit_length
from finetune.profiling.stopwatch import Costs

LENGTH = ("--trainer.max_epochs", "1")
SHORT = [option for option in QUICKEST if option not in LENGTH]
WHOLE = "trainer: {max_epochs: 7, limit_train_batches: 3}\ndata: {init_args: {image_size: 160}}\n"
MANY = 5000  # images; more are not kept
COSTS = Costs(
    start=1.0,
    batch=0.5,
    evaluate=0.01,
    decode=0.01,
    checkpoint=0.1,
    size=1,
    copying=0.0,
    between=0.2,
)


@pytest.fixture
def tried(monkeypatch):
    """The result of every trial, and the sizes that were tried."""
    sizes = []

    def trial(model, data, trainer, *seconds):
        sizes.append(data.image_size)
        if len(data.splits["train"]) > MANY:
            data.cache_limit_gb = 0.0
        share = (data.image_size / 224) ** 2
        larger = (data.eval_image_size / data.image_size) ** 2
        return COSTS._replace(batch=40 * COSTS.batch * share, evaluate=COSTS.evaluate * larger)

    monkeypatch.setattr(fit_length, "trial", trial)
    return sizes


def config_of(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.mark.slow
def test_what_is_chosen_is_written_down_and_repeats_the_run(colours, cli, tmp_path, caplog):
    fit = ["fit", "--data.root", colours, *SHORT]
    with caplog.at_level("INFO", "finetune"):
        cli(*fit, "--minutes", "0.1", "--test_after_fit", "false")
    first, second = (tmp_path / f"runs/fit/version_{i}" for i in range(2))
    chosen = config_of(first)
    assert chosen["minutes"] is None and chosen["trainer"]["max_epochs"] >= 1
    (reported,) = [text for text in caplog.messages if "on this machine, after" in text]
    assert reported.startswith(f"{chosen['trainer']['max_epochs']} epochs")
    cli("fit", "--config", first / "config.yaml")
    assert config_of(second)["trainer"] == chosen["trainer"]
    a, b = (
        torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for run in (first, second)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_what_a_config_says_of_the_length_is_overruled(colours, cli, tmp_path, tried):
    (tmp_path / "before.yaml").write_text("trainer: {max_epochs: 7, limit_train_batches: 1}")
    fit = ["fit", "--data.root", colours, *SHORT, "--config", "before.yaml"]
    cli(*fit, "--minutes", 0.2, "--test_after_fit", "false")
    chosen = config_of(tmp_path / "runs/fit/version_0")["trainer"]
    assert chosen["max_epochs"] != 7 and chosen["limit_train_batches"] != 1


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_its_length_and_is_not_tried_again(
    colours, cli, tmp_path, tried
):
    fit = ["fit", "--data.root", colours, *SHORT, "--minutes"]
    cli(*fit, 0.2)
    run = tmp_path / "runs/fit/version_0"
    before, num = config_of(run)["trainer"], len(tried)
    cli(*fit, 50, "--resume")
    assert len(tried) == num == 1 and config_of(run)["trainer"] == before
    assert not (tmp_path / "runs/fit/version_1").exists()


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")  # run_lightning silences it
def test_a_network_that_is_made_for_a_trial_leaves_the_random_numbers_of_the_fit(colours):
    cli = ParseOnly(["fit", "--data.root", str(colours), *QUICKEST])
    before = torch.get_rng_state()
    cli._instantiate_data_and_model()
    assert torch.equal(torch.get_rng_state(), before)
    cli.parser.instantiate(cli.config)  # control: its weights are random
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def settle(monkeypatch, tried):
    """The choice for 2,000 images and a network that takes 40 half-seconds a batch at 224 pixels."""

    def choose(
        budget,
        *arguments,
        num=2000,
        image_size=224,
        eval_image_size=None,
        resumed=False,
        strategy="auto",
        **given,
    ):
        data = SimpleNamespace(init_args=SimpleNamespace(image_size=image_size))
        data.init_args.cache_limit_gb = given.pop("cache_limit_gb", 8.0)
        config = SimpleNamespace(minutes=budget, data=data, test_after_fit=True, resume=resumed)
        config.ckpt_path, config.patience = (
            given.pop("ckpt_path", None),
            given.pop("patience", None),
        )
        trainer = Namespace(
            accelerator="cpu", devices=1, num_nodes=1, precision="32-true", default_root_dir="none"
        )
        trainer.strategy = strategy
        trainer.update(
            Namespace(
                max_steps=-1,
                limit_train_batches=None,
                max_epochs=None,
                accumulate_grad_batches=1,
            )
        )
        trainer.update(Namespace(val_check_interval=None, check_val_every_n_epoch=1))
        trainer.update(Namespace(limit_val_batches=None, limit_test_batches=None))
        trainer.update(Namespace(callbacks=None))
        config.checkpoint_every_n_steps = None
        trainer.update(Namespace(**given.pop("limits", {})))
        config.trainer = trainer
        model = {
            "backbone": "resnet18",
            "weights": None,
            "head_init": "auto",
            "freeze": None,
        }
        config.model = SimpleNamespace(**{**model, **given})

        def make():
            splits = {
                "train": replace(nowhere(num), cached=object()),
                "test": nowhere(100),
            }
            sizes = {
                "image_size": (size := data.init_args.image_size),
                "eval_image_size": eval_image_size or size,
            }
            model = SimpleNamespace(
                backbone=config.model.backbone,
                image_classifier=None,
            )
            limit = {"cache_limit_gb": data.init_args.cache_limit_gb, "num_workers": 0}
            return SimpleNamespace(batch_size=32, splits=splits, **sizes, **limit), model

        reported = settle_minutes(
            config, read_explicit_settings(["fit", *arguments]), time.monotonic(), make
        )
        return config, reported

    monkeypatch.setattr(minutes, "check_first_pass", lambda *_: {})  # what there is has no network
    monkeypatch.setattr(sys, "argv", ["finetune", "fit"])
    return choose


def handed_over() -> dict:
    """What the flags say that the processes of other devices start with."""
    flags = [argument.removeprefix("--").split("=", 1) for argument in sys.argv[2:]]
    return {name: yaml.safe_load(value) for name, value in flags}


def test_images_become_smaller_where_few_could_be_seen_else(settle, tried):
    # Five times is the least for 2,000 images where nobody says, and half of it is enough: 157 batches of 20 s at 224
    # pixels; at 160 they are expected to take 11.7 s, and 8.2 s at 128.
    for budget, size in ((18, 128), (33, 160), (60, 224), (2, 128)):
        tried.clear()
        config, reported = settle(budget)
        assert (
            config.data.init_args.image_size == size and f"with images of {size} pixels" in reported
        )
        assert tried == [224]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--data.image_size", "224"), {}),
        (("--data.init_args.image_size=224",), {}),
        (("--data.init_args", "{image_size: 224}"), {}),
        (("--data={init_args: {image_size: 224}}",), {}),
        ((), {"image_size": 160}),
        ((), {"backbone": "timm/vit_small_patch14_dinov2"}),
    ],
)
def test_a_size_that_somebody_chose_stays(settle, tried, arguments, options):
    config, _ = settle(30.0, *arguments, **options)
    assert len(tried) == 1 and config.data.init_args.image_size == options.get("image_size", 224)


def test_a_network_of_one_size_keeps_it(settle, tried, monkeypatch):
    def one_size(model, backbone, size):
        raise ValueError("Expected 224")

    monkeypatch.setattr(minutes, "check_first_pass", one_size)
    config, _ = settle(18.0)
    assert tried == [224] and config.data.init_args.image_size == 224


def test_the_processes_of_other_devices_are_started_with_the_choice(settle):
    config, _ = settle(18.0)
    assert config.data.init_args.image_size == 128
    assert handed_over() == {
        "minutes": None,
        "trainer.max_epochs": config.trainer.max_epochs,
        "trainer.limit_train_batches": config.trainer.limit_train_batches,
        "data.image_size": 128,
        "trainer.precision": "32-true",
        "resume": False,
    }


def test_they_are_started_with_the_length_of_a_resumed_run(settle, tried, tmp_path):
    (tmp_path / "config.yaml").write_text(WHOLE)
    config, reported = settle(18.0, resumed=str(tmp_path))
    assert (config.trainer.max_epochs, config.trainer.limit_train_batches, reported) == (7, 3, "")
    assert config.data.init_args.image_size == 160
    others = handed_over()
    assert (others["trainer.max_epochs"], others["trainer.limit_train_batches"]) == (7, 3)
    assert (others["data.image_size"], others["resume"]) == (160, str(tmp_path))
    other, _ = settle(18.0, "--data.image_size", "96", image_size=96, resumed=str(tmp_path))
    # which resuming refuses or allows, as without --minutes
    assert other.data.init_args.image_size == 96
    assert other.data.init_args.cache_limit_gb == 8.0
    kept = (
        (tmp_path / "config.yaml")
        .read_text()
        .replace("image_size: 160", "image_size: 160, cache_limit_gb: 0.0")
    )
    (tmp_path / "config.yaml").write_text(kept)
    other, _ = settle(18.0, resumed=str(tmp_path))
    assert (other.data.init_args.image_size, other.data.init_args.cache_limit_gb) == (160, 0.0)
    assert not tried


TWO_PROCESSES = """
import json, os, sys
from pathlib import Path

from finetune.commands.lightning_cli import FinetuneCLI, run_lightning
from finetune.profiling import fit_length
from finetune.profiling.stopwatch import Costs
from forked import fork_devices


class Recorded(FinetuneCLI):
    def fit(self, **kwargs):
        trainer = self.trainer
        values = [trainer.max_epochs, trainer.limit_train_batches, self.config["fit"].resume]
        Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(values))
        super().fit(**kwargs)


def trial(*_):
    assert os.environ.get("LOCAL_RANK", "0") == "0"
    with open("trials", "a") as file:
        file.write("one\\n")
    return Costs(0.0, 1.5, 0.0, 0.0, 0.0, 1, 0.0, 0.0)


if __name__ == "__main__":
    fit_length.trial = trial
    fork_devices(lambda: run_lightning(sys.argv[1:], Recorded))
    run_lightning(sys.argv[1:], Recorded)
"""


@pytest.mark.slow
def test_two_processes_train_as_long_as_the_first_has_chosen_and_continue(colours, tmp_path):
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    fit = ["fit", "--data.root", colours, *SHORT, "--trainer.devices", 2]
    fit += ["--test_after_fit", "false", "--minutes"]

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


def test_evaluation_takes_time_by_its_own_size(settle):
    # 100 images to test take a second, at ten times the side 100 seconds: 15 batches' worth.
    plain, larger = (settle(60.0, image_size=128, eval_image_size=side)[0] for side in (128, 1280))
    seen = [
        config.trainer.max_epochs * (config.trainer.limit_train_batches or 63)
        for config in (plain, larger)
    ]
    assert seen[1] < seen[0]


def test_a_long_time_is_not_used_up_for_its_own_sake(settle):
    config, reported = settle(10_000.0, num=320)
    assert config.trainer.max_epochs == fit_length.MOST_EPOCHS and reported.endswith(
        "; more than 100 epochs are not chosen"
    )


def test_without_minutes_nothing_is_tried(settle, tried):
    config, reported = settle(None)
    assert (reported, tried, config.trainer.max_epochs) == ("", [], None)


def test_images_that_there_is_no_time_to_see_twice_are_not_kept(settle, tried):
    words = "decoded as they come"
    for num, given, kept in (
        (MANY, 8.0, 8.0),
        (MANY + 1, 8.0, 0.0),
        (MANY + 1, 0.0, 0.0),
    ):
        tried.clear()
        config, reported = settle(60, num=num, cache_limit_gb=given)
        assert len(tried) == 1
        assert config.data.init_args.cache_limit_gb == kept
        assert (words in reported) == (given != kept)  # what somebody chose needs no words
        # for the processes of the other devices
        assert ("data.cache_limit_gb" in handed_over()) == (given != kept)
        sys.argv = ["finetune", "fit"]
