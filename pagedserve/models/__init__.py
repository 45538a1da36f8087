"""Models: the table of architectures, and what every model offers to the worker."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from pagedserve.errors import ModelLoadError
from pagedserve.log import get_logger
from pagedserve.registry import Registry, load

logger = get_logger(__name__)

# `architectures[0]` of config.json -> the class that computes it.
ARCHITECTURES: Registry[Any] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": "pagedserve.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "pagedserve.models.llama:MistralForCausalLM",
        "Qwen2ForCausalLM": "pagedserve.models.qwen:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "pagedserve.models.qwen:Qwen3ForCausalLM",
        "MixtralForCausalLM": "pagedserve.models.mixtral:MixtralForCausalLM",
        "Qwen3MoeForCausalLM": "pagedserve.models.mixtral:Qwen3MoeForCausalLM",
        "Gemma2ForCausalLM": "pagedserve.models.gemma:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "pagedserve.models.gemma:Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": "pagedserve.models.gemma:Gemma3ForConditionalGeneration",
        "Phi3ForCausalLM": "pagedserve.models.phi3:Phi3ForCausalLM",
        "SmolLM3ForCausalLM": "pagedserve.models.smollm3:SmolLM3ForCausalLM",
        "Olmo2ForCausalLM": "pagedserve.models.olmo2:Olmo2ForCausalLM",
        "OlmoeForCausalLM": "pagedserve.models.olmoe:OlmoeForCausalLM",
        "GraniteForCausalLM": "pagedserve.models.granite:GraniteForCausalLM",
        "OPTForCausalLM": "pagedserve.models.opt:OPTForCausalLM",
        "GPT2LMHeadModel": "pagedserve.models.gpt2:GPT2LMHeadModel",
        "GPTNeoXForCausalLM": "pagedserve.models.gpt_neox:GPTNeoXForCausalLM",
    },
)

# Installed packages add architectures by entry points of this group (see examples/add_an_architecture).
ENTRY_POINTS = "pagedserve.architectures"

# What computes architectures that are not in the table, and any with `--model-impl transformers`.
FALLBACK = "pagedserve.models.transformers_fallback:TransformersForCausalLM"


def model_class(config: Mapping[str, Any], impl: str = "auto") -> Any:
    """The class for a config.json.

    `impl` is `--model-impl`: "native" is a class of the table or of an installed package (ModelLoadError names those
    that are known), "transformers" the fallback, "auto" the first where it is there and computes this config.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelLoadError(f"config.json names no architecture; known: {', '.join(ARCHITECTURES)}")
    if impl != "transformers":
        for target in filter(None, map(_target, names)):
            native = load(target)
            reason = native.why_not(config)
            if reason is None:
                return native
            if impl == "native":
                raise ModelLoadError(f"{reason} is not native; use --model-impl auto")
            logger.info("%s is not native", reason)
    if impl == "native":
        raise ModelLoadError(
            f"architecture {', '.join(map(str, names))} is not native; use --model-impl auto, or one of those "
            f"that are: {', '.join(ARCHITECTURES)}"
        )
    return load(FALLBACK)


def _target(name: Any) -> str | None:
    """Where the class of an architecture is, as "module:class"; None where nobody knows it."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    return next((entry.value for entry in entry_points(group=ENTRY_POINTS) if entry.name == name), None)
