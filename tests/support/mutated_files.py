"""Mutated checkpoints, tables, configs and files of a run: by bytes, by entries of an archive, and by values."""

import csv
import io
import json
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

_NUMBERS: list[Any] = [True, -1, 0, 10**30, 1e308, math.nan, math.inf, -(2**63)]
_TEXTS: list[Any] = ["", "x" * 5000, "a\nb", "\0", "../..", b"\xff", "é\udcff"]
_NESTED: list[Any] = [[], {}, [[]], [None], {"": None}, [1, "a", 2.5], {"class_path": "os.mkdir"}]
_JUNK = [None, *_NUMBERS, *_TEXTS, *_NESTED]
_OTHER_TENSORS = (
    lambda tensor: tensor[:0],
    lambda tensor: torch.full_like(tensor, 127),
    lambda tensor: tensor.flatten(),
    lambda tensor: tensor.to(torch.int8),
    lambda tensor: tensor[None],
    lambda tensor: tensor.to(torch.complex64),
    lambda tensor: torch.zeros(3, 1, 1),
    lambda tensor: tensor.float() * math.nan,
)


class Canary:
    """An object whose unpickling creates a folder."""

    def __init__(self, path: Path, function: Callable[..., Any] = os.mkdir) -> None:
        self.path = str(path)
        self.function = function

    def __reduce__(self) -> Any:
        return self.function, (self.path,)


def other_bytes(content: bytes, rng: np.random.Generator) -> bytes:
    """Return a file's content with bits flipped, or a part overwritten, removed, repeated or joined to junk."""
    values = np.frombuffer(content, np.uint8).copy()
    place = int(rng.integers(len(values)))
    # as often in the first bytes, which are the header
    place = place if rng.random() < 0.5 else place % 400
    end = place + int(rng.integers(1, 400))
    form = rng.integers(6)
    if form == 0:
        for one in rng.integers(len(values), size=rng.integers(1, 9)):
            values[one] ^= 1 << rng.integers(8)
    if form == 1:
        values[place:end] = rng.integers(256, size=len(values[place:end]))
    if form == 2:
        return content[:place]
    if form == 3:
        return content[:place] + content[end:]
    if form == 4:
        return content[:end] + content[place:]
    return values.tobytes() + (rng.bytes(1000) if form == 5 else b"")


def other_value(content: Any, rng: np.random.Generator) -> Any:
    """Return a copy of nested dicts and lists in which one value is replaced or removed."""
    if isinstance(content, torch.Tensor):
        return _OTHER_TENSORS[rng.integers(len(_OTHER_TENSORS))](content)
    is_nested = isinstance(content, dict | list) and len(content) > 0
    if not is_nested or rng.random() < 0.1:
        return _JUNK[rng.integers(len(_JUNK))]
    keys = [*content] if isinstance(content, dict) else [*range(len(content))]
    key = keys[rng.integers(len(keys))]
    copy = content.copy()
    if rng.random() < 0.15:
        del copy[key]
    else:
        copy[key] = other_value(content[key], rng)
    return copy


def other_checkpoint(content: bytes, rng: np.random.Generator, canary: Path) -> bytes:
    """Return a checkpoint with other bytes, other entries, other values, or code."""
    form = rng.integers(5)
    if form == 0:
        return other_bytes(content, rng)
    if form == 1:
        return _other_entries(content, rng, canary)
    checkpoint = torch.load(io.BytesIO(content), weights_only=True)
    checkpoint = other_value(checkpoint, rng) if form < 4 else _with_code(checkpoint, rng, canary)
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()


def _with_code(checkpoint: dict[str, Any], rng: np.random.Generator, canary: Path) -> Any:
    function = (os.mkdir, os.system, eval, open)[rng.integers(4)]
    path = canary
    if function is os.system:
        path = Path(f"mkdir {canary}")
    if function is eval:
        path = Path(f"__import__('os').mkdir({str(canary)!r})")
    if function is open:
        return {**checkpoint, "extra": Canary(canary, os.makedirs)}
    keys = [*checkpoint]
    return {**checkpoint, keys[rng.integers(len(keys))]: Canary(path, function)}


def _other_entries(content: bytes, rng: np.random.Generator, canary: Path) -> bytes:
    """Return a zip in which one entry is renamed, removed, doubled, has other bytes, or is a pickle with code."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    chosen = int(rng.integers(len(entries)))
    form = rng.integers(5)
    if form == 4:
        chosen = next(i for i, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
    name, data = entries[chosen]
    names = ["../../evil", "", "a" * 300, entries[0][0], name.upper(), "archive/code/x.py"]
    replaced = {
        0: [(names[rng.integers(len(names))], data)],
        1: [],
        2: [(name, data), (name, data[: len(data) // 2])],
        3: [(name, other_bytes(data or b"a", rng))],
        4: [(name, pickle.dumps(Canary(canary), protocol=2))],
    }
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # about the name of the entry that is there twice
        for entry, value in entries[:chosen] + replaced[int(form)] + entries[chosen + 1 :]:
            archive.writestr(zipfile.ZipInfo(entry), value)
    return buffer.getvalue()


def cut(content: bytes, rng: np.random.Generator) -> bytes:
    """Return the beginning of a file, as after an error of the disk; a run replaces these files as a whole."""
    return content[: int(rng.integers(len(content)))]


def other_json(content: bytes, rng: np.random.Generator) -> bytes:
    if rng.random() < 0.3:
        return other_bytes(content, rng)
    return json.dumps(other_value(json.loads(content), rng), default=str).encode()


def other_lines(content: bytes, rng: np.random.Generator) -> bytes:
    """Return .jsonl with one other line."""
    lines = content.splitlines()
    i = int(rng.integers(len(lines)))
    lines[i] = other_json(lines[i], rng)
    return b"\n".join(lines)


def other_yaml(content: bytes, rng: np.random.Generator, canary: Path) -> bytes:
    if rng.random() < 0.3:
        return other_bytes(content, rng)
    if rng.random() < 0.2:
        return content + f"\nextra: !!python/object/apply:os.mkdir ['{canary}']\n".encode()
    changed = other_value(yaml.safe_load(content), rng)
    return yaml.safe_dump(changed, allow_unicode=True).encode("utf-8", "surrogatepass")


def other_csv(content: bytes, rng: np.random.Generator) -> bytes:
    """Return a table with one other cell, one row more or less, or other bytes."""
    if rng.random() < 0.4:
        return other_bytes(content, rng)
    rows = list(csv.reader(io.StringIO(content.decode())))
    row = int(rng.integers(len(rows))) if rng.random() < 0.8 else 0
    if rng.random() < 0.2:
        del rows[row]
    elif rng.random() < 0.2:
        rows.insert(row, rows[-1][: int(rng.integers(4))])
    else:
        rows[row][rng.integers(len(rows[row]))] = str(_JUNK[rng.integers(len(_JUNK))])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def other_zip(content: bytes, rng: np.random.Generator, canary: Path) -> bytes:
    if rng.random() < 0.6:
        return other_bytes(content, rng)
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(f"../{canary.name}", b"outside")
    return buffer.getvalue()
