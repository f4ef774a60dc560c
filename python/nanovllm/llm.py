"""LLM: an engine for one thread at a time, with the methods of nano-vLLM's and vLLM's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanovllm import _core
from nanovllm.config import find_model, to_engine_options
from nanovllm.inputs import PromptType, as_prompts, salt_of, text_of
from nanovllm.outputs import RequestOutput, make_output
from nanovllm.sampling_params import SamplingParams, to_json
from nanovllm.tokenizer import Tokenizer

__all__ = ["LLM"]


class LLM:
    """A model, loaded, and its engine.

    `model` is a Hugging Face model directory, or the name of one in Hugging Face's cache. Options, all by name: `enforce_eager,
    tensor_parallel_size, max_num_batched_tokens, max_num_seqs, max_model_len,
    gpu_memory_utilization, kvcache_block_size, num_kvcache_blocks` as nano-vLLM has them, and those
    of `nanovllm generate` (docs/cli.md), such as `device, dtype, seed, num_threads, load_format`.

    Calls from several threads wait for one another. An LLM works in the process that made it: after
    fork() the child's calls raise RuntimeError.
    """

    def __init__(self, model: str, **options: Any) -> None:
        directory = find_model(model)
        self._lock = threading.RLock()
        self._engine = _core.Engine(directory, to_engine_options(directory, options))
        self._tokenizer: Tokenizer | None = None
        weakref.finalize(self, end_engine, self._engine, self._lock)

    @property
    def tokenizer(self) -> Tokenizer:
        """encode, decode, apply_chat_template."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._engine)
        return self._tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those that the model's generation_config.json recommends."""
        return SamplingParams(**self._engine.default_params())

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Runs all prompts to their ends and returns their outputs in order.

        A prompt is text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}. One SamplingParams
        is for all prompts, a list for each its own; None takes the model's defaults. `priority` has
        one number for each prompt, of which lower ones are served earlier (scheduling_policy). A
        request that is not acceptable raises ValueError before any runs. Ctrl-C raises
        KeyboardInterrupt within a step, and the engine can be used on.
        """
        given = as_prompts(prompts)
        params = self._as_params(sampling_params, len(given))
        priorities = [0] * len(given) if priority is None else list(priority)
        if len(priorities) != len(given):
            raise ValueError(f"{len(given)} prompts, but {len(priorities)} numbers in priority")
        keys = [(id(p), number, salt_of(one)) for p, number, one in zip(params, priorities, given)]
        wires = {key: p._wire(*key[1:])[0] for key, p in dict(zip(keys, params)).items()}
        with self._lock, _Progress(len(given), use_tqdm) as progress:
            raw = self._engine.generate(given, [wires[key] for key in keys], progress.update)
        return [make_output(output, text_of(prompt)) for output, prompt in zip(raw, given)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """generate() over the chat template: the model's, or `chat_template`, a text in Jinja.

        `messages` is a conversation or a list of them.
        """
        variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            variables["continue_final_message"] = True
        if tools is not None:
            variables["tools"] = tools
        if chat_template is not None:
            variables["chat_template"] = chat_template
        variables.update(chat_template_kwargs or {})
        lists = (list, tuple)
        several = isinstance(messages, lists) and all(isinstance(one, lists) for one in messages)
        prompts = [
            self._engine.openai_prompt(to_json(conversation), to_json(variables))
            for conversation in (messages if several else [messages])
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def add_request(self, prompt: PromptType, sampling_params: SamplingParams, priority: int = 0) -> int:
        """Queues a request for step() and returns its id; ValueError if it is not acceptable."""
        with self._lock:
            wire, _ = checked(sampling_params)._wire(priority, salt_of(prompt))
            return self._engine.add_request(prompt, wire)

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """One step of the engine, as nano-vLLM's: (id, token ids) of each request that has ended,
        and the tokens of the step: those of prompts, or minus the generated ones."""
        raw, num_tokens = self._step()
        return [(output[0], output[2][0][2]) for output in raw], num_tokens

    def _step(self) -> tuple[list[tuple[Any, ...]], int]:
        with self._lock:
            raw, num_tokens = self._engine.step()
            return [output for output in raw if output[3]], num_tokens

    def abort_request(self, request_id: int) -> None:
        """Ends a request of add_request(); an unknown id is ignored."""
        with self._lock:
            self._engine.abort_request(request_id)

    def is_finished(self) -> bool:
        """No request of add_request() is left."""
        with self._lock:
            return self._engine.is_finished()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        with self._lock:
            self._engine.reset_prefix_cache()

    @property
    def info(self) -> dict[str, Any]:
        """Facts of the engine: device, memory, limits, and notes for the user."""
        return self._engine.info()

    @property
    def stats(self) -> dict[str, Any]:
        """Counters since the engine was made."""
        with self._lock:
            return self._engine.stats()

    def exit(self) -> None:
        """Frees the engine; at the interpreter's end it happens by itself."""
        with self._lock:
            self._engine.exit()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()

    def _as_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, (SamplingParams, dict)) or not hasattr(params, "__iter__"):
            return [checked(params)] * count
        listed = [checked(given) for given in params]
        if len(listed) != count:
            raise ValueError(f"{count} prompts, but {len(listed)} sampling_params")
        return listed


def end_engine(engine: _core.Engine, lock: threading.RLock) -> None:
    """Ends an engine whose owner is gone, or at the interpreter's end, where a daemon's thread may be at work in it."""
    try:
        engine.stop()
        with lock:
            engine.exit()
    except RuntimeError:  # a child of fork() has no engine to end
        pass


def checked(params: Any) -> SamplingParams:
    if isinstance(params, SamplingParams):
        return params
    raise TypeError(f"sampling_params must be SamplingParams, or a list of them, got {params!r:.80}")


class _Progress:
    """nano-vLLM's progress bar, where tqdm is installed, or one that `wanted` makes, as in vLLM."""

    def __init__(self, total: int, wanted: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        self.update: Callable[[int, float, float], None] | None = None
        if not wanted:
            return
        make: Any = wanted
        if not callable(make):
            try:
                from tqdm.auto import tqdm  # type: ignore[import-untyped]
            except ImportError:
                return
            make = tqdm
        self._bar = make(total=total, desc="Generating", dynamic_ncols=True)
        self._rates = {"Prefill": 0.0, "Decode": 0.0}
        self.update = self._update

    def _update(self, finished: int, prefill: float, decode: float) -> None:
        for name, rate in (("Prefill", prefill), ("Decode", decode)):
            if rate > 0:
                self._rates[name] = rate
        rates = {name: f"{int(rate)}tok/s" for name, rate in self._rates.items()}
        self._bar.set_postfix(rates, refresh=False)
        self._bar.update(finished - self._bar.n)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
