"""The rule of zeroth-order training: what steps do to a parameter, and the record of each.

Source: ZO2 alg. 1 (MeZO): theta + eps z, - 2 eps z, + eps z, - lr (g z + decay theta).

[Note: Positions] Whatever has happened to a parameter is a position on one line of operations. A
step of n directions has 4 n of them: for each direction a move by eps z to the one side, by -2 eps
z to the other and back by eps z; then an update for each. Every operation acts on an element alone
and is known once its step's record is, so who has a parameter at one position can make it at any
later one, in one pass or in several, now or when it is needed, and the bits are the same. The base
at position 0 and the records are all that there is to keep.

A parameter that is kept in a format of its own ([Note: Kept parameters] in
common/_storage_formats.py) is kept as it is before a step: its updates alone lead it on, each
step's rounded at its end, and where it is moved to begins there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from lohan.common._storage_formats import ROUND_SAMPLE
from lohan.journal._direction import Stream

Op = tuple[str, bool, int, int, int, int, float, float, float]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is the same in all steps.

    Attributes:
        seed: of z, 64 bits.
        eps: how far the parameters move to either side.
        samples: directions of a step.
        rng: what makes z: "philox" (_direction.py) or "torch" (_zo_torch.py).
    """

    seed: int
    eps: float
    samples: int = 1
    rng: str = "philox"

    @property
    def step_length(self) -> int:
        """Positions of a step."""
        return 4 * self.samples

    def clean(self, step: int) -> int:
        """The position before a step: all updates are in, and nothing is moved."""
        return step * self.step_length

    def plus(self, step: int, sample: int) -> int:
        """Moved by eps z."""
        return step * self.step_length + 3 * sample + 1

    def minus(self, step: int, sample: int) -> int:
        """Moved by -eps z."""
        return step * self.step_length + 3 * sample + 2

    def step_of(self, position: int) -> int:
        """The step that a position is in."""
        return position // self.step_length


@dataclasses.dataclass(frozen=True)
class Record:
    """What a step did.

    Attributes:
        lr: learning rate.
        decay: weight decay, decoupled.
        gradients: (l+ - l-) / (2 eps) of each direction.
        losses: l+ of each.
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
    """What leads a parameter from one position to a later one, as _core.zo_apply takes it.

    Args:
        rule: of the run.
        records: of its steps so far.
        param: the parameter's number.
        begin: where it is.
        end: where it is to be; not before begin.
        decays: weight decay is for it.

    Raises:
        ValueError: end is before begin, or behind what is recorded.
    """
    if end < begin:
        raise ValueError(f"from position {begin} back to {end}")
    before: Stream | None = None
    for position in range(begin, end):
        step, place = divmod(position, rule.step_length)
        is_update = place >= 3 * rule.samples
        sample = place - 3 * rule.samples if is_update else place // 3
        stream = Stream(rule.seed, param, step, sample)
        if not is_update:
            yield _op("perturb", stream, before, rule.eps * (1.0, -2.0, 1.0)[place % 3], 0.0, 0.0)
        elif step >= len(records):
            raise ValueError(f"position {end} is behind step {step}, which has no record")
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
    """What leads a kept parameter on, as _core.zo_lead takes it; see operations().

    Args:
        rule: of the run.
        records: of its steps so far.
        param: the parameter's number.
        begin: the step before which it is.
        end: the position that its values are to be at; not in a step's updates.
        decays: weight decay is for it.

    Raises:
        ValueError: end is before begin, or behind what is recorded.
    """
    last, place = divmod(end, rule.step_length)
    if last < begin:
        raise ValueError(f"from step {begin} back to {last}")
    if last > len(records):
        raise ValueError(f"step {last} is behind step {len(records)}, which has no record")
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
