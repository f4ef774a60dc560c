"""The spellings of vLLM's offline examples: basic, chat, parameters for each prompt, structured output, log probabilities."""

import asyncio
import dataclasses
import inspect
import json
import re
from argparse import ArgumentParser

import pytest
from conftest import DEMO, PROMPTS, skip_without_grammars

import nanovllm
from nanovllm import LLM, AsyncLLM, EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams, _core
from nanovllm.engine.arg_utils import EngineArgs as EngineArgsByPath
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils import FlexibleArgumentParser

PARAMS = [
    SamplingParams(temperature=0, logprobs=1, prompt_logprobs=1, max_tokens=6),
    SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, seed=2, max_tokens=12),
    SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, seed=3, max_tokens=9),
]


def test_engine_args_are_the_options_of_an_engine():
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert sorted(names) == sorted(["model", *_core.config_names()])
    assert EngineArgsByPath is EngineArgs
    args = EngineArgs(model=DEMO, device="cpu", max_model_len=100, num_threads=1)
    with LLM(**dataclasses.asdict(args)) as engine:
        assert engine.info["max_model_len"] == 100
    with pytest.raises(TypeError, match="max_modellen"):
        EngineArgs(model=DEMO, max_modellen=100)


def test_a_command_line_makes_an_engine():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser.add_argument_group("engine"))
    parser.set_defaults(model=DEMO)
    parser.add_argument("--max-tokens", type=int)
    line = ["--max_num_seqs", "3", "--max-tokens=4", "--gpu_memory_utilization=0.5", "--no-enable-prefix-caching"]
    given = vars(parser.parse_args([*line, "--device", "cpu", "--dtype=a_b"]))
    assert given.pop("max_tokens") == 4 and given["dtype"] == "a_b"
    assert given["gpu_memory_utilization"] == 0.5 and given["enable_prefix_caching"] is False
    given["dtype"] = "bfloat16"
    with LLM(**given) as engine:
        assert engine.info["max_num_seqs"] == 3
    plain = EngineArgs.add_cli_args(ArgumentParser())
    args = EngineArgs.from_cli_args(plain.parse_args(["--model", DEMO, "--enforce-eager"]))
    assert args == EngineArgs(model=DEMO, enforce_eager=True)
    with pytest.raises(SystemExit):
        plain.parse_args(["--max-num-seqs", "many"])


def test_async_engine_args_are_the_options_of_an_async_llm():
    """As vLLM's async_llm_streaming.py has it."""
    from nanovllm import AsyncEngineArgs, AsyncLLMEngine
    from nanovllm.engine.async_llm_engine import AsyncLLMEngine as EngineByPath
    from nanovllm.engine.arg_utils import AsyncEngineArgs as ArgsByPath
    from nanovllm.v1.engine.async_llm import AsyncLLM

    assert AsyncLLMEngine is EngineByPath is AsyncLLM
    own = list(inspect.signature(AsyncLLM.__init__).parameters)[2:-1]
    names = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    assert names == [*(field.name for field in dataclasses.fields(EngineArgs)), *own]
    line = ["--model", DEMO, "--device=cpu", "--num-threads=1", "--max-num-seqs=3", "--served-model-name=x"]
    args = ArgsByPath.from_cli_args(ArgsByPath.add_cli_args(ArgumentParser()).parse_args(line))
    engine = AsyncLLM.from_engine_args(args)

    async def main():
        delta = SamplingParams(max_tokens=9, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
        pieces = []
        async for output in engine.generate(request_id="a-1", prompt=PROMPTS[0], sampling_params=delta):
            pieces.extend(answer.text for answer in output.outputs)
            assert output.request_id == "a-1"
            if output.finished:
                break
        return "".join(pieces), await engine.openai("/v1/models")

    text, models = asyncio.run(main())
    assert engine.info["max_num_seqs"] == 3 and models["data"][0]["id"] == "x"
    engine.shutdown()
    with LLM(DEMO, device="cpu", num_threads=1) as plain:
        whole = SamplingParams(max_tokens=9, temperature=0.8, seed=42)
        assert text == plain.generate(PROMPTS[0], whole, use_tqdm=False)[0].outputs[0].text


def test_a_stop_reason_is_a_string_or_a_token(llm):
    long = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = llm.generate(PROMPTS[0], long, use_tqdm=False)[0].outputs[0]
    assert (plain.finish_reason, plain.stop_reason) == ("length", None)
    token = next(t for i, t in enumerate(plain.token_ids) if i and t not in plain.token_ids[:i])
    long.stop_token_ids = [token]
    by_token = llm.generate(PROMPTS[0], long, use_tqdm=False)[0].outputs[0]
    assert (by_token.stop_reason, by_token.token_ids[-1]) == (token, token)
    stop = SamplingParams(temperature=0, max_tokens=12, stop=[plain.text[2:4]])
    assert llm.generate(PROMPTS[0], stop, use_tqdm=False)[0].outputs[0].stop_reason == plain.text[2:4]


def test_prompts_have_vllms_types(llm):
    from nanovllm.inputs import PromptType, TextPrompt, TokensPrompt

    assert (PromptType, TextPrompt, TokensPrompt) == (nanovllm.PromptType, nanovllm.TextPrompt, nanovllm.TokensPrompt)
    same: list[PromptType] = [TextPrompt(prompt=PROMPTS[0]), llm.tokenizer.encode(PROMPTS[0])]
    first, second = llm.generate(same, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert first == second


def test_best_of_is_refused_as_vllm_does():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(n=2, best_of=5)


def test_an_llm_engine_gives_what_generate_gives(llm):
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    engine = LLMEngine.from_engine_args(EngineArgs(model=DEMO, device="cpu", num_threads=1))
    waiting, outputs = list(zip("abc", PROMPTS, PARAMS)), {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(*waiting.pop(0))
        for output in engine.step():
            assert isinstance(output, RequestOutput) and output.finished
            outputs[output.request_id] = output
    assert sorted(outputs) == ["a", "b", "c"] and engine.get_num_unfinished_requests() == 0
    for name, want in zip("abc", expected):
        got = outputs[name]
        assert (got.prompt, got.prompt_token_ids) == (want.prompt, want.prompt_token_ids)
        assert [(o.text, o.token_ids, o.logprobs) for o in got.outputs] == [
            (o.text, o.token_ids, o.logprobs) for o in want.outputs
        ]
        assert got.prompt_logprobs == want.prompt_logprobs
    assert outputs["a"].prompt_logprobs and len(outputs["c"].outputs) == 2


def test_an_llm_engine_ends_requests_by_name():
    engine = LLMEngine(DEMO, device="cpu", num_threads=1)
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    for name in ("first", "second", "third"):
        engine.add_request(name, PROMPTS[0], long)
    with pytest.raises(ValueError, match="first"):
        engine.add_request("first", PROMPTS[0], long)
    engine.abort_request("third")
    engine.abort_request(["first", "second", "unknown"])
    ended = {}
    while engine.has_unfinished_requests():
        ended.update((o.request_id, o.outputs[0].finish_reason) for o in engine.step())
    assert ended == dict.fromkeys(("first", "second", "third"), "abort")
    engine.add_request("first", PROMPTS[0], SamplingParams(max_tokens=1))
    assert engine.step()[0].request_id == "first"


def test_a_lower_priority_is_served_earlier(llm):
    options = {"device": "cpu", "num_threads": 1, "max_num_seqs": 1, "block_size": 8}
    short, same = SamplingParams(max_tokens=1), [list(range(20))] * 3
    with LLM(DEMO, scheduling_policy="priority", **options) as engine:
        # The first that is served finds nothing in the prefix cache.
        outputs = engine.generate(same, short, use_tqdm=False, priority=[300, -300, 0])
        assert [output.num_cached_tokens for output in outputs] == [16, 0, 16]
        with pytest.raises(ValueError, match="3 prompts, but 2 numbers in priority"):
            engine.generate(same, short, use_tqdm=False, priority=[1, 2])
        with pytest.raises(ValueError, match="priority must be an integer"):
            engine.generate("a", short, use_tqdm=False, priority=["high"])
    engine = LLMEngine(DEMO, scheduling_policy="priority", **options)
    for number in (2, 1, 0):
        engine.add_request(f"{number}", PROMPTS[0], short, priority=64 * number)
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step()]
    assert order == ["0", "1", "2"]
    with pytest.raises(ValueError, match="prompt 1: priority needs scheduling_policy priority"):
        llm.generate(PROMPTS, short, use_tqdm=False, priority=[0, 1, 0])

    async def main():
        async for _ in AsyncLLM(DEMO, **options).generate(PROMPTS[0], short, priority=1):
            pass

    with pytest.raises(ValueError, match="priority needs scheduling_policy priority"):
        asyncio.run(main())


def test_structures_of_each_kind(llm):
    skip_without_grammars(llm)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["sedan", "truck"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    grammar = 'root ::= "SELECT " column " FROM " table\ncolumn ::= "id" | "name"\ntable ::= "users"'

    def text_of(**structure):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**structure), max_tokens=60, seed=1)
        return llm.generate("Answer:", sampling_params=params, use_tqdm=False)[0].outputs[0].text

    assert text_of(choice=["Positive", "Negative"]) in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{2,5}@[a-z]{2,5}\.com", text_of(regex=r"[a-z]{2,5}@[a-z]{2,5}\.com"))
    answer = json.loads(text_of(json=schema))
    assert set(answer) == {"name", "kind"} and answer["kind"] in ("sedan", "truck")
    assert text_of(grammar=grammar) in ("SELECT id FROM users", "SELECT name FROM users")


def test_default_params_are_changed_by_attribute(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.top_k = 5, 0.0, 1
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hello"}]
    alone = llm.chat(messages, params, use_tqdm=False)[0]
    batch = llm.chat([messages] * 3, sampling_params=params, use_tqdm=False)
    assert len(alone["token_ids"]) <= 5 and batch == [alone] * 3
