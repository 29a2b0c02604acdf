"""Decide a fit: from what the user has set to a plan in which nothing is open, in one place and in one process."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from pytorch_lightning import seed_everything

from finetune.data.addresses import joined, real_place
from finetune.data.class_weights import parse_class_weights
from finetune.data.data_place import at_place
from finetune.distributed.launch import has_launcher
from finetune.fitting.build import local_root, open_data
from finetune.fitting.defaults import (
    Rule,
    settle_clipping,
    settle_head_stages,
    settle_hub_backbone,
    settle_optimizer,
    settle_preparation,
)
from finetune.fitting.fit_checks import check_folds, check_minutes, check_values
from finetune.fitting.minutes import settle_minutes
from finetune.fitting.network_choice import choose_network
from finetune.fitting.plan import Plan
from finetune.models.backbones import check_name
from finetune.models.candidates import is_choice
from finetune.models.checkpoint_values import class_paths
from finetune.models.weights import check_weights
from finetune.runs.changes import changes_between, check_fixed, held_settings
from finetune.runs.folder import check_name as check_run_name
from finetune.runs.folder import check_unused, has_result
from finetune.runs.identity import Identity, check_has_last, find_run, read_identity
from finetune.runs.local_copies import check_is_in, shown_place
from finetune.runs.resume import check_resumable, read_start
from finetune.runs.run_dir import RunDir
from finetune.runs.run_download import fetch_run
from finetune.settings.layers import Layer, Layers, read_config, replaced
from finetune.settings.schema import IMAGE_FOLDER, FitSettings
from finetune.system.messages import NotFound, WrongUsage
from finetune.training.run_length import SOLVED_HEAD, settle_length

_PLACES = ("root", "table", "corrections")
_CLASSES = ("data", "model.optimizer", "model.scheduler")
_TRUSTED = (
    "finetune.",
    "torch.optim.",
    "albumentations.",
)  # the modules of classes that a run may name


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
    if plan.run is None:
        plan = _put(plan, settle_optimizer(plan.settings, layers))
        plan = _put(plan, settle_clipping(plan.settings))
    check_values(plan.settings)
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
    if asked.folds is not None:
        check_folds(asked, layers)
    root = local_root(asked.trainer.default_root_dir, "fit")
    layers = layers.on_top(Layer("run", "decided", {"trainer.default_root_dir": root}))
    if not asked.resume:
        if asked.name is not None:
            check_run_name(asked.name)
            check_unused(Path(root, "fit", asked.name))
        return Plan(_normal(layers.parse(FitSettings)), command), layers
    run, note = _run_to_continue(asked, layers, Path(root))
    if run is None:
        settings = replaced(layers.parse(FitSettings), {"resume": False})
        return Plan(_normal(settings), command, notes=(note,)), layers
    return _continued(run, layers, command, note)


def _normal(settings: FitSettings) -> FitSettings:
    """Return settings with the weights of classes as numbers; a fit with a solved head runs its loop once."""
    weights = parse_class_weights(settings.model.class_weights)
    values = SOLVED_HEAD if settings.model.freeze == "backbone" else {}
    return replaced(settings, {"model.class_weights": weights, **values})


def _run_to_continue(asked: FitSettings, layers: Layers, root: Path) -> tuple[Path | None, str]:
    """Return the run that `--resume` continues, None for none, and a note about the choice.

    Raises:
        ValueError: The run that is named is of other data or another network, or has no checkpoint from which training
            can continue; or there is neither a run to continue nor data for a new one.
    """
    wanted = _wanted(asked, layers)
    if isinstance(asked.resume, str):
        out = layers.value("trainer.default_root_dir") if _is_explicit_root(layers) else None
        run = Path(asked.resume)
        if len(run.parts) < 3 or ".." in run.parts:  # the folder of runs is its second parent
            run = Path(os.path.abspath(run))
        _check_named(run, replace(wanted, place=""))
        check_is_in(out, run)
        return run, ""
    if asked.name is not None:
        run = root / "fit" / asked.name
        fetch_run(run)
        if not run.exists() or not (has_result(run) or RunDir(run).num_folds):
            check_run_name(asked.name)
            check_unused(run)
            _check_has_data(asked, f"no run {shown_place(run)}")
            return None, f"--resume found no run {shown_place(run)}: a new run begins"
        _check_named(run, replace(wanted, place=""))
        return run, ""
    found = find_run(root, wanted)
    passed = found.passed_in_words()
    if found.run is None or found.begun is not None:
        where = shown_place((root / "fit").resolve())
        why = f", since {passed}" if passed else ""
        what = f"no run of these data and this network in {where} to continue{why}"
        if found.begun is not None:
            what = f"that {found.begun} ended before its first checkpoint"
        _check_has_data(asked, what)
        return None, f"--resume found {what}: a new run begins"
    fetch_run(found.run)
    check_has_last(found.run)
    return found.run, passed and f"passed over: {passed}"


def _is_explicit_root(layers: Layers) -> bool:
    return any(
        layer.kind == "flag" and "trainer.default_root_dir" in layer.values
        for layer in layers.layers
    )


def _wanted(asked: FitSettings, layers: Layers) -> Identity:
    """Return the data and the network that the user names; "" and None for any."""
    place = asked.data.table or asked.data.root
    is_folder = (
        asked.data.class_path == IMAGE_FOLDER
    )  # the default, which continues a run of any data class
    return Identity(
        place=real_place(place) if place else "",
        data_class="" if is_folder else asked.data.class_path,
        network=asked.model.backbone if layers.is_explicit("model.backbone") else "",
        folds=asked.folds,
    )


def _check_named(run: Path, wanted: Identity) -> None:
    """Check that a run that the user names can continue.

    Raises:
        ValueError: It has no checkpoint, another number of folds, or is of another network or data class.
    """
    fetch_run(run)
    check_has_last(run)
    folds = RunDir(run).num_folds
    if folds is None and not RunDir(run).has("last"):
        last = shown_place(RunDir(run).checkpoint("last"))
        raise NotFound(f"--resume {shown_place(run)}: there is no {last} to continue from")
    if wanted.folds not in (None, folds):
        has = f"{folds} folds" if folds else "no folds"
        raise WrongUsage(f"{run} has {has}, not {wanted.folds}: omit --folds")
    identity = read_identity(run)
    if identity is not None and (difference := identity.difference(wanted)):
        raise WrongUsage(f"--resume {run}: the run is {difference}")


def _check_has_data(asked: FitSettings, why: str) -> None:
    """Check that there is data for a new run.

    Raises:
        NotFound: There is none.
    """
    is_folder = asked.data.class_path == IMAGE_FOLDER
    if is_folder and asked.data.root is None and asked.data.table is None:
        hint = "and there is no data for a new one: finetune fit FOLDER --resume"
        raise NotFound(f"--resume found {why}, {hint}")


def _continued(run: Path, layers: Layers, command: str, note: str) -> tuple[Plan, Layers]:
    """Return the plan of a fit that continues a run, and the layers with that of the run."""
    own = _settings_of(run, layers)
    layers = layers.below_configs(own)
    before = Layers("fit", (own,)).parse(FitSettings)
    now = _normal(layers.parse(FitSettings))
    if is_choice(now.model.backbone):  # the run has chosen
        chosen = {f"model.{name}": getattr(before.model, name) for name in ("backbone", "weights")}
        now = replaced(now, chosen)
    changes = changes_between(before, now)
    check_fixed(changes, before.model.members)
    held: dict[str, Any] = {
        name: reduce(getattr, name.split("."), before) for name in held_settings(changes)
    }
    held |= {"resume": str(run), "trainer.default_root_dir": str(run.parent.parent)}
    start = None
    if now.folds is not None:
        check_folds(now, layers)
    else:
        start = read_start(RunDir(run).checkpoint("last"))
        check_resumable(start)
    if now.name not in (None, run.resolve().name):
        raise WrongUsage(
            f"--name {now.name}: the run to continue is {run}, which keeps its name: omit --name"
        )
    plan = Plan(replaced(now, held), command, run=run, start=start, changes=changes)
    return plan.put({}, note), layers


def _settings_of(run: Path, layers: Layers) -> Layer:
    """Return the settings of a run as a layer, without those of the command that began it.

    Raises:
        ValueError: config.yaml is missing or damaged.
    """
    path = run / "config.yaml"
    try:
        values = dict(read_config("fit", str(path), "run").values)
    except FileNotFoundError:
        raise NotFound(f"--resume {run}: it has no config.yaml, so it cannot continue") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; begin a new run without --resume") from error
    _check_trusted(path, values, layers)
    for name in ("resume", "allow_changes", "ckpt_path", "minutes", "name"):
        values.pop(name, None)
    if has_launcher():  # torchrun or srun decides; the run may have begun with another number
        values.pop("trainer.devices", None)
        values.pop("trainer.num_nodes", None)
    explicit = [name for name in ("root", "table") if layers.is_explicit(f"data.{name}")]
    data = {name[5:]: values.pop(name) for name in list(values) if name.startswith("data.")}
    folder = str(RunDir(run).facts().get("folder") or "")
    if os.path.isdir(folder) and not os.path.samefile(folder, os.curdir):
        # the paths of the data are relative to the folder in which the run began
        data |= {name: joined(folder, data[name]) for name in _PLACES if data.get(name)}
    values |= {f"data.{name}": value for name, value in at_place(data, explicit).items()}
    return Layer(str(path), "run", values)


def _check_trusted(config: Path, values: Mapping[str, Any], layers: Layers) -> None:
    """Check that a run's config.yaml names no class of a module of others: importing it runs its code.

    Raises:
        ValueError: It does.
    """
    named = [(f"{name}.class_path", values.get(f"{name}.class_path")) for name in _CLASSES]
    named += [
        ("data.augmentations", path) for path in class_paths(values.get("data.augmentations"))
    ]
    for name, class_path in named:
        is_known = "." not in str(class_path) or str(class_path).startswith(_TRUSTED)
        if not is_known and not layers.is_explicit(name):
            option = name.removesuffix(".class_path")
            raise ValueError(
                f"{config} names the class {class_path}, and importing it runs its code: if you trust it, pass "
                f"--{option} with it"
            )


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
        check_minutes(plan.settings, layers)
    if is_choice(model.backbone):
        plan = choose_network(plan, layers)
    else:
        plan = _put(plan, settle_preparation(plan.settings.data, model, layers, plan.start))
    if plan.start is None and model.weights is not None and not is_choice(model.backbone):
        check_name(model.backbone)
        check_weights(model.weights, model.backbone)
    return _put(plan, settle_head_stages(plan.settings.model, layers))


def _with_minutes(plan: Plan, layers: Layers, began: float) -> Plan:
    settings = plan.settings
    if settings.minutes is None:
        return plan
    if plan.run is None:
        return settle_minutes(plan, layers, began)
    check_minutes(settings, layers)
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
    recorded = None if plan.run is None else read_identity(plan.run)
    identity = Identity(
        place=real_place(data.root) if data.root else "",
        data_class=plan.settings.data.class_path,
        network=asked if recorded is None else recorded.network,
        chosen=plan.settings.model.backbone,
        folds=plan.settings.folds,
    )
    return replace(plan, identity=identity, data=data)
