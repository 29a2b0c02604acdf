"""Advice for error messages about weights that do not fit a network."""

from collections.abc import Collection

from torchvision import models

from finetune.models.backbones import skeleton
from finetune.models.stages import head_name
from finetune.models.timm_backbones import PREFIX, is_timm
from finetune.system.option_names import option

# A file with less than this share of the network's parameter names was written by other code.
_OTHER_CODE = 0.1
# A file that lacks less than this share of them, and has no others, is of this network.
_INCOMPLETE = 0.1


def advice(names: Collection[str], backbone: str) -> str:
    """Return a sentence of advice for weights that do not fit the backbone, from their parameter names."""
    own = _names(backbone)
    has_option = bool(option("model.backbone"))
    if own.issuperset(names) and 0 < len(_required(backbone) - set(names)) < _INCOMPLETE * len(own):
        return "The file is incomplete: get it again"
    if len(own & set(names)) >= _OTHER_CODE * len(own):
        return f"It is of another network{': pass its name as --backbone' if has_option else ''}"
    twin = (
        backbone.removeprefix(PREFIX).partition(".")[0] if is_timm(backbone) else PREFIX + backbone
    )
    if _is_known(twin) and len(_names(twin) & set(names)) >= (1 - _OTHER_CODE) * len(names):
        return f"It is of {twin}{f': pass --backbone {twin}' if has_option else ''}"
    origin = "timm" if is_timm(backbone) else "torchvision"
    return (
        f"Its parameters have the names of other code ({min(names)}, where this network has {min(own)}): pass the file "
        f"that {origin} publishes, or rename them"
    )


def _names(backbone: str) -> set[str]:
    return set(skeleton(backbone).state_dict())


def _required(backbone: str) -> set[str]:
    """Return the names that weights must have: all but those of the head, and counters that old files lack."""
    head = head_name(skeleton(backbone)) + "."
    return {
        name
        for name in _names(backbone)
        if not name.startswith(head) and not name.endswith("num_batches_tracked")
    }


def _is_known(backbone: str) -> bool:
    if not is_timm(backbone):
        return backbone in models.list_models(module=models)
    try:
        import timm
    except ImportError:
        return False
    return timm.is_model(backbone.removeprefix(PREFIX))
