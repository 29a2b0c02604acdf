"""A DataLoader worker that was killed is recognised by any error that torch raises then."""

import os
import signal

import pytest
from hanging import Hanging, receive_no_descriptor, receive_nothing
from torch._utils import ExceptionWrapper  # noqa: PLC2701 (what a GPU run raises)
from torch.utils.data import DataLoader

from finetune.system.killed_worker import is_killed_worker_error


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


class Dying:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        be_killed()


@pytest.mark.slow
@pytest.mark.parametrize("hang_up", [receive_nothing, receive_no_descriptor])
def test_a_worker_that_ends_while_it_hands_over_a_batch_is_known(hang_up):
    with pytest.raises(EOFError) as elsewhere:
        hang_up()
    assert not is_killed_worker_error(elsewhere.value)  # the control: no worker
    with pytest.raises(EOFError) as caught:
        next(iter(DataLoader(Hanging(hang_up), batch_size=None, num_workers=1)))
    assert is_killed_worker_error(caught.value)
    with pytest.raises(EOFError) as pinned:
        ExceptionWrapper(
            (EOFError, caught.value, None), where="in pin memory thread for device 0"
        ).reraise()
    assert is_killed_worker_error(pinned.value)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_known_behind_an_error_of_any_kind():
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(Dying(), batch_size=None, num_workers=1)))
    reported = KeyError("made of it by a library")
    reported.__context__ = caught.value
    assert is_killed_worker_error(reported) and not is_killed_worker_error(KeyError("by itself"))
    assert not is_killed_worker_error(ConnectionResetError("of a download"))
