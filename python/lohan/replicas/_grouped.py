"""States in a run in which some processes have modules that others lack.

[Note: The norm of groups] The norm counts each parameter once: the first rank of its group, or rank
0 for what all processes have, tells its sum of squares. Every process adds all of them in the order
of their values, as one process does for its parameters (csrc/sched/norm.c). So the norm has the
same bits in all processes, and those of one process that has all modules.
"""

from __future__ import annotations

import array
from typing import TYPE_CHECKING

from lohan.replicas import _values
from lohan.replicas._group_exchange import GroupExchange
from lohan.replicas._whole import Whole

if TYPE_CHECKING:
    from lohan.replicas._exchange import Exchange
    from lohan.replicas._groups import Groups
    from lohan.replicas._replica import Replica

_NORMS = b"norms"  # followed by the sums of squares that this process tells


class Grouped(Whole):
    """States of modules that only the processes of a group have."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._edited_step = -1  # the step after which parameters were last written outside of steps

    def join(self, peers: Replica) -> Exchange:
        """Connect to the other processes, and return the exchange of gradients."""
        self.peers = peers
        session, every = peers.session, self._groups.every
        ranks_of = session.layout.ranks_of
        return GroupExchange(peers.world, session.engine, peers.trained, ranks_of, every)

    def counts_edit(self) -> bool:
        """Count a change of parameters once a step, since processes have different numbers."""
        before, self._edited_step = self._edited_step, self.peers.session.step
        return before != self._edited_step

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
        what = f"the norms of step {peers.session.step + 1}"
        told = peers.world.exchange(_NORMS + said.tobytes(), what)
        return _values.added([each.removeprefix(_NORMS) for each in told])
