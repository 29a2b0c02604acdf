"""The short words of the command line: what a person guesses, and the full flags that they stand for.

config.yaml and configs say all in full; a short word is for the command line alone. Nothing heavy is imported here.
"""

import re
from types import MappingProxyType

from finetune.commands.option_names import OPTIONS

_MEASURE = {
    "batch": "data.batch_size",
    "workers": "data.num_workers",
    "devices": "trainer.devices",
    "precision": "trainer.precision",
    "out": "trainer.default_root_dir",
}
_FIT = {
    "epochs": "trainer.max_epochs",
    "lr": "model.optimizer.lr",
    "optimizer": "model.optimizer",
    "size": "data.image_size",
    "backbone": "model.backbone",
    "weights": "model.weights",
    "freeze": "model.freeze",
    "members": "model.members",
    "seed": "seed_everything",
    **_MEASURE,
}

# command: {short word: full name}
WORDS = MappingProxyType(
    {
        "fit": _FIT,
        # Its own --devices says which numbers of them are held beside each other; it leaves one file.
        "benchmark": {word: full for word, full in _FIT.items() if word != "devices"}
        | {"out": "output"},
        "validate": _MEASURE,
        "test": _MEASURE,
        "predict": _MEASURE | {"out": "output", "pictures": "data.predict"},
        "sheet": {"out": "output"},
        "export": {"out": "output"},
        "serve": {},
        "check": {"out": "output", "size": "image_size"},
    }
)


# command: {full name: how it is named by position}
POSITIONS = MappingProxyType(
    {
        "fit": {"data.root": "FOLDER"},
        "benchmark": {"data.root": "FOLDER"},
        "validate": {"ckpt_path": "CKPT", "data.root": "CKPT FOLDER"},
        "test": {"ckpt_path": "CKPT", "data.root": "CKPT FOLDER"},
        "predict": {"ckpt_path": "CKPT PICTURES", "data.predict": "CKPT PICTURES"},
        "sheet": {"ckpt_path": "CKPT PICTURES", "pictures": "CKPT PICTURES"},
        "export": {"ckpt_path": "CKPT"},
        "serve": {"ckpt_path": "CKPT"},
        "check": {"folder": "FOLDER"},
    }
)


def in_full(command: str, name: str) -> str:
    """Return the full name of an option, without dashes; a full one as it is."""
    return WORDS.get(command, {}).get(name, name)


def both(command: str, full: str) -> str:
    """Return an option as messages have it: as it is said in short, if it is, and the full flag."""
    if place := POSITIONS.get(command, {}).get(full):
        return f"finetune {command} {place} (--{full})"
    word = next((word for word, name in WORDS.get(command, {}).items() if name == full), None)
    return f"--{word} (--{full})" if word else f"--{full}"


def word_for(full: str) -> str | None:
    """Return the short word for a full name, where any command has one."""
    return next(
        (word for words in WORDS.values() for word, name in words.items() if name == full), None
    )


# An argument of Python in a message: with its group, or alone if nothing else is spelt so.
_ARGUMENT = re.compile(
    r"""(?<![\w.\-/'"=])((?:data|model|trainer)\.[a-z_.]*[a-z]|[a-z]+_[a-z_]+|members|mixup|cutmix)(?![\w=/'"]|\.\w)"""
)


def with_options(command: str, message: str) -> str:
    """Return a message in which arguments of Python, such as batch_size, are options, as `both` writes them."""

    def as_option(match: re.Match[str]) -> str:
        name = match[1]
        # not those of a class
        options = [full for full in OPTIONS.get(command, ()) if full.count(".") <= 1]
        matches = [full for full in options if full == name or full.endswith(f".{name}")]
        return both(command, matches[0]) if len(matches) == 1 else name

    return _ARGUMENT.sub(as_option, message)
