"""How kernels are launched, and the shipped configurations: what is checked and warmed up is what serves.

A module of kernels writes each launch once, as a function from tensors to a `Launch`. Serving runs it; `variants()`
calls the same function with tensors of the "meta" device and takes from it what Triton would compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

# Every module of kernels: each has `variants() -> list[Variant]`.
MODULES = tuple(
    f"pagedserve.kernels.triton.{name}"
    for name in (
        "attention_variants",
        "kv_cache",
        "norm",
        "elementwise",
        "embedding",
        "rotary",
        "logits",
        "sampling",
        "logprobs",
        "moe",
        "experts",
        "linear",
    )
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compilation of one kernel.

    `signature` has an entry for each argument that is no constexpr, written as Triton's compiler tool has it:
    "*bf16:16" (a pointer to bf16 whose address divides by 16), "i32:16" (an int known to divide by 16), "i32", "i64",
    "fp32"; "1" is an int that is always 1, and "None" an argument that is not given.
    """

    name: str  # unique among all: kernel, types and sizes, as in "decode-bf16-d128-g4"
    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    capabilities: tuple[int, ...] = (80, 90)  # the targets it ships for, 10 * major + minor
    ctas_per_sm: int = 1  # planned residents: what registers and shared memory must leave room for
    expects: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # capability -> what its PTX must contain
    representative: bool = False  # compiled in every test run; the others only in the slow ones

    def warm_up(self) -> Any:
        """Compiles it for the current GPU into Triton's cache, launching nothing; returns Triton's compiled kernel."""
        # Constexprs follow the arguments in every kernel, so positions agree.
        arguments = [_example(self.signature[name]) for name in self.kernel.arg_names if name in self.signature]
        return self.kernel.warmup(*arguments, grid=(1,), **self.constexprs, **self.options())

    def options(self) -> dict[str, Any]:
        """How Triton is told to compile it."""
        return _options(self.num_warps, self.num_stages)


@dataclass(slots=True, kw_only=True)
class Launch:
    """One launch of a kernel, ready to run."""

    kernel: Any  # the @triton.jit function
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # in the kernel's order; tensors, numbers, None
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Queues it on the current stream; an empty grid is no launch."""
        if 0 in self.grid:
            return
        if _collected is not None:
            _collected.append(self)
            return
        options = _options(self.num_warps, self.num_stages)
        self.kernel[self.grid](*self.arguments.values(), **self.constexprs, **options)

    def variant(self, name: str, **more: Any) -> Variant:
        """What Triton compiles for it. `more` are the fields of Variant that a launch does not know."""
        general = {*(self.kernel.do_not_specialize or ()), *(self.kernel.do_not_specialize_on_alignment or ())}
        return Variant(
            name=name,
            kernel=self.kernel,
            signature={key: _kind(value, key in general) for key, value in self.arguments.items()},
            constexprs=self.constexprs,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            **more,
        )


_collected: list[Launch] | None = None


@contextmanager
def collecting() -> Iterator[list[Launch]]:
    """Within, launches are taken down and nothing runs: with tensors of the "meta" device, what a model launches."""
    global _collected
    _collected = launches = []
    try:
        yield launches
    finally:
        _collected = None


def _options(num_warps: int, num_stages: int) -> dict[str, Any]:
    # Fused multiply-adds by name: from Triton 3.10 on they are not the default.
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def all_variants() -> list[Variant]:
    """Every shipped configuration of every module."""
    return [variant for module in MODULES for variant in import_module(module).variants()]


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}


def type_name(dtype: torch.dtype) -> str:
    """Triton's name of a dtype, as in signatures."""
    return _TYPES[dtype]


def _kind(argument: Any, general: bool) -> str:
    """Triton's specialization of an argument; a general one is not specialized on its value."""
    if argument is None:
        return "None"
    if isinstance(argument, torch.Tensor):
        offset = argument.storage_offset() * argument.element_size()
        return f"*{_TYPES[argument.dtype]}" + (":16" if offset % 16 == 0 and not general else "")
    if isinstance(argument, float):
        return "fp32"
    if argument == 1 and not general:
        return "1"
    width = "i32" if -(2**31) <= argument < 2**31 else "i64"
    return width + (":16" if argument % 16 == 0 and not general else "")


def _example(kind: str) -> Any:
    """An argument that Triton specializes on as `kind` says; a dtype stands for an aligned pointer."""
    kind, _, alignment = kind.partition(":")
    if kind == "None":
        return None
    if kind.startswith("*"):
        return _DTYPES[kind[1:]]
    if kind == "fp32":
        return 0.5
    if kind == "1":
        return 1
    number = 48 if alignment else 3
    return number + 2**32 if kind == "i64" else number
