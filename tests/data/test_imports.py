"""What the import of each part of the package imports, in one interpreter."""

import os
import subprocess
import sys

import pytest

# Each with what it must not have imported, nor those before it.
STEPS = {
    "finetune": {"albumentations"},
    "finetune.data.decode": {"torch", "cv2", "PIL.AvifImagePlugin", "pillow_heif", "pi_heif"},
    "finetune.data.datasets.download": {"pooch", "requests"},
    "finetune.data.datasets.fashion_mnist_files, finetune.parity.data_parallel": {
        *("pytorch_lightning", "albumentations", "torchvision", "jsonargparse")
    },
}


@pytest.mark.slow
def test_parts_are_light_and_no_update_is_asked_for():
    """albumentations contacts a server on import unless an environment variable is set before."""
    lines = [
        "import sys",
        *(f"import {names}; print({heavy!r} & set(sys.modules))" for names, heavy in STEPS.items()),
    ]
    lines += ["import os; print(os.environ['NO_ALBUMENTATIONS_UPDATE'])"]
    environment = {
        name: value for name, value in os.environ.items() if name != "NO_ALBUMENTATIONS_UPDATE"
    }
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["set()"] * len(STEPS) + ["1"]
