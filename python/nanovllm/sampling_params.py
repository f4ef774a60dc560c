"""A request's parameters for the sampler."""

from __future__ import annotations

from enum import IntEnum
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm import _core

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    # The module dataclasses takes longer to import than this whole package.
    _Class = TypeVar("_Class", bound=type)

    def dataclass(cls: _Class) -> _Class:
        """__init__, __eq__ and a __repr__ of what differs from the defaults."""
        fields = {name: getattr(cls, name) for name in cls.__annotations__}
        arguments = ", ".join(f"{name}=_fields[{name!r}]" for name in fields)
        body = "".join(f"    self.{name} = {name}\n" for name in fields)
        scope: dict[str, Any] = {"_fields": fields}
        exec(f"def __init__(self, {arguments}):\n{body}    self.__post_init__()", scope)
        scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
        cls._fields = fields
        cls.__dataclass_fields__ = _Fields()
        cls.__init__ = scope["__init__"]
        cls.__eq__ = lambda self, other: type(self) is type(other) and vars(self) == vars(other)
        cls.__hash__ = None
        cls.__repr__ = _repr
        return cls

    class _Fields:
        """The fields that dataclasses.replace(), asdict() and fields() go by, made when they ask."""

        def __get__(self, given: Any, cls: Any) -> dict[str, Any]:
            from dataclasses import field, make_dataclass

            fields = [(name, cls.__annotations__[name], field(default=value)) for name, value in cls._fields.items()]
            cls.__dataclass_fields__ = make_dataclass(cls.__name__, fields).__dataclass_fields__
            return cls.__dataclass_fields__

    def _repr(self: Any) -> str:
        shown = (f"{name}={value!r}" for name, value in _given(self).items())
        return f"{type(self).__name__}({', '.join(shown)})"


def _given(params: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    for name in vars(params).keys() - params._fields.keys():
        raise TypeError(f"{type(params).__name__} has no {name}")
    return {name: value for name, value in vars(params).items() if value != params._fields[name]}


class RequestOutputKind(IntEnum):
    """The content of what AsyncLLM.generate() yields: everything so far, what is new, or the end alone."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

    def __repr__(self) -> str:
        return f"RequestOutputKind.{self.name}"


@dataclass
class StructuredOutputsParams:
    """The structure that an answer's text must have; one of these."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if len(_given(self)) != 1:
            raise ValueError(f"exactly one of {', '.join(vars(self))} must be given")


@dataclass
class SamplingParams:
    """How a request is sampled: nano-vLLM's parameters first, with its defaults, then vLLM's.

    A value out of range raises ValueError here. `temperature=0` is greedy. `max_tokens=None` goes on
    to the end of the context. `spaces_between_special_tokens` may be true only; a parameter of vLLM's
    that is not here raises TypeError.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    n: int = 1
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        _core.check_params(self._wire()[0])

    def _wire(self, priority: int = 0, cache_salt: str | None = None) -> tuple[str, int]:
        """The JSON form of a request (docs/cli.md), and the kind of output."""
        # nano-vLLM's default for max_tokens is not the engine's; all others are, and stay away.
        given = {"max_tokens": self.max_tokens, **_given(self)}
        if self.max_tokens is None:
            given["max_tokens"] = 2**31 - 1
        for name, value in given.items():
            if isinstance(value, float) and not isfinite(value):  # JSON has no such number
                raise ValueError(f"{name} is {value}: it must be finite")
        kind = int(RequestOutputKind(given.pop("output_kind", 0)))
        if priority != 0:
            given["priority"] = priority
        if cache_salt is not None:
            given["cache_salt"] = cache_salt
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            given["structured_outputs"] = _given(self.structured_outputs)
        return to_json(given), kind


def _plain(value: Any) -> Any:
    """numpy's numbers, as nano-vLLM takes them, as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of JSON: {value!r:.80}")


def to_json(value: Any) -> str:
    """JSON without the numbers that JSON has not (NaN, infinity), and without lone surrogates: ValueError."""
    import json

    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        raise ValueError("numbers must be finite, and no list may contain itself") from None
    text.encode()
    return text
