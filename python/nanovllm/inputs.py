"""Prompts: text, or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypedDict, Union

from nanovllm import _core

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    """A prompt as text. Only prompts of the same `cache_salt`, or of none, share cached prefixes."""

    prompt: str


class TokensPrompt(_Salted):
    """A prompt as token ids; `cache_salt` as of TextPrompt."""

    prompt_token_ids: list[int]


PromptType = Union[str, Sequence[int], TextPrompt, TokensPrompt, _core.Prompt]


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt, or a list of them. The engine refuses bytes and what is no list, as it does in a list."""
    if isinstance(prompts, (str, bytes, dict)) or not hasattr(prompts, "__iter__"):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def text_of(prompt: Any) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if isinstance(text, _core.Prompt):
        return text.text
    return text if isinstance(text, str) else None


def salt_of(prompt: Any) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is None or isinstance(salt, str):
        return salt
    raise TypeError(f"a prompt's cache_salt must be a string, got {salt!r:.80}")
