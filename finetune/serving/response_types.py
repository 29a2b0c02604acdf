"""The JSON of the service's answers. Handlers fill these types, and the OpenAPI description is made from them.

The text of a field is its description. `NotRequired` fields may be absent.
"""

from typing import Annotated, NotRequired, TypedDict


class Prediction(TypedDict):
    """The prediction for an image by a network with one class per image."""

    name: Annotated[str, "of the file, as the request has it; empty for a body without one"]
    label: Annotated[str, "the predicted class, by the checkpoint's threshold if it has one"]
    probability: Annotated[float, "of that class, from 0 to 1"]
    probabilities: Annotated[
        dict[str, float], "of every class, or of the top_k most probable, in that order"
    ]
    looked_at: NotRequired[
        Annotated[
            str | None,
            "a data: URL of a heat map of the predicted class; "
            "null if the network does not support it, and absent unless requested",
        ]
    ]


class LabelsPrediction(TypedDict):
    """The prediction for an image by a network with several labels per image."""

    name: Annotated[str, "of the file, as the request has it; empty for a body without one"]
    labels: Annotated[
        list[str], "labels whose probability is at least their threshold; any number of them"
    ]
    probabilities: Annotated[
        dict[str, float], "of every label, or of the top_k most probable, in that order"
    ]
    thresholds: Annotated[dict[str, float], "of the same labels"]
    looked_at: NotRequired[
        Annotated[
            dict[str, str | None],
            "for each predicted label a data: URL of its heat map; "
            "null for networks that have none. Only if it was requested",
        ]
    ]


class FailedImage(TypedDict, total=False):
    """An image of a request that failed."""

    index: int
    name: str
    error: str


class Error(TypedDict):
    """The answer to a request that is refused."""

    error: Annotated[str, "one line: what is wrong, and what to do"]
    pictures: NotRequired[Annotated[list[FailedImage], "the images of the request that failed"]]


class Status(TypedDict, total=False):
    """Whether the service is there."""

    status: str
