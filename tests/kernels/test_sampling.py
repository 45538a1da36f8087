"""Native sampling against its meaning: the same tokens for the same uniform numbers; what happens at the edges."""

from __future__ import annotations

import pytest
import torch

from pagedserve.kernels import cpu, native, reference

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def columns(num_rows: int, seed: int = 0) -> Columns:
    """temperature, min_p, top_k, top_p, uniform: every mixture of the filters, some rows greedy."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        index = torch.randint(len(values), (num_rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[index]

    return (
        pick([0.0, 0.3, 0.8, 1.0, 1.7, 6.0], torch.float32),
        pick([0.0, 0.0, 0.0, 0.01, 0.2], torch.float32),
        pick([0, 0, 0, 1, 7, 50, 900], torch.int64),
        pick([2.0, 2.0, 0.99, 0.9, 0.5, 1e-6], torch.float64),
        torch.rand(num_rows, dtype=torch.float64, generator=generator),
    )


def logits_of(num_rows: int, vocab_size: int, scale: float, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(
    ("vocab_size", "scale"), [(1, 1.0), (2, 3.0), (127, 3.0), (1000, 0.2), (5003, 3.0), (5003, 30.0)]
)
def test_tokens_are_those_of_the_reference(isa: str, num_threads: int, vocab_size: int, scale: float) -> None:
    num_rows = 300
    wide = logits_of(num_rows, vocab_size + 5, scale, vocab_size)
    logits = wide[:, :vocab_size]  # a head that is padded past the vocabulary
    arguments = columns(num_rows)
    assert torch.equal(cpu.sample(logits, *arguments), reference.sample(logits, *arguments))


def test_rounded_logits_tie(isa: str) -> None:
    logits = logits_of(300, 700, 2.0, 3).round()
    arguments = columns(300, seed=1)
    assert torch.equal(cpu.sample(logits, *arguments), reference.sample(logits, *arguments))


def test_numbers_that_are_none(isa: str) -> None:
    """NaN is impossible, inf the likeliest; a row of nothing else has no token; its neighbours do not notice."""
    logits = logits_of(60, 400, 3.0, 5)
    logits[::3, 5::7] = torch.nan
    logits[1::3, 9] = torch.inf
    logits[2::6] = -torch.inf
    logits[5::6] = torch.nan
    logits[8, 11] = 0.5
    arguments = columns(60, seed=2)
    found = cpu.sample(logits, *arguments)
    assert torch.equal(found, reference.sample(logits, *arguments))
    assert (found[[2, 5, 14, 17]] == -1).all() and found[8] == 11 and (found[1::3] == 9).all()
    assert not torch.isnan(logits.gather(1, found.clamp(min=0).unsqueeze(1)))[found >= 0].any()


def test_a_row_alone_draws_what_it_draws_in_a_batch(isa: str) -> None:
    logits, arguments = logits_of(40, 3000, 3.0, 7), columns(40, seed=3)
    together = cpu.sample(logits, *arguments)
    for row in range(40):
        one = slice(row, row + 1)
        assert cpu.sample(logits[one], *(column[one] for column in arguments)) == together[one]


def test_flat_logits_need_the_whole_vocabulary(isa: str) -> None:
    """Where the nucleus is most of the vocabulary, and where all values are equal."""
    logits = torch.zeros(4, 3000)
    logits[2:] = logits_of(2, 3000, 1e-3, 8)
    arguments = (
        torch.ones(4),
        torch.zeros(4),
        torch.tensor([0, 10, 2000, 0]),
        torch.tensor([0.5, 2.0, 0.7, 0.97], dtype=torch.float64),
        torch.tensor([0.2501, 0.9991, 0.5, 0.75], dtype=torch.float64),
    )
    found = cpu.sample(logits, *arguments)
    assert torch.equal(found, reference.sample(logits, *arguments))
    assert found[0] == 750 and found[1] == 2997


@pytest.mark.skipif(not native.available(), reason="the native library is not built here")
def test_columns_are_checked() -> None:
    logits, arguments = torch.zeros(3, 10), list(columns(3))
    with pytest.raises(ValueError, match="top_k has shape"):
        cpu.sample(logits, *arguments[:2], arguments[2][:2], *arguments[3:])
    with pytest.raises(TypeError, match=r"top_p must be torch\.float64"):
        cpu.sample(logits, *arguments[:3], arguments[3].float(), arguments[4])
    with pytest.raises(TypeError, match="logits must be fp32"):
        cpu.sample(logits.double(), *arguments)
