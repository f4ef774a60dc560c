"""A module at the place where vLLM's scripts import it from."""

from nanovllm.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
