"""Small JSON files of a run that a resumed run continues, such as seconds.json. A damaged one does not stop it."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.system.messages import reason

log = logging.getLogger(__name__)

_Check = Callable[[dict[str, Any]], bool]


def read_side_file(path: Path, is_sound: _Check | None = None) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dict if there is no such file.

    Args:
        path: The file.
        is_sound: Returns whether a content is what a run writes to the file; None accepts any JSON object.

    Raises:
        ValueError: The file is damaged.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ValueError(f"{path} is damaged: {reason(error)}") from error
    if not isinstance(content, dict) or not (is_sound is None or is_sound(content)):
        raise ValueError(f"{path} is damaged: its content is not what a run writes there")
    return content


def continue_side_file(path: Path, is_sound: _Check, loss: str) -> dict[str, Any]:
    """Return the content of a JSON file; rename a damaged file and return an empty dict.

    Args:
        path: The file.
        is_sound: Returns whether a content is what a run writes to the file.
        loss: What the run lacks without the file, for the log.
    """
    try:
        return read_side_file(path, is_sound)
    except ValueError as error:
        set_aside(path, str(error), loss)
        return {}


def set_aside(path: Path, damage: str, loss: str) -> None:
    """Rename a damaged file, so that the run writes a new one, and log that.

    Args:
        path: The file.
        damage: The error message.
        loss: What the run lacks without the file.
    """
    aside = path.with_name(f"{path.name}.damaged")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    log.warning("%s; it is now called %s, and %s", damage, aside.name, loss)


def are_seconds(content: dict[str, Any]) -> bool:
    """Return whether seconds.json is sound."""
    return all(type(value) in (int, float) and 0 <= value < math.inf for value in content.values())


def are_names(content: dict[str, Any]) -> bool:
    """Return whether loggers.json is sound."""
    return all(type(value) is str for value in content.values())


def is_about(content: dict[str, Any]) -> bool:
    """Return whether about.json is sound."""
    names = ("command", "folder", "root", "fingerprint", "began", "ended")
    texts = [content.get(name) or "" for name in names]
    for name in ("lines", "doubts", "went_on_by"):
        lines = content.get(name, [])
        texts += lines if isinstance(lines, list) else [None]
    splits = content.get("splits", {})
    if not isinstance(splits, dict) or not all(
        isinstance(split, dict) for split in splits.values()
    ):
        return False
    counts = [split.get("counts") for split in splits.values()]
    are_counts = all(
        isinstance(count, dict) and all(type(num) is int for num in count.values())
        for count in counts
    )
    numbers = [split["num_images"] for split in splits.values() if "num_images" in split]
    return (
        are_counts
        and all(type(num) is int and num >= 0 for num in numbers)
        and all(type(text) is str for text in texts)
        and _is_ranking(content.get("backbone_ranking"))
        and _is_first_look(content.get("first_look"))
        and are_corrections(content.get("corrections"))
    )


def are_corrections(content: Any) -> bool:
    """Return whether a value is None or the numbers of `AppliedCorrections.plain`."""
    if content is None:
        return True
    if not isinstance(content, dict) or type(content.get("file")) is not str:
        return False
    splits = content.get("splits")
    if not isinstance(splits, dict) or not all(map(_is_corrected_split, splits.values())):
        return False
    return all(type(content.get(name)) is int for name in ("unknown", "in_test"))


def _is_corrected_split(split: Any) -> bool:
    names = ("changed", "excluded", "confirmed", "outdated")
    if not isinstance(split, dict) or not all(type(split.get(name)) is int for name in names):
        return False
    pairs = split.get("pairs")
    return isinstance(pairs, list) and all(
        isinstance(pair, list) and [type(value) for value in pair] == [str, str, int]
        for pair in pairs
    )


def _is_first_look(look: Any) -> bool:
    """Return whether a value is None or the result of `FirstLook.plain`."""
    if look is None:
        return True
    if not isinstance(look, dict) or not isinstance(look.get("findings"), list):
        return False
    are_numbers = all(type(look.get(name)) is int for name in ("num_files", "num_opened"))
    return are_numbers and all(map(_is_finding, look["findings"]))


def _is_finding(finding: Any) -> bool:
    if not isinstance(finding, dict) or not isinstance(finding.get("rows"), list):
        return False
    if not all(type(finding.get(name)) is str for name in ("level", "title")):
        return False
    return all(
        isinstance(row, dict)
        and isinstance(row.get("files"), list)
        and all(type(file) is str for file in row["files"])
        and type(row.get("note")) is str
        for row in finding["rows"]
    )


def _is_ranking(ranking: Any) -> bool:
    """Return whether the ranking of networks in about.json, if there is one, is sound."""
    if ranking is None:
        return True
    if not isinstance(ranking, dict) or not isinstance(ranking.get("unusable", {}), dict):
        return False
    if type(ranking.get("metric", "")) is not str:
        return False
    rows = ranking.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    numbers = [
        row.get(name) for row in rows for name in ("accuracy", "loss", "num_images", "seconds")
    ]
    numbers.append(ranking.get("seconds"))
    return all(type(number) in (int, float) for number in numbers) and all(
        type(row.get("name")) is str for row in rows
    )
