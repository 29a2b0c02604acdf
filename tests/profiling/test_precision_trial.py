"""bf16 or float32 by timed steps, once per network, size and machine."""

import os
from unittest.mock import patch

import pytest
import torch

from finetune.profiling import precision_trial
from finetune.profiling.precision_trial import (
    faster_precision,
    fit_precision,
    read_choices,
    time_ratio,
)
from finetune.system.cache_dir import PRECISIONS, cache_dir
from finetune.training.classifier import Classifier


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """Replace the timing by a list of ratios, and list the image sizes that were tried."""
    tried = []
    ratios = {}

    def ratio(model, image_size):
        tried.append(image_size)
        return ratios.get(image_size, 2.0)

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(precision_trial, "time_ratio", ratio)
    tried_and_ratios = (tried, ratios)
    return tried_and_ratios


def network(**settings) -> Classifier:
    return Classifier(["a", "b"], **{"backbone": "resnet18_small", "weights": None, **settings})


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(3.0, "bf16-mixed"), (1.06, "bf16-mixed"), (1.04, "32-true"), (0.5, "32-true")],
)
def test_bf16_must_be_faster_by_more_than_the_noise(trials, ratio, expected):
    trials[1][32] = ratio
    assert faster_precision(network(), 32, has_peers=False) == expected


def test_a_size_that_the_network_cannot_take_is_refused_and_not_kept(trials):
    with pytest.raises(ValueError, match="small_cnn does not support images of 32x32 pixels"):
        faster_precision(network(backbone="small_cnn"), 32, has_peers=False)
    assert read_choices(cache_dir() / PRECISIONS) == {}


def test_a_choice_is_kept_for_each_network_and_size(trials):
    tried, ratios = trials
    ratios[48] = 0.5
    for _ in range(2):
        assert faster_precision(network(), 32, has_peers=False) == "bf16-mixed"
        assert faster_precision(network(), 48, has_peers=True) == "32-true"
    assert tried == [32, 48]
    faster_precision(network(backbone="resnet18"), 32, has_peers=False)
    faster_precision(network(freeze="backbone"), 32, has_peers=False)  # a forward pass, mostly
    assert tried == [32, 48, 32, 32]
    with patch.object(precision_trial, "processor", lambda: "another"):
        faster_precision(network(), 32, has_peers=False)
    assert len(tried) == 5


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"finetune's cache\n[1]", b"finetune's cache\n{", b"\xff\n\xff"]
)
def test_a_damaged_file_is_replaced(trials, content):
    cache_dir().mkdir(parents=True)
    file = cache_dir() / PRECISIONS
    file.write_bytes(content)
    for _ in range(2):
        assert faster_precision(network(), 32, has_peers=False) == "bf16-mixed"
    assert trials[0] == [32]
    assert list(read_choices(file).values()) == ["bf16-mixed"]


def test_a_precision_that_nobody_chooses_here_is_not_read(trials):
    faster_precision(network(), 32, has_peers=False)
    file = cache_dir() / PRECISIONS
    file.write_bytes(file.read_bytes().replace(b"bf16-mixed", b"transformer-engine"))
    assert read_choices(file) == {}


def test_without_a_place_for_the_choice_several_processes_choose_by_the_processor(
    trials, monkeypatch, tmp_path, caplog
):
    trials[1][32] = 0.5
    (tmp_path / "file").touch()
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file/cache"))
    assert faster_precision(network(), 32, has_peers=False) == "32-true"
    assert trials[0] == [32]  # once
    with caplog.at_level("WARNING", "finetune"):
        assert faster_precision(network(), 32, has_peers=True) == "bf16-mixed"
    assert trials[0] == [32]
    assert "no steps were timed, and every process trains in bf16-mixed" in caplog.text


def test_a_choice_that_cannot_be_written_is_tried_once(trials, monkeypatch):
    def fail(file, choices):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(precision_trial, "_write", fail)
    assert faster_precision(network(), 32, has_peers=False) == "bf16-mixed"
    assert trials[0] == [32]


class Images:
    image_size = 32
    splits = ("train",)


@pytest.mark.parametrize(
    ("trainer", "environment", "expected", "num_tried"),
    [
        ({"devices": "auto", "num_nodes": 1}, {}, "32-true", 1),
        ({"devices": 2, "num_nodes": 1}, {}, "32-true", 1),
        ({"devices": 2, "num_nodes": 2}, {}, "bf16-mixed", 0),
        (
            {"devices": "auto", "num_nodes": 1},
            {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "32-true",
            1,
        ),
        (
            {"devices": "auto", "num_nodes": 1},
            {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "bf16-mixed",
            0,
        ),
    ],
)
def test_processes_of_several_machines_time_nothing(
    trials, trainer, environment, expected, num_tried
):
    trials[1][32] = 0.5
    with patch.dict(os.environ, environment):
        assert fit_precision(network(), Images(), trainer) == expected
    assert len(trials[0]) == num_tried


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"freeze": "backbone"}, marks=pytest.mark.slow),
        pytest.param({"members": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_trial_changes_neither_the_network_nor_the_random_numbers(settings):
    model = network(**settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    num_threads = torch.get_num_threads()
    assert 0 < time_ratio(model, 28) < float("inf")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads
    assert len(model.image_classifier.members) == settings.get("members", 1)


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("amx_bf16"), reason="needs a CPU with AMX for bf16"
)
@pytest.mark.parametrize(
    ("backbone", "expected"),
    [("resnet18", "bf16-mixed"), ("timm/tf_efficientnet_lite0", "32-true")],
)
def test_dense_convolutions_gain_from_bf16_and_depthwise_ones_lose(
    monkeypatch, tmp_path, backbone, expected
):
    if backbone.startswith("timm/"):
        pytest.importorskip("timm")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    assert faster_precision(network(backbone=backbone), 128, has_peers=False) == expected
