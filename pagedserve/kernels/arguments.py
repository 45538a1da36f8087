"""What CPU ops ask of a tensor before its address goes to C: TypeError or ValueError with the argument's name."""

from __future__ import annotations

import torch


def check_rows(tensor: torch.Tensor, name: str, num_dims: int) -> None:
    """An fp32 CPU tensor, contiguous but for the stride of its first dimension (where it has two or more)."""
    if tensor.dtype is not torch.float32 or not tensor.is_cpu:
        raise TypeError(f"{name} must be fp32 on the CPU, it is {tensor.dtype} on {tensor.device}")
    if tensor.dim() != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimensions, its shape is {tuple(tensor.shape)}")
    if tensor.is_contiguous():
        return
    expected = 1
    for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if stride != expected and size != 1:
            break
        expected *= size
    else:
        if num_dims > 1:
            return
    raise ValueError(f"{name} must be contiguous but for its first dimension: strides {tensor.stride()}")


def check_ints(tensor: torch.Tensor, name: str, dtype: torch.dtype, num_dims: int) -> None:
    """An integer CPU tensor, contiguous but for the stride of a matrix' rows."""
    if tensor.dtype is not dtype or not tensor.is_cpu:
        raise TypeError(f"{name} must be {dtype} on the CPU, it is {tensor.dtype} on {tensor.device}")
    if tensor.dim() != num_dims or not (tensor.is_contiguous() or (num_dims == 2 and tensor.stride(1) == 1)):
        raise ValueError(f"{name} must be contiguous with {num_dims} dimensions: {tuple(tensor.shape)}")


def check_shape(found: tuple[int, ...], wanted: tuple[int, ...], name: str) -> None:
    """The shape that other arguments ask for."""
    if tuple(found) != wanted:
        raise ValueError(f"{name} has shape {tuple(found)}, it must be {wanted}")
