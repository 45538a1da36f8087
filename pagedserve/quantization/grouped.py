"""8- and 4-bit weights on GPUs: groups of 32 codes that stay packed in the device's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedserve.errors import ConfigError
from pagedserve.kernels import ops
from pagedserve.kernels.grouped import GROUP, GroupedMatrix, concatenate
from pagedserve.quantization.gguf import as_dense, check_rows, dequantize
from pagedserve.quantization.method import LinearWeight, QuantMethod, RoundingError, as_list
from pagedserve.quantization.none import DenseMethod

_BITS = {"int8": 8, "int4": 4}
# GGUF types whose blocks are a scale (and an offset) and 32 codes: held without loss.
_STORED_BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}
_COMPARED_ROWS = 128
_ROWS = 4096  # quantised at a time: what that takes beside the weights is bounded


class GroupedWeight(LinearWeight):
    """One matrix of codes."""

    def __init__(self, matrix: GroupedMatrix, rounding_error: RoundingError | None = None):
        self.matrix = matrix
        self._rounding_error = rounding_error
        self.out_features, self.in_features = matrix.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    @property
    def rounding_error(self) -> RoundingError | None:
        return self._rounding_error

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, self.matrix, bias=bias)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        return ops.linear_rows(self.matrix, row_ids.to(self.matrix.codes.device))


class GroupedMethod(QuantMethod):
    """Groups of 8 or 4 bits where a file has them or they are asked for; all else is dense.

    "auto" keeps the blocks of Q8_0, Q4_0 and Q4_1, and dequantises other types; int8 and int4 quantise what the file
    holds in more bits. Matrices that are multiplied as one and whose parts come out in different formats are dense.
    """

    name = "grouped"

    def __init__(self, weights_dtype: str, device: torch.device, dtype: torch.dtype | None = None):
        """`dtype` is that of the activations, and of what is dense."""
        if weights_dtype not in ("auto", *_BITS):
            raise ConfigError(f"grouped weights are auto, int8 or int4, not {weights_dtype}")
        self._bits = _BITS.get(weights_dtype)
        self._asked = weights_dtype
        self._device, self._dtype = device, dtype
        self._dense = DenseMethod("auto", device, dtype)
        self.changes_weights = self._bits is not None

    def exact(self) -> QuantMethod:
        return self._dense

    def for_head(self) -> QuantMethod:
        # As on CPUs: 4-bit logits cost more than all other 4-bit matrices do.
        return GroupedMethod("int8", self._device, self._dtype) if self._asked == "int4" else self

    def for_experts(self) -> QuantMethod:
        if self._bits is not None:
            raise ConfigError(
                f"--weights-dtype {self._asked}: the experts of a mixture are held in the activations' type on GPUs; "
                "use --weights-dtype auto for this model"
            )
        return self._dense

    def from_dense(self, weight: torch.Tensor | Sequence[torch.Tensor]) -> LinearWeight:
        parts = as_list(weight)
        if self._bits is None:
            return self._dense.from_dense(parts)
        return self._stack([self._quantized(part) for part in parts])

    def from_gguf(
        self, quant_type: str | Sequence[str], rows: np.ndarray | Sequence[np.ndarray], in_features: int
    ) -> LinearWeight:
        parts, kinds = as_list(rows), as_list(quant_type)
        kinds = kinds * (len(parts) // len(kinds))
        for kind, part in zip(kinds, parts, strict=True):
            check_rows(kind, part, in_features)
        if not self._are_grouped(kinds):
            return self._dense.from_gguf(kinds, parts, in_features)
        made: list[tuple[GroupedMatrix, RoundingError | None]] = []
        for kind, part in zip(kinds, parts, strict=True):
            if self._bits_of(kind) == _STORED_BITS.get(kind):
                made.append((self._unpacked(kind, part), None))
            else:
                dense = as_dense(kind, part)
                made.append(self._quantized(dequantize(kind, part) if dense is None else dense))
        return self._stack(made)

    def size_of(self, stored: Sequence[str], out_features: Sequence[int], in_features: int) -> int:
        if not self._are_grouped(stored):
            return self._dense.size_of(stored, out_features, in_features)
        self._check(in_features)
        bits = self._bits_of(stored[0])
        assert bits is not None
        return GroupedMatrix.num_bytes(bits, sum(out_features), in_features)

    def stack_experts(self, experts: Sequence[Sequence[LinearWeight]]) -> torch.Tensor:
        return self._dense.stack_experts(experts)

    def _bits_of(self, kind: str) -> int | None:
        """Bits in which a matrix of a file's type is held; None: dense."""
        stored = _STORED_BITS.get(kind)
        if self._bits is None or (stored is not None and stored <= self._bits):
            return stored
        return self._bits

    def _are_grouped(self, kinds: Sequence[str]) -> bool:
        bits = {self._bits_of(kind) for kind in kinds}
        return len(bits) == 1 and None not in bits

    def _check(self, in_features: int) -> None:
        if in_features % GROUP:
            raise ConfigError(
                f"{self._asked} weights need rows of a multiple of {GROUP} numbers, here are {in_features}: "
                "use --weights-dtype bfloat16"
            )

    def _quantized(self, part: torch.Tensor) -> tuple[GroupedMatrix, RoundingError]:
        assert self._bits is not None
        self._check(part.shape[1])
        pieces = [
            GroupedMatrix.quantize(rows.to(self._device), self._bits)
            for rows in part.split(_ROWS)  # each in the file's own type until it is on the device
        ]
        matrix = concatenate(pieces)
        chosen = torch.linspace(0, len(part) - 1, min(_COMPARED_ROWS, len(part)), dtype=torch.float64).long()
        wanted = part[chosen.to(part.device)].to(self._device).double()
        lost = matrix.dequantize(rows=chosen.to(self._device)).double() - wanted
        return matrix, RoundingError(float(lost.square().sum()), float(wanted.square().sum()))

    def _unpacked(self, kind: str, rows: np.ndarray) -> GroupedMatrix:
        """The blocks of a file's rows, uint8 [out_features, row_bytes], as codes and scales on the device."""
        head_bytes = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}[kind]
        code_bytes = GROUP * _STORED_BITS[kind] // 8
        # A mapped file is read-only, which torch cannot express.
        blocks = torch.from_numpy(np.require(rows, requirements=("C", "W"))).to(self._device)
        blocks = blocks.unflatten(1, (-1, head_bytes + code_bytes))
        codes = blocks[..., head_bytes:].flatten(1)
        heads = blocks[..., :head_bytes].contiguous().view(torch.float16)  # [out_features, num_groups, 1 or 2]
        scales = heads[..., 0].contiguous()
        if kind == "Q8_0":
            return GroupedMatrix(codes.view(torch.int8), scales, None)
        # Q4_0's codes count from -8.
        return GroupedMatrix(codes, scales, heads[..., 1].contiguous() if kind == "Q4_1" else scales * -8)

    def _stack(self, made: list[tuple[GroupedMatrix, RoundingError | None]]) -> LinearWeight:
        found = [error for _, error in made if error is not None]
        return GroupedWeight(concatenate([matrix for matrix, _ in made]), sum(found[1:], found[0]) if found else None)
