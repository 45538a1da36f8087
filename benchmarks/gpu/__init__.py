"""The phases of `benchmarks/gpu_check.py`; each module has functions from a `Check` to records."""
