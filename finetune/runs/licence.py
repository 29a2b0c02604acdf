"""Whose terms hold for what a network learned before its training here: the one place that says it."""

from torchvision import models

from finetune.models.backbones import OWN

_FILES = (".pt", ".pth", ".safetensors", ".ckpt")


def licence(weights: str | None, backbone: str, began_from: str | None = None) -> str:
    """Return what training started from and whose terms hold for it, in a sentence; what is not known is unknown.

    Args:
        weights: As `model.weights` has them: torchvision's name, a file, None for random ones.
        backbone: Of which network.
        began_from: The checkpoint of another run that training went on from instead.
    """
    if began_from:
        return f"the checkpoint {began_from}: licence unknown, its terms hold"
    if weights is None:
        return "random weights: nobody else's terms hold"
    if str(weights).endswith(_FILES):
        return f"the file {weights}: licence unknown, whoever gave it to you says on which terms"
    if terms := _own_terms(weights, backbone):
        return f"torchvision's {weights} weights, which have a licence of their own: {terms}"
    return (
        f"torchvision's {weights} weights, learned from ImageNet: torchvision's code is under the BSD 3-Clause "
        "licence, and its authors leave it to you whether ImageNet's terms allow your use"
    )


def _own_terms(weights: str, backbone: str) -> str | None:
    if backbone in OWN or backbone not in models.list_models():
        return None
    members = models.get_model_weights(backbone).__members__
    found = members.get(weights.rpartition(".")[2])
    return found.meta.get("license") if found else None
