"""Matrices of 8- or 4-bit codes as GPUs hold them: groups of 32 numbers with a scale, and of 4 bits an offset."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """[out_features, in_features] of code * scale (+ offset).

    `codes`: int8 [out_features, in_features]; or uint8 [out_features, in_features / 2], of a group the first 16 codes
    in the lower halves of its bytes, the others in the upper ones (as in GGUF's Q4_0 and Q4_1).
    `scales`, and of 4 bits `offsets`: fp16 [out_features, in_features / 32].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    @property
    def bits(self) -> int:
        return 8 if self.offsets is None else 4

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * GROUP

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda

    @property
    def is_meta(self) -> bool:
        return self.codes.is_meta

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @staticmethod
    def num_bytes(bits: int, out_features: int, in_features: int) -> int:
        """`nbytes` of a matrix of this shape."""
        return out_features * (in_features * bits // 8 + in_features // GROUP * (2 if bits == 8 else 4))

    @classmethod
    def quantize(cls, weight: torch.Tensor, bits: int) -> GroupedMatrix:
        """The nearest codes of a float matrix whose rows are whole groups: 8 bits by the largest magnitude, 4 bits by
        smallest and largest number."""
        groups = weight.float().unflatten(-1, (-1, GROUP))
        if bits == 8:
            scales = (groups.abs().amax(-1) / 127).half()
            codes = (groups / _nonzero(scales)).round().clamp(-127, 127)
            return cls(codes.to(torch.int8).flatten(-2), scales, None)
        offsets = groups.amin(-1).half()
        scales = ((groups.amax(-1) - offsets.float()) / 15).half()
        codes = ((groups - offsets.float().unsqueeze(-1)) / _nonzero(scales)).round().clamp(0, 15).to(torch.uint8)
        halves = codes[..., :16] | codes[..., 16:] << 4
        return cls(halves.flatten(-2), scales, offsets)

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The matrix, or the rows int64 [num_rows] of it, [num_rows, in_features]."""
        codes, scales, offsets = (
            part if part is None or rows is None else part[rows] for part in (self.codes, self.scales, self.offsets)
        )
        if offsets is None:
            return (codes.unflatten(-1, (-1, GROUP)) * scales.float().unsqueeze(-1)).flatten(-2).to(dtype)
        halves = codes.unflatten(-1, (-1, GROUP // 2))
        wide = torch.cat((halves & 15, halves >> 4), dim=-1)
        return (wide * scales.float().unsqueeze(-1) + offsets.float().unsqueeze(-1)).flatten(-2).to(dtype)


def concatenate(parts: list[GroupedMatrix]) -> GroupedMatrix:
    """Matrices of one number of bits, stacked by rows."""
    if len(parts) == 1:
        return parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return GroupedMatrix(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
    )


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 1]; 1 where a group has no spread, whose codes are all 0."""
    return torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
