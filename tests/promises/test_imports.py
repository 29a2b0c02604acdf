"""What the import of each part of the package imports, in one interpreter."""

import os
import subprocess
import sys

import pytest
from promise import promise

# Each with what it must not have imported, nor those before it.
STEPS = {
    "finetune": {"albumentations"},
    "finetune.data.decode": {"torch", "cv2", "PIL.AvifImagePlugin", "pillow_heif"},
    "finetune.parity.data_parallel": {
        *("pytorch_lightning", "albumentations", "torchvision", "jsonargparse")
    },
    "finetune.data.image_files": {"obstore"},
    "finetune.runs.sync": {"obstore"},
}


@promise("nothing-sent")
@pytest.mark.slow
def test_parts_are_light_and_no_update_is_asked_for():
    """albumentations contacts a server on import unless an environment variable is set before."""
    lines = [
        "import sys",
        *(f"import {names}; print({heavy!r} & set(sys.modules))" for names, heavy in STEPS.items()),
    ]
    # images of a folder need no client of object storage
    lines += ["print(finetune.data.image_files.kind_of('.'), 'obstore' in sys.modules)"]
    lines += ["import os; print(os.environ['NO_ALBUMENTATIONS_UPDATE'])"]
    environment = {
        name: value for name, value in os.environ.items() if name != "NO_ALBUMENTATIONS_UPDATE"
    }
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["set()"] * len(STEPS) + ["folder", "False", "1"]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_client_of_the_hub_sends_no_telemetry_whichever_is_imported_first(is_first):
    """It reads the variable when it is imported, so alone it does (the control)."""
    client = "from huggingface_hub import constants; print(constants.HF_HUB_DISABLE_TELEMETRY)"
    imports = ["import finetune", client] if is_first else [client, "import finetune"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
    }
    command = [sys.executable, "-c", "\n".join([*imports, client])]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [str(is_first), "True"]
