"""`finetune serve`: serve the predictions of a checkpoint, with an API and a web page."""

import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.settings.all_commands import ServeSettings
from finetune.system.machine import num_cores
from finetune.system.messages import WrongUsage, be_quiet
from finetune.system.terminal import write_line

if TYPE_CHECKING:
    from finetune.serving.service import Service

_log = logging.getLogger(__name__)

TOKEN = "FINETUNE_TOKEN"


def serve(options: ServeSettings) -> None:
    """Serve predictions over HTTP until Ctrl-C, the same as `finetune predict`.

    The page is at http://127.0.0.1:8000, the API at /openapi.json. Requests of all clients are classified together.
    """
    token = os.environ.get(TOKEN) if options.token is None else options.token
    if token == "":
        raise WrongUsage(f"--token, or {TOKEN}, is empty: pass a word, or remove it")
    if token and (not token.isascii() or not token.isprintable() or " " in token):
        raise WrongUsage("--token: letters, digits and signs of ASCII, without spaces")
    from finetune.serving.guard import is_loopback
    from finetune.serving.http_server import address_of, listen, serve_until_stopped

    # Before the model is loaded, so that a used port is reported at once.
    with listen(options.host, options.port) as listener:
        be_quiet()
        service, description = _loaded(options)

        def announce() -> None:
            address = f"serving at {address_of(listener)} (API: /openapi.json); Ctrl-C stops"
            # a log on stdout has lines of JSON only
            write_line(f"{description}\n{address}", descriptor=1 if options.log is None else 2)
            if token is None and not is_loopback(options.host):
                _log.warning(
                    "everybody who reaches port %d of this machine can send requests: --token WORD restricts that",
                    options.port,
                )

        from finetune.serving.app import make_app

        logged_model = fingerprint(options.ckpt_path) if options.log == "json" else None
        serve_until_stopped(
            make_app(service, token, options.host, logged_model),
            listener,
            service.limits.seconds,
            announce,
            service.stop,
        )
    print("stopped", file=sys.stderr)


def fingerprint(path: str | Path) -> str:
    """Return the first 16 digits of the SHA-256 of a file, as `sha256sum` prints them."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _loaded(options: ServeSettings) -> tuple["Service", str]:
    """Return the service of a checkpoint, and a description of it."""
    # imports torch, which takes seconds
    from finetune.inference.predictor import Predictor, device_named
    from finetune.serving.service import Service
    from finetune.serving.uploads import Limits
    from finetune.training.precision import allow_tf32

    allow_tf32()
    device = device_named(options.device)
    predictor = Predictor(options.ckpt_path, device, options.precision, None, options.coverage)
    where = f"{num_cores()} CPU cores" if predictor.device.type == "cpu" else str(predictor.device)
    summary = f"{predictor.network_name}, {len(predictor.class_names)} classes, {predictor.precision} on {where}"
    return Service(predictor, Limits(), options.max_batch), f"{options.ckpt_path}: {summary}"
