"""The table of all commands, and the settings of those that are not in `schema`: an own command is a row here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec

from finetune.settings.fields import About, Page, Section
from finetune.settings.schema import (
    BenchmarkSettings,
    Ckpt,
    Count,
    Coverage,
    File,
    FitSettings,
    Folder,
    LabelsOfTable,
    Pixels,
    Positive,
    Precision,
    PredictSettings,
    Seed,
    TestSettings,
    ValidateSettings,
)

_OUT = "out o output_file"
_CLASSES = "classes class_names label_names"
_CKPT = "CKPT is a checkpoint, or the folder of a run: its best one."


class TableSettings(Section, frozen=True):
    """How a table of images is read.

    Attributes:
        root: Of a table: folder that its paths start from, if not its own.
        columns: Of a table: columns, such as path:photo,label:breed.
        label_separator: Of a table: character between the labels of an image, if not ; or |.
    """

    root: Folder | None = None
    columns: Annotated[str | None, About(value="ROLE:NAME")] = None
    label_separator: Annotated[str | None, About(value="CHAR")] = None


class CheckSettings(TableSettings, frozen=True):
    """The settings of `finetune check`.

    Attributes:
        folder: Folder or table, as `fit` takes it.
        output: Folder of check.html and check.json.
        lists: Also write a list of files for each finding.
        labels: Of a table: single or several labels per image.
        corrections: Labels that were corrected by finetune review.
        weights: Weights of a network, to rank improbable labels.
        backbone: The network of these weights.
        image_size: Side of its input, in pixels.
        ckpt_path: A run instead of weights; it may repeat wrong labels.
    """

    page: ClassVar = Page(
        "FOLDER|TABLE [options]",
        "Finds errors in labelled images before training: broken and unusual files, images in more than one split or "
        "class, shortcuts that reveal a class, and, with weights, doubtful labels. It writes a page, and changes "
        "nothing. Exit codes: 0 nothing found, 1 something found (also notes), 2 the check failed.",
        (
            "check photos",
            "check photos --weights resnet18.pt",
            "check labels.csv --out checked --lists lists",
        ),
    )
    folder: Annotated[Folder, About(place="FOLDER")] = ""
    output: Annotated[Folder, About(word="out", also=_OUT)] = "."
    lists: Folder | None = None
    labels: LabelsOfTable = "auto"
    corrections: File | None = None
    weights: File | None = None
    backbone: Annotated[str, About(value="NAME")] = "resnet18"
    image_size: Annotated[Pixels, About(word="size")] = 96
    ckpt_path: Ckpt | None = None


class ReviewSettings(TableSettings, frozen=True):
    """The settings of `finetune review`.

    Attributes:
        folder: Folder or table, as `fit` takes it.
        run: Same as RUN: its mistakes come early.
        labels: Classes of images that have no labels. Of a table: single or several labels per image.
        output: By default corrections.csv in FOLDER, or labels.csv for images without labels.
        weights: Weights of the features, if not those of RUN. DEFAULT downloads published ones once; null shows
            copies first, and images without labels in random order.
        backbone: The network of these weights.
        image_size: Side of its input, in pixels.
        port: Port of the page; 0: any free one.
    """

    page: ClassVar = Page(
        "FOLDER|TABLE [RUN] [options]",
        "Serves a page on this machine where people correct labels by the keyboard, the most doubtful ones first, or "
        "label images that have no labels, the most useful ones first. Each decision is a line of a file. No image is "
        "changed, moved or deleted. `fit` trains with corrections by --data.corrections FILE, and on labels.csv.",
        (
            "review photos",
            "review photos runs/fit/version_0",
            "review new --labels cat,dog",
        ),
    )
    folder: Annotated[Folder, About(place="FOLDER")] = ""
    run: Annotated[Folder | None, About(place="RUN")] = None
    labels: Annotated[str, About(value="CLASS,CLASS", also=_CLASSES)] = "auto"
    output: Annotated[File | None, About(word="out", also=_OUT)] = None
    weights: File | None = "DEFAULT"
    backbone: Annotated[str, About(value="NAME")] = "resnet18"
    image_size: Annotated[Pixels, About(word="size")] = 128
    port: int = 0


class ExportSettings(Section, frozen=True):
    """The settings of `finetune export`.

    Attributes:
        ckpt_path: A checkpoint of `finetune fit`.
        format: onnx, safetensors (weights alone) or timm (a folder).
        output: By default next to the checkpoint.
        verify_on: Images to compare on, at most 64; by default synthetic ones.
        quantize: Int8, calibrated on at most 200 images of this folder. A quarter of the size.
    """

    page: ClassVar = Page(
        "CKPT [options]",
        "Writes a checkpoint as a file for other programs, after verifying that it predicts as the checkpoint. "
        + _CKPT,
        (
            "export runs/fit/version_0",
            "export best.ckpt --out model.onnx --verify_on photos",
            "export best.ckpt --quantize photos",
        ),
    )
    ckpt_path: Annotated[Ckpt, About(place="CKPT")] = ""
    format: Annotated[Literal["onnx", "safetensors", "timm"], About(value="KIND")] = "onnx"
    output: Annotated[File | None, About(word="out", also=_OUT)] = None
    verify_on: Annotated[str | None, About(value="IMAGES")] = None
    quantize: Folder | None = None


class ServeSettings(Section, frozen=True):
    """The settings of `finetune serve`.

    Attributes:
        ckpt_path: A checkpoint of `finetune fit`, or a file that `finetune export` made of one.
        host: Address to listen on; 0.0.0.0 accepts other machines.
        port: Port of the page; 0: any free one.
        token: Word that requests must send; safer: FINETUNE_TOKEN. Other users may read a command line.
        device: cpu, cuda or cuda:1.
        precision: 32-true or bf16-mixed; by default as in predict.
        max_batch: Images classified at a time, at most.
        coverage: Prediction sets that have the true class for SHARE of images.
        log: A line for each request on stdout; the rest is then on stderr.
    """

    page: ClassVar = Page(
        "CKPT [options]",
        "Serves predictions over HTTP until Ctrl-C, the same as `finetune predict`: a page for people, and an API for "
        "programs, described at /openapi.json. CKPT is a checkpoint, a file of finetune export, or the folder of a "
        "run: its best one.",
        (
            "serve runs/fit/version_0",
            "serve best.onnx --port 9000",
            "serve best.ckpt --host 0.0.0.0 --token word",
        ),
    )
    ckpt_path: Annotated[Ckpt, About(place="CKPT")] = ""
    host: Annotated[str, About(value="ADDRESS")] = "127.0.0.1"
    port: int = 8000
    token: Annotated[str | None, About(value="WORD")] = None
    device: Annotated[str, About(value="NAME")] = "auto"
    precision: Annotated[
        Precision | None,
        About(value="KIND"),
    ] = None
    max_batch: Count = 32
    coverage: Coverage | None = None
    log: Literal["json"] | None = None


class DemoSettings(Section, frozen=True):
    """The settings of `finetune demo`.

    Attributes:
        root: Folder of the runs.
        seed: Seed of the runs; the images are always the same.
    """

    page: ClassVar = Page(
        "[options]",
        "Generates images of dishes, pretrains a ResNet-18 on them, fine-tunes it on hot dogs, and compares that with "
        "training from scratch: in a few minutes, offline. It writes data/sample and the runs.",
        ("demo", "demo --root runs/tried", "demo --seed 1"),
    )
    root: Folder = "runs/demo"
    seed: Seed = 0


class ByHandSettings(Section, frozen=True):
    """The settings of `finetune by-hand`.

    Attributes:
        devices: A replica on each: cuda:0,cuda:1; cpu,cpu run in turn.
        batch_size: Images in a batch, over all devices together.
        lr: Learning rate of plain SGD, for the mean loss over the batch.
        epochs: Passes over the 60,000 training images.
        root: Fashion-MNIST's files; missing ones are downloaded.
        dtype: float64: the same accuracies on any number of devices.
        seed: Seed of the initial weights and of the order of images.
        output: The page with the curve of accuracy.
    """

    page: ClassVar = Page(
        "[options]",
        "Trains LeNet on Fashion-MNIST by data parallelism that is written by hand, without a framework. It prints the "
        "test accuracy of each epoch, and draws the curve.",
        (
            "by-hand",
            "by-hand --devices cuda:0,cuda:1",
            "by-hand --devices cpu,cpu --dtype float64 --epochs 1",
        ),
    )
    devices: Annotated[str, About(value="NAMES", also="device gpus gpu replicas")] = "cpu"
    batch_size: Annotated[Count, About(word="batch")] = 256
    lr: Annotated[Positive, About(value="RATE")] = 0.2
    epochs: Count = 10
    root: Folder = "data/fashion-mnist"
    dtype: Annotated[Literal["float32", "float64"], About(value="KIND")] = "float32"
    seed: Seed = 0
    output: Annotated[File, About(word="out", also=_OUT)] = "by_hand.html"


class ParitySettings(Section, frozen=True):
    """The settings of `finetune parity`.

    Attributes:
        devices: Devices of each kind; branch parallelism takes two.
        steps: Training steps.
        dtype: Type of weights and arithmetic.
    """

    page: ClassVar = Page(
        "[options]",
        "Trains the same networks on the same images with every kind of parallelism, and compares the weights with "
        "those of one device: in a minute or two on two CPU cores. Exit code 1 if a kind differs by more than "
        "rounding.",
        ("parity", "parity --devices 4", "parity --dtype float32 --steps 20"),
    )
    devices: Count = 2
    steps: Count = 10
    dtype: Annotated[Literal["float64", "float32"], About(value="KIND")] = "float64"


class CacheSettings(Section, frozen=True):
    """The settings of `finetune cache`.

    Attributes:
        remove: Delete all caches and copies.
    """

    page: ClassVar = Page(
        "[options]",
        "Lists the caches of decoded images and the copies of images in object storage and archives, or removes all "
        "of them. A run that uses a removed cache keeps it until its end; one whose copies are removed ends. Copies "
        "of runs in object storage stay. The variable FINETUNE_CACHE sets another folder.",
        ("cache", "cache --remove all"),
    )
    remove: Literal["all"] | None = None


class ReportSettings(Section, frozen=True):
    """The settings of `finetune report`.

    Attributes:
        runs: Folder of a run of `finetune fit` or `finetune test`.
        output: By default report.html in the run's folder.
    """

    page: ClassVar = Page(
        "RUN [--out FILE.html]",
        "Writes report.html into a run's folder: the result, classes, mistakes, how to repeat it.",
        ("report runs/fit/version_0", "report runs/fit/version_0 --out result.html"),
    )
    runs: Annotated[list[Folder], About(place="RUN")] = msgspec.field(default_factory=list)
    output: Annotated[File | None, About(word="out", also=_OUT)] = None


class CompareSettings(Section, frozen=True):
    """The settings of `finetune compare`.

    Attributes:
        runs: Folder of a run of `finetune fit` or `finetune test`.
        output: The page to write.
    """

    page: ClassVar = Page(
        "RUN_A RUN_B [RUN ...] [--out FILE.html]",
        "Compares runs on one page: results with intervals, and settings that differ. Two runs that were tested on the "
        "same images are also compared image by image.",
        (
            "compare runs/fit/version_0 runs/fit/version_1",
            "compare runs/fit/version_* --out all.html",
        ),
    )
    runs: Annotated[list[Folder], About(place="RUN")] = msgspec.field(default_factory=list)
    output: Annotated[File, About(word="out", also=_OUT)] = "comparison.html"


class RunsSettings(Section, frozen=True):
    """The settings of `finetune runs`.

    Attributes:
        folder: Folder of runs.
        sort: when, data, network, epochs, accuracy, seconds, size or folder. Numbers are sorted from the highest down.
        json: Print JSON instead of a table.
    """

    page: ClassVar = Page(
        "[FOLDER] [--sort KEY] [--json]",
        "Lists the runs of `finetune fit` beneath a folder, the newest first. It reads no checkpoint and writes "
        "nothing. `finetune runs rm RUN --yes` deletes runs.",
        ("runs", "runs results --sort accuracy", "runs rm runs/fit/version_3 --yes"),
    )
    folder: Annotated[Folder, About(place="FOLDER")] = "runs"
    sort: Annotated[
        Literal["when", "data", "network", "epochs", "accuracy", "seconds", "size", "folder"],
        About(value="KEY"),
    ] = "when"
    json: bool = False


class RunsRmSettings(Section, frozen=True):
    """The settings of `finetune runs rm`.

    Attributes:
        runs: Folder of a run.
        yes: Delete. Without it, only the size is printed.
    """

    page: ClassVar = Page(
        "RUN [RUN ...] --yes",
        "Deletes the files that finetune wrote in the folders of runs. Other files in them stay, and are printed. A "
        "folder that is not a run, and a run that is being written, are refused.",
        ("runs rm runs/fit/version_3 --yes",),
    )
    runs: Annotated[list[Folder], About(place="RUN")] = msgspec.field(default_factory=list)
    yes: bool = False


class BackbonesSettings(Section, frozen=True):
    """The settings of `finetune backbones`.

    Attributes:
        pattern: Part of a name, or a pattern such as '*vit*' or 'timm/*'.
        local: Only those whose weights are on this machine.
        json: Print JSON instead of a table.
    """

    page: ClassVar = Page(
        "[PATTERN] [--local] [--json]",
        "Lists the networks that --backbone takes: those of torchvision and, if it is installed, of timm. Without a "
        "pattern or --local, those of timm are only counted.",
        ("backbones", "backbones '*vit*'", "backbones --local"),
    )
    pattern: Annotated[str | None, About(place="PATTERN", value="PATTERN")] = None
    local: bool = False
    json: bool = False


class Command(NamedTuple):
    """A command.

    Attributes:
        settings: Its settings.
        function: The function that runs it, as module:name. It is imported when the command line is understood.
    """

    settings: type[Section]
    function: str


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "fit": Command(FitSettings, "finetune.fitting.decide:run_fit"),
        "validate": Command(ValidateSettings, "finetune.fitting.evaluate:run_evaluation"),
        "test": Command(TestSettings, "finetune.fitting.evaluate:run_evaluation"),
        "predict": Command(PredictSettings, "finetune.fitting.evaluate:run_evaluation"),
        "benchmark": Command(BenchmarkSettings, "finetune.commands.benchmark:benchmark"),
        "check": Command(CheckSettings, "finetune.commands.check:check"),
        "review": Command(ReviewSettings, "finetune.commands.review:review"),
        "backbones": Command(BackbonesSettings, "finetune.commands.list_backbones:list_backbones"),
        "report": Command(ReportSettings, "finetune.commands.report:report"),
        "compare": Command(CompareSettings, "finetune.commands.report:compare"),
        "runs": Command(RunsSettings, "finetune.commands.runs:runs"),
        "runs rm": Command(RunsRmSettings, "finetune.commands.runs:remove"),
        "export": Command(ExportSettings, "finetune.commands.export:export"),
        "serve": Command(ServeSettings, "finetune.commands.serve:serve"),
        "demo": Command(DemoSettings, "finetune.demo.demo:demo"),
        "parity": Command(ParitySettings, "finetune.commands.parity:parity"),
        "by-hand": Command(ByHandSettings, "finetune.commands.by_hand:by_hand"),
        "cache": Command(CacheSettings, "finetune.commands.cache:cache"),
    }
)
