"""Draws on a GPU never look at a number on the way: proved with tensors that have a device and no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedserve.kernels import ops
from pagedserve.sampling.batch import SamplingBatch, TokenMasks
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling.transfers import Readback
from pagedserve.sampling_params import BeamParams, SamplingParams
from tests.sampling.rows import Row, history_of

VOCAB = 400
NOWHERE = torch.device("meta")
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "logprobs": {"logprobs": 5},
    "the best of several": {"n": 1, "best_of": 3},
    "beams": {"temperature": 0.0, "beam": BeamParams(width=3), "n": 3, "logprobs": 2},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "changes": {
        "logit_bias": {3: 1.0},
        "allowed_token_ids": (1, 2, 3, 4),
        "bad_words_token_ids": ((7,), (2, 3)),
        "min_tokens": 4,
        "stop_token_ids": (9,),
    },
}


def columns_like(logits: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Stands for `ops.logprobs`: values, ranks, top values, top ids."""
    shapes = ((len(logits),), (len(logits),), (len(logits), most), (len(logits), most))
    return tuple(torch.empty(shape, device=logits.device) for shape in shapes)


@pytest.mark.parametrize("names", [[name] for name in WISHES] + [list(WISHES)], ids=[*WISHES, "all"])
@pytest.mark.parametrize("with_masks", [False, True])
def test_nothing_is_looked_at_before_it_has_been_copied(
    names: list[str], with_masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels are somebody else's; what is proved is what happens around them.
    monkeypatch.setattr(ops, "sample", lambda logits, *columns: torch.zeros_like(columns[2]))
    monkeypatch.setattr(ops, "apply_token_bitmask", lambda logits, rows, masks: None)
    monkeypatch.setattr(ops, "apply_penalties", lambda logits, **columns: None)
    monkeypatch.setattr(ops, "logprobs", lambda logits, token_ids, most: columns_like(logits, most))
    rows = [
        Row(torch.zeros(VOCAB), SamplingParams(**WISHES[name]), output=(2, 2), eos_token_ids=(5,)) for name in names
    ] * 2
    history = history_of(rows)
    sampler = Sampler(VOCAB)
    monkeypatch.setattr(ops, "on_gpu", lambda device: device == NOWHERE)
    monkeypatch.setattr(Readback, "take", lambda self, values: torch.empty_like(values, device="cpu"))
    logits = torch.empty((len(rows), VOCAB), device=NOWHERE)
    batch = SamplingBatch([row.state() for row in rows], VOCAB, NOWHERE)
    masks = TokenMasks.unpack([1], np.zeros(13, dtype=np.int32).tobytes(), NOWHERE) if with_masks else None
    drawn = sampler.draw(logits, sampler.prepare(batch, history, masks), Readback(NOWHERE))
    assert drawn.token_ids.device == NOWHERE and drawn.token_ids.shape == (len(rows),)


@pytest.mark.parametrize("look", [torch.Tensor.tolist, torch.Tensor.nonzero, bool], ids=["tolist", "nonzero", "bool"])
def test_a_look_would_be_noticed(look: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        look(torch.empty((1, VOCAB), device=NOWHERE).argmax(dim=-1))
