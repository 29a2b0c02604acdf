"""Networks to choose from: whose weights are cached, how large they are, and under which licence."""

import http.server
import threading
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from torchvision import models

from finetune.models import candidates as module
from finetune.models.backbones import build
from finetune.models.candidates import (
    BUILT_IN,
    Candidate,
    built_in_candidates,
    cached_file,
    candidate_names,
    is_choice,
    is_reachable,
    weights_server,
)
from finetune.models.timm_backbones import is_timm, pretrained_cfg
from finetune.runs.licence import is_restricted, licence

OF_TIMM = [name for name in BUILT_IN if is_timm(name)]


@pytest.mark.parametrize("backbone", [name for name in BUILT_IN if not is_timm(name)])
def test_sizes_are_torchvisions_and_no_terms_of_its_own_hold(backbone):
    weights = models.get_model_weights(backbone).DEFAULT
    assert BUILT_IN[backbone] == round(weights.meta["_file_size"])
    assert not is_restricted(licence("DEFAULT", backbone))


@pytest.mark.parametrize("backbone", OF_TIMM)
def test_sizes_are_timms_and_the_licence_is_permissive(backbone):
    assert pretrained_cfg(backbone).license == "apache-2.0"
    with torch.device("meta"):
        network = timm.create_model(backbone.removeprefix("timm/"), pretrained=False)
    num_bytes = 4 * sum(parameter.numel() for parameter in network.parameters())
    assert BUILT_IN[backbone] == round(num_bytes / 1e6)


def test_all_of_them_are_supported_and_the_smallest_comes_first():
    for candidate in built_in_candidates():
        with torch.device("meta"):
            assert build(candidate.backbone, 3, 224) is not None
    assert list(BUILT_IN.values()) == sorted(BUILT_IN.values())


def test_without_timm_its_networks_are_no_candidates(monkeypatch):
    monkeypatch.setattr(module, "has_timm", lambda: False)
    assert [candidate.backbone for candidate in built_in_candidates()] == [
        name for name in BUILT_IN if not is_timm(name)
    ]


def test_networks_are_named_by_their_weights_only_where_they_must_be():
    listed = [Candidate("resnet18", "a.pt"), Candidate("resnet18", "b.pt"), Candidate("resnet50")]
    assert candidate_names(listed) == ["resnet18=a.pt", "resnet18=b.pt", "resnet50"]


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [("auto", True), ("resnet18,resnet50", True), ("resnet18", False), (None, False)],
)
def test_a_choice_is_auto_or_a_list(backbone, expected):
    assert is_choice(backbone) is expected


def test_what_was_downloaded_before_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    asked = Candidate("resnet50", "IMAGENET1K_V1")
    assert cached_file(asked) is None
    file = tmp_path / "checkpoints" / Path(models.ResNet50_Weights.IMAGENET1K_V1.url).name
    file.parent.mkdir()
    file.touch()
    # whose DEFAULT is V2
    assert cached_file(asked) == file and cached_file(Candidate("resnet50")) is None
    assert weights_server(asked) == "https://download.pytorch.org"


def test_what_the_hub_keeps_is_found(tmp_path, monkeypatch):
    found = {("timm/convnext_nano.in12k_ft_in1k", "pytorch_model.bin"): str(tmp_path / "a.bin")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *asked: found.get(asked))
    assert cached_file(Candidate(OF_TIMM[1])) == tmp_path / "a.bin"
    assert cached_file(Candidate(OF_TIMM[0])) is None


def test_a_server_is_reachable_if_it_answers_anything():
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as answering:
        threading.Thread(target=answering.handle_request, daemon=True).start()
        assert is_reachable(f"http://127.0.0.1:{answering.server_port}")
    assert not is_reachable(f"http://127.0.0.1:{answering.server_port}")  # closed by now
