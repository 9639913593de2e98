"""How the processes of a run have the optimizer's states: each of the owners has all of them.

[Note: Ways to have states] Replica and Mate hold one of these objects: Whole; Grouped for an owner,
or GroupedMate, if some processes have modules that others lack; Divided for an owner, or
DividedMate, if each process has the states of some units, also of modules that others lack. Whole
is the interface, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.layout._partial_sums import tree_of
from lohan.replicas._exchange import Exchange

if TYPE_CHECKING:
    from lohan.replicas._groups import Groups
    from lohan.replicas._replica import Replica


class Whole:
    """States that each of the owners has.

    Args:
        groups: the groups of this process's modules; None: all processes have the same modules.
    """

    peers: Replica

    def __init__(self, groups: Groups | None) -> None:
        self._groups = groups
        self._edited_step = -1  # the step after which parameters were last written outside of steps

    def join(self, peers: Replica) -> Exchange:
        """Connect to the other processes, and return the exchange of gradients."""
        self.peers = peers
        engine, owners = peers.session.engine, peers.owners
        config = peers.session.config
        given = peers.world, engine, peers.trained, owners, peers.part_of()
        if self._groups is None:
            tree = tree_of(config, peers.trained) if config.tree_leaf_count > 0 else None
            return Exchange(*given, is_cut=config.order == "vertical", tree=tree)
        from lohan.replicas._group_exchange import GroupExchange

        ranks_of, every = peers.session.layout.ranks_of, self._groups.every
        return GroupExchange(*given, ranks_of, every)

    @property
    def values_bytes(self) -> int:
        """The bytes of new parameters that a step sends, to all others together."""
        return 0

    def backward_ended(self) -> None:
        """Handle the end of a backward whose gradients were exchanged."""

    def learn(self) -> None:
        """Learn which parameters have gradients in the open step, if processes differ in that."""
        self._filled(self.peers.exchange.summed)

    def _filled(self, present: set[int]) -> set[int]:
        """Let experts without tokens have gradients of zeros. See [Note: Idle experts] in _idle.py.

        Args:
            present: the parameters that have gradients in any process.

        Returns:
            These, and those of idle experts, if other experts of their layer are present.
        """
        layout = self.peers.session.layout
        if not layout.fills_idle:
            return present
        family_of = [layout.units[param.unit].family for param in layout.params]
        used = {family_of[index] for index in present} - {0}
        idle = {param.index for param in self.peers.trained if family_of[param.index] in used}
        self.peers.exchange.fill(idle - present)
        return present | idle

    def agreed(self) -> None:
        """Handle that all processes close the open step."""
        self.learn()

    def closing_failed(self) -> None:
        """Handle an error after the engine has closed a step."""

    def square_sum(self) -> float:
        """Return the sum of squares of the gradients that the engines have received."""
        return float(self.peers.session.engine.gradient_square_sum())

    def pass_values(self) -> None:
        """Exchange the new values of the step that was just closed."""

    def aborted(self) -> None:
        """Handle the end of a step that is discarded."""

    def counts_edit(self) -> bool:
        """Return whether a change of parameters counts as one that all processes make.

        With groups it counts once a step, since processes have different numbers of parameters.
        """
        before, self._edited_step = self._edited_step, self.peers.session.step
        return self._groups is None or before != self._edited_step

    # --- A mate's part ------------------------------------------------------------------------

    def share_square_sums(self) -> None:
        """Take part in what the owners exchange before one of them knows the norm."""

    def given_back(self) -> None:
        """Take the tags of what the owners exchange during an update."""
