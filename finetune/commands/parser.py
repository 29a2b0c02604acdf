"""The parser of all commands: wrong flags and keys in one line with the nearest right one; what a command line says."""

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader

from finetune import public_paths

_UNKNOWN = (
    re.compile(r"does not accept (?:nested )?option '(?P<key>[^']+)'"),
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),  # of a class that a class_path names
    re.compile(r"[Uu]nrecognized arguments?: (?P<key>--?[^\s=]+)"),
    re.compile(r"[Kk]ey '(?P<key>[^']+)' is not expected"),
    re.compile(r"Unknown argument:? '?(?P<key>[^\s']+)'?"),
)

# What other tools call it, where the nearest spelling is something else or nothing: option -> what people say.
_SAID = {
    "trainer.max_epochs": "epochs epoch num_epochs n_epochs",
    "trainer.max_steps": "steps num_steps iterations",
    "trainer.devices": "gpus gpu num_gpus n_gpu device ngpus",
    "trainer.accelerator": "cpu cuda mps",
    "trainer.precision": "amp fp16 bf16 half",
    "trainer.default_root_dir": "out output_dir out_dir logdir log_dir save_dir run_dir",
    "trainer.callbacks": "patience early_stopping",
    "output": "out o output_file",
    "top_k": "k top topk",
    "ckpt_path": "checkpoint ckpt weights_path",
    "seed_everything": "seed",
    "data.batch_size": "batch bs b",
    "data.image_size": "size img_size imgsz input_size resolution crop_size",
    "data.num_workers": "workers j",
    "data.root": "path folder dir data_dir data_path dataset",
    "data.class_names": "classes",
    "model.backbone": "arch architecture network name model_name net",
    "model.weights": "pretrained",
    "model.optimizer": "opt optim",
    "model.optimizer.lr": "lr learning_rate rate lr0",
    "model.optimizer.weight_decay": "wd decay",
}

# A value that fits none of the types that a key may have.
_KEY = re.compile(r'Parser key "([^"]+)":')
_VALUE = re.compile(r"(?:Given|Got) value: (.*)$", re.S)
_EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: .*)?$", re.M)
_CLASS = re.compile(r"<class '([^']+)'>|typing\.Literal\[([^]]+)\]")

# Configs of earlier versions name our classes by their modules.
_load_yaml = get_loader("yaml")
set_loader("yaml", lambda text: public_paths(_load_yaml(text)), (yaml.YAMLError,))


class OneLineErrorParser(ArgumentParser):
    """A parser whose errors are one line on stderr and exit code 2; the beginning of a flag is not the flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        print(f"finetune: error: {explain(self, message)}", file=sys.stderr)
        self.exit(2)


def explain(parser: ArgumentParser, message: str) -> str:
    """Return `message` in one line; if it is about an unknown key, with the nearest valid one."""
    for pattern in _UNKNOWN:
        if match := pattern.search(message):
            key = match["key"]
            valid = valid_keys(parser)
            if key.lstrip("-") in ("", "config"):
                break
            nearest = nearest_key(key.lstrip("-"), valid)
            if nearest == key.lstrip("-"):
                return f"{key!r} is an option of another command"
            return f"there is no option {key!r}" + (f"; did you mean {nearest!r}?" if nearest else "")
    if (key := _KEY.match(message)) and (value := _VALUE.search(message)):
        types = dict.fromkeys(_CLASS.sub(_plain_type, expected) for expected in _EXPECTED.findall(message))
        return f"{key[1]}: {value[1].strip()} is not valid" + (f"; expected {' or '.join(types)}" if types else "")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines)
    return text if len(text) < 500 else f"{text[:400]} … {text[-80:]}"


def _plain_type(match: re.Match[str]) -> str:
    return match[2] or ("null" if match[1] == "NoneType" else match[1])


def nearest_key(key: str, valid: list[str]) -> str | None:
    """Return the valid dotted key that was probably meant by `key`: another word for it, or one spelt like it."""
    key = key.replace("-", "_")
    group, _, last = key.rpartition(".")
    if key in valid:
        return key
    said = [option for option, words in _SAID.items() if last in words.split()]
    # Within a class that a class_path names, keys are valid without their group.
    said = [key for option in said for key in (option, option.rpartition(".")[2]) if key in valid]
    if said:
        return max(said, key=lambda option: option.startswith(f"{group}."))
    matches = difflib.get_close_matches(key, valid, n=1, cutoff=0.75)
    if matches:
        return matches[0]
    for candidates in ([name for name in valid if name.rpartition(".")[0] == group], valid):
        by_last_part = {name.rpartition(".")[2]: name for name in candidates}
        if matches := difflib.get_close_matches(last, list(by_last_part), n=1, cutoff=0.75):
            return by_last_part[matches[0]]
    return None


def valid_keys(parser: ArgumentParser) -> list[str]:
    """Return the dotted names of all options of a parser, those of its subcommands included."""
    keys: list[str] = []
    for action in parser._actions:
        keys += [option.lstrip("-") for option in action.option_strings]
        default: Any = action.default
        if isinstance(default, (dict, Namespace)) and "class_path" in default:  # its arguments can be given, too
            module, _, name = default["class_path"].rpartition(".")
            arguments = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            keys += [f"{action.dest}.{argument}" for argument in arguments]
        choices: Any = getattr(action, "_name_parser_map", None) or {}
        for subparser in choices.values():
            keys += valid_keys(subparser)
    return sorted({key for key in keys if " " not in key})  # links have names with an arrow


def last_value(args: Sequence[str], name: str) -> str | None:
    """Return what the command line gives for a flag, None where it is not there."""
    value = None  # of several the last counts, as for the parser
    for i, argument in enumerate(args):
        if argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
        elif argument == name and i + 1 < len(args):
            value = args[i + 1]
    return value


def settings_in(value: str) -> dict[str, Any]:
    """Return what a file, or the text itself, holds; nothing where that is no table."""
    is_text = value.lstrip().startswith("{")  # too long for a name, perhaps
    content = yaml.safe_load(Path(value).read_text("utf-8") if not is_text and Path(value).is_file() else value)
    return content if isinstance(content, dict) else {}
