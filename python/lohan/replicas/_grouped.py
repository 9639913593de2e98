"""States in a run in which some processes have modules that others lack.

[Note: The norm of groups] The norm counts each parameter once: the first rank of its group, or rank
0 for what all processes have, tells its sum of squares. Every process adds all of them in the order
of their values, as one process does for its parameters (csrc/sched/norm.c). So the norm has the
same bits in all processes, and those of one process that has all modules.
"""

from __future__ import annotations

import array

from lohan.replicas import _values
from lohan.replicas._whole import Whole

_NORMS = b"norms"  # followed by the sums of squares that this process tells


class Grouped(Whole):
    """States of modules that only the processes of a group have."""

    def square_sum(self) -> float:
        """Return the sum of squares over all processes. See [Note: The norm of groups]."""
        peers, layout = self.peers, self.peers.session.layout
        units = {layout.params[index].unit for index in peers.exchange.summed}
        counted = [param.index for param in layout.params if param.unit in units]
        sums = array.array("d", peers.session.engine.gradient_square_sums())
        said = array.array("d")
        for index, value in zip(counted, sums, strict=True):
            if layout.ranks_of.get(index, (0,))[0] == peers.world.rank:
                said.append(value)
        return _values.added([each.removeprefix(_NORMS) for each in self._told(said.tobytes())])

    def _told(self, said: bytes) -> list[bytes]:
        what = f"the norms of step {self.peers.session.step + 1}"
        return self.peers.world.exchange(_NORMS + said, what)


class GroupedMate(Grouped):
    """The states of a process whose parameters, also those of groups, another one has."""

    def share_square_sums(self) -> None:
        """Take part as the owners tell their sums of squares."""
        self._told(b"")
