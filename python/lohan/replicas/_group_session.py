"""A session of several processes, some of which have modules that others lack.

[Note: The norm of groups] The norm counts each parameter once: the first rank of its group, or rank
0 for what all processes have, tells its sum of squares. Every process adds all of them in the order
of their values, as one process does for its parameters (csrc/sched/norm.c). So the norm has the
same bits in all processes, and those of one process that has all modules.
"""

from __future__ import annotations

import array
from typing import TYPE_CHECKING, Any

from lohan.replicas import _values
from lohan.replicas._group_exchange import GroupExchange
from lohan.replicas._replica_session import ReplicaSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan.layout._block import Param
    from lohan.replicas._exchange import Exchange
    from lohan.replicas._groups import Groups

_NORMS = b"norms"  # followed by the sums of squares that this process tells


class GroupSession(ReplicaSession):
    """A session with modules that only the processes of a group have."""

    _edited_step = -1  # the step after which parameters were last written outside of steps

    def __init__(self, *args: Any, groups: Groups, **settings: Any) -> None:
        """Make a session, and connect it to those of the other processes."""
        self._groups = groups
        super().__init__(*args, **settings)

    def _exchange_make(self, trained: Sequence[Param]) -> Exchange:
        ranks_of, every = self.layout.ranks_of, self._groups.every
        return GroupExchange(self.world, self._engine, trained, ranks_of, every)

    def _on_edit(self) -> None:
        """Count a change of parameters once a step, since processes have different numbers."""
        self._edit_count += self._edited_step != self.step
        self._edited_step = self.step

    def _whole_square_sum(self) -> float:
        """Return the sum of squares over all processes. See [Note: The norm of groups]."""
        layout, rank = self.layout, self.world.rank
        units = {layout.params[index].unit for index in self.exchange.summed}
        counted = [param.index for param in layout.params if param.unit in units]
        sums = array.array("d", self._engine.gradient_square_sums())
        said = array.array("d")
        for index, value in zip(counted, sums, strict=True):
            if layout.ranks_of.get(index, (0,))[0] == rank:
                said.append(value)
        what = f"step {self.step + 1}"
        told = self.world.exchange(_NORMS + said.tobytes(), f"the norms of {what}")
        return _values.added([each.removeprefix(_NORMS) for each in told])
