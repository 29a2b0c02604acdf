"""The trial of a fit: what it says is what the steps took, and nothing of it stays."""

import multiprocessing
import time

import pytest
import torch

from finetune import Classifier, ImageFolderData
from finetune.profiling import time_trial
from finetune.profiling.time_trial import _cores, _num_devices, trial

ONE = {"accelerator": "cpu", "devices": 1, "precision": "32-true", "accumulate_grad_batches": 1}
SLOW = 0.05  # seconds


class Slow(Classifier):
    """One whose steps and evaluations take a known time."""

    def forward(self, images):
        time.sleep(SLOW if self.training else SLOW / 5 * len(images))
        self.num_seen = len(images)
        return super().forward(images)


@pytest.fixture
def made(colours):
    def make(**options):
        data = ImageFolderData(str(colours), **{"batch_size": 6, "image_size": 28, "num_workers": 0, **options})
        return Slow(data.class_names, "small_cnn", weights=None), data

    return make


def test_the_parts_take_what_they_take(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    costs = trial(*made(), ONE, seconds=0.3)
    assert SLOW <= costs.batch < 3 * SLOW  # the network itself takes a millisecond; other work may stand in the way
    assert SLOW / 5 <= costs.evaluate < 3 * SLOW / 5
    assert 0 < costs.decode < 0.05 and 0 < costs.checkpoint < 5 and 0 < costs.start < 60
    assert not list(tmp_path.iterdir()) and not multiprocessing.active_children()


def test_workers_end_with_the_trial(made):
    trial(*made(num_workers=1), ONE, seconds=0.1)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("devices", "num"), [(1, 6), (2, 3), (4, 2)])
def test_a_device_has_its_share_of_a_batch_and_of_the_cores(made, devices, num, monkeypatch):
    monkeypatch.setattr(time_trial, "num_cores", lambda: 4)
    threads, before = [], torch.get_num_threads()
    model, data = made()
    forward = model.forward
    model.forward = lambda images: (threads.append(torch.get_num_threads()), forward(images))[1]
    trial(model, data, ONE | {"devices": devices}, seconds=0.1)
    assert model.num_seen == num
    assert set(threads) == ({4 // devices} if devices > 1 else {before}) and torch.get_num_threads() == before


def test_the_number_of_devices_is_that_which_is_meant():
    assert [_num_devices("cpu", devices) for devices in (1, "2", "auto", [0, 1])] == [1, 2, 1, 2]
    assert _num_devices("auto", "auto") == max(1, torch.cuda.device_count())


def test_the_cores_come_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), _cores(2):
        raise KeyError
    assert torch.get_num_threads() == before


def test_what_would_end_the_fit_ends_the_trial(made, colours, tmp_path):
    for label in "ab":
        (tmp_path / "bad" / label).mkdir(parents=True)
        for i in range(8):
            (tmp_path / "bad" / label / f"{i}.jpg").write_bytes(b"no picture")
    data = ImageFolderData(str(tmp_path / "bad"), batch_size=2, image_size=28, num_workers=0)
    with pytest.raises(ValueError, match=r"\.jpg"):
        trial(Classifier(data.class_names, "small_cnn", weights=None), data, ONE, seconds=0.1)
