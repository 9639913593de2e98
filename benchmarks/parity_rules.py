"""Update rules of the parity matrix: their settings, and replays of gradients by torch.

torch has neither Lion nor Adam-mini, so that both are written out here, as csrc/compute/rule.h
defines them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import lohan
import torch
from lohan.common._rules import RULES
from torch import nn

Values = dict[str, torch.Tensor]
Parts = dict[str, list[torch.Tensor]]  # gradients of a step's backwards, by parameter
Group = dict[str, Any]
# A row of this many elements has a second moment of its own under Adam-mini.
ROW_ELEMENTS_MIN = 64
# fp32 does not determine the sign of a sum that is this much smaller than its terms: the error of
# a decaying sum of 100 steps, each of which is rounded by 2^-24, and some room.
SIGN_SLACK = 2.0**-19


class Lion(torch.optim.Optimizer):
    """Lion, in the dtype of the parameters.

    Its state has a mask of the elements whose sign fp32 did not determine in some step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply the gradients of a step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if not (state := self.state[param]):
                    state["exp_avg"] = torch.zeros_like(param)
                    state["magnitude"] = torch.zeros_like(param)
                    state["undetermined"] = torch.zeros_like(param, dtype=torch.bool)
                m, terms, g = state["exp_avg"], state["magnitude"], param.grad
                moved = m * beta1 + g * (1 - beta1)
                terms_of_step = terms * beta1 + g.abs() * (1 - beta1)
                state["undetermined"] |= moved.abs() < SIGN_SLACK * terms_of_step
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(moved.sign(), alpha=group["lr"])
                m.mul_(beta2).add_(g, alpha=1 - beta2)
                terms.mul_(beta2).add_(g.abs(), alpha=1 - beta2)


class AdamMini(torch.optim.Optimizer):
    """AdamW with one second moment for each row of a parameter, in the dtype of the parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply the gradients of a step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                squares = rows_of(param.grad).square().mean(1, keepdim=True)
                if not (state := self.state[param]):
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(param)
                    state["of_rows"] = torch.zeros_like(squares)
                state["step"] += 1
                m = state["exp_avg"].lerp_(param.grad, 1 - beta1)
                v = state["of_rows"].mul_(beta2).add_(squares, alpha=1 - beta2)
                root = v.sqrt() / (1 - beta2 ** state["step"]) ** 0.5 + group["eps"]
                moved = (rows_of(m) / root).reshape(m.shape)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(moved, alpha=group["lr"] / (1 - beta1 ** state["step"]))


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """Return a view of values of a parameter, in which each row has one second moment."""
    is_one = values.dim() < 2 or values.numel() < ROW_ELEMENTS_MIN * values.shape[0]
    return values.reshape(1 if is_one else values.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class Method:
    """An update rule with its hyper-parameters.

    Attributes:
        title: its name in the table.
        rule: its name in lohan.common._rules.RULES.
        given: the arguments of wrap() that choose it, and its hyper-parameters.
        make: makes torch's optimizer from groups and the hyper-parameters of `given`.
    """

    title: str
    rule: str
    given: dict[str, Any]
    make: Callable[..., torch.optim.Optimizer]

    @property
    def is_coupled(self) -> bool:
        """Whether weight decay is a part of the gradient."""
        return self.rule not in ("adamw", "lion", "adam_mini")

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyper-parameters, without what chooses the rule."""
        return {name: value for name, value in self.given.items() if name != "method"}


# Weight decay that is a part of the gradient, and must not outweigh the rest.
COUPLED = 1e-4


def _sgd(title: str, **own: Any) -> Method:
    make = functools.partial(torch.optim.SGD, **own)
    given = {"method": lohan.SGD(**own), "lr": 0.1, "weight_decay": COUPLED}
    return Method(title, "sgd_momentum", given, make)


ADAM_HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# In this order, parity_cells.of_methods() clips adapters only where they train fast enough.
# Rules that the table leaves out. tests/py/test_adafactor.py compares Adafactor with fp64;
# tests/py/test_muon.py compares Muon, whose products torch computes in bf16 and lohan in fp32.
LEFT_OUT = {"adafactor", "muon"}
METHODS = {
    "adamw": Method("AdamW", "adamw", ADAM_HYPER, torch.optim.AdamW),
    "sgd": Method(
        "SGD", "sgd", {"method": "sgd", "lr": 0.3, "weight_decay": COUPLED}, torch.optim.SGD
    ),
    # fp32 has these momentums exactly. The rounding of 0.9 is common to lohan and torch, and
    # outweighs the others: torch's norm of gradients, too small by 1e-7, would cancel a part of it.
    "momentum": _sgd("SGD, momentum, dampening", momentum=0.875, dampening=0.25),
    "lion": Method(
        "Lion",
        "lion",
        {"method": "lion", "lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
        Lion,
    ),
    "nesterov": _sgd("SGD, Nesterov", momentum=0.875, nesterov=True),
    "adagrad": Method(
        "Adagrad",
        "adagrad",
        {"method": lohan.Adagrad(lr_decay=1e-3), "lr": 1e-2, "eps": 1e-10, "weight_decay": COUPLED},
        functools.partial(torch.optim.Adagrad, lr_decay=1e-3),
    ),
    "adam": Method(
        "Adam", "adam", {"method": "adam", **ADAM_HYPER, "weight_decay": COUPLED}, torch.optim.Adam
    ),
    "rmsprop": Method(
        "RMSprop",
        "rmsprop",
        {"method": "rmsprop", "lr": 5e-4, "eps": 1e-8, "weight_decay": COUPLED},
        torch.optim.RMSprop,
    ),
    "rmsprop momentum": Method(
        "RMSprop, momentum",
        "rmsprop_momentum",
        {"method": lohan.RMSprop(momentum=0.9), "lr": 1e-4, "eps": 1e-8, "weight_decay": COUPLED},
        functools.partial(torch.optim.RMSprop, momentum=0.9),
    ),
    "adam_mini": Method("Adam-mini", "adam_mini", {"method": "adam_mini", **ADAM_HYPER}, AdamMini),
}


def groups_of(trained: list[nn.Parameter], method: Method) -> list[Group]:
    """Return two groups of parameters that alternate, with hyper-parameters of their own."""
    own = {"lr": method.hyper["lr"] / 2, "weight_decay": 0.0}
    return [{"params": trained[::2]}, {"params": trained[1::2], **own}]


def scheduler_of(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return a scheduler that changes the learning rates of every step."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)


class Replay:
    """Torch's optimizer on masters of one dtype, which gradients are summed and clipped in.

    Args:
        start: the trained parameters' values.
        dtype: the dtype of masters, gradients and states.
        method: the update rule.
        clip: the norm to which a step's gradients are clipped; None: they are not.
        steps: with groups and a scheduler for this number of steps; None: without.
    """

    def __init__(
        self,
        start: Values,
        dtype: torch.dtype,
        method: Method,
        clip: float | None,
        steps: int | None,
    ) -> None:
        self.method, self.clip = method, clip
        self.masters = {k: nn.Parameter(v.to(dtype, copy=True)) for k, v in start.items()}
        trained = list(self.masters.values())
        groups = [{"params": trained}] if steps is None else groups_of(trained, method)
        self.optimizer = method.make(groups, **method.hyper)
        self.scheduler = None if steps is None else scheduler_of(self.optimizer, steps)
        self.clipped_steps = 0

    def step(self, parts: Parts) -> None:
        """Apply the gradients of a step."""
        for name, master in self.masters.items():
            total = parts[name][0].to(master.dtype, copy=True)
            for part in parts[name][1:]:
                total += part.to(master.dtype)
            master.grad = total
        if self.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip)
            self.clipped_steps += float(norm) > self.clip
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def state(self) -> Values:
        """Return masters and moments."""
        keys = RULES[self.method.rule].moments
        moments = {
            moment: {name: self.optimizer.state[param][key] for name, param in self.masters.items()}
            for moment, key in keys.items()
        }
        return states_of({k: v.detach() for k, v in self.masters.items()}, moments)

    def undetermined(self) -> Values:
        """Return the masks of elements that have no determined value in fp32, by name."""
        states = {name: self.optimizer.state[param] for name, param in self.masters.items()}
        return {k: v["undetermined"] for k, v in states.items() if "undetermined" in v}


def states_of(values: Values, moments: dict[str, Values]) -> Values:
    """Return masters, and moments by the names of masters with a mark."""
    made = dict(values)
    for moment, mark in (("moment1", "(m)"), ("moment2", "(v)")):
        made |= {f"{name} {mark}": value for name, value in moments.get(moment, {}).items()}
    return made
