"""Trains the demo model from random weights and writes it, rounded to bf16, as model.safetensors.

    python train.py --output DIRECTORY [--steps 8000] [--max-seconds 300] [--scale 1.0] [--device cuda]

Reads models/demo/config.json and tokenizer.json. The corpus and the order of its rows follow from --seed. On a GPU one
step (four shapes of rows, forward, backward, AdamW) is compiled and replayed as one CUDA graph, since a model this small
is otherwise bound by kernel launches.
"""

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import evaluate
from corpus import IGNORED, MODEL_DIRECTORY, make_shape, load_tokenizer

# Rows drawn from in all, rows per step, and the weight of their loss.
ROWS = {"sums": 400_000, "texts": 160_000, "long": 4_000, "calls": 96_000}
BATCH = {"sums": 1024, "texts": 128, "long": 8, "calls": 40}
SECOND_BATCH = {"sums": 384, "texts": 48, "long": 2, "calls": 96}
WEIGHT = {"sums": 1.0, "texts": 1.0, "long": 0.5, "calls": 1.0}
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 200


def make_data(seed: int, scale: float, device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        rows = {shape: make_shape(pool, shape, seed + i, max(64, int(count * scale))) for i, (shape, count) in enumerate(ROWS.items())}
    return {shape: tuple(torch.from_numpy(part).to(device) for part in parts) for shape, parts in rows.items()}


def make_model(seed: int, device: str, start: Path | None):
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(MODEL_DIRECTORY)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if start:
        missing, unexpected = model.load_state_dict({n: t.float() for n, t in load_file(start).items()}, strict=False)
        assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
        model.tie_weights()
    return model.to(device)


def make_optimizer(model, device: str) -> torch.optim.Optimizer:
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    plain = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    on_gpu = device == "cuda"
    return torch.optim.AdamW(groups, lr=torch.tensor(0.0, device=device), betas=(0.9, 0.98), eps=1e-9, fused=on_gpu, capturable=on_gpu)


class Step:
    """One optimiser step over static buffers: the row numbers of each shape in, the losses out."""

    def __init__(self, model, data, batch: dict[str, int], device: str, compiled: bool):
        self.model, self.data, self.device = model, data, device
        self.optimizer = make_optimizer(model, device)
        self.rows = {s: torch.zeros(n, dtype=torch.long, device=device) for s, n in batch.items()}
        self.losses = {s: torch.zeros((), device=device) for s in batch}
        self.loss_of = torch.compile(self.loss_of_eager, dynamic=False) if compiled else self.loss_of_eager
        self.graph = None

    def loss_of_eager(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False):
            logits = evaluate.forward(self.model, ids[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)

    def run(self) -> None:
        for shape, rows in self.rows.items():
            ids, labels = (part[rows].long() for part in self.data[shape])
            loss = self.loss_of(ids, labels)
            (loss * WEIGHT[shape]).backward()
            self.losses[shape].copy_(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def capture(self) -> None:
        """Compiles and records the step. The warm-up runs at learning rate 0 and so leaves the weights as they are."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        self.graph = graph

    def __call__(self, learning_rate: float, generator: torch.Generator) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(learning_rate)
        for shape, rows in self.rows.items():
            rows.copy_(torch.randint(len(self.data[shape][0]), rows.shape, generator=generator, device=self.device))
        self.graph.replay() if self.graph else self.run()


def schedule(peak: float, step: int, progress: float) -> float:
    """Linear warm-up, then a cosine down to zero at progress 1."""
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(args, model, step_of: Step, tokenizer) -> None:
    generator = torch.Generator(args.device).manual_seed(args.seed)
    probe = {n: c for n, c in evaluate.arithmetic_cases(True, 0.2).items() if n in ("+ chat", "- chat")}
    start = time.time()
    for step in range(args.steps):
        elapsed = time.time() - start
        progress = max(step / args.steps, elapsed / args.max_seconds)
        if progress >= 1:
            break
        step_of(schedule(args.learning_rate, step, progress), generator)
        if step % args.log_every == 0:
            losses = " ".join(f"{s} {v.item():.4f}" for s, v in step_of.losses.items())
            print(f"step {step} at {time.time() - start:.1f} s, progress {progress:.3f}: {losses}", flush=True)
        if step and step % (10 * args.log_every) == 0:
            report, _ = evaluate.measure(model.eval(), tokenizer, probe, 16)
            print("  held out: " + ", ".join(f"{n} {r['share']:.2%}" for n, r in report.items()), flush=True)
            model.train()
    print(f"{step + 1} steps in {time.time() - start:.1f} s", flush=True)


def save(model, directory: Path) -> None:
    state = {n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.state_dict().items() if n != "lm_head.weight"}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--max-seconds", type=float, default=300, help="the schedule ends by then even if steps are left")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--scale", type=float, default=1.0, help="size of corpus and batch, for trying things out")
    parser.add_argument("--start", type=Path, help="weights to go on from: the second stage, with other batches, not compiled")
    parser.add_argument("--no-evaluation", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--no-graph", action="store_true", help="launch kernel by kernel")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    start = time.time()
    data = make_data(args.seed, args.scale, args.device)
    print(f"corpus after {time.time() - start:.1f} s: " + ", ".join(f"{s} {tuple(p[0].shape)}" for s, p in data.items()), flush=True)
    model, tokenizer = make_model(args.seed, args.device, args.start), load_tokenizer()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    batch = SECOND_BATCH if args.start else BATCH
    step_of = Step(model, data, {s: max(1, int(n * args.scale)) for s, n in batch.items()}, args.device, args.device == "cuda" and not args.start)
    if args.device == "cuda" and not args.no_graph:
        step_of.capture()
        print(f"compiled after {time.time() - start:.1f} s", flush=True)
    train(args, model, step_of, tokenizer)
    save(model, args.output)
    if args.no_evaluation:
        return

    rounded = model.to(torch.bfloat16).eval()
    reports = {}
    for dtype in (torch.bfloat16, torch.float32):
        reports[str(dtype)], wrong = evaluate.evaluate(rounded.to(dtype), tokenizer, min(1.0, args.scale))
        print("\n".join([str(dtype)] + wrong + [f"  {n}: {r}" for n, r in reports[str(dtype)].items()]), flush=True)
        (args.output / "eval.json").write_text(json.dumps(reports, indent=2) + "\n")
    for prompt, answer in zip(evaluate.STORY_PROMPTS, evaluate.greedy(rounded, tokenizer, evaluate.STORY_PROMPTS, 250)):
        print(f"\n{prompt}\n[{answer.text}] ended={answer.ended}, gap {answer.gap:.3f}", flush=True)


if __name__ == "__main__":
    main()
