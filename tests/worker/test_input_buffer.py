from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedserve.worker.input_buffer import InputBuffer

CPU = torch.device("cpu")


class ElsewhereBuffer(InputBuffer):
    """One that packs and copies as for a GPU, to memory beside the host's."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._is_here = False


def arrays(seed: int, sizes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(size,) if i % 2 else (2, 1, size) for i, size in enumerate(sizes)]
    kinds = (np.int64, np.int32, np.int32, np.int64)
    return [
        rng.integers(0, 2**31, shape).astype(kind)
        for shape, kind in zip(shapes, [kinds[i % 4] for i in range(len(sizes))], strict=True)
    ]


@pytest.mark.parametrize("buffer", [InputBuffer(CPU), ElsewhereBuffer()], ids=["here", "elsewhere"])
def test_what_is_sent_arrives_whatever_its_size(buffer: InputBuffer) -> None:
    for seed, sizes in enumerate(((1,), (3, 5, 1, 7), (0, 4), (300, 2, 5, 1000, 1), (2, 2))):
        sent = arrays(seed, sizes)
        found = buffer.send(sent)
        assert [tensor.dtype for tensor in found] == [torch.from_numpy(array).dtype for array in sent]
        assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(found, sent, strict=True))
        assert all(tensor.data_ptr() % 16 == 0 for tensor in found if tensor.numel()) or buffer._is_here


def test_a_steps_inputs_stay_until_the_one_after_the_next() -> None:
    buffer = ElsewhereBuffer()
    first, second, third = (arrays(seed, (8, 8)) for seed in range(3))
    found = [buffer.send(first), buffer.send(second)]
    assert np.array_equal(found[0][0].numpy(), first[0]) and np.array_equal(found[1][0].numpy(), second[0])
    place = found[0][0].data_ptr()
    assert buffer.send(third)[0].data_ptr() == place
    assert np.array_equal(found[1][0].numpy(), second[0])
