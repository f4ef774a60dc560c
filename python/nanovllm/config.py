"""The options of an engine: nano-vLLM's names, vLLM's, and ours."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Any

from nanovllm import _core

__all__: list[str] = []

# nano-vLLM's name: ours.
_NAMES = {"kvcache_block_size": "block_size", "num_kvcache_blocks": "num_gpu_blocks_override"}
_DTYPES = {"bfloat16": "bf16", "float32": "f32", "float": "f32"}


def find_model(model: Any) -> str:
    """The model's directory: as it is given, or that of a name in Hugging Face's cache."""
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model must be a directory or a name in Hugging Face's cache, got {model!r:.80}")
    return _core.find_model(os.path.expanduser(os.fspath(model)))


def to_engine_options(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Fields of EngineConfig (nanovllm/params.h). TypeError names an option that there is not."""
    known = set(_core.config_names())
    options: dict[str, Any] = {}
    for name, value in given.items():
        name = _NAMES.get(name, name)
        if name not in known:
            raise TypeError(_unknown(name, known))
        if value is not None:
            options[name] = value
    events = options.get("kv_events_config")
    if events is not None and not isinstance(events, str):
        import json

        options["kv_events_config"] = json.dumps(events)
    dtype = str(options.get("dtype", "auto")).removeprefix("torch.")  # or one of PyTorch's own
    options["dtype"] = _DTYPES.get(dtype, dtype)
    if options.get("num_gpu_blocks_override") == -1:  # nano-vLLM's way to leave it open
        del options["num_gpu_blocks_override"]
    if options.get("max_model_len") == "auto":  # vLLM's word for -1
        options["max_model_len"] = -1
    if not options.get("allow_long_max_model_len"):
        _clip_max_model_len(model, options)
    return options


def _unknown(name: str, known: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known | set(_NAMES), 1)
    hint = f": did you mean {close[0]}?" if close else ""
    return f"there is no engine option {name}{hint}"


def _clip_max_model_len(model: str, options: dict[str, Any]) -> None:
    """As nano-vLLM does: no more positions than the model has."""
    asked = options.get("max_model_len")
    if not isinstance(asked, Integral) or asked <= (most := _core.longest_context(model)):
        return
    import warnings

    options["max_model_len"] = most
    warnings.warn(
        f"max_model_len is {most}, not {asked}: the model has no more positions",
        stacklevel=4,
    )
