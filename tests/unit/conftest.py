"""Fixtures of tests of pure functions."""

import pytest

from finetune.data import heif, walk


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package that reads HEIC, whether one is installed or not."""
    monkeypatch.setattr(heif, "has_heic_reader", lambda: False)
    monkeypatch.setattr(walk, "IMAGE_SUFFIXES", walk.IMAGE_SUFFIXES - set(heif.HEIC_SUFFIXES))
