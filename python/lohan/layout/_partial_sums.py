"""Which partial sums of a step's gradients a process has, in the order of a tree.

That is [Note: Trees of sums] in csrc/compute/sum_tree.h. With k micro-batches in each process,
those of rank r have the numbers from r * k on. So a process has a range of numbers, which consists
of a few nodes of the tree: the largest aligned ranges of 2^h numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan.config import Config
    from lohan.layout._block import Param

FAILED_BITS = 32  # of a message's trailer: the most processes whose sums it has
_SUM_BYTES = 4


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
    """The partial sums of several processes, and of the machines that add up those of their own.

    [Note: Sums of machines] The processes of a machine whose ranks follow one another have a range
    of micro-batches together, whose nodes are at most as many as those of its processes. Such a
    machine sends the sums of these nodes, if they are fewer. In a run with such a machine each
    message has sums in fp32. Where processes have one micro-batch each, whose gradient may be of 16
    bits, there are sums only if they are fewer bytes than all gradients.

    Attributes:
        count: the number of micro-batches of a process in a step; 0: there is no tree.
        is_kept: whether processes add up several micro-batches of their own.
        nodes: by rank, the nodes that the process sends.
        machines: by rank, the ranks whose gradients its machine sends together; one: it sends its
            own to everybody.
        copies: the most nodes in a message; 0: each process sends its gradient as it is.
        places: the most partial sums of each parameter that a process has at a time.
    """

    def __init__(
        self,
        process_count: int,
        count: int,
        machines: Sequence[int] = (),
        gradient_bytes: float = 0.0,
    ) -> None:
        """Find the nodes of each process, and of each machine.

        Args:
            process_count: the number of processes.
            count: the number of micro-batches of a process in a step; 0: there is no tree.
            machines: by rank, the number of the process's machine; empty: each has its own.
            gradient_bytes: the mean size of an element of a gradient.
        """
        self.count = count
        self.is_kept = count > 1
        self.nodes = [nodes_of(rank * count, count) for rank in range(process_count)]
        self.machines: list[Sequence[int]] = [(rank,) for rank in range(process_count)]
        is_several = count > 0 and len({*machines}) > 1
        for ranks in _together(machines) if is_several else ():
            own = sum(len(self.nodes[rank]) for rank in ranks)
            if len(self.nodes_of_machine(ranks)) < own:
                self.machines[ranks[0] : ranks[-1] + 1] = [ranks] * len(ranks)
        sums = sum(len(self.nodes_of_machine(ranks)) for ranks in {*map(tuple, self.machines)})
        if not self.is_kept and _SUM_BYTES * sums >= gradient_bytes * process_count:
            self.machines = [(rank,) for rank in range(process_count)]
        sent = [len(nodes) for nodes in self.nodes]
        sent += [len(self.nodes_of_machine(ranks)) for ranks in self.machines]
        self.copies = max(sent) if self.is_kept or self.has_machines else 0
        ranges = [rank * count for rank in range(process_count)] if self.is_kept else []
        self.places = max((places_of(first, count) for first in ranges), default=0)

    @property
    def has_machines(self) -> bool:
        """Whether any machine adds up what its processes send."""
        return any(len(ranks) > 1 for ranks in self.machines)

    def sources(self, here: int) -> list[tuple[Sequence[int], list[int]]]:
        """Return what a message to a process has, by the rank that sends it.

        Args:
            here: the rank that gets the messages.

        Returns:
            The ranks whose gradients it has, and their nodes. Without a tree the gradient counts as
            the only node.
        """
        apart = (each if here not in each else (rank,) for rank, each in enumerate(self.machines))
        return [(ranks, self.nodes_of_machine(ranks)) for ranks in apart]

    def nodes_of_machine(self, ranks: Sequence[int]) -> list[int]:
        """Return the nodes of several processes together, whose ranks follow one another."""
        if self.count == 0:
            return [*ranks]
        return nodes_of(ranks[0] * self.count, len(ranks) * self.count)


def tree_of(config: Config, trained: Sequence[Param]) -> Tree:
    """Return the partial sums of a run with these settings and trained parameters."""
    sizes = [(param.tensor.numel(), param.tensor.element_size()) for param in trained]
    total = sum(count * size for count, size in sizes)
    mean = total / max(1, sum(count for count, _ in sizes))
    machines: Sequence[int] = getattr(config, "machines", ())  # a ReplicaConfig has them
    return Tree(config.process_count, config.tree_leaf_count, machines, mean)


def _together(machines: Sequence[int]) -> list[range]:
    """Return the ranks of each machine that has several processes with ranks in a row."""
    found = []
    for number in dict.fromkeys(machines):
        ranks = [rank for rank, each in enumerate(machines) if each == number]
        row = range(ranks[0], ranks[-1] + 1)
        if len(row) == len(ranks):  # a message has a bit for each process that has failed
            found += [row[at : at + FAILED_BITS] for at in range(0, len(row), FAILED_BITS)]
    return [row for row in found if len(row) > 1]
