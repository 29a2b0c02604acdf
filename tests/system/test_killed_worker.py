"""A killed DataLoader worker is recognised by torch's message in a chain of errors, or by an incomplete batch."""

import pytest
from hanging import Hanging, receive_no_descriptor, receive_nothing
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from finetune.system.killed_worker import is_killed_worker_error


@pytest.mark.slow
@pytest.mark.parametrize("hang_up", [receive_nothing, receive_no_descriptor])
def test_a_worker_that_ends_while_it_hands_over_a_batch_is_known(hang_up):
    with pytest.raises(EOFError) as elsewhere:
        hang_up()
    assert not is_killed_worker_error(elsewhere.value)
    with pytest.raises(EOFError) as caught:
        next(iter(DataLoader(Hanging(hang_up), batch_size=None, num_workers=1)))
    assert is_killed_worker_error(caught.value)
    with pytest.raises(EOFError) as pinned:
        ExceptionWrapper(
            (EOFError, caught.value, None), where="in pin memory thread for device 0"
        ).reraise()
    assert is_killed_worker_error(pinned.value)


@pytest.mark.parametrize(
    "words", ["(pid(s) 7) exited unexpectedly", "(pid 7) is killed by signal: Killed."]
)
def test_torch_s_words_are_found_behind_an_error_of_any_kind(words):
    reported = KeyError("made of it by a library")
    reported.__context__ = RuntimeError(f"DataLoader worker {words}")
    assert is_killed_worker_error(reported) and not is_killed_worker_error(KeyError("by itself"))


def test_a_connection_that_has_no_batch_is_another_matter():
    assert not is_killed_worker_error(ConnectionResetError("of a download"))
