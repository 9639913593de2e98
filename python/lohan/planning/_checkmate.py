"""Checkmate's policy: an integer program says what stays, what moves and what is computed again.

Its cost model sees the GPU and the link. Forward takes as long as the longer of its computation and
of what goes out; backward as long as that of its own computation, with what it computes again, and
of what comes back:

    minimise  T_f + T_b + a thousandth of the time that bytes move
    T_f >= FLOP_f / THP_G                       T_f >= moved bytes / BW_G (out)
    T_b >= (2 FLOP_f + recomputed) / THP_G      T_b >= moved bytes / BW_G (in)
    kept bytes (+ room for a block's on their way, if any move) <= what the GPU has for activations
    moved bytes <= what main memory has for them
    layers between blocks are not computed again

Layers of equal size and work are alike, so the program has counts of them and not a variable a
layer: a deep model takes no longer than a shallow one.

Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", 2020; with
main memory as LoHan has it. scipy's HiGHS solves it: `pip install lohan[plan]`.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING, Any

from lohan import _core
from lohan.errors import BudgetError, UnsupportedError

if TYPE_CHECKING:
    from lohan.planning._plan import Layer, Machine, Model

# What a byte that moves costs though it hides behind computation, in parts of its time on the link.
MOVE_WEIGHT = 1e-3
# Bytes are counted in so large units that a tier has at most so many: exact in the solver.
_UNIT_COUNT_MAX = 1 << 20
# Of the optimum: where all layers differ, the last of it takes long to prove.
GAP = 1e-4
_SECONDS_MAX = 20.0


def fates(model: Model, machine: Machine) -> list[str]:
    """What happens to each layer's activations: "keep", "host" or "recompute".

    Args:
        model: with its batch.
        machine: rates of GPU and link; of host_bytes and gpu_bytes what a step's buffers leave.

    Raises:
        BudgetError: what is never computed again has no room; the message has the numbers.
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
        # The first ones are away for longest, the last ones are needed soonest.
        for place, index in enumerate(group):
            if place < moved:
                made[index] = "host"
            elif place < len(group) - kept:
                made[index] = "recompute"
    return made


def plan(model: Model, machine: Machine) -> dict[str, Any]:
    """As `lohan._core.plan`: states on SSD, updates in backward, the papers' master.

    Raises:
        BudgetError: it does not fit.
        UnsupportedError: scipy is not installed.
    """
    chosen = fates(model, machine)
    return _core.plan_step(model.as_core(), machine.as_core(), chosen, master_bytes=4)


def _room(model: Model, machine: Machine) -> tuple[int, int]:
    """What the GPU and main memory have for activations, behind the buffers of a step."""
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
    """How many layers of each kind are kept, and how many go to main memory."""
    # A block's activations on their way out or in want room, as for every policy.
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
    """Rows of the integer program.

    Columns: kept of each kind, moved of each kind, T_f, T_b; times in units of forward's
    computation.
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
        """Kept layers, or those that move, have room bytes."""
        unit = max(math.gcd(*self.sizes), -(-room // _UNIT_COUNT_MAX), 1)
        parts = [-(-size // unit) for size in self.sizes]  # what fits so does fit
        zero = [0] * len(parts)
        self._add(parts if kept else zero, zero if kept else parts, most=room // unit)

    def solve(self) -> tuple[float, list[tuple[int, int]]] | None:
        """What it costs, and how many of each kind are kept and moved; None: it cannot be."""
        try:
            import numpy as np
            from scipy import optimize
        except ImportError as error:
            raise UnsupportedError(
                "policy 'checkmate' solves an integer program with scipy, which is not installed:"
                " pip install lohan[plan]"
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
