"""generate() and step(): outputs, log probabilities, parameters."""

import json
import pickle
import pydoc
import subprocess
import sys

import pytest
from conftest import DEMO, PROMPTS

import nanovllm
from nanovllm import SamplingParams


def test_generate_returns_dicts_that_are_objects(llm):
    output = llm.generate(["Once upon a time"], SamplingParams(max_tokens=8), use_tqdm=False)[0]
    assert list(output) == ["text", "token_ids"]
    assert json.loads(json.dumps(output)) == output
    assert output.outputs[0].text == output["text"]
    assert output.outputs[0].token_ids == output["token_ids"]
    assert output.prompt == "Once upon a time"
    assert output.prompt_token_ids == llm.tokenizer.encode("Once upon a time")
    assert output.finished and output.outputs[0].finish_reason == "length"
    assert pickle.loads(pickle.dumps(output)).outputs[0].text == output["text"]


def test_use_tqdm_may_make_the_bar(llm):
    """As vLLM documents it: functools.partial(tqdm, leave=False), say."""
    tqdm = pytest.importorskip("tqdm").tqdm
    bars = []

    def make(**options):
        bars.append(tqdm(disable=None, leave=False, **options))
        return bars[-1]

    llm.generate(["Once", "upon"], SamplingParams(max_tokens=1), use_tqdm=make)
    assert [bar.total for bar in bars] == [2]


def test_the_bytes_are_those_of_the_program(llm, program):
    sampling = [
        {"temperature": 0.8, "seed": 5, "max_tokens": 40},
        {"temperature": 0, "max_tokens": 20, "logprobs": 3},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 1, "max_tokens": 30, "n": 2},
    ]
    expected = program(
        [{"prompt": p, "sampling_params": s} for p, s in zip(PROMPTS, sampling)],
        "--generation-config",
        "vllm",
    )
    outputs = llm.generate(PROMPTS, [SamplingParams(**s) for s in sampling], use_tqdm=False)
    for want, got in zip(expected[:2], outputs):
        assert got["text"] == want["text"]
    assert [o.text for o in outputs[2].outputs] == [o["text"] for o in expected[2]["outputs"]]
    assert outputs[1]["token_ids"] == expected[1]["token_ids"]


def test_log_probabilities_have_vllms_form(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    output = llm.generate("23 + 58 =", params, use_tqdm=False)[0]
    positions = output.outputs[0].logprobs
    assert len(positions) == 4
    for chosen, position in zip(output["token_ids"], positions):
        best = position[chosen]
        assert best.rank == 1 and best.logprob == max(c.logprob for c in position.values())
        assert best.decoded_token == llm.tokenizer.decode([chosen])
    total = sum(p[chosen].logprob for chosen, p in zip(output["token_ids"], positions))
    assert output.outputs[0].cumulative_logprob == total
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_no_params_are_the_models_own(llm):
    # models/demo/generation_config.json
    with open(f"{DEMO}/generation_config.json") as file:
        recommended = json.load(file)
    params = llm.get_default_sampling_params()
    for name in {"temperature", "top_k", "top_p"} & set(recommended):
        assert getattr(params, name) == recommended[name]
    assert llm.generate(["Hello"], use_tqdm=False)[0].finished


def test_add_request_and_step_are_nano_vllms(llm):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = [o["token_ids"] for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.reset_prefix_cache()
    numbers = [llm.add_request(prompt, params) for prompt in PROMPTS]
    finished, tokens = {}, []
    while not llm.is_finished():
        outputs, num_tokens = llm.step()
        tokens.append(num_tokens)
        finished.update(outputs)
    assert [finished[number] for number in numbers] == expected
    assert sum(t for t in tokens if t > 0) == sum(len(llm.tokenizer.encode(p)) for p in PROMPTS)
    assert [t for t in tokens if t < 0] == [-3] * 4


def test_requests_that_were_added_before_come_from_step(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    number = llm.add_request(PROMPTS[1], params)
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert not llm.is_finished()
    finished = {}
    while not llm.is_finished():
        finished.update(llm.step()[0])
    assert list(finished) == [number] and len(finished[number]) == 3


def test_importing_takes_no_library_that_is_not_needed():
    code = "import sys, nanovllm; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    slow = {"asyncio", "dataclasses", "json", "numpy", "torch", "transformers", "tqdm"}
    assert not slow & set(modules)


def test_help_reads_well():
    text = pydoc.render_doc(nanovllm.LLM)
    assert "KeyboardInterrupt within a step" in text and "tensor_parallel_size" in text
    for name in nanovllm.__all__:
        assert name in dir(nanovllm)  # what Jupyter completes
        assert getattr(nanovllm, name).__doc__ or name in ("__version__", "PromptType")
