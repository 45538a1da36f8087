"""Conformance cases of GPU kernels: pytest runs them under the interpreter, `benchmarks/gpu_check.py` on a card.

So nothing here imports pytest. A case makes its inputs on the device it is given, computes reference and kernel there,
and raises AssertionError where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Modules of cases, each with `cases() -> list[Case]`.
MODULES = tuple(
    f"tests.kernels.cases.{name}"
    for name in ("triton_kv_cache", "triton_attention", "triton_ops", "triton_sampling", "cuda", "cuda_backend")
)


@dataclass(frozen=True)
class Case:
    name: str  # unique in its module
    run: Callable[[torch.device], None]
    full_size: bool = False  # too large for the interpreter: on a card only
