"""The hyper-parameters of AdamW in a parameter group, in the form that the engine takes."""

from __future__ import annotations

import math
from typing import Any

from lohan.errors import HyperParameterError

Hyper = tuple[float, float, float, float, float]


def hyper_of(group: dict[str, Any]) -> Hyper:
    """Return the numbers of one parameter group: (lr, beta1, beta2, eps, weight_decay).

    Raises:
        HyperParameterError: one of them is text; the message names it.
    """
    for name in ("lr", "eps", "weight_decay"):
        if isinstance(group[name], str):  # multiplying it, as schedulers do, would fail
            raise HyperParameterError(
                f"{name} {group[name]!r} is text, not a number (YAML reads 2e-5 as text, but 2.0e-5"
                " as a number)"
            )
    beta1, beta2 = group["betas"]
    return (
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
    )


def numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group, by name."""
    lr, beta1, beta2, eps, weight_decay = hyper_of(group)
    return {"lr": lr, "betas": [beta1, beta2], "eps": eps, "weight_decay": weight_decay}


def check_hyper(hyper: Hyper) -> None:
    """Reject values for which AdamW is not defined, as torch.optim.AdamW does.

    Raises:
        HyperParameterError: a value is out of range; the message names the value and the limit.
    """
    lr, beta1, beta2, eps, weight_decay = hyper
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0.0:
            said = "is not a number" if math.isnan(value) else "is below 0"
            raise HyperParameterError(f"{name} {value} {said}: it must be at least 0")
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise HyperParameterError(f"betas ({beta1}, {beta2}) are not in [0, 1)")
