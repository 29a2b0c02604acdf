"""Help pages of the commands with many options, shown without importing torch, which takes seconds.

`--help all` shows all options. `tests/promises/test_help.py` checks that names and defaults are those of the
parser.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from finetune.commands.options import TABLE, Option


class Page(NamedTuple):
    """The help of a command.

    Attributes:
        usage: The usage line after the command.
        text: A description of the command.
        examples: Command lines.
        headings: The sections of the table of options that the page shows, in order.
        has_all: Whether these are all options of the command.
    """

    usage: str
    text: str
    examples: Sequence[str]
    headings: Sequence[str]
    has_all: bool = False


_WIDTH = 80  # columns of a page
_TEXT = 29  # column of the text of an option
_ALL = "All options: finetune {command} --help all"
_AFTER = "Defaults are in brackets."
_CKPT = "CKPT is a checkpoint, or the folder of a run: its best one."
_CKPT_OR_EXPORT = _CKPT.replace(
    "CKPT is a checkpoint,", "CKPT is a checkpoint, a file of finetune export,"
)


def _evaluation_page(command: str, split: str, name: str) -> Page:
    return Page(
        "CKPT [FOLDER] [options]",
        f"""\
Measures a checkpoint on the {name} split of the data set that it was trained on, or of FOLDER:
its {split}/, or all of its class folders. Images seen in training are skipped or refused.
{_CKPT_OR_EXPORT}""",
        (
            f"finetune {command} runs/fit/version_0",
            f"finetune {command} runs/fit/version_0 other_photos",
            f"finetune {command} best.ckpt --batch 256 --devices 2",
        ),
        ("data", "machine", "run"),
    )


PAGES = {
    "fit": Page(
        "FOLDER|TABLE [options]",
        """\
Trains a classifier, then tests it. FOLDER, or its .tar or .zip, has a folder for each class, or train, val and test
with these. TABLE has a row for each image: columns path and label, optionally split, group, weight.""",
        (
            "finetune fit photos",
            "finetune fit labels.csv --epochs 20 --size 128 --out runs/small --resume",
            "finetune fit --config hotdog.yaml",
        ),
        ("data", "network", "training", "machine", "run"),
    ),
    "predict": Page(
        "CKPT IMAGES ... [options]",
        f"""\
Classifies images. {_CKPT_OR_EXPORT}
IMAGES are image files, folders, globs, tables, or text files with a path on each line.""",
        (
            "finetune predict runs/fit/version_0 a.jpg",
            "finetune predict runs/fit/version_0 photos --out predictions.csv --top_k 2",
            "finetune predict best.ckpt -- -a-name-with-a-dash.jpg",
        ),
        ("predictions", "data", "machine", "run"),
    ),
    "export": Page(
        "CKPT [options]",
        f"""\
Writes a checkpoint as a file for other programs, after verifying that it predicts as the checkpoint.
{_CKPT}""",
        (
            "finetune export runs/fit/version_0",
            "finetune export best.ckpt --out model.onnx --verify_on photos",
            "finetune export best.ckpt --quantize photos",
        ),
        ("the file",),
        has_all=True,
    ),
    "serve": Page(
        "CKPT [options]",
        f"""\
Serves predictions over HTTP until Ctrl-C, the same as `finetune predict`: a page for people, and an API for
programs, described at /openapi.json.
{_CKPT_OR_EXPORT}""",
        (
            "finetune serve runs/fit/version_0",
            "finetune serve best.onnx --port 9000",
            "finetune serve best.ckpt --host 0.0.0.0 --token word",
        ),
        ("the address", "machine", "monitoring"),
        has_all=True,
    ),
    "validate": _evaluation_page("validate", "val", "validation"),
    "test": _evaluation_page("test", "test", "test"),
    "check": Page(
        "FOLDER|TABLE [options]",
        """\
Finds errors in labelled images before training: broken and unusual files, images in more than one split or
class, shortcuts that reveal a class, and, with weights, doubtful labels. It writes a page, and changes
nothing. Exit codes: 0 nothing found, 1 something found (also notes), 2 the check failed.""",
        (
            "finetune check photos",
            "finetune check photos --weights resnet18.pt",
            "finetune check labels.csv --out checked --lists lists",
        ),
        ("output", "of a table", "doubtful labels"),
        has_all=True,
    ),
    "review": Page(
        "FOLDER|TABLE [RUN] [options]",
        """\
Serves a page on this machine where people correct labels by the keyboard, the most doubtful ones first. Each
decision is a line of corrections.csv. No image is changed, moved or deleted. `fit` trains with the corrections:
--data.corrections FILE.""",
        (
            "finetune review photos",
            "finetune review photos runs/fit/version_0",
            "finetune fit photos --data.corrections corrections.csv",
        ),
        ("what is reviewed", "of a table"),
        has_all=True,
    ),
    "benchmark": Page(
        "FOLDER [options]",
        """\
Measures a fit, with all its options: images per second, and the share of waiting for data. It leaves no files
except caches.""",
        (
            "finetune benchmark photos",
            "finetune benchmark photos --devices 1,2",
            "finetune benchmark photos --out measured.json",
        ),
        ("the measurement", "data", "network", "machine"),
    ),
    "demo": Page(
        "[options]",
        """\
Generates images of dishes, pretrains a ResNet-18 on them, fine-tunes it on hot dogs, and compares that with
training from scratch: in a few minutes, offline. It writes data/sample and the runs.""",
        (
            "finetune demo",
            "finetune demo --root runs/tried",
            "finetune demo --seed 1",
        ),
        ("the runs",),
        has_all=True,
    ),
    "parity": Page(
        "[options]",
        """\
Trains the same networks on the same images with every kind of parallelism, and compares the weights with those
of one device: in a minute or two on two CPU cores. Exit code 1 if a kind differs by more than rounding.""",
        (
            "finetune parity",
            "finetune parity --devices 4",
            "finetune parity --dtype float32 --steps 20",
        ),
        ("the comparison",),
        has_all=True,
    ),
    "by-hand": Page(
        "[options]",
        """\
Trains LeNet on Fashion-MNIST by data parallelism that is written by hand, without a framework. It prints the
test accuracy of each epoch, and draws the curve.""",
        (
            "finetune by-hand",
            "finetune by-hand --devices cuda:0,cuda:1",
            "finetune by-hand --devices cpu,cpu --dtype float64 --epochs 1",
        ),
        ("the training",),
        has_all=True,
    ),
    "cache": Page(
        "[options]",
        """\
Lists the caches of decoded images, or removes all of them. A run that uses a removed cache keeps it until its
end. Unpacked archives and copies of runs in object storage stay. The variable FINETUNE_CACHE sets another folder.""",
        (
            "finetune cache",
            "finetune cache --remove all",
        ),
        ("the caches",),
        has_all=True,
    ),
}


def help_page(arguments: Sequence[str]) -> str | None:
    """Return the help page that a command line asks for; None if it asks for none, or for all options."""
    command, *rest = arguments
    asks = next((i for i, argument in enumerate(rest) if argument in ("-h", "--help")), None)
    if (
        command not in PAGES
        or asks is None
        or "--" in rest[:asks]
        or rest[asks + 1 : asks + 2] == ["all"]
    ):
        return None
    return page(command)


def page(command: str) -> str:
    """Return the help of a command."""
    shown = PAGES[command]
    lines = [
        f"usage: finetune {command} {shown.usage}",
        "",
        *textwrap.wrap(shown.text, _WIDTH),
        "",
        "for example:",
        *(f"  {line}" for line in shown.examples),
        "",
    ]
    for title in shown.headings:
        lines.append(f"{title}:")
        for option in _section(command, title):
            lines += _lines(command, option)
    after = _AFTER if shown.has_all else f"{_AFTER} {_ALL}"
    return "\n".join([*lines, "", *textwrap.wrap(after.format(command=command), _WIDTH)])


def options(command: str) -> list[Option]:
    """Return the options on a command's page."""
    return [option for title in PAGES[command].headings for option in _section(command, title)]


def _section(command: str, title: str) -> list[Option]:
    return [option for option in TABLE if option.title == title and command in option.commands]


def _lines(command: str, option: Option) -> list[str]:
    flag = f"  --{option.word or option.full} {option.value}".rstrip()
    default = f" [{option.default}]" if option.default is not None else ""
    text = f"{option.text.format(command=command)}{default}"
    first = f"{flag} ".ljust(_TEXT)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=" " * _TEXT, break_on_hyphens=False
    ) or [flag]
