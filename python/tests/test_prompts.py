"""The forms of prompts and parameters, and what is refused."""

import pytest
from conftest import PROMPTS

from nanovllm import SamplingParams, TokensPrompt


def test_prompts_come_as_text_ids_and_dicts(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    prompts = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, TokensPrompt(prompt_token_ids=ids)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert all(output == outputs[0] for output in outputs)
    assert llm.generate(ids, SamplingParams(temperature=0, max_tokens=8), False)[0] == outputs[0]


def test_what_a_prompts_dict_asks_for_and_this_engine_lacks_is_refused(llm):
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.generate({"prompt": "a", "multi_modal_data": None, "mm_processor_kwargs": {}}, params, use_tqdm=False)
    llm.generate({"prompt": "a", "prompt_token_ids": None}, params, use_tqdm=False)
    llm.generate({"prompt": None, "prompt_token_ids": [1]}, params, use_tqdm=False)
    with pytest.raises(TypeError, match="a prompt has no multi_modal_data here"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": "x"}}, params, use_tqdm=False)


def test_prompts_of_another_salt_find_no_cached_prefix(llm):
    ids, params = list(range(200, 300)), SamplingParams(temperature=0, max_tokens=1)

    def cached(**salt):
        prompts = [{"prompt_token_ids": ids, **salt}] * 2
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        assert outputs[0] == outputs[1]
        return [output.num_cached_tokens for output in outputs]

    assert cached() == cached(cache_salt="mine") == cached(cache_salt="yours") == [0, 64]
    both = llm.generate([{"prompt_token_ids": ids, "cache_salt": s} for s in ("mine", "new")], params, use_tqdm=False)
    assert [output.num_cached_tokens for output in both] == [64, 0]
    with pytest.raises(TypeError, match="cache_salt must be a string, got .1"):
        llm.generate({"prompt": "a", "cache_salt": [1]}, params, use_tqdm=False)
    with pytest.raises(ValueError, match="cache_salt must be a string of 1 to 256 bytes"):
        llm.generate({"prompt": "a", "cache_salt": ""}, params, use_tqdm=False)


def test_prompts_may_be_cut_to_their_last_tokens(llm):
    ids = list(range(200, 300))
    last = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=9)
    outputs = llm.generate([ids, ids[-9:]], last, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids[-9:]] * 2
    assert outputs[0] == outputs[1]
    with pytest.raises(ValueError, match="truncate_prompt_tokens"):
        llm.generate(ids, SamplingParams(truncate_prompt_tokens=-2), use_tqdm=False)


def test_a_bad_request_among_good_ones_is_named_and_none_runs(llm):
    steps = llm.stats["steps"]
    with pytest.raises(ValueError, match="prompt 1"):
        llm.generate([[1], [10**6]], SamplingParams(), use_tqdm=False)
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(TypeError, match="prompt must be"):
        llm.generate([[1.5]], SamplingParams(), use_tqdm=False)
    assert llm.stats["steps"] == steps
    assert llm.is_finished()


def test_text_that_is_no_unicode_is_a_value_error(llm):
    half = "\ud83d"  # of an emoji, as a cut JSON text or surrogateescape has it
    for call in [
        lambda: llm.generate(half, use_tqdm=False),
        lambda: llm.generate({"prompt": half}, use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": half}], use_tqdm=False),
        lambda: SamplingParams(stop=half),
        lambda: llm.tokenizer.encode(half),
    ]:
        with pytest.raises(ValueError, match="surrogates not allowed"):
            call()


ITSELF: dict = {}
ITSELF["prompt"] = ITSELF


@pytest.mark.parametrize("prompts", [b"hi", [b"hi"], None, 3, {}, [None], {"prompt": {"prompt": "a"}}, ITSELF])
def test_what_is_no_prompt_is_a_type_error_that_says_so(llm, prompts):
    with pytest.raises(TypeError, match="a prompt must be text"):
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(TypeError, match="a prompt must be text"):
        llm.add_request(prompts, SamplingParams(max_tokens=1))


def test_numpys_numbers_are_numbers(llm):
    numpy = pytest.importorskip("numpy")
    ids = numpy.array([374, 305])
    params = SamplingParams(temperature=numpy.float32(0), max_tokens=numpy.int64(4), stop_token_ids=list(ids))
    want = llm.generate([374, 305], SamplingParams(0, 4, stop_token_ids=[374, 305]), use_tqdm=False)
    for prompts in [ids, list(ids), [ids], [list(ids)]]:
        assert llm.generate(prompts, params, use_tqdm=False) == want
    with pytest.raises(TypeError, match="object is no value of JSON"):
        SamplingParams(stop=object())


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], [None], SamplingParams, 3, ["a"]])
def test_what_are_no_sampling_params_is_a_type_error_that_says_so(llm, params):
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate(["a"], params, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.add_request("a", params)
