"""Models: the table of architectures, and what every model offers to the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedserve.errors import ModelLoadError
from pagedserve.registry import Registry, load

# `architectures[0]` of config.json -> the class that computes it.
ARCHITECTURES: Registry[Any] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": "pagedserve.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "pagedserve.models.llama:LlamaForCausalLM",
    },
)


def model_class(config: Mapping[str, Any]) -> Any:
    """The class for a config.json; ModelLoadError names an architecture that is not known, and those that are."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelLoadError(f"config.json names no architecture; known: {', '.join(ARCHITECTURES)}")
    for name in names:
        if name in ARCHITECTURES:
            return load(ARCHITECTURES[name])
    raise ModelLoadError(
        f"architecture {', '.join(map(str, names))} is not supported; known: {', '.join(ARCHITECTURES)}"
    )
