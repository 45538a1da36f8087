"""Kernels: `ops` is what other rooms call, `reference` says what each op means, `cpu` and `native` reach csrc."""

from __future__ import annotations

# Of the native CPU library: here, where it costs no import of torch.
ABI_VERSION = 6
