"""`finetune.load` predicts what `finetune predict` writes, for images from any source, and in any thread.

What it refuses: refusals/python.yaml; with several labels: test_multi_label.py.
"""

import copy
import csv
import io
import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from colours import NAMES
from PIL import Image
from promise import promise

from finetune import LoadedModel, load
from finetune.data.decode import decode
from finetune.data.transforms import preparation
from finetune.models.stages import head


@pytest.fixture(scope="module")
def model(fitted_runs) -> LoadedModel:
    return load(fitted_runs.single, device="cpu")


@pytest.fixture(params=["single", "ensemble"])
def any_model(request, fitted_runs) -> LoadedModel:
    return load(getattr(fitted_runs, request.param), device="cpu")


@pytest.fixture
def good(colours) -> Path:
    return colours / "test/red/03.png"


@pytest.fixture
def half(good, tmp_path) -> Path:
    """An image of which a part is missing."""
    (tmp_path / "half.png").write_bytes(good.read_bytes()[:200])
    return tmp_path / "half.png"


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def prepare_at_another_size(monkeypatch):
    def of_training(settings):
        return {**preparation(settings), "image_size": 24}

    monkeypatch.setattr("finetune.inference.predictor.preparation", of_training)


@promise("preparation", controls=[prepare_at_another_size])
def test_python_answers_as_predict(finished, predicted):
    answers = load(finished, "cpu").predict(list(predicted))
    probabilities = [[answer.probabilities[name] for name in NAMES] for answer in answers]
    np.testing.assert_allclose(probabilities, list(predicted.values()), rtol=0, atol=2e-6)


def test_a_printed_prediction_begins_with_its_label_and_probability(model, good):
    (prediction,) = model.predict(good)
    label, probability = prediction.label, prediction.probability
    assert repr(prediction).startswith(f"Prediction({label=}, {probability=}, ")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_predict_says_what_the_command_writes_to_the_digit(
    fitted_runs, model, colours, cli, tmp_path, precision
):
    known = torch.load(model.path, weights_only=True)
    known["finetune"]["precision"] = precision
    torch.save(known, tmp_path / "some.ckpt")
    words = ("--out", "said.csv", "--trainer.accelerator", "cpu")
    cli("predict", "some.ckpt", colours / "test", *words)
    predictions = load(tmp_path / "some.ckpt", device="cpu").predict(colours / "test")
    written = rows(tmp_path / "said.csv")
    assert len(predictions) == 30 and len({each.probability for each in predictions}) > 20
    for one, row in zip(predictions, written, strict=True):
        assert (one.path, one.label) == (row["path"], row["class"])
        expected = {name: float(row[f"p_{name}"]) for name in one.probabilities}
        assert {name: round(p, 7) for name, p in one.probabilities.items()} == expected
    # the control: it does compute in the checkpoint's precision
    others = model.predict(colours / "test")
    is_equal = [
        one.probabilities == other.probabilities
        for one, other in zip(predictions, others, strict=True)
    ]
    assert all(is_equal) == (precision == "32-true")


def test_load_takes_a_run_or_a_checkpoint_and_says_what_it_is(fitted_runs, model):
    run = fitted_runs.single
    for path in (run, str(run), run / "checkpoints/best.ckpt"):
        assert load(path).class_names == model.class_names == ["blue", "green", "red"]
    assert model.image_size == 28 and model.path == run / "checkpoints/best.ckpt"
    for words in ("small_cnn at 28 pixels", "3 classes", "temperature", str(model.path)):
        assert words in repr(model)


def test_predict_of_an_image_is_the_same_from_wherever_it_comes(model, colours, good, monkeypatch):
    opened = Image.open(good)
    pixels = decode(good)
    pixels.flags.writeable = False
    content = good.read_bytes()
    given = [good, str(good), content, bytearray(content), opened, pixels, pixels[:, ::-1][:, ::-1]]
    predictions = model.predict(given)
    assert [one.index for one in predictions] == list(range(7))
    assert [one.path for one in predictions] == [str(good)] * 2 + [None] * 5
    assert len({one.probability for one in predictions}) == 1
    (alone,) = model.predict(good)
    (same,) = model.predict(iter([opened]))
    assert same == replace(alone, path=None)
    # float32 in another company
    assert predictions[0].probability == pytest.approx(alone.probability, rel=0, abs=1e-7)
    assert model.predict([colours / "test/blue", good])[-1].index == 10
    monkeypatch.chdir(colours)
    assert len(model.predict("test/*/0*.png")) == 30 and model.predict([]) == []
    grey = np.full((50, 40), 90, np.uint8)
    (of_grey,), (of_colour,) = model.predict([grey]), model.predict([np.stack([grey] * 3, 2)])
    assert of_grey.probabilities == of_colour.probabilities


@pytest.mark.parametrize("kind", ["turned.jpg", "clear.png", "deep.png", "palette.gif"])
def test_predict_reads_an_image_of_pillow_as_its_file_and_leaves_it_as_it_was(
    model, tmp_path, kind
):
    rng = np.random.default_rng(0)
    image = {
        "turned.jpg": lambda: Image.fromarray(rng.integers(0, 255, (40, 90, 3)).astype(np.uint8)),
        "clear.png": lambda: Image.fromarray(rng.integers(0, 255, (40, 60, 4)).astype(np.uint8)),
        "deep.png": lambda: Image.fromarray(rng.integers(0, 2**16, (40, 60)).astype(np.uint16)),
        "palette.gif": lambda: Image.fromarray(
            rng.integers(0, 255, (40, 60)).astype(np.uint8)
        ).convert("P"),
    }[kind]()
    exif = Image.Exif()
    if kind == "turned.jpg":
        exif[0x0112] = 6  # lies on its side
    image.save(tmp_path / kind, **({"exif": exif} if exif else {}))
    with Image.open(tmp_path / kind) as opened:
        before = (opened.size, opened.mode, opened.getexif().get(0x0112))
        of_file, of_memory = model.predict([tmp_path / kind, opened])
        assert (opened.size, opened.mode, opened.getexif().get(0x0112)) == before
    # The pixels are equal: so is the answer, in whatever company.
    assert of_file.probabilities == of_memory.probabilities


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (np.zeros((8, 8, 3), np.float32), ValueError, "float32"),
        (np.zeros((3, 8, 8), np.uint8), ValueError, r"\(3, 8, 8\)"),
        (np.zeros((8, 8, 4), np.uint8), ValueError, r"\(8, 8, 4\)"),
        (np.zeros((0, 8, 3), np.uint8), ValueError, r"\(0, 8, 3\)"),
        (np.zeros((2, 8, 8, 3), np.uint8), ValueError, "as a list"),
        (torch.zeros(3, 8, 8), TypeError, "torch.Tensor"),
        (None, TypeError, "NoneType"),
        (b"no image", ValueError, "cannot be decoded"),
    ],
)
def test_predict_and_embed_name_what_is_no_image(model, good, wrong, kind, words):
    for method in (model.predict, model.embed):
        with pytest.raises(kind, match=words) as reported:
            method([good, wrong])
        assert "images[1]" in str(reported.value) and "\n" not in str(reported.value)
    with pytest.raises(kind):
        model.predict(wrong)


def test_on_bad_image_skip_leaves_broken_images_out(model, good, half):
    lazy = Image.open(io.BytesIO(half.read_bytes()))  # no error before its pixels are wanted
    with pytest.raises(ValueError, match=r"images\[1\]: cannot be decoded"):
        model.predict([good, lazy])
    predictions = model.predict([good, half, lazy, good], on_bad_image="skip")
    assert [one.index for one in predictions] == [0, 3]
    assert model.predict(half, on_bad_image="skip") == []
    assert model.embed([half, good], on_bad_image="skip").shape[0] == 1


def test_threads_predict_at_once_and_nothing_of_torch_changes(model, colours):
    paths = sorted(map(str, (colours / "test").rglob("*.png")))
    alone = [model.predict(path)[0].probabilities for path in paths]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda path: model.predict(path)[0].probabilities, paths * 2))
    assert together == alone * 2 and len({tuple(one.values()) for one in alone}) > 20
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    assert all(parameter.grad is None for parameter in model.network.parameters())
    assert pickle.loads(pickle.dumps(model.predict(paths[:2]))) == model.predict(paths[:2])


def batch_of(model: LoadedModel, paths: list[Path]) -> torch.Tensor:
    """Return images as the network takes them, (B, 3, H, W) uint8."""
    images = [model.prepare(decode(path)) for path in paths]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def test_network_is_a_module_from_pixels_to_the_logits_of_predict(any_model, colours):
    model, paths = any_model, sorted((colours / "test").rglob("*.png"))[::4]
    images = batch_of(model, paths)
    assert isinstance(model.network, torch.nn.Module) and not model.network.training
    temperature = model.calibration.temperature
    with torch.no_grad():
        logits = model.network(images)
        raw = model.network.network(images.float())
    assert logits.shape == (len(paths), 3) and logits.dtype == torch.float32
    expected = [list(one.probabilities.values()) for one in model.predict(paths)]
    probabilities = (logits.double() / temperature).softmax(1)
    np.testing.assert_allclose(probabilities, expected, rtol=0, atol=1e-5)  # float32
    # the control: without the normalization inside
    wrong = (raw.double() / temperature).softmax(1)
    assert np.abs(wrong.numpy() - expected).max() > 1e-3


def test_a_copy_of_network_trains_and_predictions_stay(any_model, good):
    model = any_model
    before, copied = model.predict(good), copy.deepcopy(model.network).train()
    images = torch.cat([batch_of(model, [good])] * 2)
    copied(images).sum().backward()
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    assert model.predict(good) == before
    with torch.no_grad():
        assert not torch.equal(copied.eval()(images), model.network(images))


def test_embed_gives_what_the_head_sees(any_model, colours, good):
    model, paths = any_model, sorted((colours / "test").rglob("*.png"))[::4]
    before = model.predict(good)
    found = model.embed(paths)
    heads = [head(network) for network in model.network.members]
    widths = [each.in_features for each in heads]
    assert found.shape == (len(paths), sum(widths)) and found.dtype == np.float32
    # The head on them gives the network's logits: of an ensemble, each member's on its part.
    parts = torch.from_numpy(found).split(widths, dim=1)
    with torch.no_grad():
        each = [layer(part) for layer, part in zip(heads, parts, strict=True)]
        probabilities = torch.stack(each).softmax(2).mean(0)
        expected = model.network(batch_of(model, paths)).softmax(1)
    assert torch.allclose(probabilities, expected, atol=1e-5)
    assert len({row.tobytes() for row in found}) == len(paths)  # the control: they differ
    assert (
        model.embed([]).shape == (0, sum(widths)) and model.embed(colours / "test").shape[0] == 30
    )
    assert np.array_equal(model.embed(Image.open(good)), model.embed(good.read_bytes()))
    assert model.predict(good) == before


@pytest.mark.parametrize("out", ["safetensors", pytest.param("other.onnx", marks=pytest.mark.slow)])
def test_export_is_that_of_the_command(fitted_runs, colours, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    shutil.copy(fitted_runs.ensemble / "checkpoints/best.ckpt", tmp_path / "some.ckpt")
    model = load("some.ckpt", device="cpu")
    file = model.export(out)
    assert file == Path("some.safetensors" if out == "safetensors" else out)
    exported = load(file, device="cpu")
    expected, found = model.predict(colours / "test"), exported.predict(colours / "test")
    assert [one.label for one in found] == [one.label for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.probability == pytest.approx(other.probability, abs=1e-5)  # float32
    if out.endswith(".onnx"):
        for use in (lambda: exported.network, lambda: exported.embed(colours / "test")):
            with pytest.raises(ValueError, match="no torch network"):
                use()


@pytest.mark.slow
def test_test_is_that_of_the_command(fitted_runs, colours, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seed = torch.random.initial_seed()
    result = load(fitted_runs.ensemble, device="cpu").test(colours, batch=7, workers=0, out="ours")
    assert torch.random.initial_seed() == seed  # the process is left as it was
    words = ("--batch", 7, "--workers", 0, "--out", "theirs", "--trainer.accelerator", "cpu")
    cli("test", fitted_runs.ensemble, colours, *words)
    ours, theirs = (
        json.loads((tmp_path / f"{out}/test/version_0/test.json").read_text())
        for out in ("ours", "theirs")
    )
    assert result == ours and {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    assert sum(map(sum, result["confusion_matrix"])) == 30
