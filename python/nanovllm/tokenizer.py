"""The model's tokenizer with the methods of Hugging Face's that programs use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, overload

from nanovllm.sampling_params import to_json

if TYPE_CHECKING:
    from nanovllm import _core

__all__ = ["Tokenizer"]

# Arguments of transformers' apply_chat_template() that are no variables of the template.
_ABSENT = {
    *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}


class Tokenizer:
    """Text to token ids and back, and conversations to prompts. Safe to use from any thread."""

    def __init__(self, engine: _core.Engine | _core.AsyncEngine) -> None:
        self._engine = engine
        self.vocab_size, self.bos_token_id, self.eos_token_id, template = engine.tokenizer_facts()
        self.chat_template: str | None = template or None

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, list[Any]]:
        """The ids and a mask of ones: lists of numbers, or of such lists where several texts are given."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        lists = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": lists, "attention_mask": [[1] * len(ids) for ids in lists]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"encode() takes one text, got {text!r:.80}")
        return self._engine.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, Integral) else token_ids
        return self._engine.decode([int(id) for id in ids], skip_special_tokens)  # type: ignore[union-attr]

    def batch_decode(self, lists: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in lists]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, str):
            return self._engine.token_to_id(tokens)
        return [self._engine.token_to_id(token) for token in tokens]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        if isinstance(ids, Integral):
            return self._engine.id_to_token(int(ids))
        return [self._engine.id_to_token(int(id)) for id in ids]  # type: ignore[union-attr]

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._engine.id_to_token(self.eos_token_id)

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._engine.id_to_token(self.bos_token_id)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """The prompt of a conversation: its token ids, or its text with tokenize=False. Further
        arguments are variables of the template, such as enable_thinking."""
        for name in _ABSENT & variables.keys():
            if variables.pop(name):
                raise TypeError(f"apply_chat_template() has no {name} here: it gives a text, or a list of ids")
        variables["add_generation_prompt"] = add_generation_prompt
        if tools is not None:
            variables["tools"] = tools
        if documents is not None:
            variables["documents"] = documents
        if continue_final_message:
            variables["continue_final_message"] = True
        prompt = self._engine.chat_prompt(to_json(conversation), to_json(variables))
        return self._engine.tokenize(prompt) if tokenize else prompt.text
