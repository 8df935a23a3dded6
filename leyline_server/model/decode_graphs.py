"""The decode pass as CUDA graphs, one for each of a few batch sizes.

Owns capture, staging and padding: a batch runs in the smallest graph that holds it, and the columns left over repeat
the padding. One set serves all: whether a key is turned is decided inside the attention kernel, tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pass = Callable[[Tensor], tuple[Tensor, ...]]
"""inputs [k, B] int32 -> tensors whose first axis is B. Must not ask the host for anything."""


class DecodeGraphs:
    """Captures `run` for batches up to `max_batch`. `padding` [k] is a column that changes nothing."""

    def __init__(self, run: Pass, max_batch: int, padding: Sequence[int], device: torch.device) -> None:
        self.sizes = batch_sizes(max_batch)
        self._padding = np.array(padding, np.int32)[:, None]
        self._inputs = torch.empty(len(padding), max_batch, dtype=torch.int32, device=device)
        # Two, since a pass may be launched before the one in front of it was read.
        self._staging = [torch.empty(len(padding) * max_batch, dtype=torch.int32).pin_memory() for _ in range(2)]
        self._turn = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self._graphs[size] = self._capture(run, size)

    def replay(self, inputs: NDArray[np.int32]) -> tuple[Tensor, ...]:
        """inputs [k, B]. The tensors returned are the graph's own: the next replay overwrites them."""
        batch = inputs.shape[1]
        size = next(size for size in self.sizes if size >= batch)
        staged = self._stage(inputs, size)
        self._columns(size).copy_(staged, non_blocking=True)
        graph, outputs = self._graphs[size]
        graph.replay()
        return tuple(output[:batch] for output in outputs)

    def _columns(self, size: int) -> Tensor:
        """The first `size` columns, next to each other in memory."""
        num_inputs = len(self._padding)
        return self._inputs.view(-1)[: num_inputs * size].view(num_inputs, size)

    def _stage(self, inputs: NDArray[np.int32], size: int) -> Tensor:
        self._turn = 1 - self._turn
        staged = self._staging[self._turn][: len(self._padding) * size].view(len(self._padding), size)
        host = staged.numpy()
        host[:, : inputs.shape[1]] = inputs
        host[:, inputs.shape[1] :] = self._padding
        return staged

    def _capture(self, run: Pass, size: int) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        columns = self._columns(size)
        columns.copy_(torch.from_numpy(np.repeat(self._padding, size, axis=1)))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(columns)  # kernels are compiled and libraries choose theirs outside the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            outputs = run(columns)
        return graph, outputs


def batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, and of 32 beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_batch, 32)]
    return [size for size in sizes if size < max_batch] + [max_batch]
