"""`finetune parity`, whose processes are forked from its own: `parity_ways.py MISTAKE ARGUMENTS…`.

A mistake is `none`, or `no_sum`: gradients by hand that are not added up.
"""

import sys
from functools import partial
from unittest.mock import patch

from forked import become_finetune
from torch import multiprocessing

from finetune.parity import data_parallel

if __name__ == "__main__":
    mistake, *arguments = sys.argv[1:]
    forked = partial(multiprocessing.start_processes, start_method="fork")
    patch.object(multiprocessing, "spawn", forked).start()
    if mistake == "no_sum":
        patch.object(data_parallel, "allreduce", lambda data: None).start()
    become_finetune(["parity", *arguments])
