"""DataLoader workers that end while they hand over a batch."""

import multiprocessing
import socket
from multiprocessing import reduction

from torch.utils.data import Dataset


class Hanging(Dataset):
    def __init__(self, hang_up):
        self.hang_up = hang_up

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Answer(self.hang_up)


class Answer:
    def __init__(self, hang_up):
        self.hang_up = hang_up

    def __reduce__(self):
        return self.hang_up, ()


def receive_nothing():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    ours.recv_bytes()


def receive_no_descriptor():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        reduction.recvfds(ours, 1)
