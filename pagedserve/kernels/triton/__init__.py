"""Kernels for NVIDIA GPUs in Triton (3.6 to 3.9), which need neither nvcc nor a build.

Imported only where a GPU serves, or where TRITON_INTERPRET=1 runs the same code on CPU tensors: `import triton` takes
a while, and a CPU server never needs it. Every module has `variants()`, the configurations that serving launches.
"""
