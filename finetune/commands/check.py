"""`finetune check`: find faults of a data set before training on it."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.checking.checks import (
    class_findings,
    file_findings,
    scan_findings,
)
from finetune.data.checking.copies import duplicate_findings, find_copies, is_blank
from finetune.data.checking.findings import Finding, worst_first
from finetune.data.checking.image_facts import Facts, collect_facts, inspect_images
from finetune.data.checking.series import series_findings
from finetune.data.checking.shortcuts import shortcut_findings
from finetune.data.corrections import correct, read_corrections
from finetune.data.data_set import DataSet
from finetune.data.datasets.scan import scan
from finetune.data.listing import ScanOptions
from finetune.data.tables.table_columns import parse_columns
from finetune.reports.check_page import write_json, write_lists, write_page
from finetune.settings.all_commands import CheckSettings
from finetune.system.files import check_target
from finetune.system.machine import sleep_at_once
from finetune.system.messages import WrongUsage, as_wrong_usage, counted, is_bug, reason, shown
from finetune.system.progress import track

if TYPE_CHECKING:
    from finetune.features.image_features import FeatureNetwork


def check(options: CheckSettings) -> None:
    """Find errors in a data set: files, classes, copies across splits, likely label errors, shortcuts.

    Writes the page check.html, and check.json. Nothing is changed, moved or deleted. The exit code is 0 if nothing was
    found, 1 if something was found, and 2 if the check failed.
    """
    began = time.perf_counter()
    try:
        if Path(options.output).suffix in (".html", ".json") and not os.path.isdir(options.output):
            raise WrongUsage(
                f"--out {options.output} must be a folder: check.html and check.json are written into it"
            )
        for file in ("check.html", "check.json"):
            check_target(Path(options.output, file), "--out")
        _check_is_ours(Path(options.output))
        if options.lists is not None:
            check_target(Path(options.lists, "unreadable.txt"), "--lists")
        how = ScanOptions(
            root=options.root,
            columns=parse_columns(options.columns),
            separator=options.label_separator,
            labels=options.labels,
        )
        data = scan(options.folder, how, prefix="")
        if options.corrections is not None:
            decisions = read_corrections(options.corrections, "--corrections")
            data = correct(data, options.corrections, decisions, with_test=True)
            if data.corrections is not None:
                print(data.corrections.line())
        # before images are read, so that an error comes early
        with as_wrong_usage("--weights" if options.ckpt_path is None else "--ckpt_path"):
            network = label_network(
                options.weights, options.backbone, options.image_size, options.ckpt_path
            )
        num = len(data)
        facts = collect_facts(track(inspect_images(data.paths), num, "reading images"), num)
        findings = worst_first([*_findings(data, facts, network)])
        seconds = time.perf_counter() - began
        Path(options.output).mkdir(parents=True, exist_ok=True)
        network_name = network.name if network else ""
        write_json(Path(options.output, "check.json"), data, findings, network_name)
        write_page(Path(options.output, "check.html"), data, findings, seconds, network_name)
        num_unlisted = (
            0 if options.lists is None else write_lists(Path(options.lists), data, findings)
        )
    except (OSError, ValueError) as error:
        if isinstance(error, WrongUsage) or is_bug(error):
            raise
        raise WrongUsage(reason(error)) from error  # whose exit code says that the check failed
    _print_findings(data, findings)
    print(
        f"report in {Path(options.output, 'check.html')}, as JSON in {Path(options.output, 'check.json')}"
    )
    if options.lists is not None:
        print(f"lists in {options.lists}")
    if num_unlisted:
        print(
            f"{counted(num_unlisted, 'file')} with a line break in the name cannot be listed: see check.json"
        )
    sys.exit(any(finding.is_judged for finding in findings))


def _check_is_ours(folder: Path) -> None:
    """Make sure that check.html and check.json of a folder, if it has any, are those of an earlier check.

    Raises:
        WrongUsage: They are not.
    """
    if not any((folder / name).exists() for name in ("check.html", "check.json")):
        return
    try:
        is_ours = "findings" in json.loads((folder / "check.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        is_ours = False
    if not is_ours:
        raise WrongUsage(
            f"{folder} has a check.html or check.json that finetune did not write: pass --out FOLDER"
        )


def label_network(
    weights: str | None, backbone: str, image_size: int, ckpt_path: str | None
) -> "FeatureNetwork | None":
    """Return the network for features, and how images are prepared for it; None without weights.

    Args:
        weights: Weights, as `--model.weights` takes them.
        backbone: The network of these weights.
        image_size: Side in pixels of its input.
        ckpt_path: A checkpoint, whose network, size and preparation are used instead.

    Raises:
        WrongUsage: Weights and a checkpoint are named, or the weights do not fit the network or the size.
    """
    preparation: dict[str, Any] = {}
    if ckpt_path is not None:
        if weights is not None:
            raise WrongUsage("pass --weights or --ckpt_path, not both")
        from finetune.data.transforms import preparation as evaluation
        from finetune.runs.checkpoint_io import read_checkpoint

        checkpoint = read_checkpoint(ckpt_path)
        weights = ckpt_path
        backbone = checkpoint["hyper_parameters"]["backbone"]
        data = checkpoint["datamodule_hyper_parameters"]
        preparation = evaluation(data)
        image_size = preparation["image_size"]
    if weights is None:
        return None
    sleep_at_once()
    from finetune.features.image_features import FeatureNetwork, Features  # with torch, for seconds
    from finetune.models.weights import describe_weights

    if ckpt_path is None:
        preparation = describe_weights(weights, backbone).preparation
    return FeatureNetwork(
        f"{backbone} of {weights} at {image_size} pixels",
        Features(backbone, weights, image_size),
        {**preparation, "image_size": image_size},
    )


def _findings(data: DataSet, facts: Facts, network: "FeatureNetwork | None") -> Iterator[Finding]:
    """Yield all findings, those that need a network only if there is one."""
    copies = find_copies(facts)
    chosen = copies.distinct
    if network is not None and len(chosen):
        from finetune.features.image_features import image_features
        from finetune.features.label_errors import label_findings

        paths = [data.paths[int(i)] for i in chosen]
        parts = image_features(network.features, paths, network.preparation)
        features = np.stack(list(track(parts, len(paths), "computing features")))
        yield from label_findings(data, chosen, features.astype(np.float64), copies.near)
    yield from duplicate_findings(data, copies.exact, copies.near)
    yield from file_findings(facts)
    yield from scan_findings(data)
    if data.label_kind == "several":
        return
    yield from class_findings(data)
    seen = np.flatnonzero(facts.is_readable & ~is_blank(facts))
    yield from series_findings(data, facts, seen)
    yield from shortcut_findings(facts, seen, "class", data.set_of, data.class_names)
    yield from shortcut_findings(facts, seen, "split", data.split_of, list(data.splits))


def _print_findings(data: DataSet, findings: list[Finding]) -> None:
    by_split = ", ".join(f"{n} {len(part):,}" for n, part in data.splits.items() if n != "all")
    classes = counted(len(data.class_names), "class", "classes")
    if data.label_kind == "several":
        classes += ", several labels per image"
    splits = f" ({by_split})" if by_split else ""
    print(f"{shown(data.place)}: {counted(len(data), 'image')} in {classes}{splits}")
    for finding in findings:
        first = finding.rows[0] if finding.rows else None
        example = ""
        if first is not None:
            named = " = ".join(map(data.name, first.images[:2]))
            such_as = ", such as " if len(finding.rows) > 1 else ": "
            example = such_as + (f"{named} ({first.note})" if named else first.note)
        print(
            f"  {finding.level if finding.is_judged else 'look':<8} {shown(finding.title + example)}"
        )
    if not any(finding.is_judged for finding in findings):
        print("  no problems found")
