"""The partial sums of this process's gradients, until they are sent: [Note: Partial sums].

[Note: Partial sums] In the order of a tree ([Note: Trees of sums] in csrc/compute/sum_tree.h), a
process adds up the micro-batches of each of its nodes, and sends the sums with its last
micro-batch, in fp32. With k micro-batches it has 1 node if k is a power of two, and otherwise at
most about 2 log2(k). A process with one micro-batch in a step sends its gradient as it is.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import torch

from lohan import _core
from lohan.layout._block import DTYPE_CODES
from lohan.layout._partial_sums import nodes_of, places_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lohan.layout._block import Param


class Partials:
    """The partial sums of the open step, in memory of their own.

    Attributes:
        count: the most micro-batches of this process in a step.
    """

    def __init__(self, params: Sequence[Param], rank: int, count: int) -> None:
        """Allocate the memory.

        Args:
            params: the trained parameters.
            rank: this process's rank.
            count: the most micro-batches of a process in a step.
        """
        self.count = count
        self._first = rank * count
        self._nodes = nodes_of(self._first, count)
        self._sizes = {param.index: param.tensor.numel() for param in params}
        self._stride, self._begins = 0, {}
        for index, size in self._sizes.items():
            self._begins[index] = self._stride
            self._stride += size
        places = places_of(self._first, count)
        self._memory = torch.empty(places * self._stride, dtype=torch.float32)
        self.forget()

    def forget(self) -> None:
        """Begin a step."""
        # By parameter: the places in use, each by a micro-batch of its node.
        self._leaves: dict[int, list[int]] = {}

    def __contains__(self, index: int) -> bool:
        """Return whether a parameter has a gradient in the open step."""
        return index in self._leaves

    def __iter__(self) -> Iterator[int]:
        """Iterate over the parameters that have a gradient in the open step."""
        return iter(self._leaves)

    def add(self, index: int, micro_batch: int, flat: torch.Tensor) -> None:
        """Add a gradient of a parameter: its values in main memory, flat and contiguous."""
        self._join(index, self._first + micro_batch, flat.data_ptr(), DTYPE_CODES[flat.dtype])

    def sums(self, index: int) -> list[tuple[int, torch.Tensor]]:
        """Return the sums of a parameter that has no further gradients in the step.

        Returns:
            For each node that has a gradient, its number and its values.
        """
        self._join(index, self._first + self.count, 0, DTYPE_CODES[torch.float32])
        found = []
        for place, leaf in enumerate(self._leaves[index]):
            begin = place * self._stride + self._begins[index]
            node = bisect.bisect_right(self._nodes, leaf) - 1
            found.append((node, self._memory[begin : begin + self._sizes[index]]))
        return found

    def _join(self, index: int, number: int, address: int, code: int) -> None:
        sums = self._memory.data_ptr() + 4 * self._begins[index]
        leaves = self._leaves.get(index, [])
        size = self._sizes[index]
        given = sums, self._stride, self._first, leaves, number, address, code, size
        self._leaves[index] = _core.partial_add(*given)
