"""Passes padded to a graph's size, run without a graph: what a GPU replays gives Hugging Face's logits, and the padding
changes nothing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from leyline_server.cache.pool import upload
from leyline_server.engine.engine import EndReason
from leyline_server.lab.oracle import full_forward
from leyline_server.model.batch import Form, PassSize, PrefillPart, lists, pack, unpack
from leyline_server.model.graphs import Graphs, batch_sizes
from leyline_server.model.runner import _WARM_UP, _WARM_UP_ENTRIES, Runner
from leyline_server.sampling import Sampler, SamplingParams
from tests.engine.harness import Rig, random_ids
from tests.engine.pairs import Pair, worst

TOLERANCE = 3e-4  # a padded pass sums in another order


class Uncaptured(Graphs):
    """Runs the passes that a GPU would replay; notes which sizes."""

    def __init__(self, sizes, device) -> None:
        self.sizes, self._device, self._graphs, self.replayed = sizes, device, {}, []

    def capture(self, size, example, run) -> None:
        run(torch.from_numpy(example))
        self._graphs[size] = run

    def replay(self, size, inputs):
        self.replayed.append(size)
        return self._graphs[size](torch.from_numpy(inputs.copy()))


@pytest.fixture
def padded(monkeypatch):
    """Makes rigs whose short passes are padded as on a GPU."""
    warm_up = Runner.warm_up

    def as_on_a_gpu(runner):
        cpu, runner._device = runner._device, torch.device("cuda")
        with monkeypatch.context() as during:
            during.setattr("leyline_server.model.runner.upload", lambda array, device: upload(array, cpu))
            during.setattr("leyline_server.model.runner._WARM_UP", ((8,), (5,) * 4))
            warm_up(runner)
        runner._device = cpu

    monkeypatch.setattr("leyline_server.model.runner.Graphs", Uncaptured)
    monkeypatch.setattr(Runner, "warm_up", as_on_a_gpu)
    return lambda model, **more: Rig(model, **{"num_slots": 300, "max_running": 5, "ahead": True, **more})


@pytest.fixture(params=[False, True], ids=["absorbed", "expanded"])
def expanded(request, monkeypatch):
    """Each pass in one form."""
    monkeypatch.setattr(Form, "expands", lambda form, pairs, entries: request.param)
    return request.param


def test_logits_of_edits_equal_the_oracle(padded, loaded, unpatched, variant, expanded):
    pair = Pair(padded(loaded(variant), prefill_chunk=100), unpatched(variant), random_ids(60))
    pair.prefill()
    pair.amortize((10, 18, random_ids(2, seed=1)), (40, 40, random_ids(11, seed=2)))
    pair.append(random_ids(25, seed=3))
    assert pair.error(random_ids(5, seed=4)) < TOLERANCE
    pair.forget(20, 30, random_ids(3, seed=5))
    assert pair.error(random_ids(4, seed=6)) < TOLERANCE
    assert pair.row_error() < TOLERANCE
    runner = pair.rig.engine.runner
    assert {bool(size.entries) for size in runner._prefills.replayed} == {expanded}
    assert [size.tokens for size in runner._prefills.replayed] == ([64, 64, 128] if expanded else [64, 40, 72])
    assert set(runner._decodes.replayed) == {1}


def test_parts_of_one_pass_share_a_graph(padded, loaded, reference, expanded):
    rig = padded(loaded("v2-qlora-dense"), prefill_chunk=100)
    texts = [random_ids(length, seed) for seed, length in enumerate((30, 1, 17))]
    runs = [rig.generate(rig.open(text), 3) for text in texts]
    rig.run()
    for run, text in zip(runs, texts, strict=True):
        assert run.end is EndReason.LENGTH
        assert worst(run.logits, full_forward(reference, text + run.tokens)[len(text) - 1 : -1]) < TOLERANCE
    assert rig.engine.runner._prefills.replayed == [PassSize(64, 4, 301) if expanded else PassSize(48, 16)]
    assert rig.engine.runner._decodes.replayed == [4, 4]
    rig.close_all()


@pytest.mark.parametrize(("pairs", "graphs"), [(1 << 22, [PassSize(56, 16)]), (100, [])], ids=["few", "many"])
def test_more_parts_than_expanded_graphs_have_run_absorbed(padded, loaded, reference, monkeypatch, pairs, graphs):
    """Unless they have more pairs than that pays for: then they are launched by hand, expanded."""
    monkeypatch.setattr(Form, "expands", lambda form, pairs, entries: True)
    monkeypatch.setattr("leyline_server.model.runner._ABSORBED_PAIRS", pairs)
    rig = padded(loaded("v2-qlora-dense"), prefill_chunk=100)
    texts = [random_ids(length, seed) for seed, length in enumerate((30, 1, 17, 2))]
    runs = [rig.generate(rig.open(text), 2) for text in texts]
    rig.run()
    for run, text in zip(runs, texts, strict=True):
        assert worst(run.logits, full_forward(reference, text + run.tokens)[len(text) - 1 : -1]) < TOLERANCE
    assert rig.engine.runner._prefills.replayed == graphs
    rig.close_all()


def test_what_is_sent_says_where_each_token_belongs(padded, loaded):
    rig = padded(loaded("v2-qlora-dense"))
    table = rig.engine.runner._table
    one = PrefillPart(
        2, np.array([7, 8, 9]), np.array([4, 5, 6]), np.array([40, 41, 42], np.int32), False, Sampler(SamplingParams())
    )
    size = PassSize(8, 4)
    on = {name: column.tolist() for name, column in unpack(torch.from_numpy(pack([one], size, table)), size).items()}
    spare, row = table.spare_slot, table.num_rows
    assert on["ids"] == [7, 8, 9, 0, 0, 0, 0, 0]
    assert on["slots"] == [40, 41, 42, *[spare] * 5]
    assert on["rows"] == [2, 2, 2, *[row] * 5]
    assert on["owner"] == [0, 0, 0, *[3] * 5]
    assert on["q_indptr"] == [0, 3, 3, 3, 8]
    assert on["kv_len"] == [7, 0, 0, 1]
    assert on["last"] == [2, 2, 2, 7]
    assert on["note"] == [2, row, row, row]


def test_lists_stand_one_after_the_other_and_padding_behind_them(padded, loaded):
    table = padded(loaded("v2-qlora-dense")).engine.runner._table
    table.kv_slots[0, :3], table.kv_slots[3, :2] = torch.tensor([5, 6, 7]), torch.tensor([8, 9])
    table.kv_delta[3, :2] = torch.tensor([-2, -3])
    kv_start = torch.tensor([3 * table.width, 0, 0], dtype=torch.int32)
    kv_indptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    slots, delta = lists(kv_start, kv_indptr, 7, table)
    assert slots.tolist() == [8, 9, 5, 6, 7, table.spare_slot, table.spare_slot]
    assert delta.tolist() == [-2, -3, 0, 0, 0, 0, 0]


def test_a_size_holds_what_fits_beside_its_padding():
    assert PassSize(64, 4).holds(PassSize(64, 3))
    assert not PassSize(64, 4).holds(PassSize(64, 4)), "no part is left for padding"
    assert not PassSize(64, 4).holds(PassSize(65, 1))
    assert PassSize(64, 4, 100).holds(PassSize(64, 1, 99))
    assert not PassSize(64, 4, 100).holds(PassSize(64, 1, 100)), "no entry is left for padding"
    assert not PassSize(64, 4, 100).holds(PassSize(1, 1)), "another form"
    assert not PassSize(64, 4).holds(PassSize(1, 1, 1)), "another form"


def test_every_column_begins_at_16_bytes():
    for size in (PassSize(1, 1), PassSize(7, 3), PassSize(64, 16)):
        spans = list(size.spans())
        assert [name for name, _, _ in spans] == list(size.columns)
        assert all(start % 4 == 0 for _, start, _ in spans)
        assert all(end <= start for (_, _, end), (_, start, _) in pairwise(spans))


def test_warming_up_takes_every_tiling_and_number_of_splits():
    """Of an H200 and 16 heads, for passes of up to 16 parts over 4k entries or more: none is compiled later."""
    gpu = pytest.importorskip("leyline_kernels.gpu.prefill")

    def variant(tokens, parts, entries):
        tiles = gpu.choose_tiles(tokens, parts, torch.bfloat16)
        return tiles, gpu.choose_splits(tokens, 16, entries, tiles, processors=132)

    warm = {variant(sum(lengths), len(lengths), _WARM_UP_ENTRIES) for lengths in _WARM_UP}
    for parts in range(1, 17):
        for tokens in range(50 * parts, 2049):
            assert variant(tokens, parts, 4096) in warm, f"{tokens} tokens of {parts} parts"


@pytest.mark.parametrize("max_batch", [1, 3, 8, 20, 64, 100, 256])
def test_graphs_hold_every_batch(max_batch):
    sizes = batch_sizes(max_batch)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_batch
    for batch in range(1, max_batch + 1):
        padding = next(size for size in sizes if size >= batch) - batch
        assert padding < (8 if batch <= 64 else 32)
