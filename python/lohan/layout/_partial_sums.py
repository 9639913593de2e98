"""Which partial sums of a step's gradients a process has, in the order of a tree.

That is [Note: Trees of sums] in csrc/compute/sum_tree.h. With k micro-batches in each process,
those of rank r have the numbers from r * k on. So a process has a range of numbers, which consists
of a few nodes of the tree: the largest aligned ranges of 2^h numbers.
"""

from __future__ import annotations


def places_alone(count: int) -> int:
    """Return how many partial sums of each parameter one process has at a time.

    Args:
        count: the number of micro-batches of a step, of which the last one is known as such.
    """
    return max(1, count.bit_length() - 1)


def nodes_of(first: int, count: int) -> list[int]:
    """Return the largest nodes of which a range of micro-batches consists, each by its first one.

    Args:
        first: the first micro-batch.
        count: the number of micro-batches.
    """
    nodes, end = [], first + count
    while first < end:
        nodes.append(first)
        size = 1 << (end - first).bit_length() - 1
        first += min(size, first & -first or size)
    return nodes


def places_of(first: int, count: int) -> int:
    """Return the most nodes of which the first part of a range consists, whatever its length is."""
    end = first + count
    # The most nodes have ends in which as many bits as possible are 1.
    ends = {end, *((end >> bit << bit) - 1 for bit in range(end.bit_length()))}
    return max(len(nodes_of(first, each - first)) for each in ends if each > first)


class Tree:
    """The partial sums of several processes.

    Attributes:
        nodes: by rank, the nodes that the process sends.
        copies: the most nodes that a process sends; 0: each sends its gradient as it is.
        places: the most partial sums of each parameter that a process has at a time.
    """

    def __init__(self, process_count: int, count: int) -> None:
        """Find the nodes of each process.

        Args:
            process_count: the number of processes.
            count: the number of micro-batches of a process in a step; 0: there is no tree.
        """
        self.count = count
        self.nodes = [nodes_of(rank * count, count) for rank in range(process_count)]
        is_kept = count > 1
        self.copies = max(map(len, self.nodes)) if is_kept else 0
        ranges = [rank * count for rank in range(process_count)] if is_kept else []
        self.places = max((places_of(first, count) for first in ranges), default=0)
