"""Engines and files that the tests share. PYTHONPATH leads to the package in the build tree."""

import json
import os
import pathlib
import subprocess

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams, StructuredOutputsParams

SOURCE = pathlib.Path(__file__).resolve().parents[2]
DEMO = str(SOURCE / "models/demo")
PROMPTS = ["Once upon a time", "23 + 58 =", "What is paged attention?"]
PROGRAM = os.path.join(os.path.dirname(nanovllm.__file__), "nanovllm")


@pytest.fixture(scope="session")
def llm():
    engine = LLM(DEMO, device="cpu", num_threads=1)
    yield engine
    engine.exit()


@pytest.fixture
def program():
    """Runs `nanovllm generate` on JSON lines and returns the answers in order."""

    def run(requests, *options):
        lines = "".join(json.dumps(r) + "\n" for r in requests)
        command = [PROGRAM, "generate", DEMO, "--device", "cpu", "-q", "-i", "-", "-o", "-"]
        done = subprocess.run(
            command + list(options), input=lines, capture_output=True, text=True, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def skip_without_grammars(engine):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    try:
        engine.generate(["a"], params, use_tqdm=False)
    except ValueError as error:
        assert "libnanovllm-grammar.so" in str(error)
        pytest.skip("without the grammar module")
