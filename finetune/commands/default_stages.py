"""The default number of stages whose features the head of a frozen network takes."""

from typing import Any

from finetune.commands.explicit_settings import ExplicitSettings
from finetune.models.backbones import skeleton
from finetune.models.heads import SOLVED_STAGES
from finetune.models.multi_stage import most_stages


def settle_head_stages(model: Any, explicit: ExplicitSettings) -> str:
    """Set the number of stages for a fit that solves the head, and return a message if only the last one counts.

    Args:
        model: The settings of the model, as parsed; changed in place.
        explicit: The settings that configs and flags give.
    """
    if model.freeze != "backbone" or "head_stages" in explicit.arguments_of("model"):
        return ""
    most = most_stages(skeleton(model.backbone))
    model.head_stages = min(SOLVED_STAGES, most)
    if most > 1:
        return ""
    return (
        "the head takes the features of the last stage only: those of earlier stages are not supported for "
        + model.backbone
    )
