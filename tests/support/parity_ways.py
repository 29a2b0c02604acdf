"""`finetune parity`, whose processes are forked from its own: `parity_ways.py MISTAKE ARGUMENTS…`.

A mistake is `none`, or `no_sum`: gradients by hand that are not added up.
"""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from forked import ForkedCommand, become_finetune
from torch import multiprocessing

from finetune.parity import data_parallel, many_processes


def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
    code = ForkedCommand(command, env, start_new_session=True).wait()
    return SimpleNamespace(returncode=code, stderr="")


if __name__ == "__main__":
    mistake, *arguments = sys.argv[1:]
    patch.object(many_processes, "subprocess", SimpleNamespace(run=run)).start()
    forked = partial(multiprocessing.start_processes, start_method="fork")
    patch.object(multiprocessing, "spawn", forked).start()
    if mistake == "no_sum":
        patch.object(data_parallel, "allreduce", lambda data: None).start()
    become_finetune(["parity", *arguments])
