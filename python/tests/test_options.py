"""The options of an engine."""

import json
import os

import pytest
from conftest import DEMO, PROMPTS

from nanovllm import LLM, ModelError, SamplingParams


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
    with pytest.raises(TypeError, match="num_gpu_blocks_override must be an integer"):
        LLM(DEMO, num_kvcache_blocks="many")
    with pytest.raises(ValueError, match="num_gpu_blocks_override is -5"):
        LLM(DEMO, num_kvcache_blocks=-5)
    with LLM(DEMO, device="cpu", num_threads=1, dtype="torch.float32") as engine:  # str() of PyTorch's
        assert engine.info["dtype"] == "f32"
    wrong = {"enforce_eager": ("yes", "True or False"), "device": (0, "a string"), "seed": (0.5, "an integer")}
    for name, (value, kind) in wrong.items():
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


def test_all_positions_of_the_model_may_be_asked_for():
    with open(f"{DEMO}/config.json") as file:
        most = json.load(file)["max_position_embeddings"]
    for asked in (-1, "auto"):
        with LLM(DEMO, device="cpu", max_num_seqs=2, max_model_len=asked) as engine:
            assert engine.info["max_model_len"] == most


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
