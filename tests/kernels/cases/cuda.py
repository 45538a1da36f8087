"""csrc/cuda against attention in fp64: on a card, or on the CPU with the emulated library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product

import torch

from pagedserve.kernels import cuda, native_cuda, reference
from tests.helpers.guarded_memory import guarded
from tests.helpers.paged_batch import poisoned_pool
from tests.kernels.cases import Case

BF16, F16, F32, I8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
# Of the sum of |weight * value|: the weights and the output are rounded to the query's dtype, all else is fp32.
_TOLERANCES = {F32: 2e-6, F16: 1.2 * 2**-10, BF16: 1.2 * 2**-7}


@dataclass(frozen=True, kw_only=True)
class Shape:
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    head_dim: int = 64
    num_kv_heads: int = 2
    group: int = 4
    block_size: int = 16
    seq_lens: tuple[int, ...] = (1, 37, 0, 150)
    query_lens: tuple[int, ...] | None = None  # None: one each
    window: int | None = None
    soft_cap: float | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [self.dtype, self.kv_dtype, f"d{self.head_dim}", f"h{self.num_kv_heads}x{self.group}"]
        parts += [f"b{self.block_size}", f"n{len(self.seq_lens)}", f"l{max(self.seq_lens)}"]
        parts += [f"q{max(self.query_lens)}"] if self.query_lens else []
        parts += [f"w{self.window}"] if self.window else []
        parts += [f"c{self.soft_cap:g}"] if self.soft_cap else []
        return "decode-" + "-".join(str(part).removeprefix("torch.") for part in parts)


def cases() -> list[Case]:
    found = [Case(shape.name, partial(check_decode, shape)) for shape in small_shapes()]
    found += [Case(shape.name, partial(check_decode, shape), full_size=True) for shape in full_shapes()]
    found += [Case("plan", _check_plan), Case("same-step-again", _check_same_step_again)]
    found += [
        Case(f"every-code-{kv}-{t}".replace("torch.", ""), partial(_check_codes, t, kv))
        for t, kv in product((BF16, F16), (I8, FP8))
    ]
    found += [Case(f"copy-{n}", partial(_check_copy, n)) for n in (1, 40)]
    found += [Case("copy-chain", _check_chains), Case("swap", _check_swap)]
    found.append(Case("copy-2000", partial(_check_copy, 2000), full_size=True))
    return found


def small_shapes() -> list[Shape]:
    base = Shape()
    found = [base]
    found += [replace(base, dtype=t, kv_dtype=kv) for t, kv in product((BF16, F16), (I8, FP8))]
    found += [replace(base, dtype=F16, kv_dtype=F16), replace(base, dtype=F32, kv_dtype=F32)]
    for head_dim in (80, 96, 128, 256):
        shape = replace(base, head_dim=head_dim, num_kv_heads=1, seq_lens=(130, 5))
        found += [shape, replace(shape, kv_dtype=I8), replace(shape, dtype=F16, kv_dtype=FP8, group=9)]
        found += [replace(shape, dtype=F32, kv_dtype=F32, group=2)]
    found += [replace(base, group=group, seq_lens=(70,)) for group in (1, 3, 8, 12, 16, 20)]
    found += [replace(base, block_size=size, seq_lens=(200, 9), kv_dtype=kv) for size, kv in _BLOCKS]
    found += [replace(base, window=window, seq_lens=(3, 300, 65), kv_dtype=kv) for window, kv in _WINDOWS]
    found += [replace(base, soft_cap=20.0, kv_dtype=kv, seq_lens=(90,)) for kv in (BF16, I8)]
    found += [replace(base, dtype=F32, kv_dtype=F32, soft_cap=3.0, window=40, seq_lens=(90, 20))]
    # Several pieces a row: joined by the last CTA.
    found += [replace(base, num_kv_heads=1, group=g, seq_lens=(1500, 3, 700), seed=g) for g in (2, 9)]
    found += [replace(base, num_kv_heads=1, dtype=F32, kv_dtype=F32, seq_lens=(800,), group=3)]
    # Drafts to verify: some rows of several queries, one of none.
    drafts = replace(base, seq_lens=(40, 12, 3, 100), query_lens=(3, 1, 0, 4))
    found += [drafts, replace(drafts, window=7), replace(drafts, dtype=F32, kv_dtype=F32, num_kv_heads=1)]
    return found


_BLOCKS = [(8, BF16), (8, I8), (32, BF16), (64, FP8), (128, BF16)]
_WINDOWS = [(1, BF16), (64, BF16), (100, I8)]


def full_shapes() -> list[Shape]:
    base = Shape(head_dim=128, num_kv_heads=8, group=4)
    found = []
    for dtype, kv_dtype in ((BF16, BF16), (F16, F16), (BF16, I8), (BF16, FP8), (F32, F32)):
        shape = replace(base, dtype=dtype, kv_dtype=kv_dtype)
        found += [
            replace(shape, seq_lens=lens) for lens in ((32768,), (1,) * 256, _skewed(64, 8192), _skewed(256, 2048))
        ]
    for head_dim, group, block_size in ((64, 7, 16), (80, 1, 32), (96, 8, 64), (256, 2, 16), (128, 16, 128)):
        shape = replace(base, head_dim=head_dim, group=group, block_size=block_size, seq_lens=_skewed(32, 4096))
        found += [shape, replace(shape, kv_dtype=I8), replace(shape, window=1024, soft_cap=50.0)]
    lens = _skewed(48, 3000)
    found.append(replace(base, seq_lens=lens, query_lens=tuple(1 + row % 5 for row in range(48))))
    return found


def _skewed(count: int, longest: int) -> tuple[int, ...]:
    """Lengths of a batch in which few are long, and some are padding."""
    return tuple(
        0 if row % 9 == 8 else max(1, longest * (row * row % 101) // (100 * (1 + row % 3))) for row in range(count)
    )


# ---- decode ------------------------------------------------------------------------------------------------------


def check_decode(shape: Shape, device: torch.device) -> None:
    """Within rounding of fp64, the same bits on every run, and nothing else touched or read."""
    batch = make_batch(shape, device)
    first = batch.decode()
    wanted, magnitude = batch.attention_fp64()
    error = (first.double() - wanted).abs() - _TOLERANCES[shape.dtype] * magnitude
    worst = error.flatten().argmax() if error.numel() else None
    if worst is not None and not error.flatten()[worst] <= 1e-9:
        found = first.flatten()[worst].item(), wanted.flatten()[worst].item(), magnitude.flatten()[worst].item()
        rows = (~(error <= 1e-9)).nonzero()[:4].tolist()
        raise AssertionError("{} instead of {} of magnitude {}, at {} of {}".format(*found, rows, list(first.shape)))
    for how in _other_ways():
        how()
        again = batch.decode()
        if not torch.equal(again.view(torch.uint8), first.view(torch.uint8)):
            raise AssertionError("other bits when threads run in another order")
    if native_cuda.is_emulated():
        conflicts = native_cuda.library().ps_emulation_bank_conflicts()
        assert conflicts == 0, f"{conflicts} bank conflicts"


def _other_ways() -> list:
    """On a card the same again; emulated, every order of threads and moment of copies that may show a race."""
    if not native_cuda.is_emulated():
        return [lambda: None, lambda: None]
    order = native_cuda.library().ps_emulation_set
    return [partial(order, 1, 0, 0), partial(order, 2, 1, 1), partial(order, 0, 0, 0)]


@dataclass
class Batch:
    shape: Shape
    query: torch.Tensor
    pool: torch.Tensor  # [num_blocks, 2 layers, *layer_block_shape]
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor

    def decode(self) -> torch.Tensor:
        """The kernel's output [num_tokens, num_heads, head_dim]; rows that it skips are zero."""
        shape = self.shape
        step = cuda.DecodeStep(
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
            query_start_loc=None if shape.query_lens is None else self.query_start_loc,
            max_query_len=max(shape.query_lens or (1,)),
        )
        kv = cuda.KVLayer(self.pool[:, 1], shape.head_dim, shape.block_size)
        around = torch.full((len(self.query) + 2, *self.query.shape[1:]), 7.0, dtype=shape.dtype)
        around = guarded(around).to(self.query.device)
        out = around[1:-1].zero_()
        cuda.paged_decode(self.query, kv, step, shape.head_dim**-0.5, shape.window, shape.soft_cap, out)
        assert (around[0] == 7.0).all() and (around[-1] == 7.0).all(), "written outside out"
        return out

    def attention_fp64(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention gives, and the same with the values' magnitudes."""
        shape = self.shape
        keys, values = dequantized(self.pool[:, 1], shape.head_dim)
        wanted = torch.zeros(self.query.shape, dtype=torch.float64, device=self.query.device)
        magnitude = torch.zeros_like(wanted)
        starts = self.query_start_loc.tolist()
        for row, (length, (start, end)) in enumerate(zip(shape.seq_lens, pairwise(starts), strict=True)):
            if length == 0 or start == end:
                continue
            first_query = length - (end - start)
            first = 0 if shape.window is None else max(0, first_query + 1 - shape.window)
            at = torch.arange(first, length, device=self.query.device)
            blocks, offsets = self.block_tables[row][at // shape.block_size].long(), at % shape.block_size
            k = keys[blocks, :, offsets].double().transpose(0, 1)  # [num_kv_heads, context, head_dim]
            v = values[blocks, :, offsets].double().transpose(0, 1)
            q = self.query[start:end].double().unflatten(1, (shape.num_kv_heads, shape.group)).permute(1, 2, 0, 3)
            scores = q @ k.transpose(1, 2)[:, None] * shape.head_dim**-0.5  # [kv_heads, group, query_len, context]
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            distance = torch.arange(first_query, length, device=at.device)[:, None] - at
            hidden = (distance < 0) | (distance >= (shape.window or 2**40))
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
            for target, x in ((wanted, v), (magnitude, v.abs())):
                target[start:end] = (weights @ x[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
        return wanted, magnitude


def _check_codes(dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> None:
    """One key, so the output is its value: every code there is must come back as what it means."""
    shape = Shape(dtype=dtype, kv_dtype=kv_dtype, head_dim=256, num_kv_heads=1, group=1, seq_lens=(1,))
    batch = make_batch(shape, device)
    codes = torch.arange(256, device=device).to(torch.uint8)
    if kv_dtype is FP8:
        codes[codes & 127 == 127] = 0  # NaN
    keys_and_values = batch.pool[:, 1].view(torch.uint8)
    block = batch.block_tables[0, 0]
    keys_and_values[block, 1, 0, 0, :256] = codes
    scales = torch.tensor([0.5], device=device).view(torch.uint8)
    keys_and_values[block, 1, 0, 0, 256 * shape.block_size :][:4] = scales
    wanted = codes.view(kv_dtype).float() * 0.5
    assert torch.equal(batch.decode()[0, 0].float(), wanted)


def _check_plan(device: torch.device) -> None:
    """Pieces cover each row's visible keys once, in order; long contexts are cut, and equal work is cut equally."""
    plans = [
        ((5000, 0, 70, 1, 900), None, {0, 2, 3, 4}),
        ((5000, 0, 70, 1, 900), 300, {0, 2, 3, 4}),
        ((64,) * 700, None, set(range(700))),
        ((0, 0), None, set()),
    ]
    for seq_lens, window, rows in plans:
        items = _plan(seq_lens, window, device)
        covered: dict[int, list[tuple[int, int, int, int]]] = {}
        for row, begin, end, number in items:
            covered.setdefault(row, []).append((begin, end, number & 0xFFFF, number >> 16))
        assert set(covered) == rows
        for row, pieces in covered.items():
            first = 0 if window is None else max(0, seq_lens[row] - window) // 64 * 64
            assert pieces[0][0] == first and pieces[-1][1] == seq_lens[row]
            assert all(before[1] == after[0] for before, after in pairwise(pieces))
            assert [(number, count) for *_, number, count in pieces] == [(i, len(pieces)) for i in range(len(pieces))]
            assert all(begin % 64 == 0 and begin < end for begin, end, *_ in pieces)
    assert len(_plan((64,) * 700, None, device)) == 700
    alone = _plan((1 << 20,), None, device)
    assert 2 <= len(alone) <= 512
    lengths = [end - begin for _, begin, end, _ in alone]
    assert len(set(lengths[:-1])) == 1 and lengths[-1] <= lengths[0]


def _plan(seq_lens: Sequence[int], window: int | None, device: torch.device) -> list[list[int]]:
    """The plan's pieces: row, first key, end, number | count << 16."""
    shape = Shape(num_kv_heads=1, group=1, seq_lens=(1,))
    kv = cuda.KVLayer(make_batch(shape, device).pool[:, 1], shape.head_dim, shape.block_size)
    tables = torch.zeros(len(seq_lens), 1, dtype=torch.int32, device=device)
    lens = guarded(torch.tensor(seq_lens, dtype=torch.int32)).to(device)
    step = cuda.DecodeStep(seq_lens=lens, block_tables=tables)
    items = step.plan(kv, 1, BF16, window or 0).items.view(-1, 4).tolist()
    return items[1 : 1 + items[0][0]]


def _check_same_step_again(device: torch.device) -> None:
    """As a replayed graph does: lengths change in place, and the plan follows when the first layer comes back."""
    batch = make_batch(Shape(num_kv_heads=1, seq_lens=(1500, 40)), device)
    shape = batch.shape
    layers = [cuda.KVLayer(batch.pool[:, n], shape.head_dim, shape.block_size) for n in (1, 0)]
    step = cuda.DecodeStep(seq_lens=batch.seq_lens, block_tables=batch.block_tables)
    for seq_lens in ((1500, 40), (3, 39), (0, 17)):
        batch.seq_lens.copy_(torch.tensor(seq_lens))
        batch.shape = replace(shape, seq_lens=seq_lens)
        outs = [cuda.paged_decode(batch.query, layer, step, 0.125, None, None) for layer in (*layers, layers[1])]
        live = [row for row in range(2) if seq_lens[row]]
        assert torch.equal(outs[0][live], batch.decode()[live])


def dequantized(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 K and V [num_blocks, num_kv_heads, block_size, head_dim] of a layer."""
    codes = reference.split_kv(kv_cache, head_dim)
    if kv_cache.dtype not in reference.LARGEST_CODES:
        return codes[0].float(), codes[1].float()
    scales = reference.split_kv_scales(kv_cache, head_dim)
    return tuple(c.float() * s.contiguous().view(F32) for c, s in zip(codes, scales, strict=True))


def layer_block_shape(shape: Shape) -> tuple[int, ...]:
    token_size = reference.kv_token_size(shape.head_dim, shape.kv_dtype)
    if shape.kv_dtype in reference.LARGEST_CODES:
        return (2, shape.num_kv_heads, 1, shape.block_size * token_size)
    return (2, shape.num_kv_heads, shape.block_size, token_size)


def make_batch(shape: Shape, device: torch.device) -> Batch:
    """Random rows in shuffled blocks of a pool that is NaN wherever no token lies; tensors end where memory does."""
    generator = torch.Generator(device=device).manual_seed(shape.seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    blocks_of = [-(-length // shape.block_size) for length in shape.seq_lens]
    num_blocks = sum(blocks_of) + 1
    order = torch.randperm(num_blocks, generator=generator, device=device)
    pool = poisoned_pool(num_blocks, 2, *layer_block_shape(shape), dtype=shape.kv_dtype).to(device)
    # Entries behind a row's blocks lead nowhere.
    tables = torch.full((len(blocks_of), max(blocks_of)), 2**30, dtype=torch.int32, device=device)
    taken = 0
    for row, (length, count) in enumerate(zip(shape.seq_lens, blocks_of, strict=True)):
        tables[row, :count] = order[taken : taken + count].int()
        taken += count
        at = torch.arange(length, device=device)
        slots = tables[row][at // shape.block_size].long() * shape.block_size + at % shape.block_size
        key, value = (randn(length, shape.num_kv_heads, shape.head_dim) * (1 + row) for _ in range(2))
        reference.write_kv(key, value, pool[:, 1], slots)
    counts = shape.query_lens or (1,) * len(shape.seq_lens)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    # Queries lie in a fused projection: their rows are further apart than their heads are wide.
    num_heads = shape.num_kv_heads * shape.group
    qkv = guarded(randn(sum(counts), num_heads + 2 * shape.num_kv_heads, shape.head_dim).to(shape.dtype))
    return Batch(
        shape=shape,
        query=qkv[:, :num_heads],
        pool=guarded(pool),
        seq_lens=guarded(torch.tensor(shape.seq_lens, dtype=torch.int32)).to(device),
        block_tables=guarded(tables),
        query_start_loc=guarded(starts).to(device),
    )


# ---- blocks ------------------------------------------------------------------------------------------------------


def _pool(num_blocks: int, device: torch.device, pin: bool = False) -> torch.Tensor:
    """Blocks of 3 layers, which are no whole number of a CTA's share."""
    pool = torch.arange(num_blocks * 3 * 1000, dtype=torch.int32).view(num_blocks, 3, 1000)
    return pool.pin_memory() if pin and torch.cuda.is_available() else guarded(pool).to(device)


def _check_copy(count: int, device: torch.device) -> None:
    """Pairs that do not meet, in one launch or several."""
    pool = _pool(2 * count + 1, device)
    wanted = pool.clone()
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(count))
    pairs = order.view(count, 2)
    wanted[pairs[:, 1].to(device)] = pool[pairs[:, 0].to(device)]
    cuda.copy_blocks(pool, pairs)
    assert torch.equal(pool, wanted)


def _check_chains(device: torch.device) -> None:
    """Each sees what the ones before it did, though launches run their pairs at the same time."""
    pairs = torch.tensor([[0, 1], [1, 2], [3, 1], [1, 4], [4, 0], [2, 3], [5, 3], [3, 3]])
    for copy in (cuda.copy_blocks, lambda pool, chain: cuda.swap_blocks(pool, pool, chain)):
        pool = _pool(7, device)
        wanted = pool.clone()
        reference.swap_blocks(wanted, wanted, pairs)
        copy(pool, pairs)
        assert torch.equal(pool, wanted)


def _check_swap(device: torch.device) -> None:
    """Out and in again at other places; runs of neighbours, single blocks, a target that is written twice."""
    pool, host = _pool(12, device), _pool(9, device, pin=True)
    before, wanted = pool.clone(), pool.clone()
    out: Sequence[tuple[int, int]] = [(3, 0), (4, 1), (5, 2), (9, 7), (0, 5), (11, 5)]
    host.zero_()
    cuda.swap_blocks(pool, host, torch.tensor(out))
    back = [(0, 6), (1, 7), (2, 2), (5, 3)]
    cuda.swap_blocks(host, pool, torch.tensor(back))
    for (_, target), source in zip(back, (3, 4, 5, 11), strict=True):
        wanted[target] = before[source]
    assert torch.equal(pool, wanted)
