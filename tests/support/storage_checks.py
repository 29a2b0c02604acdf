"""What each storage must answer about the images of `colours` in its folder `set`."""

from pathlib import Path

import numpy as np
import pytest

from finetune.data.datasets.listing import list_images
from finetune.data.storage import kind_of, normal_path, open_file, read_pieces, refresh


def check_is_the_folder(place: str, colours: Path) -> None:
    """Check that kinds, entries and pieces of files are those of the folder.

    Args:
        place: The address of the storage.
        colours: The same images on a disk.
    """
    for is_listed in (False, True):
        if is_listed:
            refresh(f"{place}/set")
        assert kind_of(f"{place}/set//train/./red/") == "folder"
        assert kind_of(f"{place}/set/train/red/00.png") == "file"
        assert kind_of(f"{place}/set/train/re") is None
        assert kind_of(f"{place}/other") is None
        listing = list_images(f"{place}/set")
        assert np.array_equal(listing.counts(), list_images(colours).counts())
    assert normal_path(f"{place}/set//train/./red/") == f"{place}/set/train/red"
    with pytest.raises(FileNotFoundError):
        open_file(f"{place}/set/gone.png")
    for num_bytes in (1, 7, 10**6):
        pieces = [
            read_pieces(
                f"{folder}/train/red/00.png", num_bytes, lambda n: (0, n // 2, n - 3, n, n + 5)
            )
            for folder in (f"{place}/set", str(colours))
        ]
        assert pieces[0] == pieces[1]
