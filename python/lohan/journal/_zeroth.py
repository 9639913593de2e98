"""The rule of zeroth-order training: what steps do to a parameter, and the records of steps.

Source: ZO2 alg. 1 (MeZO): theta + eps z, - 2 eps z, + eps z, - lr (g z + decay theta).

[Note: Positions] The state of a parameter is a position in one sequence of operations. A step of n
directions has 4 n operations: for each direction a move by eps z to one side, by -2 eps z to the
other, and back by eps z; then one update per direction. Each operation acts on every element
separately, and is known once the record of its step is. So the parameter at any position can be
advanced to any later one, in one pass or in several, at any time, with the same bits. Only the base
at position 0 and the records have to be stored.

A parameter with a stored form ([Note: Kept parameters] in common/_storage_formats.py) is stored as
it is before a step. Only updates advance the stored form, which is rounded at the end of each step.
Values at positions within a step are derived from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from lohan.common._storage_formats import ROUND_SAMPLE
from lohan.journal._direction import Stream

Op = tuple[str, bool, int, int, int, int, float, float, float]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The settings that are the same in all steps.

    Attributes:
        seed: the seed of z, 64 bits.
        eps: the scale of the moves along z, to either side.
        samples: the number of directions in a step.
        rng: the generator of z: "philox" (_direction.py) or "torch" (_zo_run.py).
    """

    seed: int
    eps: float
    samples: int = 1
    rng: str = "philox"

    @property
    def step_length(self) -> int:
        """The number of positions in a step."""
        return 4 * self.samples

    def clean(self, step: int) -> int:
        """Return the position before a step: earlier updates are applied, and nothing is moved."""
        return step * self.step_length

    def plus(self, step: int, sample: int) -> int:
        """Return the position where a direction has moved the parameter by eps z."""
        return step * self.step_length + 3 * sample + 1

    def minus(self, step: int, sample: int) -> int:
        """Return the position where a direction has moved the parameter by -eps z."""
        return step * self.step_length + 3 * sample + 2

    def step_of(self, position: int) -> int:
        """Return the step that contains a position."""
        return position // self.step_length


@dataclasses.dataclass(frozen=True)
class Record:
    """The numbers that define a step's updates.

    Attributes:
        lr: the learning rate.
        decay: the weight decay, decoupled.
        gradients: (l+ - l-) / (2 eps) for each direction.
        losses: l+ for each direction.
    """

    lr: float
    decay: float
    gradients: tuple[float, ...]
    losses: tuple[float, ...] = ()


def operations(
    rule: Rule,
    records: Sequence[Record],
    param: int,
    begin: int,
    end: int,
    *,
    decays: bool = True,
) -> Iterator[Op]:
    """Yield the operations that advance a parameter to a later position, for _core.zo_apply.

    Args:
        rule: the run's rule.
        records: the records of the run's steps.
        param: the parameter's index in the model.
        begin: the parameter's current position.
        end: the position to reach; not before begin.
        decays: whether weight decay applies to the parameter.

    Raises:
        ValueError: end is before begin, or needs a step that has no record.
    """
    if end < begin:
        raise ValueError(f"cannot go from position {begin} back to {end}")
    before: Stream | None = None
    for position in range(begin, end):
        step, place = divmod(position, rule.step_length)
        is_update = place >= 3 * rule.samples
        sample = place - 3 * rule.samples if is_update else place // 3
        stream = Stream(rule.seed, param, step, sample)
        if not is_update:
            yield _op("perturb", stream, before, rule.eps * (1.0, -2.0, 1.0)[place % 3], 0.0, 0.0)
        elif step >= len(records):
            raise ValueError(f"position {end} is after step {step}, which has no record")
        else:
            record = records[step]
            lr = record.lr / rule.samples
            decay = record.decay if decays else 0.0
            yield _op("update", stream, before, record.gradients[sample], lr, decay)
        before = stream


def kept_operations(
    rule: Rule,
    records: Sequence[Record],
    param: int,
    begin: int,
    end: int,
    *,
    decays: bool = True,
) -> Iterator[Op]:
    """Yield the operations for a parameter with a stored form, for _core.zo_lead.

    See operations() for parameters without a stored form.

    Args:
        rule: the run's rule.
        records: the records of the run's steps.
        param: the parameter's index in the model.
        begin: the number of steps that the stored form includes.
        end: the position that the values are to reach; not among a step's updates.
        decays: whether weight decay applies to the parameter.

    Raises:
        ValueError: end is before begin, or needs a step that has no record.
    """
    last, place = divmod(end, rule.step_length)
    if last < begin:
        raise ValueError(f"cannot go from step {begin} back to {last}")
    if last > len(records):
        raise ValueError(f"step {last} is after step {len(records)}, which has no record")
    for step in range(begin, last):
        record = records[step]
        decay = record.decay if decays else 0.0
        for sample in range(rule.samples):
            stream = Stream(rule.seed, param, step, sample)
            gradient, lr = record.gradients[sample], record.lr / rule.samples
            yield _op("update", stream, None, gradient, lr, decay)
        yield _op("round", Stream(rule.seed, param, step, ROUND_SAMPLE), None, 0.0, 0.0, 0.0)
    sample, moves = divmod(place, 3)
    before: Stream | None = None
    for scale in (1.0, -2.0)[:moves]:
        stream = Stream(rule.seed, param, last, sample)
        yield _op("perturb", stream, before, rule.eps * scale, 0.0, 0.0)
        before = stream


def _op(
    kind: str, stream: Stream, before: Stream | None, scale: float, lr: float, decay: float
) -> Op:
    is_same = stream == before
    return (
        kind,
        is_same,
        stream.seed,
        stream.sample,
        stream.param,
        stream.step,
        scale,
        lr,
        decay,
    )
