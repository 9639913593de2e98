"""A zeroth-order run: the parameters in its store, and the steps in its journal.

[Note: Base] A store's parameters are those of its last commit, the base. All later steps are in the
journal and are replayed on the base, so the two together give the current parameters.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lohan import _core
from lohan.common import _storage_formats
from lohan.errors import StoreMismatchError
from lohan.journal import _journal
from lohan.journal._zeroth import kept_operations, operations

if TYPE_CHECKING:
    from lohan.journal._zeroth import Op, Record, Rule
    from lohan.layout._block import Param

# The maximum number of positions in one pass: the core takes at most 1024 operations.
PASS_POSITIONS = 1000


@dataclasses.dataclass
class Run:
    """The rule, the steps and the base of a run.

    Attributes:
        rule: the run's rule.
        records: the records of its steps.
        base: the step of the store's parameters.
        directions: the source of z if torch's generator makes it, else None.
    """

    rule: Rule
    records: Sequence[Record]
    base: int
    directions: TorchDirections | None = None

    def passes(self, param: Param, begin: int, end: int) -> Iterator[list[Op]]:
        """Yield the operations between two positions, in passes that the core accepts."""
        assert param.stream is not None
        for at in range(begin, end, PASS_POSITIONS):
            until = min(at + PASS_POSITIONS, end)
            yield [
                *operations(self.rule, self.records, param.stream, at, until, decays=param.decays)
            ]

    def kept_passes(self, param: Param, begin: int, end: int) -> Iterator[list[Op]]:
        """Yield passes from a stored form before step `begin` to position `end`, cut at steps."""
        assert param.stream is not None
        last = self.rule.step_of(end)
        steps = PASS_POSITIONS // (self.rule.samples + 1)
        for at in range(begin, max(last, begin + 1), steps):
            until = end if at + steps >= last else self.rule.clean(at + steps)
            yield [
                *kept_operations(
                    self.rule, self.records, param.stream, at, until, decays=param.decays
                )
            ]

    def lead(self, param: Param, values: torch.Tensor) -> torch.Tensor:
        """Return a parameter's current values from those of the base, which may be overwritten."""
        if param.kept is not None:
            return self._led_kept(param, values, 0, param.tensor.dtype).view(values.shape)
        if param.stream is not None:
            begin, end = self.rule.clean(self.base), self.rule.clean(len(self.records))
            self.lead_whole(param, values.data_ptr(), begin, end)
        return values

    def lead_whole(self, param: Param, address: int, begin: int, end: int) -> None:
        """Advance a parameter in main memory from one position to another."""
        assert param.stream is not None
        if self.directions is not None:
            self.directions.lead(
                address, self.records, param.stream, begin, end, decays=param.decays
            )
            return
        for ops in self.passes(param, begin, end):
            _core.zo_apply(address, address, param.z_first, param.count, ops)

    def _led_kept(
        self, param: Param, base: torch.Tensor, first: int, dtype: torch.dtype
    ) -> torch.Tensor:
        assert param.kept is not None
        kept = base.to(_storage_formats.TYPES[param.kept], copy=True).reshape(-1)
        values = torch.empty(kept.numel(), dtype=dtype)
        end = self.rule.clean(len(self.records))
        for ops in self.kept_passes(param, self.base, end):
            _core.zo_lead(
                kept.data_ptr(),
                param.kept,
                values.data_ptr(),
                _storage_formats.NAMES[dtype],
                param.z_first + first,
                kept.numel(),
                ops,
            )
        return values

    def led(
        self, param: Param, pieces: Iterable[torch.Tensor], *, is_master: bool = False
    ) -> Iterator[torch.Tensor]:
        """Yield the current values of a parameter whose base is given in pieces, flat and in order.

        Args:
            param: the parameter.
            pieces: the pieces of the base; fp32 if is_master.
            is_master: yield fp32 values, instead of the parameter's dtype.
        """
        if param.stream is None:
            yield from pieces
            return
        if param.kept is not None:
            first = 0
            for piece in pieces:
                dtype = torch.float32 if is_master else param.tensor.dtype
                yield self._led_kept(param, piece, first, dtype)
                first += piece.numel()
            return
        if self.directions is not None:  # torch draws z for a whole parameter at once
            yield self.lead(param, torch.cat([piece.clone() for piece in pieces]))
            return
        begin, end = self.rule.clean(self.base), self.rule.clean(len(self.records))
        first = 0
        for piece in pieces:
            at, count = piece.data_ptr(), piece.numel()
            for ops in self.passes(param, begin, end):
                _core.zo_apply(at, at, param.z_first + first, count, ops)
            yield piece
            first += count


def make(rule: Rule, records: Sequence[Record], base: int, params: Iterable[Param]) -> Run:
    """Create a run for the parameters of a layout."""
    directions = None
    if rule.rng == "torch":
        shapes = {p.stream: tuple(p.tensor.shape) for p in params if p.stream is not None}
        directions = TorchDirections(rule, dict(sorted(shapes.items())))
    return Run(rule, records, base, directions)


def uuid_of(store: _core.Store) -> bytes:
    """Return the store's UUID as the bytes that its journal contains."""
    return bytes.fromhex(str(store.describe()["uuid"]).replace("-", ""))


def of_store(store: _core.Store, params: Iterable[Param]) -> Run:
    """Return the run of a store, with the current contents of its journal.

    Raises:
        StoreError: the journal is missing, damaged, or older than the store.
    """
    said = store.describe()
    directories = [os.path.dirname(path) for path, _, _ in said["files"]]
    rule, records = _journal.read(directories, uuid_of(store))
    check_base(directories, len(records), store)
    return make(rule, records, int(said["step"]), params)


def check_base(directories: Sequence[str], steps: int, store: _core.Store) -> None:
    """Check that the journal contains all steps that the store's parameters include.

    A step is in the journal before any parameter that includes the step is written.

    Raises:
        StoreMismatchError: the journal ends before the step of the store's parameters, so it is an
            old copy.
    """
    base = int(store.describe()["step"])
    if steps < base:
        raise StoreMismatchError(
            f"the journal in {_journal.place(directories)} ends at step {steps}, but the store's"
            f" parameters are those of step {base}: restore the journal that belongs to them"
        )


_SEED_END = 1_000_000_000
_TABLE_COUNT = 2


class TorchDirections:
    """The directions of a run with rng="torch", which MeZO's own code would draw.

    Each direction seeds a generator with its own number (numpy's randint below 10^9, as in MeZO)
    and draws a normal for each parameter in turn. So a parameter's z depends on all parameters
    before it. A table with the generator's state at the beginning of each parameter makes it
    possible to draw each z separately. It is made by drawing the whole direction once: slow, and
    only meant for comparisons.

    Args:
        rule: the run's rule.
        shapes: the shapes of the trained parameters by stream, in the model's order.
    """

    def __init__(self, rule: Rule, shapes: dict[int, tuple[int, ...]]) -> None:
        self._rule = rule
        self._shapes = shapes
        self._seeds: list[int] = []
        import numpy as np  # only rng="torch" needs it

        self._draw = np.random.RandomState(rule.seed % (1 << 32))
        self._tables: dict[int, dict[int, torch.Tensor]] = {}

    def z(self, stream: int, step: int, sample: int) -> torch.Tensor:
        """Return z of one parameter for one direction of a step: fp32, in the parameter's shape."""
        number = step * self._rule.samples + sample
        while len(self._seeds) <= number:
            self._seeds.append(int(self._draw.randint(_SEED_END)))
        generator = torch.Generator()
        if number not in self._tables:
            while len(self._tables) >= _TABLE_COUNT:
                self._tables.pop(next(iter(self._tables)))
            generator.manual_seed(self._seeds[number])
            table = self._tables[number] = {}
            for other, shape in self._shapes.items():
                table[other] = generator.get_state()
                torch.normal(0.0, 1.0, shape, generator=generator)
        generator.set_state(self._tables[number][stream])
        return torch.normal(0.0, 1.0, self._shapes[stream], generator=generator)

    def lead(
        self,
        address: int,
        records: Sequence[Record],
        stream: int,
        begin: int,
        end: int,
        *,
        decays: bool,
    ) -> None:
        """Apply what operations() would yield to a whole parameter in main memory, with torch."""
        shape = self._shapes[stream]
        count = torch.Size(shape).numel()
        raw = (ctypes.c_float * count).from_address(address)
        values = torch.frombuffer(raw, dtype=torch.float32).view(shape)
        rule = self._rule
        for position in range(begin, end):
            step, place = divmod(position, rule.step_length)
            is_update = place >= 3 * rule.samples
            sample = place - 3 * rule.samples if is_update else place // 3
            z = self.z(stream, step, sample)
            if not is_update:
                values.add_((1, -2, 1)[place % 3] * z * rule.eps)
                continue
            record = records[step]
            decay = record.decay if decays else 0.0
            change = record.gradients[sample] * z
            if decay:
                change = change + decay * values
            values.sub_(record.lr / rule.samples * change)
