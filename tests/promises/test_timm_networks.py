"""Networks of timm by the command line: from a folder to a checkpoint that needs neither folder nor hub."""

import csv
import json
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from colours import QUICK
from paths import ROOT
from PIL import Image
from promise import control, promise
from timm.models import save_for_hf
from torchvision import transforms

from finetune.cli import run
from finetune.data.decode import decode
from finetune.data.transforms import eval_transform
from finetune.inference import timm_folder
from finetune.inference.joined_checkpoint import calibrated_network
from finetune.inference.predictor import Predictor
from finetune.models.weights import describe_weights, read_weights
from finetune.system.messages import WrongUsage

pytestmark = pytest.mark.slow

GUIDE = (ROOT / "docs/export.md").read_text("utf-8")
SECTION = GUIDE.partition("## For timm and the Hugging Face hub")[2].partition("\n## ")[0]
NETWORK = "test_convnext.r160_in1k"  # timm's smallest of its kind: 160 pixels, bicubic, 0.95


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "weights")


def write_weights(folder: Path) -> Path:
    torch.manual_seed(0)
    network = timm.create_model(NETWORK, num_classes=5)
    save_for_hf(network, str(folder), safe_serialization=True)
    about = json.loads((folder / "config.json").read_text())
    about["pretrained_cfg"] |= {
        "input_size": [3, 40, 40],
        "mean": [0.4] * 3,
        "std": [0.3] * 3,
        "crop_pct": 0.8,
    }
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def options(weights, *more):
    quick = [value for i, value in enumerate(QUICK) if QUICK[i - i % 2] != "--data.image_size"]
    given = {"--model.weights": str(weights), "--model.backbone": f"timm/{NETWORK}"}
    return [*quick, *(part for pair in given.items() for part in pair), *more]


@pytest.fixture
def no_network(monkeypatch):
    refuse_connections(monkeypatch)


def refuse_connections(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        pytest.fail("asked the network")

    patch.setattr(socket.socket, "connect", refuse)
    patch.setattr(timm.models._builder, "load_state_dict_from_hf", refuse)  # noqa: SLF001 (the hub)


@pytest.fixture(scope="module")
def trained(colours, tmp_path_factory) -> Path:
    """The folder of a fit, without the weights that it began with."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        refuse_connections(patch)
        weights = write_weights(root / "weights")
        run(["fit", str(colours), *options(weights)])
    shutil.rmtree(weights)
    return root / "runs"


@pytest.fixture
def fitted(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs/fit/version_0"


def test_a_checkpoint_alone_predicts_as_the_weights_want_it(
    colours, fitted, cli, tmp_path, no_network
):
    cli("predict", fitted, colours / "test", "--output", "out.csv", "--data.num_workers", "0")
    known = torch.load(fitted / "checkpoints/best.ckpt", weights_only=True)
    data = known["datamodule_hyper_parameters"]
    wanted = {
        "image_size": 40,
        "resize": "shorter_side",
        "interpolation": "bicubic",
        "crop_share": 0.8,
    }
    assert {name: data[name] for name in wanted} == wanted
    assert known["state_dict"]["mean"].flatten().tolist() == pytest.approx([102.0] * 3)
    assert known["state_dict"]["std"].flatten().tolist() == pytest.approx([76.5] * 3)
    predictor = Predictor(fitted / "checkpoints/best.ckpt")
    image = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    assert np.array_equal(
        predictor.prepare(image),
        eval_transform(40, "shorter_side", "bicubic", 0.8)(image=image)["image"],
    )
    assert not np.array_equal(predictor.prepare(image), eval_transform(40)(image=image)["image"])
    with open("out.csv") as file:
        assert len(list(csv.DictReader(file))) == 30
    cli("test", fitted, "--data.num_workers", "0")
    again, first = (
        json.loads((tmp_path / "runs" / name / "version_0/test.json").read_text())
        for name in ("test", "fit")
    )
    assert again["confusion_matrix"] == first["confusion_matrix"]


def probabilities_of_timm(folder, images, side=None):
    """Return what timm alone computes from a folder, (N, K), of images (H, W, 3) or of prepared ones."""
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**config)
    if side:
        assert transform.transforms[1].size == (side, side)
        transform = transforms.Compose(transform.transforms[2:])  # without resize and crop
    batch = torch.stack([transform(Image.fromarray(image)) for image in images])
    with torch.inference_mode():
        return network(batch).softmax(dim=1).numpy()


@promise("timm")
def test_timm_alone_predicts_from_the_folder_that_is_written_for_it(
    colours, fitted, cli, no_network, tmp_path, capsys
):
    checkpoint = torch.load(fitted / "checkpoints/best.ckpt", weights_only=True)
    checkpoint["finetune"]["calibration"]["scale"] = [2.0]
    torch.save(checkpoint, fitted / "checkpoints/best.ckpt")
    Path("mushrooms").mkdir()
    Path("mushrooms/README.md").write_text("mine")
    with pytest.raises(WrongUsage, match="has files of others"):
        cli("export", fitted, "--format", "timm", "--out", "mushrooms")
    Path("mushrooms/README.md").unlink()
    cli("export", fitted, "--format", "timm", "--out", "mushrooms", "--verify_on", colours / "test")
    assert "same classes" in capsys.readouterr().out
    ours = Predictor(fitted / "checkpoints/best.ckpt")
    images = [decode(path) for path in sorted((colours / "test").glob("*/*"))]
    prepared = [ours.prepare(image) for image in images]
    expected = ours.classify(np.stack(prepared))
    # float32 in another order
    np.testing.assert_allclose(
        probabilities_of_timm("mushrooms", prepared, 40), expected, rtol=0, atol=1e-5
    )
    # timm resizes with another library: some grey levels differ
    np.testing.assert_allclose(
        probabilities_of_timm("mushrooms", images), expected, rtol=0, atol=0.02
    )
    config = json.loads(Path("mushrooms/config.json").read_text())
    assert config["label_names"] == ours.class_names
    assert json.loads(Path("mushrooms/finetune.json").read_text())["temperature"] == 1
    card = Path("mushrooms/README.md").read_text()
    assert "Images of colours: test accuracy" in card and card.startswith(
        "---\nlibrary_name: timm\n"
    )
    assert not any(
        str(tmp_path) in file.read_text("utf-8", "ignore") for file in Path("mushrooms").iterdir()
    )
    Image.fromarray(images[0]).save("image.png")
    capsys.readouterr()
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.S)
    exec(code, {})
    name, probability = capsys.readouterr().out.split()
    assert name == ours.class_names[expected[0].argmax()]
    assert float(probability) == pytest.approx(expected[0].max(), abs=0.02)
    about = describe_weights("mushrooms", f"timm/{NETWORK}")  # a next fit can start from the folder
    assert about.preparation["resize"] == "shorter_side"
    head = read_weights("mushrooms", f"timm/{NETWORK}").state["head.fc.weight"]
    np.testing.assert_allclose(head, checkpoint["state_dict"]["network.head.fc.weight"] / 0.5)


@control("timm")
def test_a_folder_for_timm_that_predicts_otherwise_is_discarded(fitted, cli, monkeypatch):
    checkpoint = torch.load(fitted / "checkpoints/best.ckpt", weights_only=True)
    checkpoint["finetune"]["calibration"]["scale"] = [2.0]
    torch.save(checkpoint, fitted / "checkpoints/best.ckpt")

    def uncalibrated(content, calibration):
        return calibrated_network(content, calibration.without_scaling())

    monkeypatch.setattr(timm_folder, "calibrated_network", uncalibrated)
    with pytest.raises(ValueError, match="was discarded"):
        cli("export", fitted, "--format", "timm", "--out", "mine")
    assert not Path("mine").exists()
    Path("file").touch()
    with pytest.raises(ValueError, match="--format timm"):
        cli("export", fitted, "--format", "timm", "--out", "file")


def test_the_licence_is_reported_and_kept(colours, weights, cli, caplog):
    about = json.loads((weights / "config.json").read_text())
    about["pretrained_cfg"]["license"] = "cc-by-nc-4.0"
    (weights / "config.json").write_text(json.dumps(about))
    one_step = ("--trainer.max_steps", "1")
    cli("fit", colours, *options(weights, *one_step))
    reported = (
        "the weights in the folder weights, licence cc-by-nc-4.0: commercial use is not allowed"
    )
    found = [(each.levelname, each.message) for each in caplog.records if reported in each.message]
    assert found == [("WARNING", f"weights: {reported}")]
    shutil.rmtree(weights)
    cli("export", "runs/fit/version_0", "--format", "safetensors", "--output", "file.safetensors")
    # and so in the next
    caplog.clear()
    ours = options("file.safetensors", "--test_after_fit", "false", *one_step)
    cli("fit", colours, *ours)
    ((level, text),) = [(r.levelname, r.message) for r in caplog.records if reported in r.message]
    assert level == "WARNING" and text.startswith("weights: the file file.safetensors, ")
    kept = json.loads(Path("runs/fit/version_1/run.json").read_text())["licence_of_the_weights"]
    assert text == f"weights: {kept}"
    cli("report", "runs/fit/version_1")
    assert reported in Path("runs/fit/version_1/report.html").read_text()
