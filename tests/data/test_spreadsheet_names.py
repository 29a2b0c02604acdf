"""Names that a spreadsheet would run as a formula are reported, and no others."""

from pathlib import Path

import pytest

from finetune.data.checking.checks import spreadsheet_findings
from finetune.data.datasets.listing import Listing, list_images


def listing(root: Path, *names: str) -> Listing:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return list_images(root)


@pytest.mark.parametrize("sign", "=+-@")
def test_class_and_file_names_that_begin_like_a_formula_are_noted(tmp_path, sign):
    names = f"train/{sign}HYPERLINK(1)/1.jpg", f"train/cat/{sign}2.jpg", "train/cat/3.jpg"
    found = listing(tmp_path, *names)
    (finding,) = spreadsheet_findings(found)
    assert finding.level == "note" and finding.title.startswith("2 names of classes or files")
    of_class, of_file = finding.rows
    assert of_class.note == f"the class {sign}HYPERLINK(1)" and not of_class.images
    assert [Path(found.paths[i]).name for i in of_file.images] == [f"{sign}2.jpg"]


def test_other_names_are_not(tmp_path):
    found = listing(tmp_path, "train/hot-dog/a=1.jpg", "train/not_@_all/b-2.jpg")
    assert len(found.paths) == 2 and not list(spreadsheet_findings(found))
