"""`--members`: several fits, whose networks predict, are exported and are resumed as one."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from colours import QUICKEST
from probabilities import probabilities
from promise import promise
from runs import fits_in_this_process

import finetune
from finetune.cli import main
from finetune.data.decode import decode
from finetune.fitting import several_fits
from finetune.inference.predictor import Predictor
from finetune.models.backbones import build
from finetune.runs import run_lock
from finetune.runs.run_dir import RunDir, runs_of
from finetune.training.calibration import Calibration

pytestmark = pytest.mark.slow

EVALUATED = ["--data.num_workers", 0, "--trainer.accelerator", "cpu"]
RUN = "runs/fit/version_0"


def command(*arguments: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    run_lock.release()
    assert ended.value.code == 0


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]


def is_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.fixture(scope="module")
def folder(colours, tmp_path_factory) -> Path:
    """Where three networks were trained and exported."""
    root = tmp_path_factory.mktemp("ensemble")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        with fits_in_this_process():
            command("fit", colours, *QUICKEST, "--members", 3, "--trainer.max_epochs", 2)
        for kind in ("onnx", "safetensors"):
            best = f"{RUN}/checkpoints/best.ckpt"
            command("export", best, "--format", kind, "--output", f"best.{kind}")
        shutil.copy(f"{RUN}/checkpoints/best.ckpt", "best.ckpt")
    return root


def member_logits(folder: Path, paths: list[str]) -> torch.Tensor:
    """The logits of each member for some images, (M, B, K) float64."""
    prepare = finetune.load(folder / "best.ckpt", "cpu").prepare
    state = weights_of(folder / RUN)
    pixels = torch.stack([torch.from_numpy(prepare(decode(path))) for path in paths])
    x = (pixels.permute(0, 3, 1, 2).float() - state["mean"]) / state["std"]
    each = []
    for i in range(3):
        member, prefix = build("small_cnn", 3).eval(), f"network.members.{i}."
        member.load_state_dict(
            {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        )
        with torch.no_grad():
            each.append(member(x).double())
    return torch.stack(each)


def test_a_checkpoint_alone_says_the_mean_of_its_members(folder, colours):
    model = finetune.load(folder / "best.ckpt", "cpu")
    assert "3 × small_cnn at 28 pixels" in repr(model)
    paths = sorted(str(path) for path in colours.glob("test/*/*"))
    predicted = np.array([[*p.probabilities.values()] for p in model.predict(paths)])
    each = member_logits(folder, paths)
    checkpoint = torch.load(folder / "best.ckpt", weights_only=True)
    (scale,) = checkpoint["finetune"]["calibration"]["scale"]

    def of(logits: torch.Tensor) -> np.ndarray:
        return (logits * scale).softmax(1).numpy()

    mean = each.softmax(2).mean(0)
    # float32's rounding, of logits that the temperature makes no larger than some tens.
    np.testing.assert_allclose(predicted, of(mean.log()), rtol=0, atol=1e-5)
    # the controls: one alone, and without the temperature
    for wrong in (*map(of, each), mean.numpy()):
        assert np.abs(predicted - wrong).max() > 1e-3
    # the temperature is that of the mean on the validation images
    validated = finetune.ImageFolderData(str(colours)).splits["val"]
    labels = torch.from_numpy(validated.targets.labels)
    of_val = member_logits(folder, [*validated.paths]).softmax(2).mean(0).log()
    assert scale == pytest.approx(Calibration.fit(of_val, labels, None).scale[0], rel=1e-3)


def test_each_member_trains_as_it_would_alone(folder, colours, cli, tmp_path):
    cli("fit", colours, *QUICKEST, "--trainer.max_epochs", 2, "--model.init_seed", 1)
    alone = weights_of(tmp_path / RUN)
    members = [weights_of(folder / RUN / f"fit/member_{number}") for number in (1, 2, 3)]
    assert [is_equal(member, alone) for member in members] == [False, True, False]
    joined = weights_of(folder / RUN)
    for number, member in enumerate(members):
        for name, value in member.items():
            inner = name.replace("network.", f"network.members.{number}.")
            assert torch.equal(joined[inner], value)


def test_the_members_are_tested_together(folder, colours):
    result = json.loads((folder / RUN / "test.json").read_text())
    assert sum(map(sum, result["confusion_matrix"])) == len(list(colours.glob("test/*/*")))
    assert (folder / RUN / "test_predictions.csv").is_file()
    assert not list((folder / RUN).glob("fit/*/test.json"))


@promise("export")
@pytest.mark.parametrize("kind", ["onnx", "safetensors"])
def test_an_exported_file_says_the_same_and_is_tested(folder, colours, cli, tmp_path, kind):
    about = json.loads((folder / f"best.{kind}.json").read_text())
    assert about["members"] == 3 and about["verified"]["largest_difference"] <= 1e-5
    paths = sorted(str(path) for path in colours.glob("test/*/*"))
    own, file = (Predictor(folder / f"best.{end}") for end in ("ckpt", kind))
    images = [decode(path) for path in paths]
    np.testing.assert_allclose(
        probabilities(file, images), probabilities(own, images), rtol=0, atol=1e-5
    )
    assert file.network_name == own.network_name == "3 × small_cnn"
    for name in ("ckpt", kind):
        cli(
            "test", folder / f"best.{name}", colours, *EVALUATED, "--trainer.default_root_dir", name
        )
    first, second = (
        json.loads((tmp_path / f"{name}/test/version_0/test.json").read_text())
        for name in ("ckpt", kind)
    )
    assert first["confusion_matrix"] == second["confusion_matrix"]
    assert first["test/loss"] == pytest.approx(second["test/loss"], abs=1e-5)


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    """A copy of the finished ensemble."""
    shutil.copytree(folder / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns(".*lock"))
    return tmp_path / RUN


def test_resume_continues_each_member(copied, colours, cli):
    with fits_in_this_process():
        cli("fit", colours, *QUICKEST, "--trainer.max_epochs", 3, "--members", 3, "--resume")
    for number in (1, 2, 3):
        last = torch.load(copied / f"fit/member_{number}/checkpoints/last.ckpt", weights_only=True)
        assert last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 3
    assert yaml.safe_load((copied / "config.yaml").read_text())["members"] == 3


def test_members_that_end_before_their_first_validation_are_joined(colours, cli, tmp_path):
    with fits_in_this_process():
        cli("fit", colours, *QUICKEST, "--trainer.max_steps", 1, "--members", 2)
    facts = json.loads((tmp_path / RUN / "run.json").read_text())
    assert facts["best"]["epoch"] == 1 and "test" in facts


def test_an_ensemble_that_goes_on_has_no_result_of_its_earlier_networks(copied, colours, cli):
    options = ["--trainer.max_epochs", 3, "--members", 3, "--test_after_fit", "false"]
    with fits_in_this_process():
        cli("fit", colours, *QUICKEST, *options, "--resume")
    assert not (copied / "test.json").exists()
    assert not (copied / "test_predictions.csv").exists()
    assert "test" not in json.loads((copied / "run.json").read_text())


def test_resume_begins_a_member_again_that_was_killed_before_its_first_checkpoint(
    copied, folder, colours, cli
):
    killed = copied / "fit/member_2"
    shutil.rmtree(killed / "checkpoints")
    for run in (killed, copied):
        RunDir(run).update(ended=None)
    with fits_in_this_process():
        cli("fit", "--resume", copied)
    assert is_equal(weights_of(copied), weights_of(folder / RUN))


def test_resume_begins_members_anew_that_ended_before_their_settings_were_written(
    colours, cli, monkeypatch
):
    words = ("fit", colours, *QUICKEST, "--trainer.max_steps", 1, "--members", 2)

    def end(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(several_fits, "replace_text", end)
        cli(*words)
    with fits_in_this_process():
        cli(*words, "--resume")
    assert [len(run.fits) for run in runs_of("runs")].count(2) == 1


def test_members_are_not_joined_on_other_images_than_they_were_trained_on(copied, colours, cli):
    images = shutil.copytree(colours, copied.parents[2] / "images")
    for run in (copied, *(copied / "fit").glob("member_*")):
        config = run / "config.yaml"
        config.write_text(config.read_text().replace(str(colours), str(images)))
    RunDir(copied).update(ended=None)
    (images / "train/red/00.png").unlink()
    with fits_in_this_process(), pytest.raises(ValueError, match="other images"):
        cli("fit", "--resume", copied)


def test_resume_trains_the_members_that_are_missing(copied, folder, colours, cli):
    shutil.rmtree(copied / "fit/member_3")
    shutil.rmtree(copied / "checkpoints")
    (copied / "test.json").unlink()
    before = (copied / "fit/member_1/checkpoints/last.ckpt").stat().st_mtime_ns
    with fits_in_this_process():
        cli("fit", "--resume", copied)
    assert (copied / "fit/member_1/checkpoints/last.ckpt").stat().st_mtime_ns == before
    assert is_equal(weights_of(copied), weights_of(folder / RUN))
    assert (copied / "test_predictions.csv").read_bytes() == (
        folder / RUN / "test_predictions.csv"
    ).read_bytes()
