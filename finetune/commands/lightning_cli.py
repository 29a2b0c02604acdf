"""LightningCLI for fit, validate, test and predict: flags from signatures, and the settings of a checkpoint."""

import inspect
import logging
import re
import shlex
import signal
import sys
import time
from argparse import HelpFormatter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml
from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities.seed import isolate_rng

from finetune.commands.all_options import all_options_page
from finetune.commands.command_line import with_images
from finetune.commands.config_files import put_configs_first
from finetune.commands.error_lines import unwrap
from finetune.commands.explicit_settings import ExplicitSettings, read_explicit_settings
from finetune.commands.fit import Parts, fit
from finetune.commands.lightning_flags import add_flags
from finetune.commands.options import flag_names, with_options
from finetune.commands.parsed_line import format_line, parse_line
from finetune.commands.parser import OneLineErrorParser, command_of
from finetune.commands.plan import Plan
from finetune.commands.resumption import find_run_to_resume
from finetune.commands.run_places import check_shared, settle_root
from finetune.commands.settle import SETTINGS, TRIALS, Command, settle
from finetune.commands.trainer import DEFAULTS, OPTIONS, complete, make_ready
from finetune.commands.trust import check_groups, check_root, data_settings
from finetune.data.datamodule import ImageDataModule
from finetune.data.seen import exclude_seen
from finetune.data.transforms import PREPARATION, preparation
from finetune.distributed.ranks import ending
from finetune.distributed.signals import install_stop_at_once, is_rank_zero, stop_signals
from finetune.inference.exported_network import put_exported
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import Run, RunFolder
from finetune.runs.run_logger import run_loggers
from finetune.system.messages import WrongUsage, as_wrong_usage, be_quiet, check_seed
from finetune.training.checkpoint_settings import model_settings
from finetune.training.classifier import Classifier
from finetune.training.first_pass import check_fit
from finetune.training.precision import automatic_precision
from finetune.training.run_length import settle_length

log = logging.getLogger(__name__)

# jsonargparse reads such text as a number, YAML 1.1 does not: quotes are needed, for example for a folder `1e5`.
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
yaml.SafeDumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))

# arguments of the network that the data decide
_LINKED = {
    "class_names": "class_names",
    "network_size": "image_size",
    "label_kind": "label_kind",
}
_EVALUATED = {"validate": "val", "test": "test"}  # the split that a command evaluates


class OneLineErrorLightningParser(OneLineErrorParser, LightningArgumentParser):
    """A `OneLineErrorParser` for LightningCLI. Its help has all options of a command in sections."""

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> list[str]:
        if theclass is Trainer:
            kwargs["skip"] = inspect.signature(Trainer).parameters.keys() - OPTIONS
        return super().add_class_arguments(theclass, *args, **kwargs)

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        command = command_of(self)
        is_of_command = any(action.dest == "trainer.max_epochs" for action in self._actions)
        if not is_of_command:
            return super().format_help(formatter)
        return all_options_page(command, self)


class FinetuneCLI(LightningCLI):
    """LightningCLI with run folders, `--resume`, and checkpoints that have the settings of the model."""

    kind_of_parser: type[LightningArgumentParser] = OneLineErrorLightningParser
    may_resume = True

    def __init__(
        self, arguments: Sequence[str], typed: Sequence[str] = (), began: float | None = None
    ) -> None:
        self.run: Run
        self.requested_subcommand = arguments[0]
        self.typed = typed or arguments
        self.began = time.monotonic() if began is None else began
        self.checkpoint: Mapping[str, Any] | None = None
        super().__init__(
            Classifier,
            ImageDataModule,
            subclass_mode_data=True,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=self.kind_of_parser,
            seed_everything_default=0,
            trainer_defaults=DEFAULTS,
            args=_for_parser(arguments),
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the arguments that are no flags of the requested subcommand.

        Only this subcommand gets a parser: those of all four take 0.1 s longer.
        """
        skipped = {
            "fit": {"train_dataloaders", "val_dataloaders"},
            "validate": {"dataloaders", "verbose"},
            "test": {"dataloaders", "verbose"},
            "predict": {"dataloaders", "return_predictions"},
        }
        return {
            self.requested_subcommand: {
                "model",
                "datamodule",
                "weights_only",
                *skipped[self.requested_subcommand],
            }
        }

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.set_defaults({"data": {"class_path": "finetune.ImageFolderData"}})
        if subcommand == "fit":
            for name, source in _LINKED.items():
                parser.link_arguments(f"data.{source}", f"model.{name}", apply_on="instantiate")
        add_flags(parser, subcommand)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        subcommand = args[0]
        explicit = read_explicit_settings(args)
        asks_for_help = parse_line(args[1:]).asks_for_help()
        self.plan = Plan(args)
        if subcommand != "fit" and not asks_for_help:
            self._read_checkpoint(parser, subcommand, explicit)
        if subcommand == "fit" and self.may_resume and not asks_for_help:
            self.plan = find_run_to_resume(parser, args)
            args = list(self.plan.arguments)
            explicit = read_explicit_settings(args)
        self.explicit = explicit
        if subcommand == "fit" and (data_class := explicit.last("data.class_path")):
            self._use_defaults_of(data_class)
        super().parse_arguments(parser, args)
        self._check_options(subcommand)
        trainer = self.config[subcommand].trainer
        trainer.default_root_dir = settle_root(subcommand, trainer.default_root_dir, is_rank_zero())
        if subcommand == "fit":
            self.plan = settle(self.plan, self._command(), SETTINGS)

    def _read_checkpoint(
        self, parser: LightningArgumentParser, subcommand: str, explicit: ExplicitSettings
    ) -> None:
        """Read the checkpoint of a command that evaluates one. Its data module is the default of `--data`."""
        ckpt_path = explicit.flags.get("ckpt_path")
        if ckpt_path is None:
            parser.error(
                f"finetune {subcommand} needs a checkpoint: {flag_names(subcommand, 'ckpt_path')}"
            )
        self.checkpoint = read_checkpoint(ckpt_path)
        data = data_settings(self.checkpoint, explicit)
        # the parser reports a class of the command line that cannot be imported
        with suppress(ImportError, AttributeError):
            self._subcommand_parsers[subcommand].set_defaults({"data": data})

    def _check_options(self, subcommand: str) -> None:
        """Check the parsed options that no image is needed for.

        Raises:
            WrongUsage: An option is not for this command, or its value is out of range.
            ValueError: The data set of the checkpoint is not in its folder.
        """
        config = self.config[subcommand]
        if subcommand != "predict" and config.data.init_args.get("predict") is not None:
            raise WrongUsage(
                f"--data.predict: images to classify are for finetune predict, not {subcommand}"
            )
        if config.get("folds") is not None:
            raise WrongUsage(
                "--folds starts a process for each fold: pass it on the command line, as finetune fit FOLDER --folds 5"
            )
        checkpoint = self.checkpoint
        # without a config.yaml, the checkpoint of the run names the data set
        if self.plan.start is not None and not self.plan.has_config:
            checkpoint = self.plan.start.content
        check_root(subcommand, config, checkpoint, self.explicit)
        check_groups(config, checkpoint, self.explicit)
        if type(seed := config.get("seed_everything")) is int:
            check_seed(seed, "--seed_everything")

    def _use_defaults_of(self, data_class: str) -> None:
        """Use the default arguments of the data class of a fit. The parser would use those of `ImageFolderData`."""
        with suppress(Exception):  # the parser reports a class that cannot be imported
            self._subcommand_parsers["fit"].set_defaults({"data": {"class_path": data_class}})

    def _command(self) -> Command:
        """Return the fit as the steps of `settle` take it."""
        return Command(
            self.config,
            self.explicit,
            self._parser("fit"),
            self.began,
            self._instantiate_data_and_model,
        )

    def _parse_ckpt_path(self) -> None:
        # In fit the command line overrides the checkpoint. In other commands the checkpoint has the model's settings.
        if self.checkpoint is None:
            return
        config = self.config[self.config.subcommand]
        if self.config.subcommand == "predict" and config.data.init_args.get("predict") is None:
            self.parser.error(
                f"finetune predict needs images: {flag_names('predict', 'data.predict')}"
            )
        settings = model_settings(self.checkpoint)
        data = self.checkpoint["datamodule_hyper_parameters"]
        evaluated_with = {"class_names": settings["class_names"]}
        evaluated_with |= {name: data[name] for name in PREPARATION if name in data}
        if "eval_image_size" in config.data.init_args:  # not every class has it
            evaluated_with["eval_image_size"] = preparation(data)["image_size"]
        if "labels" in config.data.init_args:  # a table need not show which kind its labels are
            evaluated_with["labels"] = settings.get("label_kind", "single")
        overruled = _apply_settings(config.model, settings, Classifier, "model", self.explicit)
        overruled += _apply_settings(
            config.data.init_args, evaluated_with, ImageDataModule, "data", self.explicit
        )
        if overruled and is_rank_zero():
            log.info("the checkpoint decides: %s", ", ".join(overruled))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        assert self.subcommand is not None
        self.datamodule.read()  # a fit did so for the classes of its network
        config = self._get(self.config_init, "trainer")
        options = self.config[self.subcommand]
        self.run = Run(config["default_root_dir"], self.subcommand, name=options.get("name"))
        if self.subcommand == "predict":
            # the prediction for a single image is printed
            has_several = len(self.datamodule.splits["predict"]) > 1
            self.run.leaves_folder = has_several and options.get("output") is None
        if self.subcommand == "fit" and "train" in self.datamodule.splits:
            num_images = len(self.datamodule.splits["train"])
            message = settle_length(config, num_images, self.datamodule.batch_size)
            self.plan = self.plan.with_messages(message)
            options.trainer.max_epochs = config["max_epochs"]  # for config.yaml
        folder = RunFolder(self.run, self._parser(self.subcommand), options)
        monitor = self.model.task.monitor
        completed = complete(
            config, options, folder, lambda: self._automatic_precision(config), monitor
        )
        with as_wrong_usage("trainer"):
            trainer = super().instantiate_trainer(**completed)
        check_shared(self.run.root, trainer.num_nodes)
        return make_ready(trainer)

    def _automatic_precision(self, trainer: Any) -> str:
        """Return the precision for a command that does not set one.

        Args:
            trainer: The settings of its Trainer.
        """
        is_fit = self.subcommand == "fit"
        checkpoint = self.plan.start.content if self.plan.start else self.checkpoint
        network = self.model.network if is_fit else None
        return automatic_precision(trainer["accelerator"], checkpoint, is_fit, network)

    def instantiate_classes(self) -> None:
        if self.subcommand == "fit":
            self.plan = settle(self.plan, self._command(), TRIALS)
        super().instantiate_classes()
        if self.checkpoint is not None:
            put_exported(self.model.image_classifier, self.checkpoint)

    def _instantiate_data_and_model(self) -> tuple[ImageDataModule, Classifier]:
        """Return a data module and a network with the current settings; the fit's random number state stays."""
        # The network has random weights. Without this, the run could not be repeated from its config.yaml.
        with isolate_rng():
            init = self.parser.instantiate(self.config)
        model: Classifier = self._get(init, "model")
        aim = self.config["fit"].threshold
        if aim is not None:
            model.task.parse_aim(aim)  # so that an error comes before any step is timed
        return self._get(init, "data"), model

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        check_fit(
            self.trainer,
            self.model,
            self.datamodule,
            subcommand,
            self.config[subcommand].get("test_after_fit"),
        )
        if self.checkpoint is not None and subcommand in _EVALUATED:
            exclude_seen(
                self.datamodule,
                _EVALUATED[subcommand],
                self.checkpoint,
                self.trainer.is_global_zero,
            )
            corrections = self.datamodule.scanned.corrections
            if corrections is not None and self.trainer.is_global_zero:
                log.info("%s", corrections.line())
        if subcommand == "predict":
            return {**kwargs, "return_predictions": False}
        return kwargs if subcommand == "fit" else {**kwargs, "verbose": False}

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except BaseException as error:
            self._end()
            if self.trainer.is_global_zero and isinstance(error, Exception):
                self.run.discard_if_empty()
            self._upload_rest()
            raise
        self._end()
        self.run.finish_upload()

    def _upload_rest(self) -> None:
        """Upload what a run that fails or is stopped has left. The error that ends it is the one to report."""
        try:
            self.run.finish_upload()
        except ValueError as error:
            log.warning("%s", error)

    def _end(self) -> None:
        ending.set()
        for logger in run_loggers(self.trainer.loggers):
            logger.close()

    def fit(self, **kwargs: Any) -> None:
        """Train, perhaps from the checkpoint of `--resume` or `--ckpt_path`, then test the best checkpoint."""
        parts = Parts(
            trainer=self.trainer,
            model=self.model,
            data=self.datamodule,
            run=self.run,
            options=self.config["fit"],
            plan=self.plan,
        )
        fit(parts, shlex.join(["finetune", *self.typed]))


def _for_parser(arguments: Sequence[str]) -> list[str]:
    """Return a command line for the parser: configs first, by path."""
    line = parse_line(with_images(arguments)[1:])
    put_configs_first(line)
    return format_line(arguments[0], line)


def _apply_settings(
    place: Any, settings: dict[str, Any], kind: type, group: str, explicit: ExplicitSettings
) -> list[str]:
    """Replace settings by those of a checkpoint.

    Returns:
        For each explicit setting that the checkpoint overrules, text with both values.

    Raises:
        WrongUsage: A flag, not a config, contradicts the checkpoint.
    """
    overruled = []
    parameters = inspect.signature(kind).parameters
    for name, value in settings.items():
        current = place.get(name)
        if current != value and explicit.has_flag(f"{group}.{name}"):
            raise WrongUsage(
                f"--{group}.{name} {current}: the checkpoint decides that it is {value}; omit it"
            )
        if current != value and current not in (None, [], parameters[name].default):
            overruled.append(f"{group}.{name} {value}, not {current}")
        place[name] = value
    return overruled


def run_lightning(
    arguments: Sequence[str],
    kind: type[FinetuneCLI] = FinetuneCLI,
    typed: Sequence[str] = (),
    began: float | None = None,
) -> FinetuneCLI:
    """Run fit, validate, test or predict, and return the command line interface that has run it.

    Args:
        arguments: The expanded command line.
        kind: The class that runs it.
        typed: The command line as typed, if it differs.
        began: `time.monotonic` when the command started, if not now.
    """
    be_quiet()
    sys.argv = [sys.argv[0], *arguments]  # Lightning starts the other ranks with these arguments
    handlers = {signum: signal.getsignal(signum) for signum in stop_signals()}
    install_stop_at_once()  # until training begins, when Checkpoints handles signals
    try:
        return kind(arguments, typed, began)
    except Exception as error:
        cause = unwrap(error)
        if isinstance(cause, WrongUsage):
            cause.args = (with_options(arguments[0], str(cause)),)
        raise
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
