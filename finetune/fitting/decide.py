"""`finetune fit`: decide, from what the user has set, a plan in which nothing is open, then do one fit or several."""

import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pytorch_lightning import seed_everything

from finetune.data.addresses import is_address, real_place
from finetune.data.class_weights import parse_class_weights
from finetune.data.datamodule import open_data
from finetune.distributed.launch import check_num_processes, has_launcher
from finetune.distributed.signals import is_rank_zero
from finetune.fitting.build import local_root, optimizer_maker, scheduler_maker, stopped_at_once
from finetune.fitting.defaults import (
    Rule,
    settle_clipping,
    settle_head_stages,
    settle_hub_backbone,
    settle_optimizer,
    settle_preparation,
)
from finetune.fitting.fit import fit
from finetune.fitting.minutes import settle_minutes
from finetune.fitting.network_choice import choose_network
from finetune.fitting.plan import Plan, answer, read_plan
from finetune.fitting.resume import (
    changes_between,
    check_fixed,
    check_resumable,
    has_only_begun,
    read_start,
    run_to_continue,
    settings_of_run,
    without_repeated,
)
from finetune.fitting.several_fits import fit_several
from finetune.models.network_names import AUTO, is_choice
from finetune.models.weights import find_weights
from finetune.runs.facts import Identity
from finetune.runs.folder import check_unused
from finetune.runs.run_dir import RunDir
from finetune.settings.fields import settings_of
from finetune.settings.layers import Layer, Layers, flat, replaced
from finetune.settings.schema import FitSettings, ModelSettings
from finetune.system.messages import WrongUsage, reason
from finetune.training.lr_schedulers import set_run_steps
from finetune.training.run_length import SOLVED_HEAD, settle_length

_AUTO = f"--backbone {AUTO}"
_SOME_STEPS = 1000  # the real number of steps is known only after images are listed
_ANEW = "each of the fits begins anew: pass --weights"
_SAME = "all fits must have the same settings"
_TESTED_ONCE = "each image is tested once"
_LENGTH = "both set the length of training"
# What does not go with an option, and why.
_NOT_WITH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "--folds": {
            "ckpt_path": _ANEW,
            "allow_changes": _SAME,
            "data.fold": "it runs all folds",
            "data.num_folds": "it runs all folds",
            "data.test_fraction": _TESTED_ONCE,
            "test_after_fit": _TESTED_ONCE,
            "trainer.limit_test_batches": _TESTED_ONCE,
        },
        "--members": {
            "ckpt_path": _ANEW,
            "allow_changes": _SAME,
            "model.init_seed": "each member has its own",
        },
        "--minutes": {
            "ckpt_path": "it chooses the length from the first step on: pass --epochs, or the checkpoint as --weights",
            "trainer.max_steps": _LENGTH,
            "trainer.limit_train_batches": _LENGTH,
        },
        _AUTO: {},
    }
)
# What to do instead on several machines, or with torchrun or srun.
_ON_SEVERAL = MappingProxyType(
    {
        "--folds": "run each fold by --data.num_folds and --data.fold",
        "--members": "run each member by --model.init_seed",
        "--minutes": "pass --epochs",
        _AUTO: "name a network",
    }
)


def run_fit(layers: Layers, typed: Sequence[str], began: float) -> None:
    """Decide a fit, and do it.

    Args:
        layers: Who has set what.
        typed: The command line, for run.json.
        began: `time.monotonic` when the command began.
    """
    with stopped_at_once():
        carry_out(decide(layers, shlex.join(["finetune", *typed]), began))


def run_decided(file: str) -> None:
    """Do the fit of a plan that another process has written, for a device, one of several fits, or a Python program."""
    with stopped_at_once():
        run = carry_out(read_plan(Path(file)))
    if is_rank_zero():
        answer(Path(file), "run", str(run.absolute()))


def carry_out(plan: Plan, end: Callable[[int], Any] | None = None) -> Path:
    """Do what a plan says, and return the folder of its run.

    Args:
        plan: What to do.
        end: Called with the exit code at a second Ctrl-C, in place of ending the process.
    """
    if plan.settings.num_fits > 1:
        return fit_several(plan)
    run = fit(plan, end).run.path
    assert run is not None, "a fit that has ended has a folder"
    return run


def decide(layers: Layers, command: str, began: float) -> Plan:
    """Return the plan of a fit: the run that it continues, its network, rate, length and all other settings.

    Args:
        layers: Who has set what.
        command: What the user typed, for run.json.
        began: `time.monotonic` when the command began, for `--minutes`.

    Raises:
        ValueError: Settings contradict each other, or do not go with the run or the checkpoint to continue.
    """
    plan, layers = _begun(layers, command)
    asked = plan.settings.model.backbone
    if plan.settings.folds is not None:
        plan = plan.put({"data.num_folds": plan.settings.folds, "data.fold": 1})
    if plan.settings.members is not None:
        plan = plan.put({"model.head_init": "xavier"})  # the members differ by nothing else
    if plan.run is None:
        plan = _put(plan, settle_optimizer(plan.settings, layers))
        plan = _put(plan, settle_clipping(plan.settings))
    _check_values(plan.settings)
    plan = _with_start(plan)
    seed_everything(plan.settings.seed_everything, workers=True, verbose=False)
    if plan.run is None:
        plan = _with_network(plan, layers)
    plan = _with_minutes(plan, layers, began)
    return _with_length(plan, asked)


def _put(plan: Plan, rule: Rule) -> Plan:
    values, note = rule
    return plan.put(values, note)


def _begun(layers: Layers, command: str) -> tuple[Plan, Layers]:
    """Return the beginning of a plan: what the user has set, on the settings of the run that continues, if any."""
    asked = layers.parse(FitSettings)
    if asked.num_fits > 1:
        _check_several(asked, layers)
    root = local_root(asked.trainer.default_root_dir, "fit")
    layers = layers.on_top(Layer("run", "decided", {"trainer.default_root_dir": root}))
    said = {name: value for name, value in flat(asked).items() if layers.is_explicit(name)}
    if not asked.resume:
        if asked.name is not None:
            check_unused(Path(root, "fit", asked.name))
        return Plan(_normal(layers.parse(FitSettings)), command, asked=said), layers
    run, note = run_to_continue(asked, layers, Path(root))
    if run is None:
        settings = replaced(layers.parse(FitSettings), {"resume": False})
        begins_again = asked.name is not None and has_only_begun(Path(root, "fit", asked.name))
        plan = Plan(
            _normal(settings), command, asked=said, begins_again=begins_again, notes=(note,)
        )
        return plan, layers
    return _continued(run, layers, command, note)


def _normal(settings: FitSettings) -> FitSettings:
    """Return settings with the weights of classes as numbers; a fit with a solved head runs its loop once."""
    weights = parse_class_weights(settings.model.class_weights)
    values = SOLVED_HEAD if settings.model.freeze == "backbone" else {}
    return replaced(settings, {"model.class_weights": weights, **values})


def _continued(run: Path, layers: Layers, command: str, note: str) -> tuple[Plan, Layers]:
    """Return the plan of a fit that continues a run, and the layers with that of the run."""
    own = settings_of_run(run, layers)
    asked = RunDir(run).facts.asked
    layers = without_repeated(layers, asked).below_configs(own)
    now = _normal(layers.parse(FitSettings))
    changes = changes_between(own.values, now)
    check_fixed(changes)
    of_run = {"resume": str(run), "trainer.default_root_dir": str(run.parent.parent)}
    start = None
    if now.num_fits > 1:
        _check_several(now, layers)
    else:
        start = read_start(RunDir(run).checkpoint("last"))
        check_resumable(start)
    if now.name not in (None, run.resolve().name):
        raise WrongUsage(
            f"--name {now.name}: the run to continue is {run}, which keeps its name: omit --name"
        )
    plan = Plan(replaced(now, of_run), command, run=run, start=start, changes=changes, asked=asked)
    return plan.put({}, note), layers


def _with_start(plan: Plan) -> Plan:
    """Read the checkpoint of `--ckpt_path`; that of a run that continues was read with its settings."""
    path = plan.settings.ckpt_path
    if plan.run is not None or path is None:
        return plan
    start = read_start(path)
    check_resumable(start)
    return replace(plan, start=start)


def _with_network(plan: Plan, layers: Layers) -> Plan:
    """Settle the network of a new run, its weights, and what depends on them."""
    if plan.start is None:  # else the weights are those of its checkpoint
        plan = _put(plan, settle_hub_backbone(plan.settings.model, layers))
    model = plan.settings.model
    if plan.settings.minutes is not None:
        _check_minutes(plan.settings, layers)
    if is_choice(model.backbone):
        if plan.start is None:
            _check_goes_with(_AUTO, plan.settings, layers)
        plan = choose_network(plan, layers)
    else:
        plan = _put(plan, settle_preparation(plan.settings.data, model, layers, plan.start))
    if plan.start is None and model.weights is not None and not is_choice(model.backbone):
        find_weights(model.weights, model.backbone)
    return _put(plan, settle_head_stages(plan.settings.model, layers))


def _with_minutes(plan: Plan, layers: Layers, began: float) -> Plan:
    settings = plan.settings
    if settings.minutes is None:
        return plan
    if plan.run is None:
        return settle_minutes(plan, layers, began)
    _check_minutes(settings, layers)
    if settings.trainer.max_steps != -1:
        raise WrongUsage(
            f"{plan.run} ends by trainer.max_steps {settings.trainer.max_steps}: pass that instead of --minutes to "
            "continue"
        )
    epochs = settings.trainer.max_epochs
    return plan.put(
        {"minutes": None}, f"--minutes is for new runs: {plan.run} continues to its {epochs} epochs"
    )


def _with_length(plan: Plan, asked: str) -> Plan:
    """Read the images, and settle the number of epochs, which depends on their number."""
    data = open_data(plan.settings.data)
    data.read()
    if "train" in data.splits:
        num = len(data.splits["train"])
        plan = _put(plan, settle_length(plan.settings.trainer, num, data.batch_size))
    recorded = None if plan.run is None else RunDir(plan.run).facts.identity
    identity = Identity(
        place=real_place(data.root) if data.root else "",
        data_class=plan.settings.data.class_path,
        network=asked if recorded is None else recorded.network,
        chosen=plan.settings.model.backbone,
        folds=plan.settings.folds,
        members=plan.settings.members,
    )
    return replace(plan, identity=identity, data=data)


def _check_values(settings: FitSettings) -> None:
    """Check what is possible without images and a network: settings together, and what torch makes of them.

    Raises:
        WrongUsage: A value is invalid, or does not go with another one.
    """
    model = settings.model
    trainer = settings.trainer
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise WrongUsage("is 0: nothing to train", f"trainer.{name}")
    if model.freeze == "backbone" and settings.ckpt_path is not None:
        raise WrongUsage(
            "--ckpt_path continues training, and model.freeze backbone has none: pass it as --weights"
        )
    _check_optimizer(model)
    check_num_processes(trainer.devices, trainer.accelerator)
    has_gpu = trainer.accelerator not in ("cpu", "auto") or (
        trainer.accelerator == "auto" and torch.accelerator.is_available()
    )
    devices = str(trainer.devices)
    if not has_gpu and devices != "auto" and not (devices.isdigit() and int(devices) > 0):
        raise WrongUsage(
            f"{devices}: there is no GPU on this machine; on a CPU pass a number of processes, such as 2",
            "trainer.devices",
        )


def _check_optimizer(model: ModelSettings) -> None:
    """Make optimizer and scheduler of a fit for a single parameter, and step them.

    Raises:
        WrongUsage: One of their arguments is wrong.
    """
    make = optimizer_maker(model)
    try:
        optimizer = make([torch.zeros(1, 1, requires_grad=True)])
    except (ValueError, TypeError) as error:
        name = "model.optimizer.lr" if "learning rate" in str(error) else "model.optimizer"
        raise WrongUsage(reason(error), name) from error
    make_scheduler = scheduler_maker(model)
    if make_scheduler is None:
        return
    try:
        set_run_steps(optimizer, _SOME_STEPS)
        scheduler = make_scheduler(optimizer)
        # torch warns of a scheduler that is stepped before its optimizer, and checks few arguments before the step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise WrongUsage(reason(error), "model.scheduler") from error


def _check_goes_with(option: str, settings: FitSettings, layers: Layers) -> None:
    """Check that no other setting contradicts `--folds`, `--members`, `--minutes` or `--backbone auto`.

    Raises:
        WrongUsage: Another setting contradicts it, or there are several machines or a launcher.
    """
    for name, why in _NOT_WITH[option].items():
        if (
            layers.is_explicit(name)
            and layers.value(name) != settings_of(FitSettings)[name].default
        ):
            raise WrongUsage(f"does not go with {option}: {why}", name)
    if settings.trainer.num_nodes != 1 or has_launcher():
        raise WrongUsage(
            f"{option} works on one machine, and starts its processes itself: with torchrun or srun "
            f"{_ON_SEVERAL[option]}"
        )


def _check_several(settings: FitSettings, layers: Layers) -> None:
    """Refuse what a cross-validation or an ensemble cannot have.

    Raises:
        WrongUsage: A setting does not go with several fits, or a launcher has started this process.
    """
    option = "--members" if settings.folds is None else "--folds"
    _check_goes_with(option, settings, layers)
    if any(is_address(layer.values.get("trainer.default_root_dir")) for layer in layers.layers):
        raise WrongUsage(
            f"{option} writes to a local folder: pass one as --out, and copy it to object storage afterwards"
        )


def _check_minutes(settings: FitSettings, layers: Layers) -> None:
    """Make sure that a fit can have `--minutes`.

    Raises:
        WrongUsage: Another setting contradicts it, or validation is not a share of an epoch.
    """
    _check_goes_with("--minutes", settings, layers)
    interval = settings.trainer.val_check_interval
    if interval is not None and not (isinstance(interval, float) and 0 < interval <= 1):
        raise WrongUsage(
            f"{interval} is a number of batches, and --minutes chooses how many an epoch has: set it as a share of "
            "the epoch, such as 0.5",
            "trainer.val_check_interval",
        )
