"""Decoded pictures, kept on disk: decoded once, shared by workers, ranks and later runs; `finetune cache` lists them.

The name of a cache holds a hash of the relative path, size and times of change of every file (`files_digest` says what
it can't notice), of the folder's own path and of all else that decides about the pixels: another file, another setting,
another version of ours or of Pillow is another cache.
"""

# Shapes: N pictures in a cache.

import hashlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg
import torch
from rich.console import Console
from rich.progress import track

import finetune
from finetune.data.decode import DecodeError, decode, stored_size
from finetune.data.memmap import MemmapImages, TooLarge, opened, write_memmap
from finetune.data.samplers import ESTIMATE, some_of
from finetune.data.samples import CachedImages, Samples
from finetune.data.storage import concatenated, files_digest
from finetune.distributed.signals import is_first_process
from finetune.system.cache_dir import PICTURES, cache_dir, mark_used, room
from finetune.system.files import one_at_a_time, unfinished
from finetune.system.machine import num_cores
from finetune.system.messages import reason

log = logging.getLogger(__name__)

_MIN_SAVED = 1000  # pictures not decoded again: about a second of one core
_NUM_SAMPLED = 200  # headers that the estimate of the size looks at


def pays(num_reads: float, num_images: int) -> bool:
    """Return whether pictures are read at least twice, and often enough to save a second."""
    return num_reads - num_images >= max(num_images, _MIN_SAVED)


class CacheOfSplits:
    """Takes train and val from a cache, looked for when they are first asked for and again once it pays to make one."""

    def __init__(self) -> None:
        self._build: bool | None = None  # whether to make one where there is none, once looked for

    def take(
        self,
        splits: Mapping[str, Samples],
        root: str,
        limit_gb: float,
        reads: float,
    ) -> dict[str, Samples]:
        """Return the splits that a cache gives from now on, none where there is none or they are so already.

        Args:
            splits: As they are.
            root: Folder of the data set.
            limit_gb: See `from_cache`.
            reads: How many images of train will be read, each counted as often as it is read.
        """
        num = len(splits["train"]) if "train" in splits else 0
        build = num > 0 and pays(reads, num)
        if self._build is not None and self._build >= build:
            return {}
        self._build = build
        return from_cache(splits, root, limit_gb, build)


def from_cache(
    splits: Mapping[str, Samples], root: str | Path, limit_gb: float, build: bool
) -> dict[str, Samples]:
    """Return train and val as read from a cache, those that are read from files so far; none if there is no cache.

    Of several processes on a machine one builds it, and the others wait. Where it can't be had (a full disk, a folder
    that may not be written to, a data set above the limit), a line says why.

    Args:
        splits: By name; train and val have one `shorter_side`.
        root: Folder of the data set.
        limit_gb: Most gigabytes (10^9 bytes) that the cache may take, 0 for no cache. None takes more than half of what
            is free on its disk.
        build: Make it if there is none.
    """
    splits = {
        split: samples
        for split, samples in splits.items()
        if split in ("train", "val") and samples.cached is None
    }
    if limit_gb <= 0 or not splits:
        return {}
    paths = [path for samples in splits.values() for path in samples.paths]
    # however the pictures are split, it is one cache
    order = sorted(range(len(paths)), key=paths.__getitem__)
    positions = np.empty(len(paths), np.int64)
    positions[order] = np.arange(len(paths))
    paths = [paths[i] for i in order]
    stats = concatenated([samples.known_stats() for samples in splits.values()])
    digest = files_digest(paths, stats.take(np.array(order, np.int64)), root)
    shorter_side = next(iter(splits.values())).shorter_side
    decoder = f"finetune {finetune.__version__}, Pillow {PIL.__version__}, simplejpeg {simplejpeg.__version__}"
    decoder += f", torch {torch.__version__}" if shorter_side else ""
    place = os.path.realpath(root)
    about = {"root": place, "shorter_side": shorter_side, "decoder": decoder}
    key = hashlib.sha256((json.dumps(about) + digest).encode()).hexdigest()[:16]
    path = cache_dir() / f"{os.path.basename(place)}-{key}{PICTURES}"
    packed = opened(path)
    if packed is None and build:
        packed = _made(path, paths, about, limit_gb)
    if packed is None:
        return {}
    mark_used(path)
    parts = np.split(positions, np.cumsum([len(samples) for samples in splits.values()])[:-1])
    return {
        split: replace(samples, cached=CachedImages(packed, rows))
        for (split, samples), rows in zip(splits.items(), parts, strict=True)
    }


def _made(
    path: Path, paths: Sequence[str], about: dict[str, Any], limit_gb: float
) -> MemmapImages | None:
    """Build a cache, unless another process has or could not; return None where there is none.

    Who waited for one that was stopped begins anew. Where it failed nobody does: of many each would fail in turn.
    """
    failure = f"the pictures of {about['root']} are decoded anew in every epoch: "
    try:
        num_bytes = _estimate(paths, about["shorter_side"])
        max_bytes = min(limit_gb * 1e9, room(path.parent))
        if num_bytes > max_bytes:
            limit = (
                "--data.cache_limit_gb"
                if max_bytes == limit_gb * 1e9
                else f"half the free disk of {path.parent}"
            )
            above = f"a cache of {num_bytes / 1e9:.2g} GB would be above {limit}, {max_bytes / 1e9:.2g} GB"
            if is_first_process():
                log.info("%s%s", failure, above)
            return None
        with one_at_a_time(path) as has_waited:
            packed = opened(path)
            if packed is not None:
                return packed
            # nobody was stopped at it, who would have left something
            if has_waited and not unfinished(path):
                if is_first_process():
                    log.warning("%sno cache, another process could not make it", failure)
                return None
            if path.exists():
                log.warning("the cache %s is damaged: it is made anew", path)
            began = time.perf_counter()
            try:
                with ThreadPoolExecutor(num_cores()) as pool:
                    write_memmap(
                        path, _decoded(pool, paths, about["shorter_side"]), about, max_bytes
                    )
            except (OSError, TooLarge) as error:
                log.warning("%sno cache, %s", failure, reason(error, cache_dir()))
                return None
            except BaseException:
                with suppress(OSError):  # who waits is to make it
                    path.with_name(f".{path.name}.stopped.tmp").touch()
                raise
            seconds, size = time.perf_counter() - began, path.stat().st_size / 1e9
            log.info(
                "decoded %d pictures once, in %.1f s: %.2f GB in %s",
                len(paths),
                seconds,
                size,
                path,
            )
            return MemmapImages(path)
    except (
        OSError,
        NotImplementedError,
    ) as error:  # no right to write there, or no locks on that disk
        if is_first_process():
            log.warning("%sno cache, %s", failure, reason(error, cache_dir()))
        return None


def _estimate(paths: Sequence[str], shorter_side: int | None) -> float:
    """Bytes of all pictures, judged by the headers of some."""
    num_pixels = []
    # At random, for sizes may come in a rhythm; by a fixed seed, for all processes must agree.
    for i in some_of(len(paths), _NUM_SAMPLED, ESTIMATE):
        height, width = stored_size(paths[i])
        scale = min(1.0, (shorter_side or math.inf) / max(1, min(height, width)))
        num_pixels.append(height * width * scale**2)
    return 3 * len(paths) * float(np.mean(num_pixels))


def _decoded(
    pool: ThreadPoolExecutor, paths: Sequence[str], shorter_side: int | None
) -> Iterator[np.ndarray | None]:
    """Yield the pictures in order while the pool is a few ahead, with a bar on a terminal."""

    def load(path: str) -> np.ndarray | None:
        try:
            return decode(path, shorter_side=shorter_side)
        except DecodeError:
            return None

    console = Console(stderr=True)
    waiting: deque[Future[np.ndarray | None]] = deque()
    for path in track(
        paths, "decoding pictures", console=console, transient=True, disable=not console.is_terminal
    ):
        waiting.append(pool.submit(load, path))
        if len(waiting) > 4 * num_cores():
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
