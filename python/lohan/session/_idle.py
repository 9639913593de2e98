"""What trained experts owe that are blocks of their own and saw no token in a step.

[Note: Idle experts] If the experts of a layer are one tensor, an expert without tokens has a
gradient of zeros, and most rules move it in every step. With experts="apart" and idle="exact" it
owes these updates, which the engine makes when the expert is next needed ([Note: Idle units] in
csrc/sched/idle.h). How many updates an expert owes follows from the step counts that a commit has;
the hyper-parameters of the owed steps are stored with Python's part of the commit. So a commit
writes nothing for an idle expert, and a killed run resumes with the same bits.

Code that reads values outside of a forward calls settle() first, after which no expert owes any.

In several processes no expert owes anything: their stores would differ by what each of them has
settled, and one that lacks an expert's states could not settle it. Instead an expert without tokens
gets a gradient of zeros in each step (Whole in replicas/_whole.py), with the same bits.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lohan.errors import StoreMismatchError, UnsupportedError
from lohan.session._extension import Extension, Place
from lohan.store import _scalars

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Layout
    from lohan.session._training import Training

# A step's numbers for each group: lr, beta1, beta2, eps, weight_decay, and with averages what the
# step adds of the parameters.
_Numbers = list[tuple[float, ...]]
_FIELDS = 5  # without averages


def _encoded(steps: Sequence[_Numbers]) -> dict[str, Any]:
    """Return the numbers of consecutive steps, group by group and number by number."""
    fields = len(steps[0][0])
    columns = [
        numbers[group][field]
        for group in range(len(steps[0]))
        for field in range(fields)
        for numbers in steps
    ]
    raw = zlib.compress(struct.pack(f"<{len(columns)}d", *columns), 1)
    said = {"steps": len(steps), "hypers": base64.b64encode(raw).decode()}
    return said if fields == _FIELDS else {**said, "fields": fields}


def _decoded(said: dict[str, Any]) -> list[_Numbers]:
    """Return what _encoded() was given."""
    count, fields = int(said["steps"]), int(said.get("fields", _FIELDS))
    raw = zlib.decompress(base64.b64decode(said["hypers"]))
    numbers = struct.unpack(f"<{len(raw) // 8}d", raw)
    groups = len(numbers) // (count * fields)
    made: list[_Numbers] = []
    for step in range(count):
        at = [numbers[i * count + step] for i in range(groups * fields)]
        made.append([tuple(at[i : i + fields]) for i in range(0, len(at), fields)])
    return made


class Idle(Extension):
    """The updates that idle experts of a session owe.

    Args:
        layout: the model's units.
        engine: the engine, which makes the updates.
    """

    place = Place.IDLE

    def __init__(self, layout: Layout, engine: _core.Engine) -> None:
        self._layout = layout
        self._engine = engine
        self._units = [i for i, u in enumerate(layout.units) if u.family and layout.owes_idle]
        self._hypers: dict[int, _Numbers] = {}  # by step

    @property
    def is_on(self) -> bool:
        """Whether there are units that can owe updates."""
        return bool(self._units)

    def settle(self) -> None:
        """Make all updates that units owe. No step may be open that has gradients."""
        if self._layout.is_settled:
            self._engine.idle_settle()

    def state(self, session: Training) -> Mapping[str, Any]:
        """Return the hyper-parameters of the steps that experts owe, with those of this one."""
        hypers, step = session.open_step.hypers, session.step + 1
        assert hypers is not None
        rest = (session.averages.rest,) if session.averages.is_on else ()
        self._hypers[step] = [(*hyper, *rest) for hyper in hypers]
        first = step - self._engine.idle_owed(self._units)
        self._hypers = {at: kept for at, kept in self._hypers.items() if first <= at <= step}
        return {"idle": _encoded([self._hypers[at] for at in sorted(self._hypers)])}

    def restore(self, store: _core.Store) -> None:
        """Restore the hyper-parameters of owed steps from the last commit.

        Raises:
            UnsupportedError: experts owe updates, but the session has idle="skip".
            StoreMismatchError: the commit does not have what experts owe.
        """
        said = store.describe()
        owed = _scalars.owed(self._layout, said)
        if not self._units:
            if owed > 0:
                raise UnsupportedError(
                    f"the store was trained with idle='exact', and experts owe up to {owed}"
                    " updates: resume in one process with idle='exact' and close the session, which"
                    " makes them; then resume with idle='skip' or in several processes"
                )
            if self._layout.fills_idle:
                self._check_exact(_scalars.behind(self._layout, said), 0)
            return
        found = _scalars.idle_of(said)
        steps = _decoded(found) if found else []
        owed = self._engine.idle_owed(self._units)
        self._check_exact(owed, len(steps))
        first = int(said["step"]) - len(steps) + 1
        for at, hypers in enumerate(steps, first):
            self._hypers[at] = hypers
            for group, hyper in enumerate(hypers):
                self._engine.idle_history(at, group, *hyper)

    def _check_exact(self, behind: int, known: int) -> None:
        """Reject a store of idle="skip", in which experts have left out steps for good.

        Args:
            behind: the most updates that an expert made less than others of its layer.
            known: the steps whose hyper-parameters the last commit has.

        Raises:
            StoreMismatchError: the commit does not have what an expert owes.
        """
        if behind > known:
            raise StoreMismatchError(
                f"experts of the store made up to {behind} updates less than others of their layer,"
                f" but its last commit has the hyper-parameters of {known}: it was trained"
                " with idle='skip'; resume with idle='skip'"
            )
