from __future__ import annotations

import threading
from itertools import pairwise

import torch

from pagedserve.kernels import huge_pages


def test_pieces_start_as_zeros_are_aligned_and_do_not_overlap() -> None:
    sizes = [1, 100, 4096, 40 << 20, 77]
    pieces = [huge_pages.take(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    for index, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0 and not piece.any()
        piece.fill_(index + 1)
    assert all((piece == index + 1).all() for index, piece in enumerate(pieces))


def test_a_piece_outlives_the_others_of_its_mapping() -> None:
    kept = huge_pages.take(1000).fill_(7)
    for _ in range(3):
        huge_pages.take(20 << 20)[::4096] = 1
    assert (kept == 7).all()


def test_threads_get_different_pieces() -> None:
    taken: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: taken.extend(huge_pages.take(3000) for _ in range(50))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = sorted(piece.data_ptr() for piece in taken)
    assert len(starts) == 200 and all(b - a >= 3000 for a, b in pairwise(starts))
