"""`load` predicts what `finetune predict` writes, for images from any source, and in any thread."""

import copy
import csv
import io
import json
import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_fits import data, fit
from tiers import sweep

import finetune
from finetune import Classifier
from finetune.api import loaded_model
from finetune.api.loaded_model import LoadedModel, Prediction, check_not_forked, load
from finetune.data.decode import decode
from finetune.models.ensemble import combine_logits
from finetune.models.stages import head


@pytest.fixture
def model(calibrated):
    return load(calibrated)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def differing(predictions: list[Prediction], written: list[dict[str, str]]) -> list[str]:
    """Return the images whose class differs from the expected one, or whose probability differs in seven digits."""
    return [
        row["path"]
        for one, row in zip(predictions, written, strict=True)
        if (one.path, one.label) != (row["path"], row["class"])
        or any(
            round(value, 7) != float(row[f"p_{name}"]) for name, value in one.probabilities.items()
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", sweep(["32-true", "64-true", "bf16-mixed", "16-mixed"], quick=["32-true"])
)
def test_it_says_what_predict_writes_to_the_digit(calibrated, colours, cli, tmp_path, precision):
    known = torch.load(calibrated, weights_only=True)
    known["finetune"]["precision"] = precision
    torch.save(known, calibrated)
    cli(
        "predict", calibrated, colours / "test", "--out", "said.csv", "--trainer.accelerator", "cpu"
    )
    predictions, written = (
        load(calibrated, device="cpu").predict(colours / "test"),
        rows(tmp_path / "said.csv"),
    )
    assert len(predictions) == 30 and len({one.probability for one in predictions}) > 20
    assert differing(predictions, written) == []
    # control: it does compute in the checkpoint's precision
    exact = LoadedModel(calibrated, "cpu")
    exact.predictor = loaded_model.Predictor(calibrated)
    has_bf16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    is_other = {"32-true": False, "64-true": True, "bf16-mixed": has_bf16, "16-mixed": True}[
        precision
    ]
    assert bool(differing(exact.predict(colours / "test"), written)) == is_other


def test_a_run_a_checkpoint_and_public_names_are_the_same(model, calibrated, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "best.ckpt").write_bytes(calibrated.read_bytes())
    for path in (run, str(run), run / "checkpoints" / "best.ckpt"):
        assert finetune.load(path).class_names == model.class_names == ["blue", "green", "red"]
    assert finetune.LoadedModel is LoadedModel and finetune.Prediction is Prediction


def test_an_image_is_the_same_from_wherever_it_comes(model, colours, monkeypatch):
    path = colours / "test" / "red" / "03.png"
    opened = Image.open(path)
    pixels = decode(path)
    pixels.flags.writeable = False
    given = [
        path,
        str(path),
        path.read_bytes(),
        bytearray(path.read_bytes()),
        opened,
        pixels,
        pixels[:, ::-1][:, ::-1],
    ]
    predictions = model.predict(given)
    assert [one.index for one in predictions] == list(range(7))
    assert [one.path for one in predictions] == [str(path)] * 2 + [None] * 5
    assert len({one.probability for one in predictions}) == 1
    alone = model.predict(path)[0]
    assert len({alone, model.predict(path)[0]}) == 1
    assert model.predict(iter([opened])) == [
        Prediction(alone.label, alone.probability, alone.probabilities)
    ]
    # float32 in another company
    assert predictions[0].probability == pytest.approx(alone.probability, rel=0, abs=1e-7)
    assert model.predict([colours / "test" / "blue", path])[-1].index == 10
    monkeypatch.chdir(colours)
    assert len(model.predict("test/*/0*.png")) == 30 and model.predict([]) == []
    grey = np.full((50, 40), 90, np.uint8)
    assert (
        model.predict([grey])[0].probabilities
        == model.predict([np.stack([grey] * 3, 2)])[0].probabilities
    )


def test_an_image_opened_by_pillow_is_read_as_its_file_is_and_left_as_it_was(model, tmp_path):
    rng = np.random.default_rng(0)
    for name, image in {
        "turned.jpg": Image.fromarray(rng.integers(0, 255, (40, 90, 3)).astype(np.uint8)),
        "clear.png": Image.fromarray(rng.integers(0, 255, (40, 60, 4)).astype(np.uint8), "RGBA"),
        "deep.png": Image.fromarray((rng.integers(0, 2**16, (40, 60))).astype(np.uint16)),
        "table.gif": Image.fromarray(rng.integers(0, 255, (40, 60)).astype(np.uint8)).convert("P"),
    }.items():
        exif = Image.Exif()
        exif[0x0112] = 6  # lies on its side
        image.save(tmp_path / name, **({"exif": exif} if name == "turned.jpg" else {}))
        with Image.open(tmp_path / name) as opened:
            size, mode = opened.size, opened.mode
            of_file, of_memory = model.predict([tmp_path / name, opened])
            assert (opened.size, opened.mode, opened.getexif().get(0x0112)) == (
                size,
                mode,
                exif.get(0x0112),
            ) or (name != "turned.jpg" and opened.getexif().get(0x0112) is None)
        # The pixels are equal: so is the answer, in whatever company.
        assert of_file.probabilities == of_memory.probabilities, name


WRONG = [
    (
        np.zeros((8, 8, 3), np.float32),
        ValueError,
        "float32",
    ),
    (np.zeros((3, 8, 8), np.uint8), ValueError, r"shape \(3, 8, 8\)"),
    (np.zeros((8, 8, 4), np.uint8), ValueError, r"shape \(8, 8, 4\)"),
    (np.zeros((0, 8, 3), np.uint8), ValueError, r"shape \(0, 8, 3\)"),
    (np.zeros((2, 8, 8, 3), np.uint8), ValueError, "as a list"),
    (
        torch.zeros(3, 8, 8),
        TypeError,
        "torch.Tensor",
    ),
    (None, TypeError, "is of type NoneType"),
    (b"no image", ValueError, "cannot be decoded"),
    ("nowhere.png", FileNotFoundError, "nowhere.png"),
]


@pytest.mark.parametrize(("wrong", "kind", "line"), WRONG, ids=[line for *_, line in WRONG])
def test_what_is_no_image_is_reported_in_a_line_that_says_which(model, colours, wrong, kind, line):
    good = colours / "test" / "red" / "03.png"
    with pytest.raises(kind, match=line) as reported:
        model.predict([good, wrong])
    assert "\n" not in str(reported.value) and (
        "images[1]" in str(reported.value) or isinstance(wrong, str)
    )
    with pytest.raises((TypeError, ValueError, OSError)):
        model.predict(wrong)


def test_a_broken_image_is_named_or_left_out(model, colours, tmp_path):
    good = colours / "test" / "red" / "03.png"
    (tmp_path / "half.png").write_bytes(good.read_bytes()[:200])
    lazy = Image.open(io.BytesIO(good.read_bytes()[:200]))  # no error before its pixels are wanted
    with pytest.raises(ValueError, match=r"half\.png: cannot be decoded"):
        model.predict([good, tmp_path / "half.png", good])
    with pytest.raises(ValueError, match=r"images\[1\]: cannot be decoded"):
        model.predict([good, lazy])
    predictions = model.predict([good, tmp_path / "half.png", lazy, good], on_bad_image="skip")
    assert [one.index for one in predictions] == [0, 3] and len(predictions) == 2
    assert model.predict(tmp_path / "half.png", on_bad_image="skip") == []


@pytest.mark.slow
def test_unsure_is_predicted_as_by_predict(model, colours, calibrated, cli, tmp_path):
    most = sorted(max(one.probabilities.values()) for one in model.predict(colours / "test"))
    limit = (most[14] + most[15]) / 2  # half of the 30 are below
    cli("predict", calibrated, colours / "test", "--out", "said.csv", "--abstain_below", str(limit))
    predictions = model.predict(colours / "test", abstain_below=limit)
    assert [one.label for one in predictions] == [
        row["class"] for row in rows(tmp_path / "said.csv")
    ]
    assert {one.unsure for one in predictions} == {True, False}
    assert all(one.unsure == (max(one.probabilities.values()) < limit) for one in predictions)
    assert not any(one.unsure for one in model.predict(colours / "test"))


def test_it_is_as_sure_as_of_the_class_that_a_threshold_says(model, colours, monkeypatch):
    monkeypatch.setattr(model.predictor, "decide", lambda answers, names: answers.argmin(axis=1))
    # more than the least probable of three can have
    predictions = model.predict(colours / "test", abstain_below=0.334)
    assert len(predictions) == 30 and all(one.unsure for one in predictions)


@pytest.mark.slow
def test_threads_ask_at_once_and_nothing_of_torch_changes(model, colours):
    paths = sorted(map(str, (colours / "test").rglob("*.png")))
    alone = [model.predict(path)[0].probabilities for path in paths]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda path: model.predict(path)[0].probabilities, paths * 4))
    assert together == alone * 4 and len({tuple(one.values()) for one in alone}) > 20
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    with torch.enable_grad():
        model.predict(paths)
    assert all(parameter.grad is None for parameter in model.predictor.model.parameters())
    assert pickle.loads(pickle.dumps(model.predict(paths[:2]))) == model.predict(paths[:2])


def test_a_forked_process_is_reported_instead_of_waiting_for_ever(model, monkeypatch):
    check_not_forked(os.getpid())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(RuntimeError, match="set_num_threads"):
        check_not_forked(os.getppid())
    monkeypatch.undo()  # with one thread it works
    process = multiprocessing.get_context("fork").Process(
        target=model.predict, args=(np.zeros((9, 9, 3), np.uint8),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_it_says_what_it_is(model, calibrated):
    reported = repr(model)
    assert (
        "mobilenet_v3_small at 32 pixels, 3 classes (blue, green, red)" in reported
        and str(calibrated) in reported
    )
    assert "temperature 0.250, fitted on 7 validation images" in reported
    assert model.image_size == 32 and model.path == calibrated


@pytest.fixture(scope="module")
def several(colours, tmp_path_factory) -> Path:
    """A checkpoint of an ensemble of two."""
    torch.manual_seed(0)
    ensemble = Classifier(["blue", "green", "red"], "small_cnn", weights=None, members=2)
    path = tmp_path_factory.mktemp("several") / "two.ckpt"
    fit(ensemble, data(colours, image_size=28, resize="squash")).save_checkpoint(path)
    return path


@pytest.fixture(params=["one", "several"])
def model_of_any_kind(request, calibrated):
    return load(
        calibrated if request.param == "one" else request.getfixturevalue("several"), device="cpu"
    )


def batch_of(model: LoadedModel, paths: list[Path]) -> torch.Tensor:
    """Return images as the network takes them, (B, 3, H, W) uint8."""
    return torch.from_numpy(
        np.stack([model.predictor.prepare(decode(path)) for path in paths])
    ).permute(0, 3, 1, 2)


def test_its_network_is_a_module_from_pixels_to_the_logits_of_predict(model_of_any_kind, colours):
    model, paths = model_of_any_kind, sorted((colours / "test").rglob("*.png"))[::4]
    images = batch_of(model, paths)
    assert (
        isinstance(model.network, torch.nn.Module)
        and not model.network.training
        and images.dtype == torch.uint8
    )
    with torch.no_grad():
        logits = model.network(images)
    assert logits.shape == (len(paths), 3) and logits.dtype == torch.float32
    wanted = np.array([list(one.probabilities.values()) for one in model.predict(paths)])
    temperature = model.predictor.calibration.temperature
    predictions = (logits.double() / temperature).softmax(1).numpy()
    # float32, perhaps bf16 where predict computes in it
    assert predictions == pytest.approx(wanted, abs=1e-5)
    # control: without the normalization inside
    with torch.no_grad():
        other = (model.network.network(images.float()).double() / temperature).softmax(1).numpy()
    assert np.abs(other - wanted).max() > 1e-3


def test_a_copy_of_its_network_trains_and_predictions_stay(model_of_any_kind, colours):
    model, path = model_of_any_kind, colours / "test" / "red" / "03.png"
    before, copied = model.predict(path), copy.deepcopy(model.network).train()
    images = torch.cat([batch_of(model, [path])] * 2)
    copied(images).sum().backward()
    assert any(parameter.grad is not None for parameter in copied.parameters())
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    assert model.predict(path) == before
    with torch.no_grad():
        assert not torch.equal(copied.eval()(images), model.network(images))


def test_embeddings_are_what_the_head_sees(model_of_any_kind, colours):
    model, paths = model_of_any_kind, sorted((colours / "test").rglob("*.png"))[::4]
    found = model.embed(paths)
    networks = model.network.members
    width = sum(head(network).in_features for network in networks)
    assert found.shape == (len(paths), width) and found.dtype == np.float32
    # The head on them gives the network's logits: of an ensemble, each member's on its part.
    parts = torch.from_numpy(found).split(
        [head(network).in_features for network in networks], dim=1
    )
    with torch.no_grad():
        each = [head(network)(part) for network, part in zip(networks, parts, strict=True)]
        logits = combine_logits(torch.stack(each)) if len(each) > 1 else each[0]
        wanted = model.network(batch_of(model, paths))
    assert torch.allclose(logits, wanted, atol=1e-5)
    assert len({row.tobytes() for row in found}) == len(paths)  # control: they do tell images apart
    assert model.embed([]).shape == (0, width)


def test_embed_takes_what_predict_takes_and_leaves_the_network_unchanged(model, colours, tmp_path):
    good = colours / "test" / "red" / "03.png"
    before = model.predict(good)
    (tmp_path / "half.png").write_bytes(good.read_bytes()[:200])
    assert np.array_equal(model.embed(Image.open(good)), model.embed(good.read_bytes()))
    with pytest.raises(ValueError, match=r"half\.png: cannot be decoded"):
        model.embed([good, tmp_path / "half.png"])
    assert model.embed([tmp_path / "half.png", good], on_bad_image="skip").shape[0] == 1
    assert model.predict(good) == before
    assert model.embed(colours / "test").shape[0] == 30


def test_it_exports_what_the_command_exports(several, colours, tmp_path):
    shutil.copy(several, tmp_path / "some.ckpt")
    model = load(tmp_path / "some.ckpt", device="cpu")
    assert model.export("safetensors") == tmp_path / "some.safetensors"
    wanted = model.predict(colours / "test")
    found = load(tmp_path / "some.safetensors", device="cpu").predict(colours / "test")
    assert [one.label for one in found] == [one.label for one in wanted]
    # float32
    assert [one.probability for one in found] == pytest.approx(
        [one.probability for one in wanted], abs=1e-6
    )


@pytest.mark.slow
def test_a_path_says_the_format_and_an_onnx_has_no_network_of_torch_s(several, colours, tmp_path):
    file = load(several, device="cpu").export(tmp_path / "model.onnx", verify_on=colours / "test")
    assert (
        file == tmp_path / "model.onnx"
        and file.is_file()
        and (tmp_path / "model.onnx.json").is_file()
    )
    exported = load(file, device="cpu")
    assert len(exported.predict(colours / "test")) == 30
    for use in (lambda: exported.network, lambda: exported.embed(colours / "test")):
        with pytest.raises(ValueError, match="no torch network"):
            use()


@pytest.mark.slow
def test_it_tests_as_the_command_does(several, colours, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seed = torch.random.initial_seed()
    result = load(several, device="cpu").test(colours, batch=7, workers=0, out="ours")
    assert torch.random.initial_seed() == seed  # the process is left as it was
    cli(
        "test",
        several,
        colours,
        "--batch",
        "7",
        "--workers",
        "0",
        "--out",
        "theirs",
        "--trainer.accelerator",
        "cpu",
    )
    assert result == json.loads((tmp_path / "ours/test/version_0/test.json").read_text())
    theirs = json.loads((tmp_path / "theirs/test/version_0/test.json").read_text())
    assert {**result, "seconds": 0} == {**theirs, "seconds": 0}
    assert sum(map(sum, result["confusion_matrix"])) == 30
