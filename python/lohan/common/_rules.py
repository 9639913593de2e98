"""The table of update rules: hyper-parameters and states, without torch.

What a rule computes, and what it makes of the five numbers that the engine takes, is in
csrc/compute/rule.h, whose rows are in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lohan.common._states import BLOCK_ELEMENTS, PAIRED, ROW_BYTES, SCALE_BYTES, SCALED, STATES
from lohan.errors import HyperParameterError, UnsupportedError

# lr, beta1, beta2, eps and weight_decay of AdamW, or what another rule has in their places.
Hyper = tuple[float, float, float, float, float]
# Hyper-parameters that are two numbers, with the names of each.
_PAIRS = {"betas": ("beta1", "beta2"), "eps": ("eps1", "eps2")}


# Hyper-parameters that check() does not simply compare with 0.
_SIGNED = ("beta1", "beta2", "dampening", "beta2_decay", "eps1")

# Of Muon's Newton-Schulz iterations (csrc/compute/newton_schulz.h).
NS_STEPS = 5
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# Options of torch's optimizers that change their rule, with the values that do not.
_PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False}
_COUPLED = {**_PLAIN, "decoupled_weight_decay": False}
_NO_MOMENTUM = {"momentum": 0, "nesterov": False}
# The formats in fewer bits of a rule with one moment and of one with two, which share a byte.
NARROW = ("bf16", "8bit")
_NARROW_PAIRS = (*NARROW, PAIRED)
_WAYS_OUT = {
    "momentum": ". With momentum, pass method=lohan.SGD(momentum=...) to lohan.wrap(), or"
    " lohan.RMSprop(momentum=...)",
    "centered": ". Set it to False: the mean of gradients would be one more state",
    "nesterov": ". Nesterov's form needs a momentum: lohan.SGD(momentum=..., nesterov=True)",
    "decoupled_weight_decay": '. lohan.wrap(method="adamw") decouples weight decay, method="adam"'
    " does not; a store keeps its rule",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule, as `wrap(method=)` or its arguments choose it.

    Attributes:
        name: the rule's name in the core and in stores.
        title: its name for people.
        moments: its arrays of states by the names of UnitExtents, each with its key in the `state`
            of torch's optimizer.
        defaults: the hyper-parameters of a group, with the values that wrap() gives them.
        slots: the hyper-parameters that are the five numbers of the engine; None: 0.
        fixed: options of torch's optimizers that would change the rule, and the values that do not.
        call: the arguments of wrap() that choose the rule.
        narrow: the formats of moments= in fewer bits than fp32 that its moments may have.
        counts_steps: whether torch's optimizer counts the steps of a parameter in its state.
        has_rows: whether there are second moments of rows.
        has_factors: whether second moments are factors, which the unit's parameters contain.
        others: the rule of groups without use_muon, whose parameters need not be matrices; "": a
            group has no such choice.
    """

    name: str
    title: str
    moments: dict[str, str]
    defaults: dict[str, Any]
    slots: tuple[str | None, ...]
    fixed: dict[str, Any]
    call: str
    narrow: tuple[str, ...] = NARROW
    counts_steps: bool = True
    has_rows: bool = False
    has_factors: bool = False
    others: str = ""

    @property
    def is_of_whole(self) -> bool:
        """Whether an update needs more of a gradient than its element."""
        return self.has_rows or self.has_factors or self.others != ""

    @property
    def method(self) -> str:
        """The method= of wrap() that chooses the rule, alone or with other arguments."""
        return self.name.removesuffix("_momentum")

    def block_bytes(self, states: str) -> int:
        """Return the bytes of the states of a block of BLOCK_ELEMENTS elements, beside moments."""
        if self.has_rows:
            return ROW_BYTES
        return SCALE_BYTES if self.moments and states in SCALED else 0

    def arrays(self, states: str) -> tuple[str, ...]:
        """Return the arrays of moments that a store has: those of `moments`, or one of two."""
        return tuple(self.moments)[: 1 if states == PAIRED else None]

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of moments= that the rule may have: keys of STATES."""
        return ("fp32", *self.narrow) if self.moments else ("fp32",)

    @property
    def proposed(self) -> tuple[str, ...]:
        """The formats that plans and sessions propose: not 4 bits, which round coarsely."""
        return tuple(states for states in self.formats if states != PAIRED)

    def moment_arrays(self, count: int, states: str) -> tuple[int, ...]:
        """Return the bytes of each array of the moments of elements, and of what blocks have.

        Whatever predicts bytes asks this, so that predictions follow the rule.

        Args:
            count: the number of elements.
            states: how moments are stored: a key of STATES.
        """
        arrays = tuple(STATES[states] * count for _ in self.arrays(states))
        of_block = self.block_bytes(states)
        return (*arrays, -(-count // BLOCK_ELEMENTS) * of_block) if of_block else arrays

    def moment_bytes(self, count: int, states: str) -> int:
        """Return the bytes of all moments of elements; see moment_arrays()."""
        return sum(self.moment_arrays(count, states))

    def of(self, group: dict[str, Any]) -> Rule:
        """Return the rule of a parameter group."""
        return RULES[self.others] if self.others and not group.get("use_muon", True) else self

    def hyper_of(self, group: dict[str, Any]) -> Hyper:
        """Return the numbers of one parameter group, in the form that the engine takes.

        Raises:
            HyperParameterError: one of them is text; the message names it.
        """
        rule = self.of(group)
        if rule is not self:
            return rule.hyper_of(group)
        for name in self.defaults.keys() - {"adjust_lr_fn"}:
            if isinstance(group[name], str):  # multiplying it, as schedulers do, would fail
                raise HyperParameterError(
                    f"{name} {group[name]!r} is text, not a number (YAML reads 2e-5 as text, but"
                    " 2.0e-5 as a number)"
                )
            if isinstance(group[name], tuple | list) and name not in self._pairs:
                raise HyperParameterError(f"{name} {group[name]!r} must be one number")
        flat = {**group}
        for name in self._pairs:
            flat |= zip(_PAIRS[name], self._pair(name, group[name]), strict=True)
        lr, second, third, fourth, weight_decay = (
            0.0 if name is None else float(flat[name]) for name in self.slots
        )
        return lr, second, third, fourth, weight_decay

    @property
    def _pairs(self) -> list[str]:
        """The hyper-parameters that are two numbers."""
        return [name for name, value in self.defaults.items() if isinstance(value, tuple)]

    def _pair(self, name: str, value: Any) -> tuple[float, float]:
        """Return the two numbers of a hyper-parameter; -1 stands for an eps1 of None."""
        if not isinstance(value, tuple | list):
            raise HyperParameterError(f"{name} {value!r} must be two numbers for {self.title}")
        first, second = value
        if name == "eps":
            if first is not None and not float(first) >= 0:
                raise HyperParameterError(f"eps1 {first} must be None, or at least 0")
            first = -1.0 if first is None else first
        return first, second

    def put(self, group: dict[str, Any], hyper: Hyper) -> None:
        """Set the hyper-parameters of a group to numbers that hyper_of() returned."""
        rule = self.of(group)
        if rule is not self:
            rule.put(group, hyper)
            return
        flat: dict[str, Any] = {
            name: value for name, value in zip(self.slots, hyper, strict=True) if name is not None
        }
        for name in self._pairs:
            first, second = (flat.pop(each) for each in _PAIRS[name])
            flat[name] = (None if name == "eps" and first < 0 else first), second
        if "nesterov" in flat:
            flat["nesterov"] = bool(flat["nesterov"])
        group.update(flat)

    def numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of a group, by name, in a form that JSON has."""
        rule = self.of(group)
        if rule is not self:
            return rule.numbers(group)
        made: dict[str, Any] = {name: group.get(name) for name in (*self.defaults, "use_muon")}
        self.put(made, self.hyper_of(group))
        made.pop("use_muon")
        return {n: [*value] if n in self._pairs else value for n, value in made.items()}

    def check_options(self, group: dict[str, Any]) -> None:
        """Reject options of a group that would change its update rule.

        Raises:
            UnsupportedError: there is such an option; the message names it.
        """
        rule = self.of(group)
        for name, value in rule.fixed.items():
            if rule is not self and name in self.defaults:
                continue  # a hyper-parameter of the run's other groups, which this one ignores
            if group.get(name, value) != value:
                if name == "decoupled_weight_decay" and group["weight_decay"] == 0:
                    continue  # without weight decay, Adam and AdamW are the same
                raise UnsupportedError(
                    f"{name}={group[name]!r} in a parameter group is not supported: lohan's"
                    f" optimizer is {rule.title} with {name}={value!r}{_WAYS_OUT.get(name, '')}"
                )

    def check(self, hyper: Hyper) -> None:
        """Reject values for which the rule is not defined, as torch's optimizers do.

        Raises:
            HyperParameterError: a value is out of range; the message names the value and the limit.
        """
        named = {name: value for name, value in zip(self.slots, hyper, strict=True) if name}
        for name, value in named.items():
            if name == "dampening" and math.isnan(value):
                raise HyperParameterError(f"dampening {value} is not a number")
            if name == "beta2_decay" and not value <= 0.0:
                raise HyperParameterError(f"beta2_decay {value} must be at most 0")
            if name not in _SIGNED and not value >= 0.0:
                said = "is not a number" if math.isnan(value) else "is below 0"
                raise HyperParameterError(f"{name} {value} {said}: it must be at least 0")
        if "beta1" in named:
            beta1, beta2 = named["beta1"], named["beta2"]
            if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
                raise HyperParameterError(f"betas ({beta1}, {beta2}) are not in [0, 1)")
        if named.get("momentum") == 0 and named.get("dampening", 0) != 0:
            raise HyperParameterError(
                f"dampening {named['dampening']} with momentum 0 in a parameter group: torch"
                " ignores the dampening of such a group until it has momentum. Pass dampening=0"
                " for it"
            )
        if self.others and not named["momentum"] < 1.0:
            raise HyperParameterError(f"momentum {named['momentum']} is not in [0, 1)")
        if self.others:
            return
        if named.get("nesterov") and not (named["momentum"] > 0 and named["dampening"] == 0):
            raise HyperParameterError(
                f"nesterov=True with momentum {named['momentum']} and dampening"
                f" {named['dampening']}: it needs a momentum above 0 and dampening=0"
            )


ADAMW = Rule(
    "adamw",
    "AdamW",
    {"moment1": "exp_avg", "moment2": "exp_avg_sq"},
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    ("lr", "beta1", "beta2", "eps", "weight_decay"),
    {**_PLAIN, "decoupled_weight_decay": True, **_NO_MOMENTUM},
    'method="adamw"',
    narrow=_NARROW_PAIRS,
)
_ROWS = (
    ADAMW,
    Rule(
        "adam",
        "Adam",
        ADAMW.moments,
        {**ADAMW.defaults, "weight_decay": 0.0},
        ADAMW.slots,
        {**_COUPLED, **_NO_MOMENTUM},
        'method="adam"',
        narrow=_NARROW_PAIRS,
    ),
    Rule(
        "lion",
        "Lion",
        {"moment1": "exp_avg"},
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
        ("lr", "beta1", "beta2", None, "weight_decay"),
        {**_PLAIN, **_NO_MOMENTUM},
        'method="lion"',
    ),
    Rule(
        "sgd",
        "SGD without momentum",
        {},
        {"lr": 1e-3, "weight_decay": 0.0},
        ("lr", None, None, None, "weight_decay"),
        {**_COUPLED, **_NO_MOMENTUM},
        'method="sgd"',
        narrow=(),
    ),
    Rule(
        "sgd_momentum",
        "SGD with momentum",
        {"moment1": "momentum_buffer"},
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
        ("lr", "momentum", "dampening", "nesterov", "weight_decay"),
        _COUPLED,
        "method=lohan.SGD(momentum=...)",
        counts_steps=False,
    ),
    Rule(
        "adagrad",
        "Adagrad",
        {"moment2": "sum"},
        {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
            "weight_decay": 0.0,
        },
        ("lr", "lr_decay", "initial_accumulator_value", "eps", "weight_decay"),
        _COUPLED,
        'method="adagrad"',
        narrow=("bf16",),  # a sum of n squares grows by 1 / n in a step, which 8 bits round away
    ),
    Rule(
        "rmsprop",
        "RMSprop without momentum",
        {"moment2": "square_avg"},
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0},
        ("lr", None, "alpha", "eps", "weight_decay"),
        {**_COUPLED, "momentum": 0, "centered": False},
        'method="rmsprop"',
    ),
    Rule(
        "rmsprop_momentum",
        "RMSprop with momentum",
        {"moment1": "momentum_buffer", "moment2": "square_avg"},
        {"lr": 1e-2, "alpha": 0.99, "momentum": 0.0, "eps": 1e-8, "weight_decay": 0.0},
        ("lr", "momentum", "alpha", "eps", "weight_decay"),
        {**_COUPLED, "centered": False},
        "method=lohan.RMSprop(momentum=...)",
        narrow=_NARROW_PAIRS,
    ),
    Rule(
        "adam_mini",
        "Adam-mini",
        {"moment1": "exp_avg"},
        ADAMW.defaults,
        ADAMW.slots,
        {**_PLAIN, "decoupled_weight_decay": True, **_NO_MOMENTUM},
        'method="adam_mini"',
        narrow=(),
        has_rows=True,
    ),
    Rule(
        "adafactor",
        "Adafactor",
        {},
        {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "weight_decay": 0.0},
        ("lr", "beta2_decay", "eps2", "eps1", "weight_decay"),
        {"maximize": False, "d": 1.0},
        'method="adafactor"',
        narrow=(),
        has_factors=True,
    ),
    Rule(
        "muon",
        "Muon",
        {"moment1": "momentum_buffer"},
        {
            "lr": 1e-3,
            "momentum": 0.95,
            "nesterov": True,
            "eps": 1e-7,
            "weight_decay": 0.1,
            "adjust_lr_fn": None,
        },
        ("lr", "momentum", "nesterov", "eps", "weight_decay"),
        {
            "maximize": False,
            "differentiable": False,
            "ns_steps": NS_STEPS,
            "ns_coefficients": NS_COEFFICIENTS,
        },
        'method="muon"',
        narrow=(),
        counts_steps=False,
        others="adamw",
    ),
)
# In the order of the core's enum lh_rule.
RULES = {rule.name: rule for rule in _ROWS}
