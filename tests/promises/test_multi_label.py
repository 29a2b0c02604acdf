"""Several labels an image: test, predictions, exports, service and pages agree."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from colours import QUICKEST
from labelled_files import LABELS, draw_labelled
from labelled_runs import fit_labels, write_table
from promise import control, promise
from sklearn import metrics
from starlette.testclient import TestClient

from finetune import load
from finetune.api.fitted_run import FittedRun
from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.record import read_run
from finetune.serving.app import make_app
from finetune.serving.service import Service
from finetune.serving.uploads import Limits
from finetune.training.calibration import read_calibration
from finetune.training.measure import bootstrap_interval
from finetune.training.threshold import Aim

THRESHOLDS = (0.5, 0.3, 0.4, 0.2)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_labelled(tmp_path_factory.mktemp("labels") / "mosaics", train=120, test=30)


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; its files are read only."""
    return fit_labels(images, tmp_path_factory.mktemp("run"), "--trainer.max_epochs", "6")


@pytest.fixture(scope="module")
def checkpoint(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint with other thresholds than 1/2, so that ignoring them is noticed, and a scale and a bias."""
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    content["finetune"]["calibration"] = {
        "label_kind": "several",
        "scale": [0.7, 1.3, 1.0, 2.0],
        "bias": [0.2, -0.3, 0.0, 0.5],
        "thresholds": list(THRESHOLDS),
        "num_images": 9,
        "aim": None,
        "reached": None,
        "unreached": [],
    }
    path = tmp_path_factory.mktemp("checkpoint") / "some.ckpt"
    torch.save(content, path)
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: Path, images: Path) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Probabilities and labels by the path of each test image, by plain torch."""
    content = read_checkpoint(checkpoint)
    predictor = Predictor(checkpoint)
    found = {}
    for path in sorted((images / "test").iterdir()):
        image = torch.from_numpy(predictor.prepare(decode(str(path)))).permute(2, 0, 1)[None]
        with torch.no_grad():
            logits = predictor.model(image)[0].double()
        calibration = content["finetune"]["calibration"]
        z = logits * torch.tensor(calibration["scale"]) + torch.tensor(calibration["bias"])
        p = z.sigmoid().numpy()
        found[str(path)] = (
            p,
            [name for name, has in zip(LABELS, p >= THRESHOLDS, strict=True) if has],
        )
    # else a threshold of 1/2, or the most probable label alone, would not be noticed
    assert any(((p >= 0.5) != (p >= THRESHOLDS)).any() for p, _ in found.values())
    assert {len(labels) for _, labels in found.values()} >= {1, 2}
    return found


@promise("multi-label")
@pytest.mark.parametrize(
    "kind", ["ckpt", "safetensors", pytest.param("onnx", marks=pytest.mark.slow)]
)
def test_several_labels_are_the_same_from_every_program(kind, checkpoint, expected, images, cli):
    """The service: below."""
    file = checkpoint
    if kind != "ckpt":
        file = Path(f"some.{kind}")
        cli("export", checkpoint, "--format", kind, "--out", file)
        about = json.loads(Path(f"{file}.json").read_text())
        assert about["label_kind"] == "several" and "temperature" not in about
        assert about["thresholds"] == dict(zip(LABELS, THRESHOLDS, strict=True))
    predictions = load(file, "cpu").predict(list(expected))
    words = ("--trainer.accelerator", "cpu", "--out", "predictions.csv")
    cli("predict", file, images / "test", *words)
    rows = list(csv.DictReader(Path("predictions.csv").read_text().splitlines()))
    assert list(rows[0]) == ["path", "labels", *(f"p_{name}" for name in LABELS), "error"]
    for row, one, (path, (p, labels)) in zip(rows, predictions, expected.items(), strict=True):
        assert row["path"] == one.path == path
        assert list(one.labels) == labels and row["labels"] == ";".join(labels)
        assert list(one.probabilities.values()) == pytest.approx(p, abs=1e-5)
        assert [float(row[f"p_{name}"]) for name in LABELS] == pytest.approx(p, abs=1e-5)
        assert list(one.thresholds.values()) == list(THRESHOLDS)


def test_a_single_image_is_printed_with_its_thresholds(checkpoint, expected, cli, capsys):
    path, (p, labels) = next((k, v) for k, v in expected.items() if len(v[1]) == 1)
    cli("predict", checkpoint, path, "--trainer.accelerator", "cpu")
    printed = capsys.readouterr().out
    k = LABELS.index(labels[0])
    text = f"{Path(path).name}: {labels[0]} {p[k]:.4f} (threshold {THRESHOLDS[k]:.4f})\n"
    assert text in printed
    assert "not predicted: " in printed


@control("multi-label")
@pytest.mark.slow
def test_an_export_that_ignores_the_calibration_is_not_kept(checkpoint, cli, tmp_path, monkeypatch):
    from finetune.commands import export
    from finetune.inference.end_to_end import EndToEnd
    from finetune.training.calibration import Calibration

    plain = Calibration.unfitted("several", 4)
    monkeypatch.setattr(export, "EndToEnd", lambda model, _: EndToEnd(model, plain))
    with pytest.raises(ValueError, match="was discarded"):
        cli("export", "--ckpt_path", checkpoint, "--output", tmp_path / "file.onnx")
    assert not (tmp_path / "file.onnx").exists()


def test_the_service_says_the_same(checkpoint, expected, monkeypatch):
    predictor = Predictor(checkpoint)
    service = Service(predictor, Limits(10**6, 8, 10**6, 64, 20), max_batch=4)
    maps = lambda images, classes: np.full((len(classes), 5, 5), 0.5)  # noqa: E731
    monkeypatch.setattr(predictor, "activation", maps)
    with TestClient(make_app(service, None, "127.0.0.1"), "http://127.0.0.1") as client:
        model = client.get("/model").json()
        assert model["label_kind"] == "several"
        assert model["thresholds"] == dict(zip(LABELS, THRESHOLDS, strict=True))
        api = client.get("/openapi.json").json()["components"]["schemas"]["Prediction"]
        for path, (p, labels) in expected.items():
            answer = client.post("/predict?heatmap=true", content=Path(path).read_bytes())
            (prediction,) = answer.json()["predictions"]
            assert prediction.keys() == api["properties"].keys()
            assert prediction["labels"] == labels
            found = [prediction["probabilities"][name] for name in LABELS]
            assert found == pytest.approx(p, abs=1e-6)
            assert prediction["thresholds"].keys() == prediction["probabilities"].keys()
            assert list(prediction["heatmap"]) == labels
        two = client.post("/predict?top_k=2", content=Path(path).read_bytes())
        (prediction,) = two.json()["predictions"]
        assert len(prediction["probabilities"]) == 2 and prediction["labels"] == labels


def test_test_metrics_are_those_of_the_written_rows(run, images):
    rows = list(csv.DictReader((run / "test_predictions.csv").read_text().splitlines()))
    result = json.loads((run / "test.json").read_text())

    def hot(column: str) -> np.ndarray:
        return np.array([[name in row[column].split(";") for name in LABELS] for row in rows], int)

    y, predicted = hot("labels"), hot("predicted")
    names = [[name in Path(row["path"]).stem.split("+") for name in LABELS] for row in rows]
    assert (y == np.array(names)).all()
    p = np.array([[float(row[f"p_{name}"]) for name in LABELS] for row in rows])
    assert (predicted == (p >= result["calibration"]["thresholds"])).all()
    assert result["test/exact_match"] == pytest.approx(metrics.accuracy_score(y, predicted))
    assert result["test/f1_macro"] == pytest.approx(metrics.f1_score(y, predicted, average="macro"))
    average = metrics.average_precision_score(y, p, average="macro")
    assert result["test/mAP"] == pytest.approx(average, abs=1e-6)  # it is kept in float32
    interval = bootstrap_interval(average, y == 1, p)
    assert result["mAP_interval"] == pytest.approx(interval)
    assert FittedRun(run).interval == tuple(result["mAP_interval"])
    found = read_run(run).predictions
    assert (found.labels == y).all() and (found.decided == predicted).all()
    assert found.is_right.mean() == pytest.approx(result["test/exact_match"])


@pytest.mark.slow
def test_report_and_runs_show_the_mean_average_precision(run, cli, capsys, tmp_path):
    result = json.loads((run / "test.json").read_text())
    value = f"{result['test/mAP']:.3f}"
    page = tmp_path / "report.html"
    cli("report", run, "--output", page)
    assert capsys.readouterr().out.startswith(f"test mAP {value} (95 % interval ")
    content = page.read_text()
    assert f"<strong>{value}</strong> test mAP" in content
    assert "Metrics of each label" in content and "Confusion matrix" not in content
    for k, (_, (num_missed, _)) in enumerate(result["label_counts"]):
        assert (f'id="missed-{k}"' in content) == (num_missed > 0)
    cli("runs", run)
    assert re.search(rf"test mAP +{value} \(", capsys.readouterr().out)
    cli("runs", run, "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert row["mAP"] == result["test/mAP"] and "accuracy" not in row
    fitted = FittedRun(run)
    assert fitted.accuracy is None and fitted.mean_average_precision == result["test/mAP"]
    low, high = fitted.interval
    assert 0 < low < result["test/mAP"] < high < 1


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(draw_labelled(tmp_path / "labels" / "images", train=96, test=4))


VALIDATED = [*QUICKEST, "--data.val_fraction", "0.25", "--test_after_fit", "false"]
RUN = Path("runs/fit/version_0")


def test_a_fit_reports_the_mean_average_precision(table, cli, capsys, caplog):
    with caplog.at_level("INFO"):
        cli("fit", table, *VALIDATED, "--trainer.max_epochs", "2", "--threshold", "recall:1")
    printed = capsys.readouterr()
    assert " labels per image, " in caplog.text
    assert printed.err.count("  val/mAP 0.") == 2 and "accuracy" not in printed.out + printed.err
    assert "thresholds for recall 1: blue 0." in printed.out
    checkpoint = read_checkpoint(RUN / "checkpoints/best.ckpt")
    assert checkpoint["hyper_parameters"]["label_kind"] == "several"
    calibration = read_calibration(checkpoint)
    assert calibration.aim == Aim("recall", 1) and len(calibration.thresholds) == 4
    rows = read_metrics(RUN / "metrics.csv")
    assert len(rows) == 2 and float(rows[0]["train/f1_micro"]) >= 0
    columns = [f"val/average_precision/{name}" for name in LABELS]
    assert {"val/mAP", "val/f1_macro", "val/exact_match", *columns} <= set(rows[0])
    assert "val/temperature" not in rows[0]


@pytest.mark.slow
def test_patience_of_a_fit_is_that_of_the_mean_average_precision(table, cli, caplog):
    # nothing gets better
    words = ("--trainer.max_epochs", "9", "--patience", "2", "--lr", "1e-12")
    with caplog.at_level("INFO"):
        cli("fit", table, *VALIDATED, *words)
    assert "val/mAP did not improve" in caplog.text


@pytest.mark.slow
def test_the_solved_head_and_the_start_are_measured_by_it(table, cli, caplog):
    weights = ("--model.head_init", "probe")
    with caplog.at_level("INFO"):
        cli("fit", table, *VALIDATED, *weights, "--freeze", "backbone")
        cli("fit", table, *VALIDATED, *weights)
    assert "cross-validated mAP 0." in caplog.text
    assert "val/mAP" in read_run(Path("runs/fit/version_1")).facts.best.why
