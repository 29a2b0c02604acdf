"""The options of the command line: a table of their names, and a file with all options of the parser.

`TABLE` has the short words, positions, help texts, and the names that other tools use. Help pages, checks before torch
is imported, suggestions and messages are derived from it. Configs may have short words; config.yaml of a run has none.

`options.json` has all options with the kinds of their values. `make options` generates it from the parser.
"""

import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple


class Option(NamedTuple):
    """A row of the table.

    Attributes:
        full: The full name, as in config.yaml.
        word: The short word for it; "" for none.
        place: The positional arguments in the usage line, if it is one of them; "" if it is not positional.
        value: Placeholder of the value; "" for a switch.
        text: A line of help: what the option does, with its unit.
        default: The default as in YAML; None to show none.
        synonyms: Its names in other tools.
        title: The heading of its section.
        commands: The commands that have it.
    """

    full: str
    word: str
    place: str
    value: str
    text: str
    default: str | None
    synonyms: tuple[str, ...]
    title: str
    commands: tuple[str, ...]


# Sections of options: "heading: commands that have them". A row is a line of the help page: position, short word and
# full name, the placeholder of the value, then the help with the default in brackets. An indented line below a row has
# the names that other tools use, if the most similar name is another option's or none.
_TABLE = """
not shown: fit benchmark
  FOLDER, --data.root FOLDER
      path folder root dir data_dir data_path dataset
  --data.table TABLE
      csv csv_file table labels_file annotations
  --data.labels HOW
      multi_label multilabel
  --data.eval_image_size PIXELS
      eval_size test_size val_size test_input_size
  --data.class_names NAMES
      classes
  --data.corrections FILE
      corrected_labels label_fixes
  --model.optimizer.weight_decay SHARE
      wd decay
  --trainer.max_steps N                    end after N optimizer steps; -1: no limit
      steps num_steps iterations
  --trainer.accelerator KIND               kind of device: cpu, cuda or mps
      cpu cuda mps
  --trainer.callbacks NAMES                callbacks of Lightning, by name or class path
      callback
  --data.group_by HOW
      groups group
  --members, --model.members N             networks that are trained separately and predict together [1]
not shown: fit
  --folds K
      cv kfold k_fold n_splits num_bag_folds
not shown: validate test
  CKPT, --ckpt_path CKPT
      checkpoint ckpt weights_path
  CKPT FOLDER, --data.root FOLDER
  --data.table TABLE
not shown: predict
  CKPT IMAGES, --ckpt_path CKPT
  CKPT IMAGES, --pictures, --data.predict IMAGES
      pictures picture images image files input source
not shown: export serve
  CKPT, --ckpt_path CKPT
not shown: check review
  FOLDER, --folder FOLDER
the measurement: benchmark
  --repeats N                              measurements of each part, of two seconds each [5]
  --devices N,N                            numbers of devices to compare, such as 1,2
  --out, --output FILE                     also write the result as a .json
      out o output_file
predictions: predict
  --out, --output FILE                     a .csv; default runs/predict/version_N/predictions.csv
  --top_k K                                only the k most probable classes
      k top topk
  --abstain_below P                        predict unsure if no class is that probable
the file: export
  --format KIND                            onnx, safetensors (weights alone) or timm (a folder) [onnx]
  --out, --output FILE                     by default next to the checkpoint
  --verify_on IMAGES                       images to compare on; by default synthetic ones
  --quantize FOLDER                        int8, calibrated on the images of this folder
the address: serve
  --host ADDRESS                           0.0.0.0 accepts other machines [127.0.0.1]
  --port N                                 0: any free port [8000]
  --token WORD                             that requests must send; safer: FINETUNE_TOKEN
machine: serve
  --device NAME                            cpu, cuda or cuda:1 [auto]
  --precision KIND                         32-true or bf16-mixed; by default as in predict
  --max_batch N                            images classified at a time, at most [32]
monitoring: serve
  --log json                               a line for each request on stdout
output: check
  --out, --output FOLDER                   folder of check.html and check.json [.]
  --lists FOLDER                           also write a list of files for each finding
  --corrections FILE                       labels that were corrected by finetune review
doubtful labels: check
  --weights FILE                           weights of a network that computes features
  --backbone NAME                          the network of these weights [resnet18]
  --size, --image_size PIXELS              side of its input [96]
  --ckpt_path CKPT                         instead a run, which may repeat wrong labels
what is reviewed: review
  --run FOLDER                             same as RUN: its mistakes come early
  --out, --output FILE                     by default corrections.csv in FOLDER
  --weights FILE                           of a ResNet-18; by default the network of RUN
  --port N                                 0: any free port [0]
of a table: check review
  --root FOLDER                            that paths start from; by default the table's
  --columns ROLE:NAME                      unusual names, such as path:photo,label:breed
  --labels HOW                             single or several labels per image [auto]
  --label_separator CHARACTER              between labels; ; and | are found without it
data: fit benchmark
  --batch, --data.batch_size N             images in a batch, over all devices [32]
      batch bs b
  --size, --data.image_size PIXELS         side of the network's input [224]
      size img_size imgsz input_size resolution crop_size
  --data.val_fraction SHARE                share for validation if there is no val [0.1]
  --data.test_fraction SHARE               share for testing if there are no splits [0.2]
data: validate test predict
  --batch, --data.batch_size N             images in a batch; by default as in training
  --tta flip                               average with the mirror image, in twice the time
data: validate test
  --data.on_bad_image HOW                  skip: skip unreadable images
network: fit
  --backbone, --model.backbone NAME        or timm/NAME; A,B or auto: choose one [resnet18]
      arch architecture network model_name net
network: benchmark
  --backbone, --model.backbone NAME        such as resnet50 or timm/convnext_nano [resnet18]
network: fit benchmark
  --weights, --model.weights FILE          name, file or run; null for random [DEFAULT]
      pretrained
  --freeze, --model.freeze STAGE           last frozen stage; backbone: only fit the head
training: fit benchmark
  --epochs, --trainer.max_epochs N         passes over the images; by default 5 to 50
      epochs epoch num_epochs n_epochs
  --lr, --model.optimizer.lr RATE          learning rate; for a random head 0.001 [0.0001]
      lr learning_rate rate lr0
  --optimizer, --model.optimizer NAME      such as SGD; has its own default of --lr [AdamW]
      opt optim
  --class_weights, --model.class_weights W balanced, or cat:2,dog:0.5, or a .yaml file
  --seed, --seed_everything N              for order, augmentation, random weights [0]
      seed
machine: fit validate test predict
  --devices, --trainer.devices N           number of GPUs, or of processes on a CPU [auto]
      gpus gpu num_gpus n_gpu device ngpus
machine: fit benchmark validate test predict
  --workers, --data.num_workers N          DataLoader workers for each device [auto]
      workers j
  --precision, --trainer.precision KIND    32-true or bf16-mixed; by default the faster one
      amp fp16 bf16 half dtype
run: fit validate test
  --out, --trainer.default_root_dir FOLDER where runs go: FOLDER/{command}/version_N [runs]
      out output_dir out_dir logdir log_dir save_dir run_dir project
run: predict
  --trainer.default_root_dir FOLDER        where runs go: FOLDER/{command}/version_N [runs]
      out output_dir out_dir logdir log_dir save_dir run_dir project
run: fit validate test predict
  --logger, --trainer.logger NAMES         also log to tensorboard, wandb or mlflow
run: fit
  --resume                                 continue the newest such run, if any, or RUN
  --name NAME                              name of the run's folder, instead of version_N
      run_name experiment exp_name
  --minutes M                              end after about M minutes: chooses epochs and size
  --patience N                             end after N validations without improvement
      early_stopping
  --threshold AIM                          choose a threshold for f1, accuracy, recall:0.95
the runs: demo
  --root FOLDER                            folder of the runs [runs/demo]
  --seed N                                 seed of the runs; the images are always the same [0]
the training: by-hand
  --devices NAMES                          a replica on each: cuda:0,cuda:1; cpu,cpu run in turn [cpu]
      device gpus gpu replicas
  --batch, --batch_size N                  images in a batch, over all devices together [256]
  --lr RATE                                learning rate of plain SGD, for the mean loss over the batch [0.2]
  --epochs N                               passes over the 60,000 training images [10]
  --dtype KIND                             float64: the same accuracies on any number of devices [float32]
  --seed N                                 seed of the initial weights and of the order of images [0]
  --root FOLDER                            Fashion-MNIST's files; missing ones are downloaded [data/fashion-mnist]
  --out, --output FILE                     the PNG file with the curve of accuracy [by_hand.png]
the comparison: parity
  --devices N                              devices of each kind; branch parallelism takes two [2]
  --steps N                                training steps [10]
  --dtype KIND                             float64 or float32 [float64]
the caches: cache
  --remove all                             delete all caches
"""
_ROW = re.compile(
    r"  (?P<names>(?:[\w -]+, )*)--(?P<full>[\w.]+)(?: (?P<value>\S+))?"
    r"(?: +(?P<text>.*?)(?: \[(?P<default>.+)\])?)?"
)


def _read_table(table: str) -> list[Option]:
    """Return the rows of the table.

    Raises:
        ValueError: A line is neither a heading, a row nor a list of words.
    """
    options: list[Option] = []
    title = ""
    commands: tuple[str, ...] = ()
    for line in table.strip("\n").splitlines():
        if not line.startswith(" "):
            title, _, listed = line.partition(":")
            commands = tuple(listed.split())
        elif line.startswith("      "):
            options[-1] = options[-1]._replace(synonyms=tuple(line.split()))
        elif row := _ROW.fullmatch(line):
            names = [name for name in row["names"].split(", ") if name]
            words = [name.removeprefix("--") for name in names if name.startswith("--")]
            places = [name for name in names if not name.startswith("--")]
            options.append(
                Option(
                    full=row["full"],
                    word=words[0] if words else "",
                    place=places[0] if places else "",
                    value=row["value"] or "",
                    text=row["text"] or "",
                    default=row["default"],
                    synonyms=(),
                    title=title,
                    commands=commands,
                )
            )
        else:
            raise ValueError(f"not a row of the table: {line!r}")
    return options


TABLE = tuple(_read_table(_TABLE))
_COMMANDS = tuple(dict.fromkeys(command for option in TABLE for command in option.commands))

# command: {short word: full name}
WORDS = MappingProxyType(
    {
        command: {
            option.word: option.full
            for option in TABLE
            if option.word and command in option.commands
        }
        for command in _COMMANDS
    }
)
# command: {full name: positional arguments in the usage line}, in the order of the positions
POSITIONS = MappingProxyType(
    {
        command: {
            option.full: option.place
            for option in TABLE
            if option.place and command in option.commands
        }
        for command in _COMMANDS
    }
)
# full name: names in other tools
SYNONYMS = MappingProxyType({option.full: option.synonyms for option in TABLE if option.synonyms})
# Options whose values are paths. Those of images to predict are not: `data.prediction_paths` reads lists and globs.
_PATH_VALUES = ("CKPT", "FILE", "FOLDER", "TABLE")
PATHS = frozenset(
    {
        *(option.full for option in TABLE if option.value in _PATH_VALUES),
        "config",
        "data.init_args.root",
        "data.init_args.table",
        "resume",
    }
)

# The kind of an option's value: "number", "whole number", a list of choices, or None if only the parser knows.
Kind = str | list[str] | None

FILE = Path(__file__).with_name("options.json")
_PARSER = json.loads(FILE.read_text("utf-8"))
# The versions for which the file was generated. Options depend on Lightning's, names of networks on torchvision's.
LIGHTNING: str = _PARSER["lightning"]
TORCHVISION: str = _PARSER["torchvision"]
BACKBONES: tuple[str, ...] = tuple(_PARSER["backbones"])
AUTO_BACKBONE = "auto"  # chooses a network by the images
OPTIMIZERS: tuple[str, ...] = tuple(_PARSER["optimizers"])
# command: {full name: kind of value}; without the options of classes that a class_path names
OPTIONS: MappingProxyType[str, dict[str, Kind]] = MappingProxyType(
    {
        command: {**options, **(_PARSER["shared"] if command in _PARSER["shared_by"] else {})}
        for command, options in _PARSER["commands"].items()
    }
)


def in_full(command: str, name: str) -> str:
    """Return the full name of an option, without dashes; a full name is returned as it is."""
    return WORDS.get(command, {}).get(name, name)


def flag_names(command: str, full: str) -> str:
    """Return an option as written in messages: its position or short word, and the full flag."""
    if place := POSITIONS.get(command, {}).get(full):
        return f"finetune {command} {place} (--{full})"
    word = next((word for word, name in WORDS.get(command, {}).items() if name == full), None)
    return f"--{word} (--{full})" if word else f"--{full}"


def word_for(full: str) -> str | None:
    """Return the short word for a full name, if any command has one."""
    return next(
        (word for words in WORDS.values() for word, name in words.items() if name == full), None
    )


# A Python argument in a message: with its group, or alone if the name is unambiguous.
_ARGUMENT = re.compile(
    r"""(?<![\w.\-/'"=])((?:data|model|trainer)\.[a-z_.]*[a-z]|[a-z]+_[a-z_]+|members|mixup|cutmix)(?![\w=/'"]|\.\w)"""
)


def with_options(command: str, message: str) -> str:
    """Return a message with Python arguments, such as batch_size, replaced by options as in `flag_names`."""

    def as_option(match: re.Match[str]) -> str:
        name = match[1]
        # without the arguments of classes
        options = [full for full in OPTIONS.get(command, ()) if full.count(".") <= 1]
        matches = [full for full in options if full == name or full.endswith(f".{name}")]
        return flag_names(command, matches[0]) if len(matches) == 1 else name

    return _ARGUMENT.sub(as_option, message)
