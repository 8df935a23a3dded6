"""The experts' choices, measured: `python -m benchmarks.tune_experts`. What follows from it stands in `gpu/experts.py`.

One MoE block of DeepSeek-V2-Lite's shape, random weights, bf16. Each arm is checked against the twin in fp32, then
timed by replaying a CUDA graph that walks several layers' weights, so that none is still in L2. Sections fail one by
one: a traceback stands in the place of its figures. `--smoke`: tiny, without times, to run it on a CPU
(TRITON_INTERPRET=1).
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

from benchmarks.timing import call_times
from leyline_kernels import reference
from leyline_kernels.gpu import experts as gpu
from leyline_server.model.fused import fuse

SMOKE = "--smoke" in sys.argv
DEVICE = "cpu" if SMOKE else "cuda"
DTYPE = torch.float32 if SMOKE else torch.bfloat16
HIDDEN, WIDTH, EXPERTS, TOP_K, SHARED, LAYERS = (64, 32, 8, 3, 2, 2) if SMOKE else (2048, 1408, 64, 6, 2, 4)
TOKENS = (1, 5) if SMOKE else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LONG = 40 if SMOKE else 32768
REPEATS = 3


@dataclass
class Layer:
    """One layer's weights, its shared experts also as Hugging Face's MLP has them, and HF's module over the rest."""

    gate_up: Tensor
    down: Tensor
    shared_gate: Tensor
    shared_up: Tensor
    shared_down: Tensor
    theirs: Any

    @staticmethod
    def random() -> Layer:
        num = EXPERTS + SHARED
        gate_up = torch.randn(num, 2 * WIDTH, HIDDEN, device=DEVICE, dtype=DTYPE) * HIDDEN**-0.5
        down = torch.randn(num, HIDDEN, WIDTH, device=DEVICE, dtype=DTYPE) * WIDTH**-0.5
        with torch.device("meta"):
            theirs = DeepseekV2Experts(config())
        theirs.gate_up_proj = torch.nn.Parameter(gate_up[:EXPERTS], requires_grad=False)
        theirs.down_proj = torch.nn.Parameter(down[:EXPERTS], requires_grad=False)
        theirs.config._experts_implementation = "grouped_mm"
        gate, up = gate_up[EXPERTS:].chunk(2, dim=1)
        shared_down = down[EXPERTS:].transpose(0, 1).flatten(1).contiguous()
        return Layer(gate_up, down, gate.flatten(0, 1).contiguous(), up.flatten(0, 1).contiguous(), shared_down, theirs)

    def hugging_face(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As DeepseekV2Moe does it: grouped_mm, then the shared experts as one MLP."""
        inner = torch.nn.functional.silu(linear(x, self.shared_gate)) * linear(x, self.shared_up)
        return self.theirs(x, index, weights) + linear(inner, self.shared_down)

    def ours(self, x: Tensor, index: Tensor, weights: Tensor, **choice: Any) -> Tensor:
        return gpu.experts(x, index, weights, self.gate_up, self.down, SHARED, **choice)


def config(**more: Any) -> Any:
    sizes = {
        "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": SHARED, "intermediate_size": 96 if SMOKE else 10944, "num_hidden_layers": 2,
        "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 1024,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    return DeepseekV2Config(**sizes | more)


def routed(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, top_k_index, top_k_weights of uniformly chosen experts."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, generator=generator).to(DTYPE)
    weights, index = torch.rand(tokens, EXPERTS, device=DEVICE, generator=generator).softmax(-1).topk(TOP_K)
    return x, index, weights


def graph_us(calls: list[Callable[[], Any]]) -> float:
    """Microseconds a call: the median of making them all one after another."""
    if SMOKE:
        calls[0]()
        return float("nan")
    times = call_times(lambda index: calls[index](), torch.device(DEVICE), n=9, calls=len(calls))
    return 1e6 * statistics.median(times)


def bytes_read(inputs: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """The weights of the experts that are asked, the mean over inputs."""
    asked = sum(index.unique().numel() + SHARED for _, index, _ in inputs) / len(inputs)
    return asked * 3 * WIDTH * HIDDEN * 2


def check(layers: list[Layer]) -> None:
    for tokens in TOKENS:
        x, index, weights = routed(tokens, 1)
        layer = layers[0]
        want = reference.experts(x.float(), index, weights, layer.gate_up.float(), layer.down.float(), SHARED)
        arms = {
            "hf": layer.hugging_face(x, index, weights),
            "few": layer.ours(x, index, weights, max_pairs=1 << 30),
            "many": layer.ours(x, index, weights, max_pairs=0),
        }
        errors = {name: float((got.float() - want).norm() / want.norm()) for name, got in arms.items()}
        print(f"  T={tokens:<5d} relative error " + "  ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        bad = [name for name, error in errors.items() if not error < 0.02]
        if bad:
            raise AssertionError(f"wrong at T={tokens}: {bad}")


def table(layers: list[Layer]) -> None:
    print(f"{'T':>6s} {'hf us':>9s} {'few us':>9s} {'many us':>9s} {'few TB/s':>9s} {'hf TB/s':>9s} {'few ms/26':>9s}")
    for tokens in TOKENS:
        inputs = [routed(tokens, seed) for seed in range(REPEATS * len(layers))]
        pairs = [(layer, args) for args, layer in zip(inputs, layers * REPEATS, strict=True)]
        size = bytes_read(inputs)
        hf = graph_us([lambda one=one, a=a: one.hugging_face(*a) for one, a in pairs])
        few = graph_us([lambda one=one, a=a: one.ours(*a, max_pairs=1 << 30) for one, a in pairs])
        many = graph_us([lambda one=one, a=a: one.ours(*a, max_pairs=0) for one, a in pairs])
        rates = f"{size / few / 1e6:9.2f} {size / hf / 1e6:9.2f} {few * 26e-3:9.2f}"
        print(f"{tokens:6d} {hf:9.1f} {few:9.1f} {many:9.1f} {rates}")


def sweep(layers: list[Layer]) -> None:
    """Each product by itself, over tiles; tokens in the columns."""
    columns = (1, 5) if SMOKE else (1, 16, 64)
    shapes = [(16, 32, 32, 4, 1)] if SMOKE else [
        *product((16,), (64,), (64, 128), (4,), (3, 4)), (16, 64, 64, 4, 6), (16, 64, 128, 8, 4),
        (16, 128, 64, 4, 4), (16, 128, 64, 8, 4), (16, 32, 128, 4, 4), (16, 32, 256, 4, 3),
        (32, 64, 64, 4, 4), (32, 64, 128, 4, 3),
    ]  # fmt: skip
    per_token = TOP_K + SHARED
    for name, gated in (("gate_up", True), ("down", False)):
        print(f"  {name:8s} rows   n   k warps stages " + "".join(f"{f'T={t} us':>10s}{'TB/s':>6s}" for t in columns))
        for shape in shapes:
            tiles, line, began = gpu.Tiles(*shape), "", time.perf_counter()
            try:
                for tokens in columns:
                    inputs = [routed(tokens, seed) for seed in range(REPEATS * len(layers))]
                    calls = [
                        _product_call(layer, args, tiles, gated, per_token)
                        for args, layer in zip(inputs, layers * REPEATS, strict=True)
                    ]
                    us = graph_us(calls)
                    line += f"{us:10.1f}{bytes_read(inputs) * (2 if gated else 1) / 3 / us / 1e6:6.2f}"
            except Exception as error:
                line += f"  failed: {type(error).__name__}: {str(error)[:90]}"
            took = time.perf_counter() - began
            print(f"  {'':8s} {shape[0]:4d}{shape[1]:4d}{shape[2]:4d}{shape[3]:6d}{shape[4]:7d} {line}  ({took:.1f} s)")


def _product_call(
    layer: Layer, args: tuple[Tensor, Tensor, Tensor], tiles: gpu.Tiles, gated: bool, per_token: int
) -> Callable[[], Any]:
    x, index, _ = args
    num_pairs = x.shape[0] * per_token
    groups = gpu.group(index, len(layer.down), per_token, tiles.rows)
    source = x if gated else torch.randn(num_pairs, WIDTH, device=DEVICE).to(DTYPE)
    weight, width = (layer.gate_up, WIDTH) if gated else (layer.down, HIDDEN)
    out = torch.empty(num_pairs, width, device=DEVICE, dtype=DTYPE if gated else torch.float32)
    return lambda: gpu.product(source, weight, out, groups, per_token if gated else 1, gated, tiles)


def prefill(layers: list[Layer]) -> None:
    """A block at 32k tokens both ways, launched one by one as a prefill is."""
    args = routed(LONG, 1)
    for name, run in (("hf", layers[0].hugging_face), ("ours", layers[0].ours)):
        run(*args)
        if SMOKE:
            continue
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        took = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(*args)
            end.record()
            end.synchronize()
            took.append(start.elapsed_time(end))
        ms = sorted(took)[2]
        tflops = 2 * 3 * LONG * (TOP_K + SHARED) * HIDDEN * WIDTH / ms / 1e9
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        print(
            f"  {LONG} tokens {name}: {ms:.2f} ms (x 26: {26e-3 * ms:.3f} s), {tflops:.0f} TFLOP/s, {peak:.1f} GB more"
        )
    if not SMOKE:
        by_kernel("ours, by kernel", lambda: layers[0].ours(*args))


def by_kernel(title: str, run: Callable[[], Any], names: bool = True) -> int:
    """Prints what a call launches, and returns how many kernels that is."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
    counts = Counter(event.name for event in events)
    times: dict[str, float] = defaultdict(float)
    for event in events:
        times[event.name] += event.time_range.elapsed_us()
    print(f"  {title}: {sum(counts.values())} launches, {sum(times.values()):.0f} us")
    for name, us in sorted(times.items(), key=lambda item: -item[1]) if names else ():
        print(f"    {counts[name]:3d} x {us / counts[name]:8.1f} us  {name[:100]}")
    return sum(counts.values())


def launches() -> None:
    """One decoder layer with Hugging Face's own attention over 16 tokens, and the time of its MoE block."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = DeepseekV2ForCausalLM(config()).to(DTYPE).eval()
    for weight in model.parameters():
        weight.data.normal_(0.0, weight.shape[-1] ** -0.5)
    model.config._experts_implementation = "grouped_mm"
    positions = torch.arange(16, device=DEVICE)[None]
    for state in ("before", "after"):
        if state == "after":
            fuse(model)
        for idx, layer in enumerate(model.model.layers):
            hidden = torch.randn(1, 16, HIDDEN, device=DEVICE).to(DTYPE)
            turns = model.model.rotary_emb(hidden, positions)
            run = lambda layer=layer, hidden=hidden, turns=turns: layer(hidden, position_embeddings=turns)  # noqa: E731
            if SMOKE:
                run()
            else:
                by_kernel(f"layer {idx} {state}", run, names=state == "after" or idx == 1)
        for tokens in (1, 16, 64):
            hidden = torch.randn(1, tokens, HIDDEN, device=DEVICE).to(DTYPE)
            us = graph_us([lambda hidden=hidden: model.model.layers[1].mlp(hidden)] * 8)
            print(f"  block with its router {state}, T={tokens} (weights warm): {us:.1f} us")


def main() -> None:
    torch.manual_seed(0)
    if not SMOKE:
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    layers = [Layer.random() for _ in range(LAYERS)]
    if not SMOKE:
        two = torch.ones(2, 2**30, dtype=torch.uint8, device=DEVICE)
        us = graph_us([lambda: two[1].copy_(two[0])] * 4)
        print(f"copy of 1 GiB: {2**31 / us / 1e6:.2f} TB/s")
        del two
    print("check")
    check(layers)
    sections: list[tuple[str, Callable[[], None]]] = [
        ("a block without its router, shared experts in it", lambda: table(layers)),
        ("prefill", lambda: prefill(layers)),
        ("launches", launches),
        ("tiles", lambda: sweep(layers)),
    ]
    for name, section in sections:
        began = time.perf_counter()
        print(f"\n{name}")
        try:
            section()
        except Exception:
            traceback.print_exc(file=sys.stdout)
        print(f"  [{time.perf_counter() - began:.1f} s]", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
