"""Attention backends: the table of them, and the choice of one."""

from __future__ import annotations

from pagedserve.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from pagedserve.errors import ConfigError
from pagedserve.log import get_logger
from pagedserve.registry import Registry

logger = get_logger(__name__)

# In order of preference: the first whose why_not(spec) is None is taken.
BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "cpu": "pagedserve.attention.cpu:CpuBackend",
        "cuda": "pagedserve.attention.cuda:CudaBackend",
        "triton": "pagedserve.attention.triton:TritonBackend",
        "reference": "pagedserve.attention.reference:ReferenceBackend",
    },
)

__all__ = ["BACKENDS", "AttentionBackend", "AttentionMetadata", "AttentionSpec", "select"]


def select(spec: AttentionSpec, forced: str | None = None) -> type[AttentionBackend]:
    """The first backend that can serve `spec`, or the forced one.

    Raises ConfigError with the reason when the forced one (or every one) cannot.
    """
    if forced is not None:
        chosen = BACKENDS.resolve(forced)
        reason = chosen.why_not(spec)
        if reason is not None:
            raise ConfigError(f"attention backend {forced!r} cannot run here: {reason}")
        return chosen
    reasons = []
    for name in BACKENDS:
        candidate = BACKENDS.resolve(name)
        reason = candidate.why_not(spec)
        if reason is None:
            if name == "reference":
                logger.warning("attention runs in plain torch, which is slow (%s)", "; ".join(reasons))
            return candidate
        reasons.append(f"{name}: {reason}")
    raise ConfigError("no attention backend can run here (" + "; ".join(reasons) + ")")
