"""Formats in which models write their thoughts: name -> parser. The names are vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedserve.registry import Registry

if TYPE_CHECKING:
    from pagedserve.api.reasoning_parsers.base import ReasoningParser

REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry(
    "reasoning parser",
    {
        "openai_gptoss": "pagedserve.api.reasoning_parsers.harmony:HarmonyReasoning",
        "gemma4": "pagedserve.api.reasoning_parsers.gemma4:Gemma4Reasoning",
        "mistral": "pagedserve.api.reasoning_parsers.mistral:MistralReasoning",
        "granite": "pagedserve.api.reasoning_parsers.granite:GraniteReasoning",
        "glm45": "pagedserve.api.reasoning_parsers.qwen3:Qwen3Reasoning",
        "deepseek_r1": "pagedserve.api.reasoning_parsers.deepseek_r1:DeepSeekR1Reasoning",
        "qwen3": "pagedserve.api.reasoning_parsers.qwen3:Qwen3Reasoning",
    },
)
