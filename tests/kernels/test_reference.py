"""The torch twins against textbook attention with expanded keys and values, in float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import leyline_kernels
from leyline_kernels import reference

H, NOPE, V_DIM, RANK, ROPE = 3, 12, 10, 20, 8
LENGTH, POOL = 45, 60
OTHER = {"interleaved": "halves", "halves": "interleaved"}


def rotated(x: Tensor, position: Tensor, inv_freq: Tensor, layout: str) -> Tensor:
    """x [N, .., rope] at position [N], by multiplying complex numbers: shares no code with the package."""
    if layout == "interleaved":
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    else:
        pairs = torch.complex(*x.chunk(2, dim=-1))
    angle = position.double().reshape(-1, *[1] * (x.dim() - 1)) * inv_freq.double()
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    if layout == "interleaved":
        return torch.view_as_real(pairs).flatten(-2)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@pytest.fixture(params=["interleaved", "halves"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


class Textbook:
    """One sequence of MLA attention spelled out as the paper writes it, and the same one as a pool of slots."""

    def __init__(self, layout: str, inv_freq: Tensor) -> None:
        randn = torch.randn
        c_kv, k_raw = randn(LENGTH, RANK).double(), randn(LENGTH, ROPE).double()
        q_nope, q_raw = randn(LENGTH, H, NOPE).double(), randn(LENGTH, H, ROPE).double()
        w_uk, w_uv = randn(H, NOPE, RANK).double() / RANK**0.5, randn(H, RANK, V_DIM).double()
        at = torch.arange(LENGTH)
        self.scale = (NOPE + ROPE) ** -0.5

        key = torch.einsum("nr,hdr->nhd", c_kv, w_uk)
        k_pe = rotated(k_raw, at, inv_freq, layout)[:, None].expand(-1, H, -1)
        q_pe = rotated(q_raw, at, inv_freq, layout)
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([key, k_pe], -1)
        v = torch.einsum("nr,hrv->nhv", c_kv, w_uv)
        score = self.scale * torch.einsum("qhd,khd->hqk", q, k)
        assert 0.5 < score.std() < 2
        score = score.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        self.out = torch.einsum("hqk,khv->qhv", score.softmax(-1), v)

        slots = torch.randperm(POOL)[:LENGTH]
        written_at = torch.randint(0, 500, (LENGTH,))
        self.c_kv = torch.full((POOL, RANK), torch.nan).double()
        self.k_pe = torch.full((POOL, ROPE), torch.nan).double()
        self.c_kv[slots] = c_kv
        self.k_pe[slots] = rotated(k_raw, written_at, inv_freq, layout)
        self.kv_slots = slots.int()
        self.kv_delta = (at - written_at).int()
        self.kv_start, self.kv_len = torch.tensor([0]).int(), torch.tensor([LENGTH]).int()
        self.q_latent = torch.einsum("qhd,hdr->qhr", q_nope, w_uk)
        self.q_pe, self.w_uv, self.inv_freq, self.layout = q_pe, w_uv, inv_freq, layout

    def extend(self, dtype: torch.dtype, **changes: Tensor | str | None) -> Tensor:
        """[LENGTH, H, V_DIM] through leyline_kernels.extend, which on a CPU is the twin."""
        same = ("kv_start", "kv_len", "kv_slots", "kv_delta", "inv_freq", "layout", "scale")
        args = {name: getattr(self, name) for name in same}
        args |= {name: getattr(self, name).to(dtype) for name in ("q_latent", "q_pe", "c_kv", "k_pe")}
        args |= {"q_indptr": torch.tensor([0, LENGTH]).int(), "q_index": torch.arange(LENGTH).int()}
        out_latent = leyline_kernels.extend(**(args | changes))
        assert out_latent.dtype == dtype
        return torch.einsum("qhr,hrv->qhv", out_latent.double(), self.w_uv)


@pytest.fixture
def textbook(layout: str) -> Textbook:
    return Textbook(layout, 10_000.0 ** (-torch.arange(0, ROPE, 2) / ROPE))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 5e-5), (torch.float32, 5e-5), (torch.bfloat16, 2e-2)])
def test_extend_is_textbook_attention(
    dtype: torch.dtype, tolerance: float, textbook: Textbook, relative_error: Callable[[Tensor, Tensor], float]
) -> None:
    """The tolerance of float64 is that of the fp32 angles: 500 radians round to 1.5e-5."""
    assert relative_error(textbook.extend(dtype), textbook.out) < tolerance


def test_the_controls_fail(textbook: Textbook, layout: str, relative_error: Callable[[Tensor, Tensor], float]) -> None:
    def error(**changes: Tensor | str | None) -> float:
        return relative_error(textbook.extend(torch.float64, **changes), textbook.out)

    assert error() < 5e-5
    assert error(kv_delta=None) > 0.05, "rotation off"
    assert error(layout=OTHER[layout]) > 0.05, "the other layout"
    assert error(kv_delta=textbook.kv_delta - 1) > 0.05, "off by one"
    assert error(k_pe=textbook.k_pe * 1.3) > 0.05, "magnitude applied twice"
    assert error(inv_freq=textbook.inv_freq * 0.99) > 0.05, "other frequencies"


def test_magnitude_passes_through(textbook: Textbook, relative_error: Callable[[Tensor, Tensor], float]) -> None:
    """YaRN's factor, once in k_pe and once in q_pe: the score's rotary part has it squared, however far it turned."""
    m = 1.3
    magnified = textbook.extend(torch.float64, k_pe=textbook.k_pe * m, q_pe=textbook.q_pe * m)
    at_query = textbook.extend(torch.float64, q_pe=textbook.q_pe * m * m)
    assert relative_error(magnified, at_query) < 1e-12


def test_decode_is_the_last_row_of_extend(
    textbook: Textbook, relative_error: Callable[[Tensor, Tensor], float]
) -> None:
    out_latent = reference.decode(
        textbook.q_latent[-1:], textbook.q_pe[-1:], textbook.c_kv, textbook.k_pe, textbook.kv_start, textbook.kv_len,
        textbook.kv_slots, textbook.kv_delta, textbook.inv_freq, textbook.layout, textbook.scale,
    )  # fmt: skip
    out = torch.einsum("qhr,hrv->qhv", out_latent, textbook.w_uv)
    assert relative_error(out, textbook.out[-1:]) < 5e-5


def test_a_cpu_needs_no_triton() -> None:
    """Importing the package and decoding on a CPU loads no Triton."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, leyline_kernels as k\n"
        "at = torch.zeros(1, dtype=torch.int32); n = torch.ones(1).int(); x = torch.ones(1, 1, 4)\n"
        "print(k.decode(x, x, x[0], x[0], at, n, at, at, torch.ones(2), 'halves', 1.0).sum().item())\n"
    )
    env_path = [p for p in sys.path if p]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {env_path!r}\n{code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "4.0", run.stderr
