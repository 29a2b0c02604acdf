"""Series are found by numbered names whose neighbours look alike; classes that are only numbered are not series."""

from pathlib import Path

import numpy as np
import pytest
from data_files import real_data
from drawings import facts_of

from finetune.data.checking.findings import Finding
from finetune.data.checking.image_facts import SIDE, collect_facts, inspect_images
from finetune.data.checking.series import series_findings
from finetune.data.datasets.listing import list_images
from finetune.data.groups import put_into_groups
from finetune.data.samples import Samples
from finetune.data.targets import ClassIndex

BURSTS = [f"{name}/burst{k}_{i:03d}.jpg" for name in "ab" for k in range(12) for i in range(5)]
FOLDERS = [f"{name}/v{k}/{i:03d}.jpg" for name in "ab" for k in range(12) for i in range(5)]
FRAMES = [f"{name}/{i:04d}.jpg" for name in "ab" for i in range(60)]


def findings(root: Path, names: list[str], is_series: bool) -> list[Finding]:
    """The findings about files of these names; scenes of five images each, or images that have nothing in common."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    listing = list_images(root)
    rng = np.random.default_rng(0)
    scenes = rng.normal(size=(len(names), SIDE, SIDE))
    place = {str(root / name): i for i, name in enumerate(names)}
    grey = np.empty_like(scenes)
    for row, path in enumerate(listing.paths):
        i = place[path]
        scene = scenes[i // 5] if is_series else scenes[i]
        grey[row] = 128 + 40 * (scene + 0.5 * rng.normal(size=(SIDE, SIDE)))
    facts = facts_of(grey.clip(0, 255).astype(np.uint8))
    return list(series_findings(listing, facts, np.arange(len(names))))


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (BURSTS, r"--data.group_by '([^/]*?)\d+\.\w+$' keeps"),
        (FOLDERS, "--data.group_by folder keeps the images of a folder"),
        (FRAMES, "Put each series into a folder of its own"),
    ],
)
def test_series_that_a_random_split_would_tear_apart_are_found(tmp_path, names, option):
    (finding,) = findings(tmp_path, names, is_series=True)
    assert finding.kind == "series" and finding.level == "warning"
    num = len({name.rstrip("0123456789.jpg") for name in names})
    assert finding.title.startswith(f"{num} series of images")
    assert "would be torn apart by a random split" in finding.title
    assert option in finding.advice and finding.rows


@pytest.mark.parametrize("names", [BURSTS, FOLDERS, FRAMES])
def test_control_numbers_alone_are_no_evidence(tmp_path, names):
    assert findings(tmp_path, names, is_series=False) == []


def in_splits(names: list[str], is_test: list[bool]) -> list[str]:
    return [
        f"{'test' if test else 'train'}/{name}" for name, test in zip(names, is_test, strict=True)
    ]


def test_series_in_given_splits_are_found_only_where_they_straddle(tmp_path):
    every_fifth = [i % 5 == 2 for i in range(len(BURSTS))]
    (finding,) = findings(tmp_path / "torn", in_splits(BURSTS, every_fifth), is_series=True)
    assert (
        finding.title
        == "24 series of images, such as bursts or video frames, lie in more than one split"
    )
    assert "Put each series into one split" in finding.advice
    full = [i // 5 % 4 == 0 for i in range(len(BURSTS))]
    assert findings(tmp_path / "whole", in_splits(BURSTS, full), is_series=True) == []
    # each split is numbered from one: equal numbers are other images
    again = [f"{split}/{name}" for split in ("train", "test") for name in FRAMES]
    assert findings(tmp_path / "again", again, is_series=True) == []


def test_the_option_that_is_advised_makes_these_groups(tmp_path):
    (finding,) = findings(tmp_path, BURSTS, is_series=True)
    pattern = finding.advice.partition("'")[2].partition("'")[0]
    labels = ClassIndex(np.zeros(len(BURSTS), np.int64), 1)
    samples = Samples([f"/d/{name}" for name in BURSTS], labels, folder="/d")
    groups = put_into_groups(samples, pattern).groups
    prefixes = [name.split("/")[1].split("_")[0] for name in BURSTS]
    pairs = set(zip(groups.tolist(), prefixes, strict=True))
    assert len(pairs) == len(set(groups.tolist())) == len(set(prefixes))


@pytest.mark.slow
@pytest.mark.real
def test_real_photographs_numbered_in_any_order_raise_no_alarm():
    listing = list_images(real_data("hotdog"))
    num = len(listing.paths)
    facts = collect_facts(inspect_images(listing.paths), num)
    assert list(series_findings(listing, facts, np.arange(num))) == []
