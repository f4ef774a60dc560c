"""Against the library that the model's files are written for."""

import pytest
from conftest import DEMO

transformers = pytest.importorskip("transformers")
np = pytest.importorskip("numpy")

MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is 37 + 45?"},
]


@pytest.fixture(scope="module")
def reference():
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def test_text_and_ids_are_hugging_faces(llm, reference):
    for text in ["The sky was", " a\n\nb  c", "naïve 東京 🙂", "<|im_end|>x", ""]:
        ids = llm.tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert llm.tokenizer.decode(ids) == reference.decode(ids)
        assert llm.tokenizer.decode(np.array(ids, dtype=np.int64)) == reference.decode(ids)
        assert llm.tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(
            ids, skip_special_tokens=True
        )


def test_the_chat_template_is_hugging_faces(llm, reference):
    for options in [{"add_generation_prompt": True}, {}]:
        text = reference.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert llm.tokenizer.apply_chat_template(MESSAGES, tokenize=False, **options) == text
        ids = llm.tokenizer.apply_chat_template(MESSAGES, **options)
        assert ids == reference.encode(text, add_special_tokens=False)


def test_what_would_shape_the_ids_otherwise_is_refused(llm):
    """No template reads these, so that they would be lost without a word."""
    plain = llm.tokenizer.apply_chat_template(MESSAGES)
    asked = {"return_tensors": "pt", "return_dict": True, "truncation": True, "max_length": 4, "padding": "longest"}
    for name, value in asked.items():
        with pytest.raises(TypeError, match=f"has no {name} here"):
            llm.tokenizer.apply_chat_template(MESSAGES, **{name: value})
        assert llm.tokenizer.apply_chat_template(MESSAGES, **{name: None}) == plain
    for text in (["a"], None, b"a"):
        with pytest.raises(TypeError, match="encode.. takes one text"):
            llm.tokenizer.encode(text)


def test_facts_are_hugging_faces(llm, reference):
    ours = llm.get_tokenizer()
    assert ours.eos_token_id == reference.eos_token_id
    assert ours.eos_token == reference.eos_token
    assert len(ours) == len(reference)
    assert ours.convert_tokens_to_ids("<|im_end|>") == reference.convert_tokens_to_ids("<|im_end|>")
    names = ["<|im_end|>", "a"]
    ids = reference.convert_tokens_to_ids(names)
    assert ours.convert_tokens_to_ids(names) == ids
    assert ours.convert_ids_to_tokens(ids) == reference.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids[0]) == names[0]
    for texts in ["The sky", ["The sky", "", "a b c"]]:
        for name in ["input_ids", "attention_mask"]:
            assert ours(texts)[name] == reference(texts)[name]


def test_nano_vllms_example_runs_with_transformers_tokenizer(llm, reference):
    prompts = [
        reference.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in ["What is 37 + 45?", "Tell me a story."]
    ]
    from nanovllm import SamplingParams

    outputs = llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=32))
    assert all(output["text"] for output in outputs)
    assert outputs[0].prompt_token_ids == reference.encode(prompts[0])
