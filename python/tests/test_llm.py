import gc
import json
import os
import pickle
import pydoc
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import DEMO, SOURCE

import nanovllm
from nanovllm import LLM, ModelError, SamplingParams, TokensPrompt

PROMPTS = ["Once upon a time", "23 + 58 =", "What is paged attention?"]
LONG = SamplingParams(temperature=1, max_tokens=4000, ignore_eos=True, seed=3)


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


def test_the_demo_model_adds(llm):
    question = [{"role": "user", "content": "What is 37 + 45?"}]
    greedy = SamplingParams(temperature=0)
    assert "82" in llm.chat(question, greedy, use_tqdm=False)[0]["text"]
    assert llm.chat([], greedy, use_tqdm=False) == []  # no conversations, as in vLLM
    assert len(llm.chat([tuple(question)], greedy, use_tqdm=False)) == 1
    answers = llm.chat([question, question], greedy, use_tqdm=False)
    assert len(answers) == 2 and answers[0] == answers[1]


def test_a_chat_template_may_be_given(llm):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    question = [{"role": "user", "content": "23 + 58"}]
    template = "{% for message in messages %}{{ message.content }}{% endfor %} ="
    answer = llm.chat(question, greedy, use_tqdm=False, chat_template=template)[0]
    assert answer["text"] == llm.generate(["23 + 58 ="], greedy, use_tqdm=False)[0]["text"]
    assert answer["text"] != llm.chat(question, greedy, use_tqdm=False)[0]["text"]
    with pytest.raises(ValueError, match="messages: must be an array"):
        llm.chat(question[0], greedy, use_tqdm=False)
    with pytest.raises(ValueError, match="chat_template"):
        llm.chat(question, greedy, use_tqdm=False, chat_template="{% if")


def test_use_tqdm_may_make_the_bar(llm):
    """As vLLM documents it: functools.partial(tqdm, leave=False), say."""
    tqdm = pytest.importorskip("tqdm").tqdm
    bars = []

    def make(**options):
        bars.append(tqdm(disable=None, leave=False, **options))
        return bars[-1]

    llm.generate(["Once", "upon"], SamplingParams(max_tokens=1), use_tqdm=make)
    assert [bar.total for bar in bars] == [2]


def test_a_developers_message_is_the_systems(llm):
    """As in vLLM, where a template does not know OpenAI's newer name: it would leave the message out."""
    prompts = [
        llm.chat([{"role": role, "content": "Be brief."}], SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt
        for role in ("developer", "system")
    ]
    assert prompts[0] == prompts[1]


def test_a_conversation_may_be_in_openais_form(llm):
    """As vLLM's chat(), whose parse_chat_messages makes no content an empty text and arguments an object."""
    calls_of = "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}"
    template = "{% for m in messages %}{{ m.content + '|' }}" + calls_of + "{% endfor %}"
    greedy = SamplingParams(temperature=0, max_tokens=1)

    def prompt_of(**assistant):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", **assistant}]
        output = llm.chat(messages, greedy, use_tqdm=False, chat_template=template)[0]
        return llm.tokenizer.decode(output.prompt_token_ids)

    def calls(arguments):
        return [{"function": {"name": "f", "arguments": arguments}}]

    expected = prompt_of(content="", tool_calls=calls({"a": 1}))
    assert expected == 'Hi||[{"function": {"name": "f", "arguments": {"a": 1}}}]'
    assert prompt_of(content=None, tool_calls=calls('{"a": 1}')) == expected
    assert prompt_of(tool_calls=calls({"a": 1})) == expected
    for broken in ("", "no JSON", [1]):
        assert prompt_of(content="", tool_calls=calls(broken)) == expected.replace('{"a": 1}', "{}")
    assert prompt_of(content="x", tool_calls=[]) == prompt_of(content="x", tool_calls=None) == "Hi|x|"
    for bad in ([{}], [5]):
        with pytest.raises(ValueError, match=r"messages\[1\].tool_calls"):
            prompt_of(content=None, tool_calls=bad)


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


def test_prompts_come_as_text_ids_and_dicts(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    prompts = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, TokensPrompt(prompt_token_ids=ids)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert all(output == outputs[0] for output in outputs)
    assert llm.generate(ids, SamplingParams(temperature=0, max_tokens=8), False)[0] == outputs[0]


def test_what_a_prompts_dict_asks_for_and_this_engine_lacks_is_refused(llm):
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.generate({"prompt": "a", "multi_modal_data": None, "mm_processor_kwargs": {}}, params, use_tqdm=False)
    for asked in [{"cache_salt": "mine"}, {"multi_modal_data": {"image": "x"}}]:
        with pytest.raises(TypeError, match=f"a prompt has no {list(asked)[0]} here"):
            llm.generate({"prompt": "a", **asked}, params, use_tqdm=False)


def test_no_params_are_the_models_own(llm):
    # models/demo/generation_config.json
    with open(f"{DEMO}/generation_config.json") as file:
        recommended = json.load(file)
    params = llm.get_default_sampling_params()
    for name in {"temperature", "top_k", "top_p"} & set(recommended):
        assert getattr(params, name) == recommended[name]
    assert llm.generate(["Hello"], use_tqdm=False)[0].finished


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


@pytest.mark.parametrize("name, ranks", [("LLM", 1), ("LLM", 2), ("AsyncLLM", 1)])
def test_ctrl_c_ends_loading(name, ranks):
    # Of 1.2 GB of weights the first are made when the signal comes: memory tells that no others are.
    code = f"""
import resource, signal
from nanovllm import {name}
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    {name}({str(SOURCE / "bench/configs/qwen3-0.6b")!r}, device="cpu", load_format="dummy", num_threads={ranks},
           tensor_parallel_size={ranks}, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=1)
except KeyboardInterrupt:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000


def test_ctrl_c_ends_the_reading_of_prompts():
    code = f"""
import resource, signal
from nanovllm import LLM
llm = LLM({DEMO!r}, device="cpu", num_threads=1)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    llm.generate(["a b " * 700] * 100_000, use_tqdm=False)  # 600 MB of tokens
except KeyboardInterrupt:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 700


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


def test_ctrl_c_ends_generate_and_leaves_the_engine_as_it_was(llm):
    params = SamplingParams(temperature=0, max_tokens=16)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        llm.generate(PROMPTS * 400, LONG, use_tqdm=False)  # minutes on any machine
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert llm.is_finished() and llm.stats["running"] == 0
    assert llm.generate(PROMPTS, params, use_tqdm=False) == expected


def test_other_threads_run_while_the_engine_works(llm):
    counts, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counts[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    begin = time.monotonic()
    llm.generate(PROMPTS * 8, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    seconds = time.monotonic() - begin
    done.set()
    thread.join()
    # With the GIL held it would not count at all.
    assert counts[0] > 10 * min(1, seconds)


def test_threads_that_share_an_llm_get_their_own_answers(llm):
    def params(seed):
        return SamplingParams(seed=seed, max_tokens=12)

    expected = [llm.generate(PROMPTS[0], params(i), use_tqdm=False)[0]["text"] for i in range(8)]
    got = [None] * 8

    def work(i):
        got[i] = llm.generate(PROMPTS[0], params(i), use_tqdm=False)[0]["text"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_of_fork_is_refused_with_a_sentence(llm):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate(["x"], SamplingParams(), use_tqdm=False)
            os.write(writer, b"no error")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        message = file.read()
    # An engine of the child's own would wait for OpenMP's threads, which are missing there.
    assert "made before fork()" in message and "`spawn`" in message and "in the child" not in message


@pytest.mark.parametrize("work", ["llm.generate(['x'] * 200, params, use_tqdm=False)", "while True: llm.step()"])
def test_a_program_ends_well_while_a_daemons_thread_is_at_work(work):
    code = f"""
import threading, time
from nanovllm import LLM, SamplingParams
llm = LLM({DEMO!r}, device="cpu", num_threads=1)
params = SamplingParams(max_tokens=2000, ignore_eos=True)
for _ in range(50): llm.add_request("x", params)
def work():
    {work}
threading.Thread(target=work, daemon=True).start()
while llm._engine.stats()["steps"] < 20: time.sleep(0.01)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_a_freed_llm_says_so():
    engine = LLM(DEMO, device="cpu", num_threads=1)
    engine.exit()
    engine.exit()
    with pytest.raises(RuntimeError, match="exit"):
        engine.generate(["x"], SamplingParams(), use_tqdm=False)


def test_options_are_nano_vllms_and_unknown_ones_are_named():
    with LLM(
        DEMO,
        device="cpu",
        enforce_eager=True,
        tensor_parallel_size=1,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        max_model_len=128,
        gpu_memory_utilization=0.5,
        kvcache_block_size=256,
        num_kvcache_blocks=-1,
    ) as engine:
        assert engine.info["block_size"] == 256
        assert engine.info["max_num_seqs"] == 4
        assert engine.info["max_model_len"] == 128
    with pytest.raises(TypeError, match="kvcache_blocksize: did you mean kvcache_block_size"):
        LLM(DEMO, kvcache_blocksize=256)
    for name in ("max_num_seqs", "max_model_len"):
        with pytest.raises(TypeError, match=f"{name} must be an integer of 64 bits, got 'many'"):
            LLM(DEMO, **{name: "many"})
    with pytest.raises(ValueError, match="kv_events_config: there is no field .*end_point"):
        LLM(DEMO, kv_events_config={"end_point": "tcp://127.0.0.1:1"})
    with pytest.raises(ValueError, match="kv_events_config: hwm must be an integer"):
        LLM(DEMO, kv_events_config={"enable_kv_cache_events": True, "hwm": "many"})
    for name, value, kind in [("enforce_eager", "yes", "True or False"), ("device", 0, "a string"), ("seed", 0.5, "an integer")]:
        with pytest.raises(TypeError, match=f"{name} must be {kind}"):
            LLM(DEMO, **{name: value})
    with pytest.raises(ModelError, match="nowhere"):
        LLM("/nowhere")
    for model in (None, b"x", 3):
        with pytest.raises(TypeError, match="model must be a directory or a name"):
            LLM(model)


def test_any_integer_is_a_seed_as_on_the_command_line(program):
    sampling = {"temperature": 2.0, "max_tokens": 12}
    want = program([{"prompt": PROMPTS[0], "sampling_params": sampling}], "--seed", "-1")[0]
    for seed in (-1, 2**64 - 1):
        with LLM(DEMO, device="cpu", num_threads=1, seed=seed) as engine:
            output = engine.generate(PROMPTS[0], SamplingParams(**sampling), use_tqdm=False)[0]
        assert output["token_ids"] == want["token_ids"]


def test_more_positions_than_the_model_has_are_clipped_with_a_note():
    with open(f"{DEMO}/config.json") as file:
        most = json.load(file)["max_position_embeddings"]
    with pytest.warns(UserWarning, match=f"max_model_len is {most}, not {most + 1}"):
        engine = LLM(DEMO, device="cpu", max_num_seqs=2, max_model_len=most + 1)
    assert engine.info["max_model_len"] == most
    engine.exit()


def test_positions_that_yarn_adds_are_the_models(tmp_path):
    with open(f"{DEMO}/config.json") as file:
        config = json.load(file)
    most = config["max_position_embeddings"]
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": most}
    for name in os.listdir(DEMO):
        os.symlink(f"{DEMO}/{name}", tmp_path / name)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, device="cpu", num_threads=1, max_num_seqs=1, max_model_len=2 * most) as engine:
        assert engine.info["max_model_len"] == 2 * most


def resident_kib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def test_engines_that_are_dropped_leave_nothing():
    rounds = int(os.environ.get("NANOVLLM_TEST_ENGINES", "40"))
    sizes = []
    for i in range(rounds):
        engine = LLM(DEMO, device="cpu", num_threads=1, max_num_seqs=2, max_model_len=64)
        output = engine.generate(["Hello"], SamplingParams(max_tokens=2), use_tqdm=False)
        del engine, output
        gc.collect()
        if i in (rounds // 2, rounds - 1):
            sizes.append((resident_kib(), len(gc.get_objects()), len(os.listdir("/proc/self/fd"))))
    (memory, objects, files), last = sizes
    print(f"{rounds} engines: {memory} KiB, {objects} objects, {files} files at half; {last} at the end")
    assert last[0] - memory < 4096  # one engine's weights alone take 8 MiB
    assert last[1] - objects < rounds
    assert last[2] == files


def test_importing_takes_no_library_that_is_not_needed():
    code = "import sys, nanovllm; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    slow = {"asyncio", "dataclasses", "json", "numpy", "torch", "transformers", "tqdm"}
    assert not slow & set(modules)


def test_help_reads_well():
    text = pydoc.render_doc(nanovllm.LLM)
    assert "KeyboardInterrupt within a" in text and "tensor_parallel_size" in text
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name).__doc__ or name in ("__version__", "PromptType")
