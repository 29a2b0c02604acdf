"""`--coverage`: sets of classes that have the true one in a guaranteed share, from every program alike."""

import csv
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from colours import NAMES, QUICKEST
from hypothesis import given
from hypothesis import strategies as st
from labelled_files import draw_labelled
from labelled_runs import OPTIONS, write_table
from promise import control, promise
from scipy.stats import beta
from small_fits import data
from starlette.testclient import TestClient

import finetune
from finetune.api.fitted_run import FittedRun
from finetune.cli import run as run_command
from finetune.inference.predictor import Predictor
from finetune.serving.app import make_app
from finetune.serving.service import Service
from finetune.serving.uploads import Limits
from finetune.training.calibration import Calibration
from finetune.training.prediction_sets import kept, limit, set_scores

SHARE = 0.8
CPU = ("--trainer.accelerator", "cpu", "--workers", "0")


def reference(p: np.ndarray, share: float, own: list[float] | list[list[float]]) -> list[set[int]]:
    """The sets of each image by loops; `own` has the scores of validation images, of several labels for each label."""

    def limit(scores: list[float]) -> float:
        wanted = math.ceil(round((len(scores) + 1) * share, 9))
        return sorted(scores)[wanted - 1] if wanted <= len(scores) else math.inf

    if own and isinstance(own[0], list):
        limits = [limit(scores) for scores in own]
        return [{k for k, value in enumerate(row) if 1 - value <= limits[k]} for row in p]
    return [{k for k in range(len(row)) if ahead(row, k) <= limit(own) + 1e-12} for row in p]


def ahead(row: np.ndarray, k: int) -> float:
    """The probability of all classes that are more probable than class `k`."""
    return sum(value for value in row if value > row[k])


@pytest.fixture(scope="module")
def run(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a test of its sets; to be read only."""
    out = tmp_path_factory.mktemp("sets")
    words = ["--data.val_fraction", "0.4", "--lr", "2e-4", "--report", "true"]
    run_command(
        ["fit", str(colours), *QUICKEST, *words, "--coverage", str(SHARE), "--out", str(out)]
    )
    return out / "fit/version_0"


@pytest.fixture(scope="module")
def expected(run: Path, colours: Path) -> dict[str, set[str]]:
    """The set of each test image by the reference, from the probabilities of the validation images."""
    model = finetune.load(run, "cpu")
    val = data(colours, val_fraction=0.4).splits["val"]
    known = model.predict(list(val.paths))
    rows = [np.array(list(one.probabilities.values())) for one in known]
    own = [ahead(row, k) for row, k in zip(rows, val.targets, strict=True)]
    of_test = model.predict(str(colours / "test"))
    sets = reference(np.array([list(one.probabilities.values()) for one in of_test]), SHARE, own)
    return {one.path: {NAMES[k] for k in each} for one, each in zip(of_test, sets, strict=True)}


def in_csv(path: Path) -> dict[str, set[str]]:
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert all(row["set"].split(";")[0] == row["class"] for row in rows)  # the most probable first
    return {row["path"]: set(row["set"].split(";")) for row in rows}


@given(seed=st.integers(0, 2**32))
def test_validation_images_are_covered_whatever_the_size_of_a_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(60, 512, generator=generator)
    head = torch.randn(512, 5, generator=generator) / 10
    logits = features @ head
    labels = logits.softmax(dim=1).multinomial(1, generator=generator)
    calibration = Calibration.fit(logits, labels[:, 0], None)
    for size in (1, 60):  # which round otherwise
        batches = torch.cat([part @ head for part in features.split(size)])
        is_in = calibration.in_sets(calibration.probabilities(batches), SHARE)
        assert is_in.gather(1, labels).sum() >= math.ceil(round(61 * SHARE, 9))


@promise("prediction-sets")
def test_predict_test_serve_files_and_python_give_the_same_sets(run, expected, colours, tmp_path):
    assert len({len(each) for each in expected.values()}) > 1  # certain and doubtful images
    model = str(tmp_path / "best.safetensors")
    run_command(["export", str(run), "--format", "safetensors", "--out", model])
    for path in (str(run), model):
        out = tmp_path / "predictions.csv"
        words = ["--coverage", str(SHARE), "--out", str(out), *CPU]
        run_command(["predict", path, str(colours / "test"), *words])
        assert in_csv(out) == expected
        predicted = finetune.load(path, "cpu").predict(list(expected), coverage=SHARE)
        assert {one.path: set(one.set) for one in predicted} == expected
    service = Service(Predictor(model, coverage=SHARE), Limits(), 8)
    with TestClient(make_app(service, None, "127.0.0.1"), base_url="http://localhost") as client:
        assert client.get("/model").json()["coverage"] == SHARE
        for path, names in [*expected.items()][::7]:
            answer = client.post("/predict", content=Path(path).read_bytes()).json()
            assert set(answer["predictions"][0]["set"]) == names
    assert in_csv(run / "test_predictions.csv") == expected


@promise("prediction-sets")
def test_a_test_measures_the_coverage_of_each_class(run, expected):
    result = FittedRun(run).result
    of_class = [[e for path, e in expected.items() if Path(path).parent.name == n] for n in NAMES]
    covered = [sum(n in e for e in sets) for n, sets in zip(NAMES, of_class, strict=True)]
    sets = result["sets"]
    assert sets["covered"] == covered and sets["coverage"] == SHARE
    assert sets["size"] == pytest.approx([np.mean([*map(len, each)]) for each in of_class])
    assert sum(sets["sizes"]) == len(expected)
    assert not result["calibration"]["scores"]  # they stay in the checkpoint
    page = (run / "report.html").read_text()
    sizes = ", ".join(f"{num} of size {size}" for size, num in enumerate(sets["sizes"]) if num)
    assert f"of {len(expected)} true classes" in page and f": {sizes}." in page


@promise("prediction-sets")
def test_members_have_sets_and_a_run_without_them_none(fitted_runs, colours):
    image = str(colours / "test/red/00.png")
    assert finetune.load(fitted_runs.ensemble, "cpu").predict(image, coverage=0.5)[0].set
    model = finetune.load(fitted_runs.single, "cpu")
    assert model.predict(image)[0].set is None
    with pytest.raises(ValueError, match=r"0\.99 needs 99 validation images"):
        model.predict(image, coverage=0.99)
    (tags,) = finetune.load(fitted_runs.several, "cpu").predict(image, coverage=0.5)
    assert set(tags.set) <= set(tags.probabilities)


def test_too_few_validation_images_of_each_label_are_refused_before_training(tmp_path):
    table = write_table(draw_labelled(tmp_path / "mosaics", train=60, test=20))
    words = ["--data.val_fraction", "0.2", "--coverage", "0.9", "--out", str(tmp_path / "runs")]
    with pytest.raises(ValueError, match="9 validation images with a label"):
        run_command(["fit", str(table), *OPTIONS, *words])
    assert not (tmp_path / "runs").exists()


def test_the_label_with_the_lowest_coverage_is_named():
    scores = tuple(tuple(i / num for i in range(num)) for num in (18, 19, 5))
    none = Calibration.unfitted("several", 3)
    calibration = msgspec.structs.replace(none, num_images=30, scores=scores)
    line = calibration.describe(["cup", "fork", "plate"], 0.9)[-1]
    assert "77.4 %" in line and "19 validation images of fork" in line  # of cup 84.7 %
    assert line.endswith("fewer than 9: plate")


@given(
    num=st.integers(10, 60),
    num_classes=st.integers(2, 6),
    share=st.sampled_from([0.5, 0.8, 0.9]),
    is_single=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_sets_are_those_of_loops(num, num_classes, share, is_single, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2 * num, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    if not is_single:
        labels = (torch.rand(2 * num, num_classes, generator=generator) < 0.6).long()
        labels[:9] = 1  # enough of each
    fitted = Calibration.fit(logits[:num], labels[:num], None)
    p = fitted.probabilities(logits)
    known = p[:num].numpy()
    if is_single:
        own = [ahead(row, k) for row, k in zip(known, labels[:num].tolist(), strict=True)]
    else:
        own = [(1 - known[labels[:num, k] > 0, k]).tolist() for k in range(num_classes)]
    sets = fitted.sets(p[num:], share)
    assert [set(each) for each in sets] == reference(p[num:].numpy(), share, own)
    for each, row in zip(sets, p[num:].tolist(), strict=True):
        assert each == sorted(each, key=lambda k: -row[k])  # the most probable first
        assert each or not is_single  # never empty


def test_a_limit_near_one_gives_only_the_classes_below_it():
    """Of 100 classes the network is certain of one, which is the wrong one for every tenth image."""
    num = 200  # of the images of each half
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * num, 100, generator=generator, dtype=torch.float64)
    labels = torch.randint(100, (2 * num,), generator=generator)
    predicted = torch.where(torch.arange(2 * num) % 10 == 0, (labels + 1) % 100, labels)
    logits[torch.arange(2 * num), predicted] += 25
    fitted = Calibration.fit(logits[:num], labels[:num], None).without_scaling()
    p = fitted.probabilities(logits)
    own = [ahead(row, k) for row, k in zip(p[:num].numpy(), labels[:num].tolist(), strict=True)]
    fitted = msgspec.structs.replace(fitted, scores=(tuple(sorted(own)),))
    sizes = [len(each) for each in fitted.sets(p[num:], 0.95)]
    assert 15 < np.mean(sizes) < 85
    exact = [len(each) for each in reference(p[num:].numpy(), 0.95, own)]
    assert sizes == pytest.approx(exact, abs=2)  # the reference has a tolerance of its own


def coverages(is_trained_on: bool) -> np.ndarray:
    """The coverage of new images in 1,000 draws of 60 images each, by which the limit is chosen.

    The network is too sure of new images, and has learned those by heart that it was trained on.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(80_000, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)
    own = set_scores((2 * logits).softmax(1), "single").gather(1, labels).squeeze(1)
    by_heart = 2 * logits + 8 * torch.eye(4)[labels.squeeze(1)]
    known = set_scores(by_heart.softmax(1), "single").gather(1, labels).squeeze(1)
    drawn = (known if is_trained_on else own)[:60_000].view(1000, 60)
    limits = [limit(kept(scores), SHARE) for scores in drawn]
    new = np.sort(own[60_000:].numpy())
    return np.searchsorted(new, limits, side="right") / len(new)


@promise("prediction-sets")
def test_the_coverage_of_1000_draws_is_that_of_the_bound():
    found = coverages(is_trained_on=False)
    rank = math.ceil(61 * SHARE)
    assert found.mean() == pytest.approx(rank / 61, abs=0.01)  # of a beta distribution
    lowest = beta.ppf(0.05, rank, 61 - rank)
    assert (found < lowest).mean() < 0.07


@control("prediction-sets")
def test_control_sets_that_are_calibrated_on_training_images_cover_too_few():
    assert coverages(is_trained_on=True).max() < SHARE - 0.1
