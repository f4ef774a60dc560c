"""A model of random weights under random structures: an answer that ends with `stop` is what was asked for, and none stalls.

NANOVLLM_GENERATIONS says how many answers (scripts/nightly.sh: 10,000). The judges are json, jsonschema and re.
"""

import json
import os
import random
import re

import jsonschema
import pytest
from conftest import DEMO, SOURCE, skip_without_grammars

from nanovllm import LLM, SamplingParams, StructuredOutputsParams

COUNT = int(os.environ.get("NANOVLLM_GENERATIONS", "120"))
BATCH = 40


@pytest.fixture(scope="module")
def random_llm(tmp_path_factory):
    """Weights are drawn; the tokenizer is the demo model's."""
    folder = tmp_path_factory.mktemp("random-weights")
    with open(f"{DEMO}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(f"{DEMO}/{name}")
    with LLM(str(folder), device="cpu", load_format="dummy", num_threads=1) as engine:
        skip_without_grammars(engine)
        yield engine


def random_regex(rng, depth=0):
    """A regular expression, and a grammar of the same texts."""
    kind = rng.choice(["text", "class", "digit"] + ["sequence", "choice", "repeat"] * (depth < 3))
    if kind == "text":
        text = "".join(rng.choices("abcxyz019 _", k=rng.randint(1, 4)))
        return text, json.dumps(text)
    if kind == "class":
        return rng.choice([("[a-f]", "[a-f]"), ("[^\\n\"]", '[^\\n"]'), ("[A-Z0-9]", "[A-Z0-9]")])
    if kind == "digit":
        return "\\d", "[0-9]"
    if kind == "repeat":
        regex, grammar = random_regex(rng, depth + 1)
        least = rng.randint(0, 2)
        count = rng.choice(["*", "+", "?", f"{{{least},{least + 2}}}"])
        return f"(?:{regex}){count}", f"({grammar}){count}"
    parts = [random_regex(rng, depth + 1) for _ in range(rng.randint(2, 3))]
    between = "|" if kind == "choice" else ""
    return (
        f"(?:{between.join(part[0] for part in parts)})",
        f"({(between or ' ').join(part[1] for part in parts)})",
    )


def random_structure(rng, schemas):
    """What is asked for, and what raises where a text is something else."""
    kind = rng.choice(["json", "json", "json_object", "regex", "choice", "grammar"])
    if kind == "json":
        schema = rng.choice(schemas)
        judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        return StructuredOutputsParams(json=schema), lambda text: judge.validate(json.loads(text))
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True), lambda text: dict(json.loads(text))
    if kind == "choice":
        texts = ["".join(rng.choices("abc é\"{", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5))]
        return StructuredOutputsParams(choice=texts), texts.index
    regex, grammar = random_regex(rng)

    def check(text):
        assert re.fullmatch(regex, text, re.ASCII), regex

    if kind == "regex":
        return StructuredOutputsParams(regex=regex), check
    return StructuredOutputsParams(grammar=f"root ::= {grammar}"), check


def random_params(rng, structure, closers):
    return SamplingParams(
        temperature=rng.choice([1, 5]),
        max_tokens=rng.choice([1, 2, 5, 20, 100, 300]),
        seed=rng.randrange(2**31),
        # Half of the answers are drawn to an end: random weights close a string once in 1,500 tokens.
        logit_bias={token: 40.0 for token in closers} if rng.random() < 0.5 else None,
        structured_outputs=structure,
    )


def test_answers_of_random_weights_are_what_was_asked_for(random_llm):
    rng = random.Random(int(os.environ.get("NANOVLLM_SEED", "20")))
    with open(SOURCE / "tests/data/schemas/programs.jsonl", encoding="utf-8") as file:
        schemas = [json.loads(line)["schema"] for line in file]
    # CI compiles few schemas: each takes a share of a second there.
    schemas = schemas if COUNT > 1000 else rng.sample(schemas, 15)
    closers = {random_llm.tokenizer.encode(text)[-1] for text in '"}],:'} | {random_llm.tokenizer.eos_token_id}
    ended = done = late = 0
    while done < COUNT:
        batch = [random_structure(rng, schemas) for _ in range(min(BATCH, COUNT - done))]
        params = [random_params(rng, structure, closers) for structure, _ in batch]
        done += len(batch)
        outputs = None
        while outputs is None:
            try:
                outputs = random_llm.generate(["Once"] * len(batch), params, use_tqdm=False)
            except ValueError as error:
                if "kMaxCompileSeconds" not in str(error):
                    raise
                late += 1  # refused, by the machine's speed
                number = int(re.match("prompt ([0-9]+): ", str(error))[1])
                del batch[number], params[number]
        for (structure, judge), asked, output in zip(batch, params, outputs):
            answer = output.outputs[0]
            assert answer.finish_reason in ("stop", "length"), (structure, asked, output.error)
            if answer.finish_reason == "stop":
                ended += 1
                try:
                    judge(answer.text)
                except Exception as error:
                    raise AssertionError(f"{structure} {asked}: {answer.text!r}") from error
            else:
                assert len(answer.token_ids) == asked.max_tokens
    print(f"{done} answers, {ended} ended by themselves, {late} of schemas that did not compile in time")
    assert ended > done / 10 and late <= done / 20


def test_a_structure_that_cannot_be_enforced_is_a_value_error_and_nothing_runs(random_llm):
    steps = random_llm.stats["steps"]
    good = SamplingParams(max_tokens=2)
    for structure, fragment in [
        (StructuredOutputsParams(regex="("), "regex"),
        (StructuredOutputsParams(json={"type": "nope"}), "json: #/type"),
        (StructuredOutputsParams(grammar="x"), "root"),
    ]:
        bad = SamplingParams(max_tokens=2, structured_outputs=structure)
        with pytest.raises(ValueError, match=fragment):
            random_llm.generate("Once", bad, use_tqdm=False)
        with pytest.raises(ValueError, match=f"prompt 1: .*{fragment}"):
            random_llm.generate(["Once", "Once"], [good, bad], use_tqdm=False)
        with pytest.raises(ValueError, match=fragment):
            random_llm.add_request("Once", bad)
    assert random_llm.stats["steps"] == steps and random_llm.is_finished()
