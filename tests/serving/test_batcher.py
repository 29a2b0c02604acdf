"""Images are classified at once when the network is idle, and as a batch when it is busy."""

import asyncio
import threading

import numpy as np
import pytest

from finetune.serving.batcher import Batcher


class Network:
    """A network that blocks until it is released, and records its batches."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.sizes = []
        self.fails = False
        self.may_go.set()

    def __call__(self, images: np.ndarray) -> np.ndarray:
        assert self.may_go.wait(20)
        self.sizes.append(len(images))
        if self.fails:
            raise RuntimeError("no memory")
        return images.reshape(len(images), -1)[:, :2].astype(float)


def image(value: int) -> np.ndarray:
    return np.full((2, 2, 3), value, np.uint8)


@pytest.fixture
def network():
    return Network()


def asked(network: Network, scenario, max_batch: int = 4):
    reported: list[int] = []

    async def run():
        batcher = Batcher(network, max_batch, reported.append)
        try:
            async with asyncio.timeout(20):
                return await scenario(batcher)
        finally:
            network.may_go.set()
            batcher.close()

    result = asyncio.run(run())
    assert reported == network.sizes
    return result


def test_a_lone_image_waits_for_nobody(network):
    async def scenario(batcher):
        return [await batcher([image(k)]) for k in range(3)]

    rows = asked(network, scenario)
    assert network.sizes == [1, 1, 1]
    assert [row.tolist() for row in rows] == [[[k, k]] for k in range(3)]


def test_what_comes_while_one_is_computed_goes_together_and_each_gets_its_own(network):
    async def scenario(batcher):
        network.may_go.clear()
        tasks = [asyncio.create_task(batcher([image(k)])) for k in range(4)]
        tasks.append(asyncio.create_task(batcher([image(k) for k in range(4, 7)])))
        await asyncio.sleep(0.05)
        network.may_go.set()
        return await asyncio.gather(*tasks)

    rows = asked(network, scenario)
    assert network.sizes == [1, 4, 2]  # the first at once, then at most four
    assert np.concatenate(rows)[:, 0].tolist() == list(range(7))


def test_what_nobody_waits_for_is_not_computed(network):
    async def scenario(batcher):
        network.may_go.clear()
        tasks = [asyncio.create_task(batcher([image(k)])) for k in range(4)]
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.sleep(0)
        network.may_go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    rows = asked(network, scenario)
    assert network.sizes == [1, 1]
    assert rows[0].tolist() == [[0, 0]] and rows[3].tolist() == [[3, 3]]
    assert all(isinstance(row, asyncio.CancelledError) for row in rows[1:3])


def test_a_batch_that_fails_fails_alone(network):
    async def scenario(batcher):
        network.fails = True
        failed = await asyncio.gather(batcher([image(1), image(2)]), return_exceptions=True)
        network.fails = False
        return failed, await batcher([image(3)])

    (error,), rows = asked(network, scenario)
    assert str(error) == "no memory" and rows.tolist() == [[3, 3]]


def test_other_work_of_the_network_s_thread_comes_between_batches(network):
    async def scenario(batcher):
        names = [await batcher.run(lambda: threading.current_thread().name) for _ in range(2)]
        return {*names, (await batcher.run(lambda x, y: x + y, 1, 2))}

    found = asked(network, scenario)
    assert len(found) == 2 and 3 in found
