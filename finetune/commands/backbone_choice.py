"""`--backbone auto`: choose the network of a fit by its images, before any network is built."""

import gc
import json
import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities.seed import isolate_rng

from finetune.commands.dependent_defaults import settle_preparation
from finetune.commands.explicit_settings import ExplicitSettings
from finetune.commands.minutes import check_minutes
from finetune.commands.options import flag_names
from finetune.commands.resumption import data_module
from finetune.data.data_settings import missing_split_message
from finetune.data.decode import DecodeError
from finetune.data.samples import Samples
from finetune.data.transforms import eval_transform, preparation
from finetune.distributed.launch import is_launched
from finetune.distributed.signals import is_rank_zero
from finetune.features.backbone_ranking import FeaturesOf, OutOfTime, Ranking, Unusable, rank
from finetune.features.image_features import Features, features_of
from finetune.models.backbones import check_name
from finetune.models.candidates import (
    AUTO,
    DEFAULT,
    Candidate,
    built_in_candidates,
    cached_file,
    candidate_names,
    is_choice,
    is_published,
    is_reachable,
    weights_server,
)
from finetune.models.hub import is_hub
from finetune.models.timm_backbones import backbone_of, folder_of
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.resume import Start
from finetune.runs.run_checkpoint import checkpoint_of
from finetune.system.messages import NotFound, WrongUsage, counted, reason
from finetune.system.progress import duration, track

log = logging.getLogger(__name__)

_CHOSEN_VARIABLE = "FINETUNE_BACKBONE"  # of the environment: the choice of rank 0, for other ranks
# Time for the ranking: a share of --minutes; without --minutes seconds.
_BUDGET_SHARE = 0.2
_BUDGET_SECONDS = 120.0
_WEIGHTS = "model.weights"
_ACCURACY = "accuracy"
_ACCURACY_OF_RAREST = "accuracy on the rarest label of each image"


class BackboneChoice(NamedTuple):
    """How the network was chosen. The network itself is in the config.

    Attributes:
        messages: Lines to log.
        record: The ranking, for about.json; None if there was none.
    """

    messages: list[str]
    record: dict[str, Any] | None = None


def settle_backbone(
    config: Any, explicit: ExplicitSettings, start: Start | None = None
) -> BackboneChoice:
    """Choose the network of a fit if its config leaves that to the data.

    The choice is written to the config like an explicit setting, so that a repeated or resumed run does not rank again.

    Args:
        config: As parsed, with the subcommand; changed in place.
        explicit: The settings that configs and flags give.
        start: The checkpoint from which training starts, whose network is used; None for none.

    Raises:
        WrongUsage: The candidates are invalid, or another option does not go with a choice among networks.
        OSError: The weights of no candidate can be used.
    """
    options = config["fit"]
    if not is_choice(options.model.backbone):
        return BackboneChoice([])
    _check_configs(explicit)
    record = None
    messages = []
    if start is not None:
        settings = start.content["hyper_parameters"]
        chosen = Candidate(settings["backbone"], settings.get("weights"))
        messages.append(
            f"the network is that of {start.path}, {chosen.backbone}: nothing is ranked"
        )
    elif not is_rank_zero():
        if _CHOSEN_VARIABLE not in os.environ:
            raise WrongUsage(
                f"{_option()} must start the processes of the other devices itself: name a network instead"
            )
        chosen = Candidate(*json.loads(os.environ[_CHOSEN_VARIABLE]))
    else:
        _check_options(options, explicit)
        chosen, record, messages = _rank_candidates(config, explicit)
        os.environ[_CHOSEN_VARIABLE] = json.dumps(chosen)
    _write_candidate(config, chosen)
    return BackboneChoice([*messages, settle_preparation(config, explicit, start)], record)


def _rank_candidates(
    config: Any, explicit: ExplicitSettings
) -> tuple[Candidate, dict[str, Any], list[str]]:
    """Rank the candidates; return the best one, the ranking for about.json, and what to log."""
    options = config["fit"]
    candidates = sorted(
        candidates_of(options.model.backbone, options.model.weights), key=_needs_download
    )
    data = data_module(options.data.class_path, options.data.init_args.as_dict())
    if "train" not in data.splits:
        raise ValueError(missing_split_message(data.root, "train"))
    split = data.splits["train"]
    budget = _BUDGET_SECONDS if options.minutes is None else _BUDGET_SHARE * 60 * options.minutes
    log.info(
        "ranking %s by features, in at most about %s",
        counted(len(candidates), "network"),
        duration(budget),
    )
    began = time.monotonic()
    reachable: dict[str, bool] = {}
    by_name = dict(zip(candidate_names(candidates), candidates, strict=True))
    networks = {
        name: partial(_load, name, candidate, config, explicit, split, reachable)
        for name, candidate in by_name.items()
    }
    seed = options.get("seed_everything")
    # If images have several labels, the head predicts the rarest one of each image, or that it has none.
    num_strata = len(data.class_names)
    has_several = data.label_kind == "several"
    if has_several:
        num_strata += 1
    with isolate_rng():  # the ranking must not change the random numbers of the fit
        ranking = rank(
            networks,
            split.targets.strata(),
            num_strata,
            budget,
            seed if type(seed) is int else 0,
            split.groups,
        )
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # subprocesses may train on this GPU
    if not ranking.standings:
        hint = "pass runs or folders of timm's: --weights A,B"
        raise OSError(f"{_option()}: no network can be used: {_reasons(ranking.unusable)}; {hint}")
    chosen = by_name[ranking.standings[0].name]
    record = _record(ranking, chosen, len(split), time.monotonic() - began, budget)
    record["metric"] = _ACCURACY_OF_RAREST if has_several else _ACCURACY
    return chosen, record, list(describe_ranking(record))


def describe_ranking(record: dict[str, Any]) -> list[str]:
    """Return a line about a ranking, and further lines if it is incomplete."""
    best = record["rows"][0]
    rows = []
    for row in record["rows"]:
        of = "" if row["num_images"] == best["num_images"] else f" of {row['num_images']} images"
        scores = f"{row['loss']:.3f}, {100 * row['accuracy']:.1f} %"
        rows.append(f"{row['name']} {scores}{of} ({duration(row['seconds'])})")
    images = f"{best['num_images']} training images"
    if best["num_images"] < record["num_train"]:
        images = f"{best['num_images']} of {record['num_train']} training images"
    lines = [
        f"backbone {best['name']}, chosen in {duration(record['seconds'])} by the cross-validated log loss of a head "
        f"on frozen features of {images}; log loss and {record.get('metric', _ACCURACY)} there: {'; '.join(rows)}"
    ]
    if record["is_cut"]:
        untried = f"; not tried: {', '.join(record['untried'])}" if record["untried"] else ""
        lines.append(f"the ranking ended early, after its {duration(record['budget'])}{untried}")
    if record["unusable"]:
        lines.append(f"not ranked: {_reasons(record['unusable'])}")
    return lines


def _record(
    ranking: Ranking, chosen: Candidate, num_train: int, seconds: float, budget: float
) -> dict[str, Any]:
    return {
        "backbone": chosen.backbone,
        "weights": chosen.weights,
        "num_train": num_train,
        "seconds": round(seconds, 2),
        "budget": budget,
        "rows": [
            {
                "name": standing.name,
                "accuracy": round(standing.accuracy, 4),
                "loss": round(standing.loss, 4),
                "num_images": standing.num_images,
                "seconds": round(standing.seconds, 2),
            }
            for standing in ranking.standings
        ],
        "unusable": ranking.unusable,
        "untried": ranking.untried,
        "is_cut": ranking.is_cut,
    }


def _load(
    name: str,
    candidate: Candidate,
    config: Any,
    explicit: ExplicitSettings,
    split: Samples,
    reachable: dict[str, bool],
) -> FeaturesOf:
    """Return a function that computes a candidate's features of training images, prepared as in its fit.

    Args:
        name: What the candidate is called in messages.
        candidate: The network.
        config: As parsed; not changed.
        explicit: The settings that configs and flags give.
        split: The training images.
        reachable: Which servers have answered; completed in place.

    Raises:
        Unusable: Its weights are not available, or it does not take images of this size.
    """
    weights = _weights_here(candidate, reachable)
    candidate_config = config.clone()
    _write_candidate(candidate_config, candidate)
    try:
        settle_preparation(candidate_config, explicit)
        settings = candidate_config["fit"].data.init_args.as_dict()
        prepare = preparation(settings)
        network = Features(candidate.backbone, weights, settings["image_size"])
    except (ValueError, OSError) as error:
        raise Unusable(reason(error)) from error
    size = prepare["image_size"]
    try:
        network(torch.zeros(1, 3, size, size, dtype=torch.uint8))
    except Exception as error:  # networks raise different errors if images are too small
        raise Unusable(f"it does not take images of {size} pixels ({reason(error)})") from error
    transform = eval_transform(**prepare)
    samples = _decoded_small(split, size)

    def prepared(index: int) -> np.ndarray:
        try:
            image = samples.read(index)
        except DecodeError:  # the fit reports it
            image = np.zeros((size, size, 3), np.uint8)
        return transform(image=image)["image"]

    def features(chosen: NDArray[np.integer], deadline: float | None) -> NDArray[np.floating]:
        rows: list[NDArray[np.floating]] = []
        for row in track(
            features_of(network, samples, chosen.tolist(), prepared, size),
            len(chosen),
            f"features of {name}",
        ):
            rows.append(row)
            if deadline is not None and len(rows) < len(chosen) and time.monotonic() > deadline:
                raise OutOfTime
        return np.stack(rows)

    return features


def _decoded_small(split: Samples, size: int) -> Samples:
    """Return the images such that a JPEG much larger than needed is decoded at a fraction of its size."""
    if split.cached is None and split.shorter_side is None:
        return replace(split, shorter_side=2 * size)
    return split


def _weights_here(candidate: Candidate, reachable: dict[str, bool]) -> str:
    """Return the source of a candidate's weights: a file on this machine, or else a name to download.

    Raises:
        Unusable: They are not on this machine and cannot be downloaded.
    """
    if not is_published(candidate):
        return candidate.weights
    file = cached_file(candidate)
    if file is not None:
        # torchvision's weights are read by name, which checks their hash; timm would query the hub first.
        return str(file) if candidate.backbone.startswith("timm/") else candidate.weights
    address = weights_server(candidate)
    if address not in reachable:
        reachable[address] = bool(address) and is_reachable(address)
    if not reachable[address]:
        where = f"{address} cannot be reached" if address else "HF_HUB_OFFLINE forbids downloads"
        raise Unusable(f"not on this machine, and {where}")
    log.info("downloading the weights of %s", candidate.backbone)
    return candidate.weights


def candidates_of(backbone: str, weights: str | None) -> list[Candidate]:
    """Return the networks to choose from.

    Args:
        backbone: `auto`, or names separated by commas.
        weights: DEFAULT; with `auto` also candidates separated by commas; with names also weights that all of them
            have.

    Raises:
        WrongUsage: They are invalid.
    """
    if weights is None:
        raise WrongUsage(
            f"{_option()} ranks networks by their pretrained features: remove {flag_names('fit', _WEIGHTS)} null"
        )
    if backbone == AUTO:
        return (
            built_in_candidates()
            if weights == DEFAULT
            else [_candidate_of_weights(part) for part in _parts(weights)]
        )
    if "," in weights or os.path.exists(os.path.expanduser(weights)):
        raise WrongUsage(
            f"{flag_names('fit', _WEIGHTS)} {weights} is not for several networks: pass runs or folders of timm's "
            f"with {_option()}"
        )
    listed = _parts(backbone)
    for name in listed:
        check_name(name)
    return [Candidate(name, weights) for name in listed]


def _candidate_of_weights(part: str) -> Candidate:
    """Return the candidate that a part of `--weights` names: a folder of timm's, or a checkpoint."""
    path = os.path.expanduser(part)
    folder = folder_of(path)
    if folder is not None and (is_hub(path) or os.path.isfile(os.path.join(folder, "config.json"))):
        return Candidate(backbone_of(folder), path)
    if not os.path.exists(path):
        raise NotFound(
            f"{flag_names('fit', _WEIGHTS)} {part}: there is no such file or folder; with {_option()} pass runs or "
            "folders of timm's"
        )
    path, _ = checkpoint_of(path)
    return Candidate(read_checkpoint(path)["hyper_parameters"]["backbone"], path)


def _parts(text: str) -> list[str]:
    """Return the different parts of a list that is separated by commas."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _needs_download(candidate: Candidate) -> bool:
    """Return whether weights are not on this machine yet: such networks are ranked last."""
    return is_published(candidate) and cached_file(candidate) is None


def _check_configs(explicit: ExplicitSettings) -> None:
    """Refuse a config that names one network."""
    for source, settings in explicit.configs:
        backbone = settings.get("model.backbone")
        if backbone is not None and not is_choice(backbone):
            where = source if Path(source).is_file() else "the config"
            raise WrongUsage(
                f"{_option()} and the backbone {backbone} of {where} both choose the network: omit one"
            )


def _check_options(options: Any, explicit: ExplicitSettings) -> None:
    """Refuse options that cannot be combined with a choice among networks, before anything is computed."""
    if options.model.freeze not in (None, "backbone"):
        raise WrongUsage(
            f"{flag_names('fit', 'model.freeze')} {options.model.freeze}: stages have different names in each network; "
            f"with {_option()} only backbone can be frozen"
        )
    if options.trainer.num_nodes != 1 or is_launched():
        raise WrongUsage(
            f"{_option()} ranks networks on one machine, in one process: on several machines, name a network"
        )
    if options.minutes is not None:
        check_minutes(options.minutes, options, explicit)


def _write_candidate(config: Any, candidate: Candidate) -> None:
    model = config["fit"].model
    model.backbone = candidate.backbone
    model.weights = candidate.weights


def _reasons(unusable: dict[str, str]) -> str:
    """Return the unusable networks as text, grouped by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in unusable.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(networks)} ({why})" for why, networks in by_reason.items())


def _option() -> str:
    return f"--backbone {AUTO}"
