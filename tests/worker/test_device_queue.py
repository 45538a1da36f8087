from __future__ import annotations

import threading

import pytest

from pagedserve.worker.device_queue import DeviceQueue, ThreadQueue


@pytest.mark.parametrize("kind", [DeviceQueue, ThreadQueue])
def test_work_is_done_in_order_and_says_what_went_wrong(kind: type[DeviceQueue]) -> None:
    queue, done = kind(), []

    def work(number: int) -> int:
        if number == 1:
            raise ValueError("number 1")
        done.append(number)
        return number

    futures = [queue.submit(lambda number=number: work(number)) for number in range(4)]
    queue.close()
    queue.close()
    assert done == [0, 2, 3]
    assert [future.result() for future in futures if future is not futures[1]] == [0, 2, 3]
    with pytest.raises(ValueError, match="number 1"):
        futures[1].result()


def test_a_thread_works_while_the_caller_goes_on() -> None:
    queue, goes_on = ThreadQueue(), threading.Event()
    future = queue.submit(lambda: goes_on.wait(60.0))
    assert not future.done()
    goes_on.set()
    assert future.result()
    queue.close()
