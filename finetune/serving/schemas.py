"""The options and the answers of the service, of which FastAPI makes the description in /openapi.json."""

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from finetune.features.familiarity import BELOW

_SET = Field(default=None, description="the prediction set; absent without --coverage")
_NAME = Field(description="of the file, as the request has it; empty for a body without one")


class PredictOptions(BaseModel):
    """The options in the query of a request to /predict."""

    model_config = ConfigDict(extra="forbid")

    top_k: int | None = Field(
        default=None, ge=1, description="the number of most probable classes to return"
    )
    looked_at: bool = Field(default=False, description="return a heat map of the predicted class")


class Prediction(BaseModel):
    """The prediction for an image by a network with one class per image."""

    name: str = _NAME
    label: str = Field(
        description="the predicted class, by the checkpoint's threshold if it has one"
    )
    probability: float = Field(description="of that class, from 0 to 1")
    probabilities: dict[str, float] = Field(
        description="of every class, or of the top_k most probable, in that order"
    )
    set: list[str] | None = _SET
    familiar: float | None = Field(
        default=None,
        description="the share of the validation images that are as little like the training images: "
        f"below {BELOW} the image may be of none of the classes; absent if it is not known",
    )
    looked_at: str | None = Field(
        default=None,
        description="a data: URL of a heat map of the predicted class; "
        "null if the network does not support it, and absent unless requested",
    )


class LabelsPrediction(BaseModel):
    """The prediction for an image by a network with several labels per image."""

    name: str = _NAME
    labels: list[str] = Field(
        description="labels whose probability is at least their threshold; any number of them"
    )
    probabilities: dict[str, float] = Field(
        description="of every label, or of the top_k most probable, in that order"
    )
    thresholds: dict[str, float] = Field(description="of the same labels")
    set: list[str] | None = _SET
    looked_at: dict[str, str | None] = Field(
        default={},
        description="for each predicted label a data: URL of its heat map; "
        "null if the network does not support it, and absent unless requested",
    )


P = TypeVar("P", Prediction, LabelsPrediction)


class Predictions(BaseModel, Generic[P]):
    """The answer to a request: a prediction for each image, in the order of the request."""

    predictions: list[P]


class FailedImage(BaseModel):
    """An image of a request that failed."""

    index: int
    name: str
    error: str


class Error(BaseModel):
    """The answer to a request that is refused."""

    error: str = Field(description="one line: what is wrong, and what to do")
    pictures: list[FailedImage] = Field(
        default=[], description="the images of the request that failed"
    )


class Status(BaseModel):
    """Whether the service takes requests."""

    status: str
