"""The options and the answers of the service, of which FastAPI makes the description in /openapi.json."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model

from finetune.settings.fields import helps_of
from finetune.training.prediction import DecisionRule, Prediction, rounded

_TYPES: Mapping[str, Any] = {
    "label": str,
    "labels": list[str],
    "probability": float,
    "probabilities": dict[str, float],
    "thresholds": dict[str, float],
}


class PredictOptions(BaseModel):
    """The options in the query of a request to /predict."""

    model_config = ConfigDict(extra="forbid")

    top_k: int | None = Field(
        default=None, ge=1, description="the number of most probable classes to return"
    )
    heatmap: bool = Field(default=False, description="return a heat map of the predicted class")


def _fields(rule: DecisionRule) -> dict[str, Any]:
    """Return the type of each field of `Prediction` in an answer, by its name."""
    names = ["label", "probability", "probabilities"]
    if not rule.is_single:
        names = ["labels", "probabilities", "thresholds"]
    # without None: such a field is absent
    columns = {column.name: get_args(column.type)[0] for column in rule.columns}
    return {name: _TYPES[name] for name in names} | columns


def answer_model(rule: DecisionRule) -> type[BaseModel]:
    """Return the schema of the answer to a request: a prediction for each image, in the order of the request."""
    helps = helps_of(Prediction) | {
        "name": "of the file, as the request has it; empty for a body without one",
        "label": "the predicted class",
        "probability": "of the predicted class",
        "labels": "those whose probability is at least their threshold",
        "probabilities": "of every class or label, or of the top_k most probable, in that order",
        "thresholds": "of the same labels",
    }
    kinds = {"name": str} | _fields(rule)
    fields: dict[str, Any] = {n: (kind, Field(description=helps[n])) for n, kind in kinds.items()}
    what = "a data: URL of a heat map of the predicted class"
    kind: Any = str | None
    if not rule.is_single:
        what = "for each predicted label a data: URL of its heat map"
        kind = dict[str, str | None]
    missing = "null if the network does not support it, and absent unless requested"
    fields["heatmap"] = (kind, Field(default=None, description=f"{what}; {missing}"))
    one: Any = create_model("Prediction", **fields)
    return create_model("Predictions", predictions=(list[one], ...))


def answer_of(one: Prediction, name: str, rule: DecisionRule, top_k: int | None) -> dict[str, Any]:
    """Return the answer for an image.

    Args:
        one: Its prediction.
        name: Its name in the request.
        rule: How it was predicted.
        top_k: Number of the most probable classes to return; None for all.
    """
    answer = {field: rounded(getattr(one, field)) for field in _fields(rule)}
    best = sorted(one.probabilities.items(), key=lambda item: -item[1])[:top_k]
    answer["probabilities"] = {label: rounded(value) for label, value in best}
    if one.thresholds is not None:
        answer["thresholds"] = {label: one.thresholds[label] for label, _ in best}
    return {"name": name} | answer


class FailedImage(BaseModel):
    """An image of a request that failed."""

    index: int
    name: str
    error: str


class Error(BaseModel):
    """The answer to a request that is refused."""

    error: str = Field(description="one line: what is wrong, and what to do")
    images: list[FailedImage] = Field(
        default=[], description="the images of the request that failed"
    )


class Status(BaseModel):
    """Whether the service takes requests."""

    status: str
