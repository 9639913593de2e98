"""z drawn by torch's own generator, in the order of MeZO's code, to compare runs with that code.

Each direction seeds a generator with its own number (numpy's randint below 10^9, as in MeZO) and
draws a normal for each parameter in turn. So a parameter's z depends on all parameters before it.
A table with the generator's state at the beginning of each parameter makes it possible to draw each
z separately. It is made by drawing the whole direction once: slow, and only meant for comparisons.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lohan.journal._zeroth import Record, Rule

_SEED_END = 1_000_000_000
_TABLE_COUNT = 2


class TorchDirections:
    """The directions of a run.

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
