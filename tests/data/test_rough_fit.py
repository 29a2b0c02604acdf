"""The rough alignment of all pairs, compared with OpenCV on each pair, at half the side."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from drawings import drawing

from finetune.data.checking import rough_fit
from finetune.data.checking.duplicates import best_fit
from finetune.data.checking.rough_fit import rough_fits

FORK = multiprocessing.get_context("fork")
SHARES = (1.0, 0.88, 0.78, 0.69, 0.6, 0.53)
BLUR = 1.5


@pytest.fixture(scope="module")
def grey():
    """Eight drawings, then a part of each, as squashed copies."""
    full = [drawing(i, 300, 220) for i in range(8)]
    parts = [
        image.crop((20, 10, 20 + 180 + 10 * i, 10 + 132 + 7 * i)) for i, image in enumerate(full)
    ]
    return np.stack([np.asarray(image.convert("L").resize((48, 48), 4)) for image in full + parts])


def one_by_one(grey, i, j, ratios):
    half = [cv2.resize(g, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA) for g in grey]
    found = [best_fit(half[a], half[b], r, SHARES) for a, b, r in zip(i, j, ratios, strict=True)]
    return np.array([fit for fit, _ in found]), np.array([share for _, share in found])


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [7, 8192])
def test_each_pair_fits_as_it_does_alone(grey, monkeypatch, at_once):
    monkeypatch.setattr(rough_fit, "_AT_ONCE", at_once)
    i, j = np.triu_indices(16, 1)
    for ratios in (np.ones(len(i)), np.exp(0.04 * (np.arange(len(i)) % 5 - 2))):
        fits, which = rough_fits((grey, grey), np.column_stack([i, j]), ratios, SHARES, BLUR)
        wanted, share = one_by_one(grey, i, j, ratios)
        # whole grey levels there, fractions here
        np.testing.assert_allclose(fits, wanted, atol=0.04)
        clear = wanted > 0.5
        assert clear.sum() >= 8 and np.array_equal(np.array(SHARES)[which][clear], share[clear])
    # the control: proportions matter
    pairs = np.column_stack([i, j])
    other, _ = rough_fits((grey, grey), pairs, np.full(len(i), 1.2), SHARES, BLUR)
    assert np.abs(other - fits).max() > 0.2


def test_what_has_no_detail_fits_nowhere():
    grey = np.stack([np.full((48, 48), 90, np.uint8), np.asarray(drawing(1, 48, 48).convert("L"))])
    pairs = np.array([[0, 0], [0, 1], [1, 1]])
    fits, _ = rough_fits((grey, grey), pairs, np.ones(3), SHARES, BLUR)
    assert fits[:2] == pytest.approx(0, abs=0.01) and fits[2] == pytest.approx(1, abs=1e-3)


def test_of_no_pairs_there_are_none():
    none = np.zeros((0, 2), np.int64)
    fits, which = rough_fits(
        (np.zeros((2, 48, 48), np.uint8),) * 2, none, np.zeros(0), SHARES, BLUR
    )
    assert len(fits) == len(which) == 0


def threads_of_a_fork() -> int:
    ours, its = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: its.send(len(os.listdir("/proc/self/task"))))
    process.start()
    process.join()
    return ours.recv()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux")
def test_it_leaves_no_threads_that_begin_anew_in_workers():
    """Threads in a worker would receive signals that it has blocked. scipy.fft starts such threads."""
    code = """
import sys
sys.path[:0] = sys.argv[1:]
import numpy as np
from test_rough_fit import threads_of_a_fork
from finetune.data.checking.rough_fit import rough_fits
grey = np.random.default_rng(0).integers(0, 256, (4, 48, 48), np.uint8)
pairs = np.column_stack([np.arange(4), np.arange(4)[::-1]])
rough_fits((grey, grey), pairs, np.ones(4), (0.9, 0.8), 3.0)
ours = threads_of_a_fork()
import scipy.fft
scipy.fft.rfft2(np.ones((64, 64, 64)), workers=2)
print(ours, threads_of_a_fork())
"""
    here = Path(__file__).parent
    places = [str(here), str(here.parent / "support")]
    done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, scipys = map(int, done.stdout.split())
    assert ours == 1 < scipys
