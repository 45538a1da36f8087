"""Weights in the panels of the native CPU kernels: floats, 8-bit and 4-bit groups of 32.

GGUF types are repacked without loss; dense weights keep their type or are quantised while loading. Activations stay
fp32: the float formats multiply in fp32, the integer ones round each row's groups of 32 inputs to 15 bits (4-bit: 12).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from pagedserve import packed_file
from pagedserve.errors import ConfigError
from pagedserve.kernels import native, ops
from pagedserve.quantization.gguf import FLOAT_TYPES, as_dense, check_rows, dequantize, type_number
from pagedserve.quantization.method import LinearWeight, QuantMethod, RoundingError, as_list

_FORMAT_OF_DTYPE = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_BITS = {
    "float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int8_g16": 8, "int8_min": 8,
    "int4_sym": 4, "int4": 4, "int4_f32": 4,
}  # fmt: skip
GROUP = 32
_COMPARED_ROWS = 128


class PackedWeight(LinearWeight):
    """One packed matrix; `packed` is what native code is given."""

    def __init__(self, packed: native.PackedMatrix, rounding_error: RoundingError | None = None):
        self.packed = packed
        self._rounding_error = rounding_error
        self.out_features = packed.out_features
        self.in_features = packed.in_features

    @property
    def format(self) -> str:
        """One of `native.LINEAR_FORMATS`."""
        return self.packed.format

    @property
    def nbytes(self) -> int:
        return self.packed.data.nbytes

    @property
    def rounding_error(self) -> RoundingError | None:
        return self._rounding_error

    @property
    def is_batch_invariant(self) -> bool:
        return True

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(_as_float(x), self.packed, bias=_bias(bias)).to(x.dtype)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        return ops.linear_rows(self.packed, row_ids.long())


class StackedWeight(LinearWeight):
    """Several weights of one input, of different formats, whose rows are stacked."""

    def __init__(self, parts: Sequence[PackedWeight]):
        self.parts = tuple(parts)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def rounding_error(self) -> RoundingError | None:
        errors = [part.rounding_error for part in self.parts if part.rounding_error is not None]
        return sum(errors[1:], errors[0]) if errors else None

    @property
    def is_batch_invariant(self) -> bool:
        return True

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide, wide_bias = _as_float(x), _bias(bias)
        out = torch.empty((x.shape[0], self.out_features), dtype=torch.float32)
        first = 0
        for part in self.parts:
            rows = slice(first, first + part.out_features)
            ops.linear(wide, part.packed, bias=None if wide_bias is None else wide_bias[rows], out=out[:, rows])
            first += part.out_features
        return out.to(x.dtype)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty((row_ids.shape[0], self.in_features), dtype=torch.float32)
        first = 0
        for part in self.parts:
            here = (row_ids >= first) & (row_ids < first + part.out_features)
            out[here] = part.rows(row_ids[here] - first)
            first += part.out_features
        return out


class PackedMethod(QuantMethod):
    """Packs for the native CPU kernels.

    "auto" keeps what the file holds. A float type rounds everything to it. int8 and int4 quantise what the file
    holds in more bits, and leave the rest as it is.
    """

    name = "packed"

    def __init__(self, weights_dtype: str = "auto"):
        if weights_dtype not in ("auto", "float32", "bfloat16", "float16", "int8", "int4"):
            raise ConfigError(
                f"unknown weights dtype {weights_dtype}; known: auto, float32, bfloat16, float16, int8, int4"
            )
        self._format = weights_dtype
        self.changes_weights = weights_dtype not in ("auto", "float32")

    @property
    def cache_key(self) -> str | None:
        return packed_file.method_key(self._format)

    def exact(self) -> QuantMethod:
        return PackedMethod("auto")

    def for_head(self) -> QuantMethod:
        # 4-bit logits cost 20 times the perplexity that all other 4-bit matrices do.
        return PackedMethod("int8") if self._format == "int4" else self

    def from_dense(self, weight: torch.Tensor | Sequence[torch.Tensor]) -> LinearWeight:
        parts = [part.cpu() for part in as_list(weight)]
        formats = [self._format_for(_FORMAT_OF_DTYPE[part.dtype]) for part in parts]
        return _stack(list(zip(formats, parts, [None] * len(parts), strict=True)), parts[0].shape[1])

    def from_gguf(
        self, quant_type: str | Sequence[str], rows: np.ndarray | Sequence[np.ndarray], in_features: int
    ) -> LinearWeight:
        parts = as_list(rows)
        kinds = as_list(quant_type)
        made: list[_Part] = []
        for kind, part in zip(kinds * (len(parts) // len(kinds)), parts, strict=True):
            check_rows(kind, part, in_features)
            dense = as_dense(kind, part)
            if dense is not None:
                made.append((self._format_for(_FORMAT_OF_DTYPE[dense.dtype]), dense, None))
                continue
            stored = native.linear_format_of_ggml_type(type_number(kind))
            wanted = self._format_for(stored or "float32")
            if wanted == stored:
                made.append((wanted, part, type_number(kind)))
            else:
                made.append((wanted, dequantize(kind, part), None))
        return _stack(made, in_features)

    def size_of(self, stored: Sequence[str], out_features: Sequence[int], in_features: int) -> int:
        num_bytes = 0
        parts = zip(map(self._planned_format, stored), out_features, strict=True)
        for fmt, run in itertools.groupby(parts, lambda part: part[0]):
            _check_groups(fmt, in_features)
            num_bytes += native.PackedMatrix.num_bytes(fmt, sum(rows for _, rows in run), in_features)
        return num_bytes

    def _planned_format(self, kind: str) -> str:
        if kind in FLOAT_TYPES:
            return self._format_for(_FORMAT_OF_DTYPE[FLOAT_TYPES[kind]])
        return self._format_for(native.linear_format_of_ggml_type(type_number(kind)) or "float32")

    def stack_experts(self, experts: Sequence[Sequence[LinearWeight]]) -> native.PackedExperts:
        return native.PackedExperts([[part.packed for part in expert] for expert in experts])

    def _format_for(self, stored: str) -> str:
        if self._format == "auto":
            return stored
        if self._format in ("int8", "int4") and _BITS[stored] <= _BITS[self._format]:
            return stored
        return self._format


# The format to pack into, the rows, and their GGML type if they are not dense.
_Part = tuple[str, torch.Tensor | np.ndarray, int | None]


def _stack(parts: list[_Part], in_features: int) -> LinearWeight:
    """One matrix for each run of parts of one format; no more matrices than needed."""
    runs: list[list[_Part]] = []
    for part in parts:
        if runs and runs[-1][0][0] == part[0]:
            runs[-1].append(part)
        else:
            runs.append([part])
    weights = [_pack(run, in_features) for run in runs]
    return weights[0] if len(weights) == 1 else StackedWeight(weights)


def _pack(parts: list[_Part], in_features: int) -> PackedWeight:
    fmt = parts[0][0]
    _check_groups(fmt, in_features)
    packed = native.PackedMatrix(fmt, sum(rows.shape[0] for _, rows, _ in parts), in_features)
    first = 0
    error: RoundingError | None = None
    for _, rows, ggml_type in parts:
        if ggml_type is None:
            packed.pack(first, rows)
            if _BITS[fmt] <= 8:
                lost = _rounding_error(packed, first, rows)
                error = lost if error is None else error + lost
        else:
            packed.pack_ggml(first, rows, ggml_type)
        first += rows.shape[0]
    return PackedWeight(packed, error)


def _check_groups(fmt: str, in_features: int) -> None:
    if _BITS[fmt] <= 8 and in_features % GROUP:
        raise ConfigError(
            f"{fmt} weights need rows of a multiple of {GROUP} numbers, here are {in_features}: "
            "use --weights-dtype bfloat16"
        )


def _rounding_error(packed: native.PackedMatrix, first: int, rows: torch.Tensor) -> RoundingError:
    """Of rows that were packed from `first` on, judged by some of them."""
    chosen = torch.linspace(0, rows.shape[0] - 1, min(_COMPARED_ROWS, rows.shape[0]), dtype=torch.float64).long()
    wanted = rows[chosen].double()
    lost = ops.linear_rows(packed, chosen + first).double() - wanted
    return RoundingError(float(lost.square().sum()), float(wanted.square().sum()))


def _as_float(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide if wide.stride(-1) == 1 or wide.shape[-1] == 1 else wide.contiguous()


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()
