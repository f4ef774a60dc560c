import dataclasses
import pickle

import pytest

from nanovllm import RequestOutputKind, SamplingParams, StructuredOutputsParams


def test_defaults_and_order_are_nano_vllms():
    # nanovllm/sampling_params.py of nano-vLLM at bb823b3: temperature, max_tokens, ignore_eos.
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)
    assert SamplingParams(0.6, 256, True) == SamplingParams(
        temperature=0.6, max_tokens=256, ignore_eos=True
    )


def test_temperature_zero_is_allowed_here():
    assert SamplingParams(temperature=0).temperature == 0


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("-inf")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("min_tokens", -1),
        ("n", 0),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("logprobs", 21),
        ("seed", 2**64),
    ],
)
def test_a_value_out_of_range_is_a_value_error_that_names_it(field, value):
    with pytest.raises(ValueError) as raised:
        SamplingParams(**{field: value})
    assert field in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="temperatur"):
        SamplingParams(temperatur=1)


def test_what_vllm_has_may_be_given_with_the_value_that_asks_for_nothing():
    SamplingParams(presence_penalty=0.0, repetition_penalty=1, logit_bias=None, bad_words=None)


def test_log_probabilities_may_be_asked_for_by_true():
    """vLLM's SamplingParams.__post_init__()."""
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert params == SamplingParams(logprobs=1, prompt_logprobs=1)
    assert repr(params) == "SamplingParams(logprobs=1, prompt_logprobs=1)"
    with pytest.raises(ValueError, match="logprobs"):
        SamplingParams(logprobs=False)


def test_an_attribute_that_there_is_not_is_a_type_error(llm):
    params = SamplingParams()
    params.max_token = 5
    with pytest.raises(TypeError, match="SamplingParams has no max_token"):
        llm.generate("a", params, use_tqdm=False)
    with pytest.raises(ValueError, match="7 is not a valid RequestOutputKind"):
        SamplingParams(output_kind=7)


def test_the_repr_can_be_pasted():
    params = SamplingParams(
        temperature=0.25,
        stop=["a", 'b"'],
        seed=7,
        output_kind=RequestOutputKind.DELTA,
        max_tokens=None,
    )
    names = {"SamplingParams": SamplingParams, "RequestOutputKind": RequestOutputKind}
    assert eval(repr(params), names) == params
    assert repr(SamplingParams(n=2)) == "SamplingParams(n=2)"


def test_params_are_a_dataclass_to_the_library_as_well():
    params = SamplingParams(n=2, structured_outputs=StructuredOutputsParams(regex="a+"))
    assert dataclasses.is_dataclass(SamplingParams) and dataclasses.is_dataclass(params)
    assert dataclasses.replace(params, temperature=0.5, n=1) == SamplingParams(
        temperature=0.5, structured_outputs=params.structured_outputs
    )
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2)
    everything = dataclasses.asdict(params)
    assert everything["structured_outputs"]["regex"] == "a+" and everything["n"] == 2
    assert [f.name for f in dataclasses.fields(params)] == list(vars(params))
    with pytest.raises(TypeError, match=r"SamplingParams.__init__\(\) got an unexpected"):
        SamplingParams(best_of=1)


def test_params_survive_pickling():
    params = SamplingParams(0.5, n=3, stop="x", logprobs=2)
    assert pickle.loads(pickle.dumps(params)) == params
    assert pickle.loads(pickle.dumps(StructuredOutputsParams(regex="a+"))).regex == "a+"
