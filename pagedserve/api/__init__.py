"""The HTTP face: OpenAI-compatible routes over an AsyncLLMEngine."""
