"""A zeroth-order run as its store and its journal have it: weights of some step, and what followed.

[Note: Base] A store's parameters are those of its last commit, the base. Every step since is in
the journal, and leads them on, so that journal and base together are the parameters of now.
"""

from __future__ import annotations

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
from lohan.journal._zo_torch import TorchDirections

if TYPE_CHECKING:
    from lohan.journal._zeroth import Op, Record, Rule
    from lohan.layout._block import Param

# Positions of one pass: the core takes 1024 operations.
PASS_POSITIONS = 1000


@dataclasses.dataclass
class Run:
    """What is known of a run.

    Attributes:
        rule: of it.
        records: of its steps.
        base: the step of the store's parameters.
        directions: where torch's generator makes z.
    """

    rule: Rule
    records: Sequence[Record]
    base: int
    directions: TorchDirections | None = None

    def passes(self, param: Param, begin: int, end: int) -> Iterator[list[Op]]:
        """What leads a parameter from one position to another, in pieces that the core takes."""
        assert param.stream is not None
        for at in range(begin, end, PASS_POSITIONS):
            until = min(at + PASS_POSITIONS, end)
            yield [
                *operations(self.rule, self.records, param.stream, at, until, decays=param.decays)
            ]

    def kept_passes(self, param: Param, begin: int, end: int) -> Iterator[list[Op]]:
        """The same of a kept parameter, from before a step; each piece ends behind a step."""
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
        """A parameter's values of now from those of the base, which they may replace."""
        if param.kept is not None:
            return self._led_kept(param, values, 0, param.tensor.dtype).view(values.shape)
        if param.stream is not None:
            begin, end = self.rule.clean(self.base), self.rule.clean(len(self.records))
            self.lead_whole(param, values.data_ptr(), begin, end)
        return values

    def lead_whole(self, param: Param, address: int, begin: int, end: int) -> None:
        """Lead a parameter in main memory from one position to another."""
        assert param.stream is not None
        if self.directions is not None:
            self.directions.lead(
                address, self.records, param.stream, begin, end, decays=param.decays
            )
            return
        for ops in self.passes(param, begin, end):
            _core.zo_apply(address, address, 0, param.count, ops)

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
                first,
                kept.numel(),
                ops,
            )
        return values

    def led(
        self, param: Param, pieces: Iterable[torch.Tensor], *, is_master: bool = False
    ) -> Iterator[torch.Tensor]:
        """The values of now of a parameter whose base comes in pieces, flat and in order.

        Args:
            param: which.
            pieces: of the base; floats where is_master.
            is_master: in fp32, else in the parameter's dtype.
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
        if self.directions is not None:  # they are drawn for a whole parameter
            yield self.lead(param, torch.cat([piece.clone() for piece in pieces]))
            return
        begin, end = self.rule.clean(self.base), self.rule.clean(len(self.records))
        first = 0
        for piece in pieces:
            at, count = piece.data_ptr(), piece.numel()
            for ops in self.passes(param, begin, end):
                _core.zo_apply(at, at, first, count, ops)
            yield piece
            first += count


def make(rule: Rule, records: Sequence[Record], base: int, params: Iterable[Param]) -> Run:
    """A run over the parameters of a layout."""
    directions = None
    if rule.rng == "torch":
        shapes = {p.stream: tuple(p.tensor.shape) for p in params if p.stream is not None}
        directions = TorchDirections(rule, dict(sorted(shapes.items())))
    return Run(rule, records, base, directions)


def uuid_of(store: _core.Store) -> bytes:
    """As its journal has it."""
    return bytes.fromhex(str(store.describe()["uuid"]).replace("-", ""))


def of_store(store: _core.Store, params: Iterable[Param]) -> Run:
    """The run of a store, with its journal as it is now.

    Raises:
        StoreError: there is none, or it is damaged, or older than the store.
    """
    said = store.describe()
    directories = [os.path.dirname(path) for path, _, _ in said["files"]]
    rule, records = _journal.read(directories, uuid_of(store))
    check_base(directories, len(records), store)
    return make(rule, records, int(said["step"]), params)


def check_base(directories: Sequence[str], steps: int, store: _core.Store) -> None:
    """A step is in the journal before any parameter is written behind it.

    Raises:
        StoreMismatchError: the journal ends before the store's parameters: it is an old copy.
    """
    base = int(store.describe()["step"])
    if steps < base:
        raise StoreMismatchError(
            f"the journal in {_journal.place(directories)} ends at step {steps}, and the store's"
            f" parameters are those of step {base}: put back the journal that belongs to them"
        )
