"""Which checkpoints become a folder for timm. tests/integration/test_timm_commands.py has the folder itself."""

from types import SimpleNamespace

import pytest

from finetune.inference.timm_folder import check_supported
from finetune.system.messages import WrongUsage

SUPPORTED = {
    "backbone": "timm/test_convnext",
    "num_members": 1,
    "head_stages": 1,
    "preparation": {"resize": "whole"},
}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"backbone": "resnet18"}, "resnet18 is not a network of timm"),
        ({"num_members": 3}, "the checkpoint is an ensemble of 3 networks"),
        ({"head_stages": 2}, "its head takes the features of 2 stages"),
        ({"preparation": {"resize": "pad"}}, "timm has no resize like --data.resize pad"),
    ],
)
def test_unsupported_checkpoints_are_refused(other, reason):
    check_supported(SimpleNamespace(**SUPPORTED))
    with pytest.raises(
        WrongUsage, match=f"--format timm does not support this checkpoint: {reason}"
    ):
        check_supported(SimpleNamespace(**SUPPORTED | other))
