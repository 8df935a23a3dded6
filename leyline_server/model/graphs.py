"""Forward passes as CUDA graphs, one for each of some sizes.

Owns the capture. What a pass reads, how a smaller one is padded, and what its outputs mean is its caller's.
One set of graphs serves all lists: whether a key is turned is decided inside the attention kernels, tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_server.cache.pool import pinned

Pass = Callable[[Tensor], tuple[Tensor, ...]]
"""inputs [n] int32 -> outputs. Must not ask the host for anything."""


Size = TypeVar("Size", bound=Hashable)


class Graphs(Generic[Size]):
    """`sizes`, the one to prefer first, are those that may be captured."""

    def __init__(self, sizes: Sequence[Size], device: torch.device) -> None:
        self.sizes = sizes
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._graphs: dict[Size, _Graph] = {}

    def capture(self, size: Size, example: NDArray[np.int32], run: Pass) -> None:
        """`example` is an input that changes nothing. The largest size first: the others fit into its memory."""
        self._graphs[size] = _Graph(torch.from_numpy(example).to(self._device), run, self._memory, self._side)

    def first(self, holds: Callable[[Size], bool]) -> Size | None:
        """The first size of those captured that holds a pass; None if none does."""
        return next((size for size in self.sizes if size in self._graphs and holds(size)), None)

    def replay(self, size: Size, inputs: NDArray[np.int32]) -> tuple[Tensor, ...]:
        """The tensors returned are the graph's own: the next replay of any size may overwrite them."""
        return self._graphs[size].replay(inputs)


class _Graph:
    def __init__(self, inputs: Tensor, run: Pass, memory: Any, side: torch.cuda.Stream) -> None:
        self._inputs = inputs
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(inputs)  # kernels are compiled and libraries choose theirs outside the capture
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._outputs = run(inputs)

    def replay(self, inputs: NDArray[np.int32]) -> tuple[Tensor, ...]:
        # Pinned anew each time: passes may be on their way that have not yet read what was sent for them.
        self._inputs.copy_(pinned(inputs), non_blocking=True)
        self._graph.replay()
        return self._outputs


def batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, and of 32 beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_batch, 32)]
    return [size for size in sizes if size < max_batch] + [max_batch]
