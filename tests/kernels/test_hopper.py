"""The kernel for Hopper GPUs: it compiles wherever the tests run, and on such a GPU gives what its twin gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from leyline_kernels import reference

Measure = Callable[[Tensor, Tensor], float]

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from leyline_kernels.gpu import decode_hopper

kernel, tiling = decode_hopper._decode_kernel, decode_hopper.TILING
constants = {
    "H": 16, "RANK": decode_hopper.RANK, "ROPE": decode_hopper.ROPE, "INTERLEAVED": True, "TURNED": True,
    "MIN_TILES": tiling.min_tiles, "BLOCK_H": decode_hopper.MAX_HEADS, "BLOCK_N": tiling.block_n, "BLOCK_SEQS": 64,
    "STAGES": tiling.num_stages,
}
types = dict.fromkeys(("q_latent", "q_pe", "c_kv", "k_pe", "out_latent"), "*bf16")
types |= dict.fromkeys(("kv_start", "kv_len", "kv_slots", "kv_delta"), "*i32")
types |= dict.fromkeys(("inv_freq", "part", "part_lse"), "*fp32") | {"scale_log2": "fp32"}
types |= dict.fromkeys(constants, "constexpr")
names = kernel.arg_names
aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "i32") != "fp32"}
source = GluonASTSource(
    fn=kernel,
    signature={name: types.get(name, "i32") for name in names},
    constexprs={(names.index(name),): value for name, value in constants.items()},
    attrs={place: value for place, value in aligned.items() if names[place[0]] not in constants},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiling.num_warps})
assert "wgmma.mma_async" in compiled.asm["ptx"]
print(compiled.metadata.shared)
"""
SHARED_BYTES = 227 * 1024
"""Of a Hopper processor, for one program."""


def test_it_compiles_and_fits() -> None:
    """In a process of its own, where Triton does not interpret. Triton brings the assembler."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 128 * 1024 < int(done.stdout) <= SHARED_BYTES


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
class TestOnHopper:
    @pytest.mark.parametrize("layout", ["interleaved", "halves"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("deltas", ["none", "uniform", "pieces", "all-different"])
    @pytest.mark.parametrize("heads", [1, 16])
    def test_its_twin_gives_the_same(
        self,
        batch: Callable[..., Any],
        relative_error: Measure,
        deltas: str,
        dtype: torch.dtype,
        layout: str,
        heads: int,
    ) -> None:
        from leyline_kernels.gpu import decode as gpu_decode
        from leyline_kernels.gpu import decode_hopper

        lens = (1, 0, 64, 65, 9000, 3, 63, 128, 0, 20_000)
        b = batch(lens, heads=heads, rank=512, rope=64, layout=layout, dtype=dtype, deltas=deltas)
        assert decode_hopper.supports(b.q_latent, b.q_pe)
        got = gpu_decode.decode(**b.args())
        twin = gpu_decode.decode(**b.args(), tiling=gpu_decode.BF16)
        wide = {name: getattr(b, name).float() for name in ("q_latent", "q_pe", "c_kv", "k_pe")}
        want = reference.decode(**b.but(**wide).args())
        assert relative_error(got, want) < 1.1 * relative_error(twin, want) + 1e-4
        for _ in range(20):
            assert torch.equal(gpu_decode.decode(**b.args()), got), "not the same bits each time"

    @pytest.mark.parametrize("lens", [(1,) * 70, (64,) * 130 + (9000,), (8192,)], ids=["many", "more", "one"])
    def test_any_number_of_lists(
        self, batch: Callable[..., Any], relative_error: Measure, lens: tuple[int, ...]
    ) -> None:
        """More than 64, and programs of a single tile."""
        from leyline_kernels.gpu import decode as gpu_decode

        b = batch(lens, heads=5, rank=512, rope=64, dtype=torch.bfloat16)
        got = gpu_decode.decode(**b.args(), max_len=max(lens))
        twin = gpu_decode.decode(**b.args(), max_len=max(lens), tiling=gpu_decode.BF16)
        assert relative_error(got, twin) < 5e-3

    def test_angles_of_a_million_turn_as_the_twins(self, batch: Callable[..., Any], relative_error: Measure) -> None:
        from leyline_kernels.gpu import decode as gpu_decode

        b = batch((5000,), heads=16, rank=512, rope=64, dtype=torch.bfloat16, deltas="uniform")
        b = b.but(kv_delta=torch.full_like(b.kv_delta, 999_983))
        got, twin = gpu_decode.decode(**b.args()), gpu_decode.decode(**b.args(), tiling=gpu_decode.BF16)
        assert relative_error(got, twin) < 3e-3
