"""Formats in which models write tool calls: name -> parser. The names are vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedserve.registry import Registry

if TYPE_CHECKING:
    from pagedserve.api.tool_parsers.base import ToolParser

TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool-call parser",
    {
        "openai": "pagedserve.api.tool_parsers.harmony:HarmonyParser",
        "mistral": "pagedserve.api.tool_parsers.mistral:MistralParser",
        "deepseek_v3": "pagedserve.api.tool_parsers.deepseek_v3:DeepSeekV3Parser",
        "deepseek_v31": "pagedserve.api.tool_parsers.deepseek_v3:DeepSeekV31Parser",
        "glm45": "pagedserve.api.tool_parsers.glm45:Glm45Parser",
        "qwen3_coder": "pagedserve.api.tool_parsers.qwen3_coder:Qwen3CoderParser",
        "granite": "pagedserve.api.tool_parsers.granite:GraniteParser",
        "functiongemma": "pagedserve.api.tool_parsers.gemma:FunctionGemmaParser",
        "gemma4": "pagedserve.api.tool_parsers.gemma:Gemma4Parser",
        "gemma3": "pagedserve.api.tool_parsers.gemma:ToolCodeParser",
        "hermes": "pagedserve.api.tool_parsers.hermes:HermesParser",
        "pythonic": "pagedserve.api.tool_parsers.pythonic:PythonicParser",
        "llama3_json": "pagedserve.api.tool_parsers.llama3_json:Llama3JsonParser",
    },
)
