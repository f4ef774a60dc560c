"""AsyncLLM by its older name in vLLM."""

from nanovllm.async_llm import AsyncLLM

__all__ = ["AsyncLLMEngine"]

AsyncLLMEngine = AsyncLLM
