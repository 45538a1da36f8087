"""Sampling kernels against the sort: filters alone and together, peaked, flat and tied rows, rows without numbers."""

from __future__ import annotations

from functools import partial

import torch

from pagedserve.kernels import gpu, reference
from tests.kernels.cases import Case
from tests.kernels.cases.triton_ops import apart, randn

# temperature, min_p, top_k, top_p; 0 or 1: none
FILTERS = (
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.05, 0, 1.0),
    (1.0, 0.0, 5, 1.0),
    (1.3, 0.0, 40, 1.0),
    (1.0, 0.0, 0, 0.9),
    (0.8, 0.0, 0, 0.3),
    (1.0, 0.0, 30, 0.8),
    (1.0, 0.02, 20, 0.95),
    (2.0, 0.0, 0, 0.0),
    (1.0, 1.0, 0, 0.5),
    (0.5, 0.0, 1, 1.0),
    (1.0, 0.0, 900, 0.99),
    (1.0, 0.001, 0, 0.999),
)


def columns(
    filters: list[tuple[float, float, int, float]], device: torch.device, seed: int
) -> tuple[torch.Tensor, ...]:
    """The arguments of `ops.sample` behind logits."""
    temperature, min_p, top_k, top_p = zip(*filters, strict=True)
    uniform = torch.rand(len(filters), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (
        torch.tensor(temperature, device=device),
        torch.tensor(min_p, device=device),
        torch.tensor(top_k, device=device),
        torch.tensor(top_p, dtype=torch.float64, device=device),
        uniform.to(device),
    )


def assert_drawn(logits: torch.Tensor, arguments: tuple[torch.Tensor, ...], tokens: torch.Tensor) -> None:
    """Each token is kept by its row's filters, and the row's uniform number lies in its part of the CDF, in fp64."""
    wide = reference.usable(logits)
    for row, token in enumerate(tokens.tolist()):
        temperature, min_p, top_k, top_p, uniform = (column[row] for column in arguments)
        best = wide[row].max()
        if best == -torch.inf:
            assert token == -1
            continue
        if temperature == 0:
            assert token == int((wide[row] == best).nonzero()[0])
            continue
        scaled = wide[row] / temperature
        scaled = scaled.masked_fill(scaled < scaled.max() + min_p.log(), -torch.inf)
        if top_k > 0:
            scaled = scaled.masked_fill(scaled < scaled.topk(min(int(top_k), len(scaled))).values[-1], -torch.inf)
        values = scaled.double().sort(descending=True).values
        before = torch.softmax(values, 0).cumsum(0) - torch.softmax(values, 0)
        last = int((before < top_p - 1e-6).sum().clamp(min=1)) - 1  # surely kept, what is less likely maybe
        maybe = int((before < top_p + 1e-6).sum().clamp(min=1)) - 1
        assert scaled[token] >= values[maybe], f"row {row}: token {token} was filtered"
        if values[maybe] == values[last]:
            kept = torch.softmax(scaled.double().masked_fill(scaled < values[last], -torch.inf), 0)
            end = float(kept[: token + 1].sum())
            assert end - float(kept[token]) - 1e-6 <= float(uniform) <= end + 1e-6, f"row {row}: token {token}"


def check(logits: torch.Tensor, arguments: tuple[torch.Tensor, ...], *, different: float = 0.0) -> None:
    """`different`: the share of rows whose uniform number may be so near a step of the CDF that rounding decides."""
    tokens = gpu.sample(logits, *arguments)
    wanted = reference.sample(logits, *arguments)
    assert_drawn(logits, arguments, tokens)
    share = float((tokens != wanted).double().mean())
    assert share <= different, f"{share} of rows differ from the reference: {tokens.tolist()}, {wanted.tolist()}"


def rows_of_kind(kind: str, num_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    logits = randn(device, num_rows, vocab_size)
    if kind == "peaked":
        return logits * 5
    if kind == "flat":
        return logits * 1e-3
    if kind == "tied":
        return (logits * 2).round() - 0.0
    if kind == "equal":
        return torch.full_like(logits, -3.0)
    assert kind == "normal"
    return logits


def sample(kind: str, vocab_size: int, filters: tuple[int, ...], device: torch.device) -> None:
    logits = rows_of_kind(kind, len(filters), vocab_size, device)
    check(apart(logits), columns([FILTERS[i] for i in filters], device, seed=vocab_size))


def sample_what_is_no_number(device: torch.device) -> None:
    logits = randn(device, 8, 300)
    inf, nan = float("inf"), float("nan")
    logits[0] = -inf
    logits[1] = nan
    logits[2, 5], logits[2, 280] = inf, inf
    logits[3, :299] = nan
    logits[4, 17], logits[4, 18] = nan, -inf
    logits[5] = torch.where(torch.arange(300, device=device) % 2 == 0, -inf, logits[5])
    logits[6, 1:] = -1e30
    for filters in ((0.0, 0.0, 0, 1.0), (1.0, 0.0, 0, 1.0), (1e-3, 0.1, 3, 0.9)):
        check(logits, columns([filters] * 8, device, seed=3))


def sample_the_ends(device: torch.device) -> None:
    """Uniform numbers of 0 and just below 1 give the first and the last token that may come."""
    logits = randn(device, 2, 3000)
    logits[:, :700] = logits[:, 2500:] = -float("inf")
    for filters in ((1.0, 0.0, 0, 1.0), (1.0, 0.0, 0, 0.999999)):
        arguments = columns([filters] * 2, device, seed=0)
        arguments[4][0], arguments[4][1] = 0.0, 1 - 2**-53
        check(logits, arguments)


def a_row_does_not_depend_on_others(device: torch.device) -> None:
    logits = rows_of_kind("peaked", 4, 2500, device)
    arguments = columns([FILTERS[i] for i in (1, 2, 5, 7)], device, seed=9)
    together = gpu.sample(logits, *arguments)
    order = torch.tensor([3, 1], device=device)
    assert torch.equal(gpu.sample(logits[order], *(column[order] for column in arguments)), together[order])


def logprobs(kind: str, vocab_size: int, num_top: int, device: torch.device, num_rows: int = 4) -> None:
    logits = apart(rows_of_kind(kind, num_rows, vocab_size, device))
    logits[0, vocab_size // 2 :] = -float("inf")
    logits[-1, 0] = float("nan")
    tokens = torch.randint(0, vocab_size, (num_rows,), generator=torch.Generator().manual_seed(vocab_size)).to(device)
    tokens[-1] = int(reference.usable(logits[-1]).argmax())
    for found, wanted in zip(
        gpu.logprobs(logits, tokens, num_top), reference.logprobs(logits, tokens, num_top), strict=True
    ):
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-6)
    assert torch.equal(gpu.best_logits(logits), reference.best_logits(logits))


def logprobs_of_nothing(device: torch.device) -> None:
    logits = torch.full((2, 70), float("nan"), device=device)
    logits[1, 3] = 0.0
    chosen, ranks, values, ids = gpu.logprobs(logits, torch.tensor([5, 3], device=device), 2)
    assert chosen.isnan().tolist() == [True, False] and ranks.tolist() == [1, 1] and values[0].isnan().all()
    assert values[1].tolist() == [0.0, -float("inf")] and ids[1].tolist() == [3, 0]
    assert gpu.best_logits(logits).tolist() == [-float("inf"), 0.0]


def penalties(num_rows: int, vocab_size: int, capacity: int, device: torch.device) -> None:
    logits = apart(randn(device, num_rows + 2, vocab_size) * 3)
    generator = torch.Generator().manual_seed(capacity)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device)

    token_ids = integers(vocab_size + 3, num_rows + 3, capacity).int()
    token_ids[:, ::3] = token_ids[:, :1]  # a token that is repeated
    lengths = integers(capacity + 1, num_rows)
    prompt_lens = (lengths * 0.4).long()
    prompt_lens[-1], lengths[0] = lengths[-1], 0
    rows = torch.randperm(num_rows + 2, generator=generator)[:num_rows].to(device)
    slots = torch.randperm(num_rows + 3, generator=generator)[:num_rows].to(device)
    wishes = [torch.rand(num_rows, generator=generator).to(device) * 2 - shift for shift in (-0.1, 1.0, 1.0)]
    wishes[0][::2] = 1.0  # repetition
    wishes[1][::3] = 0.0
    wanted = logits.clone()
    arguments = (rows, token_ids, slots, prompt_lens, lengths, *wishes)
    reference.apply_penalties(wanted, *arguments)
    for _ in range(2):  # the counters are left as they were found
        changed = apart(logits)
        gpu.apply_penalties(changed, *arguments)
        torch.testing.assert_close(changed, wanted, atol=1e-6, rtol=1e-6)


def many_rows(kind: str, num_rows: int, vocab_size: int, device: torch.device) -> None:
    logits = rows_of_kind(kind, num_rows, vocab_size, device)
    filters = [FILTERS[i % len(FILTERS)] for i in range(num_rows)]
    check(logits, columns(filters, device, seed=vocab_size), different=0.05)


def cases() -> list[Case]:
    small = {
        "sample_what_is_no_number": sample_what_is_no_number,
        "sample_the_ends": sample_the_ends,
        "a_row_does_not_depend_on_others": a_row_does_not_depend_on_others,
        "sample-one_token": partial(sample, "normal", 1, (0, 1, 3, 5, 8)),
        "sample-flat-5000": partial(sample, "flat", 5000, (2, 5, 12)),  # more candidates than a row keeps
        "sample-normal-2100": partial(sample, "normal", 2100, tuple(range(len(FILTERS)))),
        **{f"sample-{kind}-2100": partial(sample, kind, 2100, (1, 3, 5, 8)) for kind in ("peaked", "tied", "equal")},
    }
    small |= {
        "logprobs-normal-2100": partial(logprobs, "normal", 2100, 5),
        "logprobs-tied-2100": partial(logprobs, "tied", 2100, 33),
        "logprobs-equal-5000": partial(logprobs, "equal", 5000, 20),  # more candidates than a row keeps
        "logprobs-none": partial(logprobs, "peaked", 300, 0),
        "logprobs_of_nothing": logprobs_of_nothing,
        "penalties-1": partial(penalties, 1, 40, 30),
        "penalties-5": partial(penalties, 5, 300, 1500),
    }
    full_size = {
        "logprobs-256x128256": partial(logprobs, "peaked", 128256, 20, num_rows=256),
        "logprobs-tied-16x128256": partial(logprobs, "tied", 128256, 1000, num_rows=16),
        "penalties-256x128256": partial(penalties, 256, 128256, 4096),
    }
    full_size |= {
        f"sample-{kind}-{num_rows}x{vocab_size}": partial(many_rows, kind, num_rows, vocab_size)
        for kind, num_rows, vocab_size in (
            ("normal", 256, 128256), ("peaked", 256, 128256), ("flat", 32, 128256), ("tied", 32, 128256),
            ("peaked", 64, 32000), ("peaked", 64, 256000), ("equal", 4, 256000),
        )
    }  # fmt: skip
    return [Case(name=name, run=run) for name, run in small.items()] + [
        Case(name=name, run=run, full_size=True) for name, run in full_size.items()
    ]
