"""Policies by name: those of csrc/plan, and those that a program has registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lohan import _core
from lohan.errors import BudgetError, MachineError

if TYPE_CHECKING:
    from lohan.planning._plan import Machine, Model


# Policies beside those of csrc/plan, by name: from a model and a machine to what make() returns.
others: dict[str, Callable[[Model, Machine], dict[str, Any]]] = {}


def names() -> list[str]:
    """Return the policies that `make` takes; docs/planning.md describes them."""
    *usual, auto = _core.plan_policies()
    return [*usual, *others, auto]


def make(model: Model, machine: Machine, policy: str) -> dict[str, Any]:
    """Make a plan, in the form that `lohan._core.plan` returns.

    Args:
        model: the model at one batch size.
        machine: the part of the machine that the plan may use.
        policy: the name of the policy.

    Raises:
        BudgetError: the policy cannot run the model on the machine; the message has the numbers.
        MachineError: no policy has that name, or the model or the machine is invalid.
        UnsupportedError: a registered policy needs a package that is not installed.
    """
    if policy.partition("/")[0] not in names():
        raise MachineError(f"policy {policy!r}: must be one of {', '.join(names())}")
    try:
        if policy in others:
            return others[policy](model, machine)
        return _core.plan(model.as_core(), machine.as_core(), policy)
    except BudgetError:
        raise
    except MemoryError as error:
        raise BudgetError(str(error)) from error
    except (TypeError, ValueError, OSError) as error:
        raise MachineError(str(error)) from error
