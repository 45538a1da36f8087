"""Kernels: `ops` is what other rooms call, `reference` says what each op means, `cpu` and `native` reach csrc."""
