"""Arguments of `finetune.fit` that make it take a second or less; colours.QUICKEST has them for the command."""

from typing import Any

QUICK: dict[str, Any] = {
    **{
        "epochs": 1,
        "size": 28,
        "batch": 16,
        "workers": 0,
        "weights": None,
        "backbone": "small_cnn",
    },
    **{"precision": "32-true", "devices": 1},
    "options": {"report": False, "trainer.accelerator": "cpu"},
}
