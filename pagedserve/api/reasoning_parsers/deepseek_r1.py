"""DeepSeek R1: as Qwen 3, but the answer is thoughts from its first word on even if no tag says so."""

from __future__ import annotations

from pagedserve.api.reasoning_parsers.qwen3 import Qwen3Reasoning


class DeepSeekR1Reasoning(Qwen3Reasoning):
    """Only a prompt that ends with the closing tag, as templates write it with thinking off, keeps it from thinking."""

    @classmethod
    def opens(cls, prompt: str, continued: str = "") -> bool:
        if continued:
            return cls.CLOSE not in continued
        return not prompt.rstrip().endswith(cls.CLOSE)
