#!/usr/bin/env python3
"""Checks the program against the library that defines its quantised format: what one writes, the other reads as the same numbers.

    pip install torch==2.15.0 transformers==5.23.0 compressed-tensors==0.20.0 accelerate==1.15.0    # 5 GB: CI does not
    python tools/check_compressed_tensors.py build/release/bin/nanovllm [--write] [NAME...]

FILES: `nanovllm quantize models/demo`, loaded by transformers: the library's weights are those of docs/contract.md to the bit, computed
with numpy here, and what transformers computes with them is near to what the program does.
CHECKPOINTS: small random models that the library compressed. The program gives for each, with --dequantize, the same bytes as for the
plain model that the library makes of it; and log probabilities near to those of transformers, where it quantises activations, too.
FIXTURES: the weights of tests/data/goldens/quantised-* are those that the library reads of them, to the bit, by its converters where the
format is AutoAWQ's or FP8 in blocks; GPTQ's, and columns in another order, which it no longer has, are left out.
--write makes tests/data/goldens/quantised-library-* of those in FIXTURES, in the form of tools/make_quantised.py.
"""
import copy
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, Qwen3Config
from transformers.utils import logging

import make_goldens
from quantised_layouts import E4M3, fnv, to_bf16

ROOT = pathlib.Path(__file__).resolve().parent.parent
LENGTHS = (2, 33, 65)
SMALL = dict(vocab_size=67, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
             head_dim=64, tie_word_embeddings=False, max_position_embeddings=512, rms_norm_eps=1e-6, eos_token_id=None,
             bos_token_id=None, pad_token_id=None, initializer_range=0.12)
# Sizes that blocks of 128 do not divide, and more than one layer.
UNEVEN = dict(SMALL, hidden_size=192, intermediate_size=224, num_hidden_layers=2, num_attention_heads=6, head_dim=32)

# -- Schemes ---------------------------------------------------------------------------------------------------------------------
INT4, INT8 = dict(num_bits=4, type="int"), dict(num_bits=8, type="int")
FP8 = dict(num_bits=8, type="float")
BLOCKS = dict(FP8, strategy="block", block_structure=[128, 128])
TOKENS = dict(strategy="token", dynamic=True)
GROUP_ROWS = dict(FP8, strategy="group", group_size=128, dynamic=True)


def group(weights, inputs=None, targets=("Linear",)):
    return dict(targets=list(targets), weights=weights, input_activations=inputs)


def of(*groups, **more):
    return dict(config_groups={f"group_{i}": g for i, g in enumerate(groups)}, ignore=["lm_head"], **more)


QKV, O, GATE_UP, DOWN = "re:.*[qkv]_proj", "re:.*o_proj", "re:.*(gate|up)_proj", "re:.*down_proj"
CHECKPOINTS = {
    # name: (configuration, its arguments, the library's)
    "packed-128": (Qwen3Config, SMALL, of(group(dict(INT4, strategy="group", group_size=128)))),
    "packed-32-zeros": (Qwen3Config, UNEVEN, of(group(dict(INT4, strategy="group", group_size=32, symmetric=False)))),
    "packed-weight-order": (Qwen3Config, SMALL, of(group(dict(INT4, strategy="group", group_size=64, actorder="weight")))),
    "packed-channel-zeros": (LlamaConfig, dict(UNEVEN, num_hidden_layers=1), of(group(dict(INT4, strategy="channel", symmetric=False)))),
    "packed-8-bits": (LlamaConfig, UNEVEN, of(group(dict(INT8, strategy="group", group_size=32)))),
    "packed-8-bits-channel-zeros": (Qwen3Config, UNEVEN, of(group(dict(INT8, strategy="channel", symmetric=False)))),
    "fp8-tensor": (LlamaConfig, SMALL, of(group(dict(FP8, strategy="tensor")))),
    "fp8-tensor-static": (Qwen3Config, SMALL, of(group(dict(FP8, strategy="tensor"), dict(FP8, strategy="tensor")))),
    "fp8-channel-token": (Qwen3Config, dict(UNEVEN, num_hidden_layers=1), of(group(dict(FP8, strategy="channel"), dict(FP8, **TOKENS)))),
    "fp8-blocks": (Qwen3Config, SMALL, of(group(BLOCKS, GROUP_ROWS))),
    "fp8-blocks-alone": (Qwen3Config, dict(SMALL, num_attention_heads=3, num_key_value_heads=3), of(group(BLOCKS))),
    "int8-channel-token": (Qwen3Config, UNEVEN, of(group(dict(INT8, strategy="channel"), dict(INT8, **TOKENS)))),
    "w4a8-128": (Qwen3Config, SMALL, of(group(dict(INT4, strategy="group", group_size=128), dict(INT8, **TOKENS)))),
    "w4a8-channel": (LlamaConfig, UNEVEN, of(group(dict(INT4, strategy="channel"), dict(INT8, **TOKENS)))),
    "int8-tensor-static": (LlamaConfig, SMALL, of(group(dict(INT8, strategy="tensor"), dict(INT8, strategy="tensor")))),
    "fp8-keys": (Qwen3Config, SMALL, of(group(dict(FP8, strategy="channel"), dict(FP8, **TOKENS)),
                                        kv_cache_scheme=dict(FP8, strategy="tensor"))),
    "mixed-rows": (Qwen3Config, SMALL, of(group(dict(INT8, strategy="channel"), dict(INT8, **TOKENS), [QKV, O]),
                                          group(dict(FP8, strategy="channel"), dict(FP8, **TOKENS), [GATE_UP]),
                                          group(dict(INT4, strategy="group", group_size=128), None, [DOWN]))),
    "mixed": (LlamaConfig, SMALL, of(group(dict(INT4, strategy="group", group_size=32, symmetric=False), None, [QKV]),
                                     group(dict(INT8, strategy="channel", symmetric=False), None, [O]), group(BLOCKS, None, [GATE_UP]),
                                     group(dict(FP8, strategy="channel"), None, [DOWN]))),
}
FIXTURES = ("mixed", "packed-channel-zeros")


# -- The program -----------------------------------------------------------------------------------------------------------------
class Program:
    def __init__(self, path):
        self.path = path

    def run(self, *arguments, stdin=""):
        done = subprocess.run([self.path, *map(str, arguments)], input=stdin, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, arguments))}: {done.stderr}")
        return done.stdout

    def logprobs(self, model, prompts, *options):
        """[(token, log probability) ...] of every position but the first: the prompt's own token, then the 20 likeliest."""
        ask = dict(temperature=0, max_tokens=1, prompt_logprobs=20)
        lines = "\n".join(json.dumps(dict(prompt_token_ids=p, sampling_params=ask)) for p in prompts)
        out = self.run("generate", model, "--input", "-", "--skip-tokenizer-init", "--quiet", *options, stdin=lines)
        return [[(e["token_id"], e["logprob"]) for e in row] for line in out.splitlines()
                for row in json.loads(line)["prompt_logprobs"][1:]]


# -- The library -----------------------------------------------------------------------------------------------------------------
def library_logprobs(model, prompts):
    with torch.no_grad():
        return torch.cat([torch.log_softmax(model(torch.tensor([p])).logits[0, :-1].double(), -1) for p in prompts])


def errors_of(want, got):
    """For each position, the largest difference of the program's log probabilities from the library's."""
    return np.array([max(abs(row[token].item() - value) for token, value in entries) for row, entries in zip(want, got, strict=True)])


def as_f32(model):
    """The same model, whatever it does to activations, in f32."""
    return torch.nn.Module.float(copy.deepcopy(model))  # transformers' own refuses quantised models


def with_exact_rows(model):
    """The library computes dynamic scales in the dtype of the activations, and vLLM and the program in f32: here it is given theirs in
    f32, and so are the products, whose results are rounded to bf16."""
    model = copy.deepcopy(model)

    def exactly(forward):
        return lambda x: forward(x.float()).bfloat16()

    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme and scheme.weights and scheme.input_activations:
            torch.nn.Module.float(module)
            module.forward = exactly(module.forward)
    return model


def scales_of(weight, args):
    """Scales and zero points by the library's rule, of the smallest and largest numbers that share one."""
    if args.strategy == "block":
        n, k = (-(-size // block) for size, block in zip(weight.shape, args.block_structure))
        parts = [w for row in weight.split(args.block_structure[0]) for w in row.split(args.block_structure[1], -1)]
        low, high = (torch.stack([f(p) for p in parts]).reshape(n, k) for f in (torch.min, torch.max))
    elif args.strategy == "tensor":
        low, high = weight.min(), weight.max()
    else:
        parts = weight.unflatten(-1, (-1, args.group_size if args.strategy == "group" else weight.shape[-1]))
        low, high = parts.amin(-1), parts.amax(-1)
    return calculate_qparams(low, high, args)


def compressed(config_class, arguments, config, directory):
    """Writes a model that the library compressed. Returns it decompressed again, in bf16 and in f32, where scale * number is not rounded
    to bf16; both quantise activations as the scheme says."""
    base = config_class(**arguments)
    base._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(base).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    apply_quantization_config(model, QuantizationConfig(**config), show_progress=False)
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        if scheme.weights:
            scale, zero = scales_of(module.weight.data, scheme.weights)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
        for static in ("input_scale", "k_scale", "v_scale"):
            if hasattr(module, static):
                # Weights that share a product share it: the program takes the largest there.
                getattr(module, static).data.fill_(0.03 if name.endswith(("o_proj", "down_proj")) else 0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    compressor.update_config(directory)
    exact = as_f32(model)
    for decompressed in (model, exact):
        compressor.decompress_model(decompressed)
    return model, exact


def load(directory, plain=False):
    """transformers' model of the directory. `plain`: dequantised as it is loaded. Else the library decompresses it in its first forward
    pass, and quantises activations as the scheme says."""
    more = dict(quantization_config=CompressedTensorsConfig(dequantize=True)) if plain else {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager", **more).eval()
    with torch.no_grad():
        model(torch.tensor([[0, 1]]))
    return model


def same_weights(a, b):
    a, b = ({k: v for k, v in model.state_dict().items() if k.endswith(".weight")} for model in (a, b))
    return a.keys() == b.keys() and all(torch.equal(v.view(torch.int16), b[k].view(torch.int16)) for k, v in a.items())


def plain_of(model):
    """A model with these weights that quantises nothing."""
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config)).to(model.dtype).eval()
    plain.load_state_dict({k: model.state_dict()[k] for k in plain.state_dict()})
    return plain


# -- The checks ------------------------------------------------------------------------------------------------------------------
def weights_of(directory):
    """module -> bf16 bits of its weight, by docs/contract.md, of a file of `nanovllm quantize`."""
    tensors, weights = load_file(directory / "model.safetensors"), {}
    for name in tensors:
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        scale = tensors[name].float().numpy()
        if module + ".weight" in tensors:
            q = tensors[module + ".weight"]
            q = q.numpy().astype(np.float32) if q.dtype == torch.int8 else E4M3[q.view(torch.uint8).numpy()].astype(np.float32)
        else:
            n, k = tensors[module + ".weight_shape"].tolist()
            words = tensors[module + ".weight_packed"].numpy().view(np.uint32)
            bits = 32 * words.shape[1] // k
            q = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & (2**bits - 1)).reshape(n, k).astype(np.float32)
            q -= 2 ** (bits - 1)
        weights[module] = to_bf16(np.repeat(scale, q.shape[1] // scale.shape[1], 1) * q)
    return weights


def check(what, holds):
    if not holds:
        sys.exit(f"FAILED: {what}")


def check_files(program, form, work):
    out = work / form
    program.run("quantize", ROOT / "models/demo", out, "--format", form)
    model, dequantised = load(out), load(out, plain=True)
    check(f"{form}: the library's two ways", same_weights(model, dequantised))
    library = {k: v.view(torch.uint16).numpy() for k, v in model.state_dict().items() if k.endswith(".weight")}
    ours = weights_of(out)
    check(f"{form}: modules", len(ours) == 7 * model.config.num_hidden_layers)
    for module, bits in ours.items():
        check(f"{form}: {module}", np.array_equal(bits, library[module + ".weight"]))
    stories = [json.loads(line) for line in (ROOT / "tests/data/demo/stories.jsonl").read_text().splitlines()[:2]]
    ids = [json.loads(program.run("tokenize", ROOT / "models/demo", "--json", s["prompt"] + s["expected"]))["ids"] for s in stories]
    got, plain = program.logprobs(out, ids), program.logprobs(out, ids, "--dequantize")
    print(f"{form}: {len(ours)} weights equal;", compare(form, model, ids, got, plain))


def compare(name, model, prompts, got, plain):
    """The program's log probabilities with those of the library's model, whose activations it quantises or not; `plain`: the program's
    with --dequantize. A number that is rounded to another bf16 may become another one of 8 bits, far beyond, so that runs with quantised
    activations differ from each other as they do from runs without."""
    if got == plain:
        exact = library_logprobs(as_f32(model), prompts)
        bound = (library_logprobs(model, prompts) - exact).abs().max().item()
        error = errors_of(exact, got).max()
        check(f"{name}: log probabilities within {error:.3f} of {bound:.3f}", error <= 2 * bound)
        return f"log probabilities within {error:.3f}, transformers' own bf16 run within {bound:.3f}"
    library = library_logprobs(with_exact_rows(model), prompts)
    mean, other = errors_of(library, got).mean(), errors_of(library, plain).mean()
    check(f"{name}: quantised activations differ by {mean:.3f}, others by {other:.3f}", mean <= 1.5 * other)
    return f"log probabilities differ by {mean:.3f} in the mean, those with unquantised activations by {other:.3f}"


def check_checkpoint(program, number, name, work):
    config_class, arguments, config = CHECKPOINTS[name]
    torch.manual_seed(number)
    directory = work / name
    model, exact = compressed(config_class, arguments, config, directory)
    plain = plain_of(model)
    plain.save_pretrained(work / (name + "-plain"))
    prompts = [torch.randint(0, arguments["vocab_size"], (n,)).tolist() for n in LENGTHS]
    want = program.logprobs(work / (name + "-plain"), prompts)
    check(f"{name}: weights", program.logprobs(directory, prompts, "--dequantize") == want)
    got = program.logprobs(directory, prompts)
    inputs = [g["input_activations"] for g in config["config_groups"].values() if g["input_activations"]]
    check(f"{name}: activations", (got == want) == (not inputs or name == "int8-tensor-static"))
    said = compare(name, plain if got == want else model, prompts, got, want)
    # Where no number is rounded to another one, both are near: of single tokens a tenth. The library's int8 scale is max / 127.5, and
    # it quantises keys and values where kv_cache_scheme says so.
    if got != want and all(i["type"] == "float" for i in inputs) and not config.get("kv_cache_scheme"):
        tokens = [[t, (t + 1) % arguments["vocab_size"]] for t in range(arguments["vocab_size"])]
        library = library_logprobs(with_exact_rows(model), tokens)
        near, other = (np.quantile(errors_of(library, program.logprobs(directory, tokens, *options)), 0.1)
                       for options in ((), ("--dequantize",)))
        said += f"; a tenth of single tokens by less than {near:.4f}, with unquantised activations {other:.4f}"
        check(f"{name}: single tokens differ by {near:.4f}, unquantised {other:.4f}", 1.5 * near < other)
    stored = json.loads((directory / "config.json").read_text())["quantization_config"]["format"]
    print(f"{name} ({stored}): the same bytes as plain; {said}", flush=True)
    return model, plain_of(exact), prompts


def fixture_weights(directory, modules):
    """The library's reading of these modules in f32; None where it has none of the format."""
    config, tensors = json.loads((directory / "config.json").read_text())["quantization_config"], load_file(directory / "model.safetensors")
    if config["quant_method"] == "fp8":
        tensors = FP8BlockDequantizer.from_pretrained(str(directory), dtype=torch.float32).process(tensors)
        return {m: tensors[m + ".weight"] for m in modules}
    if config["quant_method"] == "gptq" or "group" in [g["weights"].get("actorder") for g in config.get("config_groups", {}).values()]:
        return None
    if config["quant_method"] == "awq":
        converter = AutoAWQConverter(config["bits"], config["group_size"], config["zero_point"], config["version"])
        tensors, config = converter.process(tensors), converter.update_config(None)
    else:
        config = QuantizationConfig(**config)
    weights = {}
    for module in modules:
        scheme = next(s for s in config.config_groups.values() if any(t == "Linear" or match_name(module, t) for t in s.targets))
        state = {k.removeprefix(module + "."): v for k, v in tensors.items() if k.startswith(module + ".")}
        state["weight_scale"] = state["weight_scale"].float()
        weights[module] = BaseCompressor.get_value_from_registry(scheme.format or config.format).decompress(state, scheme)["weight"]
    return weights


def check_fixtures():
    for directory in sorted((ROOT / "tests/data/goldens").glob("quantised-*")):
        expected = json.loads((directory / "golden.json").read_text())["weights"]
        weights = fixture_weights(directory, expected)
        if weights is None:
            print(f"{directory.name}: not the library's")
            continue
        for module, digest in expected.items():
            check(f"{directory.name}: {module}", fnv(to_bf16(weights[module].numpy()).tobytes()) == digest)
        print(f"{directory.name}: {len(weights)} weights equal", flush=True)


def write_fixture(name, directory, model, exact, prompts):
    target = ROOT / "tests/data/goldens" / f"quantised-library-{name}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(directory, target)
    half = plain_of(model)
    error = max((make_goldens.logprobs_of(half, p)[1] - make_goldens.logprobs_of(exact, p)[1]).abs().max().item() for p in prompts)
    modules = {k: v for k, v in model.named_modules() if getattr(getattr(v, "quantization_scheme", None), "weights", None)}
    golden = dict(model=name, bf16_error=round(error, 4),
                  weights={k: fnv(v.weight.data.view(torch.uint16).numpy().tobytes()) for k, v in modules.items()},
                  prompts=[make_goldens.describe_prompt(exact, p) for p in prompts])
    (target / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


def main():
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    everything = ["fp8", "int8", "int4", "w4a8", *CHECKPOINTS, "fixtures"]
    names = arguments[1:] or everything
    if not arguments or set(names) - set(everything):
        sys.exit(__doc__)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    program = Program(arguments[0])
    with tempfile.TemporaryDirectory() as path:
        for name in names:
            if name == "fixtures":
                check_fixtures()
                continue
            if name not in CHECKPOINTS:
                check_files(program, name, pathlib.Path(path))
                continue
            made = check_checkpoint(program, list(CHECKPOINTS).index(name), name, pathlib.Path(path))
            if "--write" in sys.argv and name in FIXTURES:
                write_fixture(name, pathlib.Path(path) / name, *made)


if __name__ == "__main__":
    main()
