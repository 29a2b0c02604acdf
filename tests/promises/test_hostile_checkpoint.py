"""A checkpoint of somebody else runs no code."""

import sys

import pytest
import torch
from promise import control, promise


@promise("no-code")
@control("no-code")
def test_a_hostile_checkpoint_runs_no_code(finished, colours, tmp_path, cli, monkeypatch):
    """In full, for every way of reading one: test_untrusted_checkpoints.py, tests/component/test_weight_files.py."""
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = torch.load(finished / "checkpoints/best.ckpt", weights_only=True)
    checkpoint["finetune"]["data_class"] = "hostile.Data"
    torch.save(checkpoint, tmp_path / "hostile.ckpt")
    words = ["--workers", 0, "--trainer.accelerator", "cpu"]
    with pytest.raises(ValueError, match="would import hostile"):
        cli("predict", "hostile.ckpt", colours / "test", *words)
    assert not (tmp_path / "ran").exists()
    # the control: with the user's consent the module is imported, which has no such class
    with pytest.raises(ValueError, match="has no 'Data'"):
        cli("predict", "hostile.ckpt", colours / "test", *words, "--data", "hostile.Data")
    assert (tmp_path / "ran").exists()
    del sys.modules["hostile"]  # else another test's import of it would run nothing
