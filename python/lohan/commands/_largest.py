"""`lohan plan --largest`: the largest model of a family that fits a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from lohan.errors import BudgetError, MachineError
from lohan.planning import _plan
from lohan.simulate import Options, check

if TYPE_CHECKING:
    from lohan.planning._machines import Machine


def _why_not(name: str, machine: Machine, shape: dict[str, Any], options: Options) -> str:
    """Return the reason why a model does not fit, or an empty string if it fits."""
    model = _plan.named_model(name, **shape)
    try:
        check(model, machine, options)
    except BudgetError as error:
        return str(error)
    return ""


def find(
    family: str,
    machine: Machine,
    batch: int,
    seq: int,
    options: Options | None = None,
    loss: str = "logits",
) -> dict[str, Any]:
    """Find the largest model that fits, by bisection over the family's sizes.

    Args:
        family: "gpt", "opt" or "dit".
        machine: the machine; its rates do not matter.
        batch: the number of sequences, or images.
        seq: the number of tokens in each sequence.
        options: the settings that must fit; None: the defaults.
        loss: how the head and the loss are computed (docs/losses.md).

    Returns:
        The largest model that fits, the next larger one of the family (or None), and
        the reason why the next one does not fit.

    Raises:
        MachineError: the family is unknown.
        BudgetError: not even the smallest model fits; the message has the numbers.
    """
    families = sorted({name.partition("-")[0] for name in _plan.model_names()})
    if family not in families:
        raise MachineError(f"family {family!r}: must be one of {', '.join(families)}")
    names = [name for name in _plan.model_names() if name.startswith(f"{family}-")]
    sizes = {name: _plan.named_model(name, batch=1).param_count for name in names}
    names.sort(key=lambda name: sizes[name])
    options = options or Options()
    shape = {"batch": batch, "seq": seq, "loss": loss}
    why_not = {names[0]: _why_not(names[0], machine, shape, options)}
    if why_not[names[0]]:
        raise BudgetError(f"{names[0]} does not fit: {why_not[names[0]]}")
    fits, refused = 0, len(names)
    while refused - fits > 1:
        middle = (fits + refused) // 2
        why_not[names[middle]] = _why_not(names[middle], machine, shape, options)
        if why_not[names[middle]]:
            refused = middle
        else:
            fits = middle
    following = names[refused] if refused < len(names) else None
    return {
        "largest": names[fits],
        "param_count": sizes[names[fits]],
        "next": following,
        "why_not": why_not[following] if following else None,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print one line for the model that fits, and one for the next."""
    console.print(
        f"{found['largest']} fits: {found['param_count'] / 1e9:.4g} billion parameters",
        highlight=False,
    )
    if found["next"]:
        console.print(f"{found['next']} does not: {found['why_not']}", soft_wrap=True)
