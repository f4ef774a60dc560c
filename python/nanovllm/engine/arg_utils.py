"""EngineArgs: an engine's options in one object, or from a command line, with vLLM's names."""

from __future__ import annotations

from argparse import BooleanOptionalAction, Namespace, _ActionsContainer
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AsyncEngineArgs", "EngineArgs"]

_Parser = TypeVar("_Parser", bound=_ActionsContainer)


@dataclass
class EngineArgs:
    """The options of LLM; None leaves one to the engine.

    `LLM(**dataclasses.asdict(args))` and `LLM(**vars(parser.parse_args()))` take them.
    """

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    load_format: str | None = None
    quantization: str | None = None
    dequantize: bool | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    allow_long_max_model_len: bool | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: str | None = None
    gpu_memory_utilization: float | None = None
    num_gpu_blocks_override: int | None = None
    cpu_kvcache_bytes: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    decode_micro_batches: int | None = None
    tensor_parallel_size: int | None = None
    seed: int | None = None
    num_threads: int | None = None
    skip_tokenizer_init: bool | None = None
    parse_special_in_messages: bool | None = None
    kv_events_config: str | dict[str, Any] | None = None

    @classmethod
    def add_cli_args(cls, parser: _Parser) -> _Parser:
        """--max-model-len and so on; a switch also has its --no- form. Returns the parser."""
        hints = get_type_hints(cls)
        for field in fields(cls):
            option: dict[str, Any] = {"type": hints[field.name].__args__[0]}
            if option["type"] is bool:
                option = {"action": BooleanOptionalAction}
            parser.add_argument("--" + field.name.replace("_", "-"), **option)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """The options among a command line's."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


@dataclass
class AsyncEngineArgs(EngineArgs):
    """The options of AsyncLLM; None leaves one to it."""

    served_model_name: str | None = None
    generation_config: str | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    request_timeout: float | None = None
