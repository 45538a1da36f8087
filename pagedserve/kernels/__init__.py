"""Kernels: `ops` is what the other rooms call, `reference` what each op means, `native` how csrc is reached."""
