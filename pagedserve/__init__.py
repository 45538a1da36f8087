"""pagedserve: an LLM serving engine built on PagedAttention.

The package root stays light: `LLM` and `SamplingParams` are resolved on first use, so that importing
the control plane never imports torch.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutput", "__version__"]

_EXPORTS = {
    "LLM": "pagedserve.engine.llm:LLM",
    "SamplingParams": "pagedserve.sampling_params:SamplingParams",
    "StructuredOutput": "pagedserve.sampling_params:StructuredOutput",
    "RequestOutput": "pagedserve.outputs:RequestOutput",
}


def __getattr__(name: str) -> Any:
    target = _EXPORTS.get(name)
    if target is None:
        raise AttributeError(f"module 'pagedserve' has no attribute {name!r}")
    from pagedserve.registry import load

    value = load(target)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
