"""`lohan plan --longest` and `--largest-batch`: the longest sequence or largest batch that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lohan.errors import BudgetError, MachineError
from lohan.planning import _models, _plan
from lohan.simulate import Options, check

if TYPE_CHECKING:
    from lohan.planning._machines import Machine

# No larger size is tried: with it, counts of FLOP come close to 64 bits.
COUNT_MAX = 1 << 20
_UNITS = {"seq": "tokens per sequence", "batch": "sequences per step"}


@dataclasses.dataclass(frozen=True)
class Question:
    """A plan of which one size is open.

    Attributes:
        model: a model's name, a config.json or a class, as `lohan plan` takes it.
        machine: the machine; its rates do not matter.
        size: the open one of the two sizes: "seq" or "batch".
        other: the value of the other one.
        options: the policy and the other settings that must fit.
        load: further arguments of _models.load().
    """

    model: str
    machine: Machine
    size: str
    other: int
    options: Options
    load: dict[str, Any] = dataclasses.field(default_factory=dict)

    def shape(self, count: int) -> dict[str, Any]:
        """Return batch and seq if the open size is count."""
        other = "batch" if self.size == "seq" else "seq"
        return {self.size: count, other: self.other}

    def why_not(self, count: int) -> str:
        """Return the reason why the model does not fit with this size; "" if it fits."""
        try:
            model = _models.load(self.model, **self.shape(count), **self.load)
            check(model, self.machine, self.options)
        except BudgetError as error:
            return str(error)
        except MachineError as error:
            if count == 1:
                raise
            return str(error)  # a sequence that is longer than the model can take
        return ""


def bisect(why_not: Callable[[int], str], most: int) -> tuple[int, str]:
    """Return the largest number from 1 to most that fits, and why the next one does not.

    Args:
        why_not: returns why a number does not fit, or "" if it fits; if a number fits, so do all
            smaller ones.
        most: the largest number that is tried.

    Returns:
        The number (0 if not even 1 fits), and the reason ("" if `most` fits).
    """
    fits, refused, reason = 0, most + 1, ""
    tried = 1
    while refused - fits > 1:
        said = why_not(tried)
        if said:
            refused, reason = tried, said
        else:
            fits = tried
        # Double until something does not fit: what is far too large takes longest to try.
        tried = (fits + refused) // 2 if reason else min(2 * fits, most)
    return fits, reason


def find(question: Question) -> dict[str, Any]:
    """Find the longest sequence, or the largest batch, with which a model fits a machine.

    Returns:
        The model, batch, seq and tokens that fit, the next value of the open size (None if
        COUNT_MAX fits), and the reason why it does not fit.

    Raises:
        BudgetError: the model does not even fit with 1; the message has the numbers.
        MachineError: the model is unknown, or has no sequences.
    """
    if question.size == "seq" and question.model in _plan.DIT_SHAPES:
        raise MachineError(
            f"{question.model} has no sequences, but patches of an image: pass --largest-batch"
        )
    count, reason = bisect(question.why_not, COUNT_MAX)
    if count == 0:
        least = " and ".join(f"{name} {value}" for name, value in question.shape(1).items())
        raise BudgetError(f"{question.model} does not fit with {least}: {reason}")
    shape = question.shape(count)
    return {
        "model": question.model,
        **shape,
        "tokens": _models.load(question.model, **shape).tokens,
        "next": count + 1 if reason else None,
        "why_not": reason or None,
    }


def show(found: dict[str, Any], question: Question, console: Console) -> None:
    """Print one line for the size that fits, and one for the next."""
    size = question.size
    console.print(
        f"{found['model']} fits with batch {found['batch']} and seq {found['seq']}:"
        f" {found[size]:,} {_UNITS[size]}, {found['tokens']:,} tokens per step",
        highlight=False,
        soft_wrap=True,
    )
    if found["next"]:
        console.print(f"{size} {found['next']} does not: {found['why_not']}", soft_wrap=True)
    else:
        console.print(f"larger ones were not tried ({COUNT_MAX:,} is the limit)", soft_wrap=True)
