"""Checkmate's policy: an integer program chooses what is kept, moved and recomputed.

Its cost model consists of the GPU and the link. Forward takes as long as its computation or its
copies out, whichever is longer; backward takes as long as its computation, including recomputation,
or its copies in:

    minimise  T_f + T_b + a thousandth of the time of all copies
    T_f >= FLOP_f / THP_G                       T_f >= moved bytes / BW_G (out)
    T_b >= (2 FLOP_f + recomputed) / THP_G      T_b >= moved bytes / BW_G (in)
    kept bytes (+ room for a block's in transit, if any move) <= the GPU's room for activations
    moved bytes <= main memory's room for activations
    layers between blocks are not recomputed

Layers of equal size and work are interchangeable, so the program's variables are counts of them,
not one variable per layer: a deep model takes no longer to solve than a shallow one.

Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", 2020. Main
memory as a destination is LoHan's addition. scipy's HiGHS solves the program: `pip install
scipy`.
"""

from __future__ import annotations

import collections
import contextlib
import math
from typing import TYPE_CHECKING, Any

from lohan import _core
from lohan.errors import BudgetError, UnsupportedError
from lohan.planning import _policies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lohan.planning._plan import Layer, Machine, Model

# The cost of a moved byte even if computation hides it, as a share of its time on the link.
MOVE_WEIGHT = 1e-3
# Bytes are counted in units that are so large that a tier has at most this many: the solver handles
# such numbers exactly.
_UNIT_COUNT_MAX = 1 << 20
# The gap to the optimum at which the solver stops: if all layers differ, a full proof takes long.
GAP = 1e-4
_SECONDS_MAX = 20.0


def fates(model: Model, machine: Machine) -> list[str]:
    """Return the fate of each layer's activations: "keep", "host" or "recompute".

    Args:
        model: the model at one batch size.
        machine: the machine. A step's buffers are first subtracted from its host_bytes and
            gpu_bytes.

    Raises:
        BudgetError: activations that are never recomputed do not fit; the message has the numbers.
        UnsupportedError: scipy is not installed.

    Source: LoHan V-E
    """
    layers = model.layers
    gpu_bytes, host_bytes = _room(model, machine)
    kinds = collections.defaultdict(list)
    for index, layer in enumerate(layers):
        if layer.activation_bytes > 0:
            key = layer.forward_flop, layer.activation_bytes, layer.is_inter_block
            kinds[key].append(index)
    made = ["keep"] * len(layers)
    groups = list(kinds.values())
    counts = _solve([(layers[g[0]], len(g)) for g in groups], model, machine, gpu_bytes, host_bytes)
    for group, (kept, moved) in zip(groups, counts, strict=True):
        # Backward needs the first layers' activations last, so move those and keep the last ones.
        for place, index in enumerate(group):
            if place < moved:
                made[index] = "host"
            elif place < len(group) - kept:
                made[index] = "recompute"
    return made


def plan(model: Model, machine: Machine) -> dict[str, Any]:
    """Make a plan as `lohan._core.plan` does: states on SSD, updates in backward, fp32 masters.

    Raises:
        BudgetError: the model does not fit.
        UnsupportedError: scipy is not installed.
    """
    chosen = fates(model, machine)
    return _core.plan_step(model.as_core(), machine.as_core(), chosen, master_bytes=4)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Make the policy available by its name, in lohan.simulate and in a session's planner."""
    before = dict(_policies.others)
    _policies.others["checkmate"] = plan
    try:
        yield
    finally:
        _policies.others.clear()
        _policies.others.update(before)


def _room(model: Model, machine: Machine) -> tuple[int, int]:
    """Return the GPU memory and the main memory that a step's buffers leave for activations."""
    least = ["ssd" if layer.is_inter_block else "recompute" for layer in model.layers]
    step = _core.plan_step(model.as_core(), machine.as_core(), least, must_fit=False)["step"]
    room = {}
    for name in ("gpu_bytes", "host_bytes"):
        room[name] = getattr(machine, name) - step[name]
        if room[name] < 0:
            raise BudgetError(
                f"{name} {getattr(machine, name)} is too small: the buffers of a step need"
                f" {step[name]}: use a smaller batch, or raise {name}"
            )
    return room["gpu_bytes"], room["host_bytes"]


def _solve(
    kinds: list[tuple[Layer, int]], model: Model, machine: Machine, gpu_bytes: int, host_bytes: int
) -> list[tuple[int, int]]:
    """Return how many layers of each kind are kept, and how many are moved to main memory."""
    # A block's activations in transit need room, as with every policy.
    transit = max(sum(layer.activation_bytes for layer in b.layers) for b in model.blocks)
    best: tuple[float, list[tuple[int, int]]] | None = None
    for gpu_room, host_room in ((gpu_bytes, 0), (gpu_bytes - transit, host_bytes)):
        if gpu_room < 0:
            continue
        program = _Program(kinds, model, machine)
        program.fit(gpu_room, kept=True)
        program.fit(host_room, kept=False)
        found = program.solve()
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        raise BudgetError(
            "activations between blocks, which are never recomputed, take"
            f" {model.inter_block_bytes} bytes: the GPU has room for {gpu_bytes} (less {transit} if"
            f" any are swapped) and main memory for {host_bytes}: use a smaller batch, or raise"
            " gpu_bytes or host_bytes"
        )
    return best[1]


class _Program:
    """The rows of the integer program.

    The columns are the number of kept layers of each kind, the number of moved ones of each kind,
    T_f and T_b. Times are in units of forward's computation.
    """

    def __init__(self, kinds: list[tuple[Layer, int]], model: Model, machine: Machine) -> None:
        import numpy as np

        n = len(kinds)
        forward_flop = max(model.forward_flop, 1)
        per_byte = machine.gpu_flop_per_s / forward_flop
        self.sizes = [layer.activation_bytes for layer, _ in kinds]
        self.counts = [count for _, count in kinds]
        self.out = np.array(self.sizes) / machine.link_out_bytes_per_s * per_byte
        self.back = np.array(self.sizes) / machine.link_in_bytes_per_s * per_byte
        self.rows: list[list[float]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        nothing = np.zeros(n)
        for i, (layer, count) in enumerate(kinds):
            this = np.zeros(n)
            this[i] = 1
            self._add(this, this, least=count if layer.is_inter_block else 0, most=count)
        flop = np.array([layer.forward_flop for layer, _ in kinds]) / forward_flop
        self._add(nothing, -self.out, times=(1, 0), least=0)
        self._add(nothing, -self.back, times=(0, 1), least=0)
        self._add(flop, flop, times=(0, 1), least=2 + float(flop @ self.counts))

    def _add(
        self,
        kept: Any,
        moved: Any,
        *,
        times: tuple[float, float] = (0, 0),
        least: float = -math.inf,
        most: float = math.inf,
    ) -> None:
        self.rows.append([*kept, *moved, *times])
        self.low.append(least)
        self.high.append(most)

    def fit(self, room: int, *, kept: bool) -> None:
        """Limit the kept layers, or the moved ones, to `room` bytes."""
        unit = max(math.gcd(*self.sizes), -(-room // _UNIT_COUNT_MAX), 1)
        parts = [-(-size // unit) for size in self.sizes]  # rounded up, so that bytes fit as well
        zero = [0] * len(parts)
        self._add(parts if kept else zero, zero if kept else parts, most=room // unit)

    def solve(self) -> tuple[float, list[tuple[int, int]]] | None:
        """Return the cost and the (kept, moved) counts of each kind; None if nothing fits."""
        try:
            import numpy as np
            from scipy import optimize
        except ImportError as error:
            raise UnsupportedError(
                "policy 'checkmate' solves an integer program with scipy, which is not installed:"
                " pip install scipy"
            ) from error
        n = len(self.sizes)
        found = optimize.milp(
            [*np.zeros(n), *(MOVE_WEIGHT * (self.out + self.back)), 1, 1],
            integrality=[1] * (2 * n) + [0, 0],
            bounds=optimize.Bounds(
                [0] * (2 * n) + [1, 0], [*self.counts, *self.counts, np.inf, np.inf]
            ),
            constraints=optimize.LinearConstraint(np.array(self.rows), self.low, self.high),
            options={"mip_rel_gap": GAP, "time_limit": _SECONDS_MAX},
        )
        if found.x is None:
            return None
        whole = [round(value) for value in found.x[: 2 * n]]
        return found.fun, list(zip(whole[:n], whole[n:], strict=True))
