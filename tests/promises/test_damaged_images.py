"""A damaged or malicious image decodes to its pixels or is refused with a line: no crash, bounded time and memory."""

import os
import signal
from collections import Counter

import pytest
from bounded_calls import faults_of_calls
from mutated_images import MAX_PIXELS, fault_of_reading, mutated, mutation_of
from promise import control, promise

from finetune.data.decode import silence_pillow

SECONDS = 10.0  # of the processor for all readings of a file
NUM_BYTES = 16 * MAX_PIXELS + 2**26  # what `decode` promises, and the libraries' own tables


@pytest.fixture
def low_limit(monkeypatch):
    silence_pillow()
    monkeypatch.setattr("finetune.data.decode.MAX_PIXELS", MAX_PIXELS)


@promise("damaged-files")
def test_mutated_images_are_decoded_or_refused(tmp_path, low_limit, trials, record_row):
    # each kind and each mutation, also in the short part
    numbers = range(0, 10_000, trials(49, 1))
    faults = faults_of_calls(
        len(numbers), lambda i: fault_of_reading(mutated(numbers[i]), tmp_path), SECONDS, NUM_BYTES
    )
    named = {}
    bad: Counter[str] = Counter()
    for i, fault in faults.items():
        case = mutated(numbers[i])
        named[f"{numbers[i]} {case.kind}, {case.mutation}"] = fault
        bad[case.mutation] += 1
    for mutation, count in Counter(map(mutation_of, numbers)).items():
        record_row(f"image: {mutation}", count, f"{bad[mutation]} faults")
    assert named == {}


@control("damaged-files")
def test_control_each_kind_of_fault_is_seen():
    def misbehave(i: int) -> str:
        if i == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        if i == 1:
            while True:
                pass
        if i == 2:
            return str(len(bytearray(b"x") * 2**26))[:0]
        if i == 3:
            raise KeyError("a")
        return ""

    faults = faults_of_calls(5, misbehave, seconds=0.2, num_bytes=2**24)
    assert faults.pop(1) in ("the process ended: SIGPROF", "the process ended: SIGALRM")
    assert faults.pop(2).startswith("it takes")
    assert faults == {
        0: "the process ended: SIGSEGV",
        3: "KeyError: 'a'",
    }
