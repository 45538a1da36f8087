"""Penalties over tokens that lie on the device give what those counted on the host do, step after step."""

from __future__ import annotations

import numpy as np
import torch
from torch.testing import assert_close

from pagedserve.sampling.batch import TokenHistory
from pagedserve.sampling.gpu_penalties import GpuPenalties
from pagedserve.sampling.logits import Penalties
from pagedserve.sampling_params import SamplingParams
from tests.sampling.rows import CPU, Row, random_logits

VOCAB_SIZE = 40
WISHES = (
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(frequency_penalty=-0.7),
    SamplingParams(repetition_penalty=0.8),
    SamplingParams(presence_penalty=1.5),
)


def test_they_are_those_of_the_host_while_rows_grow() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE + 2, length).tolist() for length in (1, 9, 30, 4)]
    rows = [Row(random_logits(VOCAB_SIZE, 0), wish, prompt) for wish, prompt in zip(WISHES, prompts, strict=True)]
    places = [4, 0, 3, 1]  # of the rows in a batch of five
    kept = np.full((6, 400), -7, dtype=np.int32)
    lengths = np.ones(5, dtype=np.int64)
    lengths[places] = [len(prompt) for prompt in prompts]
    slots = np.array([5, 2, 0, 4, 1])
    for place, prompt in zip(places, prompts, strict=True):
        kept[slots[place], : len(prompt)] = prompt
    host = Penalties(places, [row.state() for row in rows], VOCAB_SIZE, CPU)
    device = GpuPenalties(np.array(places), [row.state() for row in rows], CPU)
    for step in range(300):
        history = TokenHistory(kept, slots, lengths)
        if step % 20 < 2:
            wanted = torch.stack([random_logits(VOCAB_SIZE, step + i) for i in range(5)])
            found = wanted.clone()
            host.prepare(history)(wanted)
            device.prepare(history)(found)
            assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        else:
            device.prepare(history)
        grown = [place for place in places if rng.random() < 0.7]  # the others wait
        kept[slots[grown], lengths[grown]] = rng.integers(0, VOCAB_SIZE, len(grown))
        lengths = lengths.copy()
        lengths[grown] += 1
    assert kept[slots[places], lengths[places] - 1].min() >= 0
