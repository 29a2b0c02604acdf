"""What the pages of `--help` say of each command: how it is called, what it does, its options with their defaults."""

from collections.abc import Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """A line of help.

    Attributes:
        full: The full name.
        value: What is to be given; "" for a flag alone.
        default: As YAML has it; None for none worth showing.
        text: What it does, with its unit.
    """

    full: str
    value: str
    default: str | None
    text: str


_DATA = (
    Option("data.batch_size", "N", "32", "pictures in a batch, over all devices together"),
    Option("data.image_size", "PIXELS", "224", "side of what the network sees"),
    Option(
        "data.val_fraction",
        "SHARE",
        "0.1",
        "of train, or of all class folders, where there is no val",
    ),
    Option("data.test_fraction", "SHARE", "0.2", "of all, where the folder has no splits"),
    Option(
        "data.resize",
        "HOW",
        "shorter_side",
        "then cropped; squash, or whole: squashed and not cropped",
    ),
    Option(
        "data.on_bad_image", "HOW", "error", "skip: leave unreadable pictures out, and list them"
    ),
)
_NETWORK = (
    Option(
        "model.backbone",
        "NAME",
        "resnet18",
        "of torchvision, as resnet50; of timm, as timm/convnext_nano",
    ),
    Option(
        "model.weights",
        "FILE",
        "DEFAULT",
        "DEFAULT: published ones; a file, a run; null: random ones",
    ),
    Option(
        "model.freeze",
        "STAGE",
        None,
        "train what follows a stage, as layer2; backbone: solve the head",
    ),
    Option("model.members", "N", "1", "networks that learn each by itself and answer together"),
)
_CHOICE = Option(
    "model.backbone", "NAME", "resnet18", "of torchvision; timm/NAME; auto, or A,B: by the data"
)
_TRAINING = (
    Option(
        "trainer.max_epochs",
        "N",
        None,
        "passes over the training pictures; 5 to 50 by their number",
    ),
    Option(
        "model.optimizer.lr",
        "RATE",
        "0.0001",
        "of backbone and head alike; 0.001 from a random head",
    ),
    Option("model.optimizer", "NAME", "AdamW", "another, as SGD, begins at its usual rate"),
    Option(
        "model.class_weights", "HOW", None, "balanced: rare classes count as much as frequent ones"
    ),
    Option("seed_everything", "N", "0", "of order, augmentation and new weights"),
)
_MACHINE = (
    Option("trainer.devices", "N", "auto", "GPUs, or processes on a CPU, that share each batch"),
    Option("data.num_workers", "N", "auto", "processes that read pictures, for each device"),
    Option(
        "trainer.precision",
        "KIND",
        None,
        "32-true, bf16-mixed; unsaid, bf16 where the hardware gains",
    ),
)
_OUT = Option(
    "trainer.default_root_dir", "FOLDER", "runs", "where runs go: FOLDER/{command}/version_N"
)
_RUN = (
    _OUT,
    Option(
        "resume",
        "",
        None,
        "go on in the newest run of these data there, or --resume RUN; else begin",
    ),
    Option("minutes", "M", None, "end after about M minutes: chooses epochs and size"),
    Option("patience", "N", None, "end after N validations without a higher accuracy"),
    Option("threshold", "AIM", None, "of two classes: recall:0.95, precision:0.95, accuracy or f1"),
)
_TRUST = Option(
    "trust_modules", "NAMES", None, "modules that it may import for its data class and transforms"
)
_MEASURED = (
    Option("data.batch_size", "N", None, "pictures in a batch; unsaid, that of its training"),
    Option("tta", "flip", None, "the mean of each picture and its mirror image, in twice the time"),
)
_CKPT = "CKPT is a checkpoint, or the folder of a run: its best one."

# command: (how it is called, what it does, examples, groups of options)
PAGES: dict[str, tuple[str, str, Sequence[str], dict[str, Sequence[Option]]]] = {
    "fit": (
        "FOLDER [options]",
        """Trains a classifier on a folder of pictures, then tests the best checkpoint. FOLDER holds a folder for each
class, or train, val and test that hold them. The defaults are shown.""",
        (
            "finetune fit pictures",
            "finetune fit pictures --epochs 20 --size 128 --backbone resnet50",
            "finetune fit pictures --weights runs/fit/version_0 --freeze layer2 --lr 0.00003",
            "finetune fit pictures --devices 2 --out runs/two --resume",
            "finetune fit --config hotdog.yaml",
        ),
        {
            "data": _DATA,
            "network": (_CHOICE, *_NETWORK[1:]),
            "training": _TRAINING,
            "machine": _MACHINE,
            "run": _RUN,
        },
    ),
    "predict": (
        "CKPT PICTURES ... [options]",
        f"""Classifies pictures. {_CKPT}
PICTURES are pictures, folders, globs, or text files with a path on each line.""",
        (
            "finetune predict runs/fit/version_0 a.jpg",
            "finetune predict runs/fit/version_0 a.jpg b.jpg more/ 'others/*.png'",
            "finetune predict runs/fit/version_0 pictures --output said.csv --top_k 2",
            "finetune predict best.ckpt pictures --abstain_below 0.8",
            "finetune predict best.ckpt -- -a-name-with-a-dash.jpg",
        ),
        {
            "what is said": (
                Option(
                    "output",
                    "FILE",
                    None,
                    ".csv, .jsonl or .parquet; unsaid, runs/predict/version_N/predictions.csv",
                ),
                Option(
                    "top_k",
                    "K",
                    None,
                    "the k best classes of each picture, not a column for each class",
                ),
                Option("abstain_below", "P", None, "say unsure where the class is less probable"),
            ),
            "data": _MEASURED,
            "machine": _MACHINE,
            "run": (_OUT, _TRUST),
        },
    ),
}
PAGES["sheet"] = (
    "CKPT PICTURES ... [options]",
    f"""Draws predicted pictures on one sheet. {_CKPT}
PICTURES are pictures, folders, globs, or text files with a path on each line.""",
    (
        "finetune sheet runs/fit/version_0 pictures",
        "finetune sheet runs/fit/version_0 a.jpg b.jpg 'more/*.png' --out sheets/few.png",
        "finetune sheet best.ckpt pictures --num 100 --columns 10 --seed 1",
    ),
    {
        "the sheet": (
            Option("output", "FILE", "sheet.png", "the PNG file to write"),
            Option("num", "N", "24", "pictures on it at most, chosen at random"),
            Option("columns", "N", "8", "pictures in a row"),
            Option("seed", "N", "0", "of the choice"),
        )
    },
)
PAGES["export"] = (
    "CKPT [options]",
    f"""Writes a checkpoint as a file for other programs, held against the network before it is kept.
{_CKPT}""",
    (
        "finetune export runs/fit/version_0",
        "finetune export best.ckpt --out model.onnx --input any_size --verify_on pictures",
        "finetune export best.ckpt --quantize int8",
    ),
    {
        "the file": (
            Option(
                "format", "KIND", "onnx", "torch: a .pt2 for torch.export; safetensors: the weights"
            ),
            Option("output", "FILE", None, "unsaid, beside the checkpoint"),
            Option(
                "input", "SIZE", "network_size", "any_size: an .onnx that prepares pictures itself"
            ),
            Option(
                "verify_on",
                "PICTURES",
                None,
                "what it is compared on; unsaid, on 64 drawn pictures",
            ),
            Option(
                "quantize",
                "int8",
                None,
                "a quarter of the size, if it loses at most a point and is faster",
            ),
            Option("root", "FOLDER", None, "pictures for int8; unsaid, those of the run"),
        )
    },
)
PAGES["serve"] = (
    "CKPT [options]",
    f"""Answers requests about pictures until Ctrl-C, with the answers of `finetune predict`: a page to drop pictures
on, and an API for programs, described at /openapi.json.
{_CKPT}""",
    (
        "finetune serve runs/fit/version_0",
        "finetune serve best.onnx --port 9000",
        "finetune serve best.ckpt --host 0.0.0.0 --token word",
    ),
    {
        "the address": (
            Option("host", "ADDRESS", "127.0.0.1", "0.0.0.0 lets other machines ask"),
            Option("port", "N", "8000", "0 takes one that is free"),
            Option("token", "WORD", None, "what requests must bear; better set as FINETUNE_TOKEN"),
        ),
        "machine": (
            Option("device", "NAME", "auto", "cpu, cuda or cuda:1"),
            Option("precision", "KIND", None, "32-true, bf16-mixed; unsaid, as predict chooses"),
            Option("max_batch", "N", "32", "pictures classified at a time, at most"),
        ),
        "limits": (
            Option(
                "max_waiting", "N", "256", "pictures without an answer; more are refused for now"
            ),
            Option("max_pictures", "N", "32", "pictures in a request"),
            Option("max_megabytes", "MB", "32.0", "size of a request"),
            Option("max_megapixels", "MPX", "64.0", "width times height of a picture"),
            Option("timeout", "SECONDS", "30.0", "for a request"),
        ),
    },
)
for _name, _split, _what in (("validate", "val", "validation"), ("test", "test", "test")):
    PAGES[_name] = (
        "CKPT [FOLDER] [options]",
        f"""Measures a checkpoint on the {_what} split of the pictures that it was trained on, or of FOLDER:
its {_split}/, or all of its class folders. What it has seen in training is left out or refused.
{_CKPT}""",
        (
            f"finetune {_name} runs/fit/version_0",
            f"finetune {_name} runs/fit/version_0 other_pictures",
            f"finetune {_name} best.ckpt --batch 256 --devices 2",
            f"finetune {_name} best.ckpt --out runs/again",
            f"finetune {_name} best.ckpt --precision 32-true",
        ),
        {
            "data": (
                *_MEASURED,
                Option("data.on_bad_image", "HOW", None, "skip: leave unreadable pictures out"),
            ),
            "machine": _MACHINE,
            "run": (_OUT, _TRUST),
        },
    )
PAGES["check"] = (
    "FOLDER [options]",
    """Says what is wrong with a folder of pictures before hours are spent: broken and odd files, pictures in more than
one split or class, what gives a class away, and, with weights, doubtful labels. It writes a page, and changes
nothing. Exit codes: 0 nothing found, 1 something found, notes too, 2 it can't run.""",
    (
        "finetune check pictures",
        "finetune check pictures --weights resnet18.pt",
        "finetune check pictures --out checked --lists lists",
    ),
    {
        "what is written": (
            Option("output", "FOLDER", ".", "where check.html and check.json go"),
            Option("lists", "FOLDER", None, "a list of files for each kind of finding, too"),
        ),
        "doubtful labels": (
            Option("weights", "FILE", None, "of a network whose features tell classes apart"),
            Option("backbone", "NAME", "resnet18", "the network that they are of"),
            Option("image_size", "PIXELS", "96", "side of what it sees"),
            Option(
                "ckpt_path",
                "CKPT",
                None,
                "a checkpoint of fit instead, or a run: it knows its own labels",
            ),
        ),
    },
)
PAGES["benchmark"] = (
    "FOLDER [options]",
    """Measures a fit, with all its options: pictures per second, where the time goes, and what would help. Nothing is
kept but caches.""",
    (
        "finetune benchmark pictures",
        "finetune benchmark pictures --batch 64 --size 128 --backbone resnet50",
        "finetune benchmark pictures --devices 1,2",
        "finetune benchmark --config hotdog.yaml --repeats 10",
        "finetune benchmark pictures --out measured.json",
    ),
    {
        "the measurement": (
            Option(
                "repeats",
                "N",
                "5",
                "how often each part is measured, two seconds of steps at a time",
            ),
            Option("devices", "N,N", None, "numbers of devices to hold beside each other, as 1,2"),
            Option("output", "FILE", None, "a .json to write"),
        ),
        "data": _DATA,
        "network": _NETWORK,
        "machine": tuple(option for option in _MACHINE if option.full != "trainer.devices"),
    },
)
OWN_PAGES = ("sheet", "export", "serve", "check")  # which have no options but these
