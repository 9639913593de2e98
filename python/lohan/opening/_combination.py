"""The one table of what cannot be combined, and why.

Each row names two settings, the reason, and the way out. `check()` raises the errors, and the
matrix of docs/limits.md is made from the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from lohan.common._rules import NARROW, RULES
from lohan.common._setting import public
from lohan.common._states import PAIRED, SCALED
from lohan.config import SCHEDULES_AT_STEP, Config
from lohan.errors import LohanError, ModelError, UnsupportedError
from lohan.torch_glue import _device

METHODS = (*dict.fromkeys(rule.method for rule in RULES.values()), "mezo")
# The keywords of wrap() that only method="mezo" accepts.
OF_METHOD = ("num_samples", "rng", "seed", "storage")


def rule_of(method: str, momentum: float | None) -> str:
    """Return the key of RULES that a method= and its momentum= choose."""
    if momentum and f"{method}_momentum" in RULES:
        return f"{method}_momentum"
    return method if method in RULES else "adamw"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a call of `lohan.wrap` so far.

    Attributes:
        config: the settings.
        method: one of METHODS.
        states: the format of moments.
        experts: "together" or "apart".
        idle: "exact" or "skip".
        given: the names of the arguments that were passed and are not None.
        open_at: the step to resume; None: the last one.
        processes: how many processes the run has; None: they have not met yet.
        has_mates: whether a machine has several of them.
        rng: the generator of zeroth-order training that was passed, or None.
        trains_experts: whether the model has experts that are trained and apart.
        rule: the update rule that the method is.
        origin: the class of the optimizer that was passed, or None.
    """

    config: Config = dataclasses.field(default_factory=Config)
    method: str = "adamw"
    states: str = "fp32"
    experts: str = "together"
    idle: str = "exact"
    given: frozenset[str] = frozenset()
    open_at: int | None = None
    processes: int | None = 1
    has_mates: bool = False
    rng: str | None = None
    trains_experts: bool = False
    rule: str = "adamw"
    origin: type | None = None

    @property
    def is_mezo(self) -> bool:
        """Whether the method is zeroth-order."""
        return self.method == "mezo"

    @property
    def is_several(self) -> bool:
        """Whether the run is known to have several processes."""
        return self.processes is not None and self.processes > 1

    @property
    def is_waiting(self) -> bool:
        """Whether updates wait for `step()`, by the schedule or for gradient norms or sums."""
        waits = self.config.sums_gradients or self.config.loss_scaling
        return waits or "max_grad_norm" in self.given or self.config.schedule in SCHEDULES_AT_STEP


# "meaning": the combination has no meaning, or its arithmetic would be another one; "not built":
# it would have one, but lohan does not have it.
Reason = Literal["meaning", "not built"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Two settings that cannot be combined.

    Attributes:
        one: the first setting, as messages name it; {f...} stands for one of the facts.
        other: the second one.
        is_so: returns whether a call combines them.
        reason: whether the combination would have a meaning.
        because: a clause of the message that says why, or "".
        way_out: what to do instead.
        text: the message, if it is not made from the other fields.
        error: the class of the error.
    """

    one: str
    other: str
    is_so: Callable[[Facts], Any]
    reason: Reason
    because: str
    way_out: str
    text: str = "{one} is not supported with {other}{because}: {way_out}"
    error: type[LohanError] = UnsupportedError

    def message(self, facts: Facts) -> str:
        """Return the message of the error."""
        names = ("one", "other", "because", "way_out")
        parts = {name: getattr(self, name).format(f=facts, c=facts.config) for name in names}
        parts["because"] = f", {parts['because']}" if parts["because"] else ""
        return self.text.format(f=facts, c=facts.config, **parts)


MEZO = 'method="mezo"'
_MEZO = "method='mezo'"
VERTICAL = "order='vertical'"
SHARE = "Parallel(share=True)"
DIVIDED = "Parallel(shard_optimizer=True)"
APART = "experts='apart'"
SHARDS = "Parallel(gather='shards')"

_NO_MEANING = "{one} has no meaning with {other}{because}: {way_out}"
_LEAVE_OUT = "leave it out"
_PLAIN = Config()


def _of_method(name: str) -> Row:
    return Row(
        f"MeZO({name}=)",
        "method='adamw'",
        lambda f: name in f.given and not f.is_mezo,
        "meaning",
        "",
        'pass method="mezo", or leave it out',
        '{one} is only valid with method="mezo": {way_out}',
        ModelError,
    )


def _of_adamw(name: str) -> Row:
    def is_so(f: Facts) -> bool:
        return f.is_mezo and name in f.given

    return Row(f"{name}=", MEZO, is_so, "meaning", "", _LEAVE_OUT, _NO_MEANING)


def _of_gradients(name: str) -> Row:
    def is_so(f: Facts) -> bool:
        return f.is_mezo and getattr(f.config, name) != getattr(_PLAIN, name)

    because = "which has no gradients"
    return Row(f"{public(Config, name)}=", MEZO, is_so, "meaning", because, _LEAVE_OUT, _NO_MEANING)


def _of_rule(name: str) -> Row:
    """A hyper-parameter that some rules lack."""
    return Row(
        f"{name}=",
        "method={f.method!r}",
        lambda f: (
            not f.is_mezo
            and name in f.given
            and name not in RULES[f.method].defaults
            and not RULES[f.method].others
        ),
        "meaning",
        "whose rule has none",
        _LEAVE_OUT,
        _NO_MEANING,
    )


ROWS = (
    # Zeroth-order training has neither gradients nor moments.
    *map(_of_method, OF_METHOD),
    *map(_of_adamw, ("betas", "max_grad_norm", "optimizer")),
    *map(_of_gradients, ("accumulate", "loss_scaling", "commit_every")),
    *map(_of_gradients, ("order", "sum_order", "clip")),
    Row(
        "moments={f.states!r}",
        MEZO,
        lambda f: f.is_mezo and f.states != "fp32",
        "meaning",
        "",
        "leave it out",
        'moments= is for AdamW\'s moments, and method="mezo" has none: {way_out}',
        ModelError,
    ),
    Row(
        SHARE,
        MEZO,
        lambda f: f.is_mezo and f.config.share == "on",
        "meaning",
        "",
        "leave it out. Its processes exchange only losses, and each reads its own copy of the"
        " parameters",
    ),
    Row(
        DIVIDED,
        MEZO,
        lambda f: f.is_mezo and f.config.replicas == "parameters",
        "meaning",
        "",
        "leave it out. This method has no optimizer states",
    ),
    Row(
        "Parallel(groups=)",
        MEZO,
        lambda f: f.is_mezo and "groups" in f.given,
        "not built",
        "",
        "leave groups= out, and let every process have all modules",
    ),
    Row(
        "on_nan={c.on_nan!r}",
        _MEZO,
        lambda f: f.is_mezo and f.config.on_nan != "raise",
        "meaning",
        "",
        "leave it out, and a step that is not finite raises an error",
    ),
    Row(
        "ema={c.ema}",
        _MEZO,
        lambda f: f.is_mezo and f.config.ema is not None,
        "not built",
        "",
        "leave one of them out",
    ),
    Row(
        "idle='skip'",
        _MEZO,
        lambda f: f.is_mezo and f.idle == "skip",
        "meaning",
        "whose steps change every parameter, with or without tokens",
        _LEAVE_OUT,
        _NO_MEANING,
    ),
    Row(
        APART,
        "MeZO(rng='torch')",
        lambda f: f.experts == "apart" and f.rng == "torch",
        "meaning",
        "with which torch draws the direction of a parameter as a whole",
        "leave rng= out",
    ),
    Row(
        "Debug(ablate=('reuse',)) of MeZO()",
        "device={c.device!r}",
        lambda f: (
            f.is_mezo and "reuse" in f.config.ablate and str(f.config.device).startswith("cuda")
        ),
        "meaning",
        "",
        "leave it out, or pass device='emu'",
        "{one} is only valid on the emulated device: {way_out}",
    ),
    # Other rules than AdamW.
    *map(_of_rule, ("betas", "eps")),
    Row(
        "moments={f.states!r}",
        "method={f.method!r}",
        lambda f: f.states in SCALED and RULES[f.rule].narrow == ("bf16",),
        "meaning",
        "whose sums of squares would soon stop growing when rounded to so few bits",
        'pass moments="bf16", whose rounding is stochastic',
    ),
    Row(
        "moments='4bit'",
        "method={f.method!r}",
        lambda f: f.states == PAIRED and RULES[f.rule].narrow == NARROW,
        "meaning",
        "which has one moment, while the two moments of an element share a byte",
        'pass moments="8bit", which takes as many bytes',
    ),
    Row(
        "moments={f.states!r}",
        "method={f.method!r}",
        lambda f: f.states != "fp32" and bool(RULES[f.rule].moments) and RULES[f.rule].is_of_whole,
        "not built",
        "",
        "leave moments= out",
    ),
    Row(
        f"{APART}, if they are trained",
        "method={f.method!r}",
        lambda f: f.trains_experts and RULES[f.rule].has_factors,
        "meaning",
        "whose step of a parameter follows from all experts in it",
        "leave experts= out",
    ),
    Row(
        "moments={f.states!r}",
        "method={f.method!r}",
        lambda f: f.states != "fp32" and RULES[f.rule].has_factors,
        "meaning",
        "which has factors of them instead",
        _LEAVE_OUT,
        _NO_MEANING,
    ),
    Row(
        "moments={f.states!r}",
        "method={f.method!r}",
        lambda f: f.states != "fp32" and not RULES[f.rule].moments,
        "meaning",
        "which has none without momentum",
        _LEAVE_OUT,
        _NO_MEANING,
    ),
    # The vertical order runs all micro-batches of a block at once.
    Row(
        VERTICAL,
        "gradient_accumulation_steps=1",
        lambda f: f.config.order == "vertical" and f.config.accumulate == 1,
        "meaning",
        "",
        "pass gradient_accumulation_steps= to lohan.wrap(), and run them with"
        " model.lohan.accumulate()",
        "{one} needs several micro-batches in a step: {way_out}",
        ModelError,
    ),
    Row(
        "Parallel(sum_order='tree')",
        "gradient_accumulation_steps='manual'",
        lambda f: f.config.sum_order == "tree" and f.config.accumulate == "manual",
        "meaning",
        "which does not say for how many micro-batches of a step there must be room",
        "pass the largest number of backwards in a step",
    ),
    Row(
        "Parallel(sum_order='tree')",
        "Parallel(groups=)",
        lambda f: f.config.sum_order == "tree" and "groups" in f.given,
        "not built",
        "in which one gradient of an expert has tokens of the micro-batches of several processes,"
        " so that its place in the tree would depend on their number",
        "leave sum_order= out",
    ),
    Row(
        VERTICAL,
        "Parallel(groups=)",
        lambda f: f.is_several and f.config.order == "vertical" and "groups" in f.given,
        "meaning",
        "whose processes use different experts in a micro-batch, so that the all-to-alls of the"
        " script would be in different orders",
        "leave order= out",
    ),
    # Updates that begin before all gradients are known.
    Row(
        "on_nan='skip'",
        "schedule={c.schedule!r}",
        lambda f: f.config.on_nan == "skip" and not f.is_waiting and f.processes == 1,
        "meaning",
        "whose updates begin before all gradients are known",
        "pass schedule='deferred', or max_grad_norm=",
    ),
    Row(
        "max_grad_norm=",
        "schedule={c.schedule!r}",
        lambda f: (
            "max_grad_norm" in f.given
            and f.config.schedule not in (*SCHEDULES_AT_STEP, _PLAIN.schedule, "auto")
        ),
        "meaning",
        "",
        f"use {' or '.join(map(repr, SCHEDULES_AT_STEP))}",
        "{other} updates before the norm of all gradients is known: with max_grad_norm, {way_out}",
        ModelError,
    ),
    Row(
        "IO(clip='repeat')",
        "max_grad_norm=None",
        lambda f: f.config.clip == "repeat" and "max_grad_norm" not in f.given,
        "meaning",
        "",
        "pass max_grad_norm=, or leave clip= out",
        "{one} says how updates treat max_grad_norm=, which is not given: {way_out}",
        ModelError,
    ),
    # Experts of a mixture as blocks of their own.
    Row(
        "idle='skip'",
        "experts='together'",
        lambda f: f.idle == "skip" and f.experts == "together",
        "meaning",
        "",
        "pass experts='apart', or leave idle= out",
        "{one} needs experts='apart': a layer's experts are one tensor otherwise: {way_out}",
        ModelError,
    ),
    Row(
        "experts='apart' with idle='skip'",
        "optimizer=",
        lambda f: f.trains_experts and f.idle == "skip" and "optimizer" in f.given,
        "meaning",
        "which has one count of steps for all experts of a layer",
        "pass params= instead, or create the Trainer without optimizers=",
    ),
    Row(
        f"{APART}, if they are trained",
        "optimizer={f.origin.__name__}",
        lambda f: (
            f.trains_experts
            and f.origin is not None
            and not f.origin.__module__.startswith("torch.optim")
        ),
        "meaning",
        "whose moments have no parts for single experts",
        "leave experts= out, or pass params= instead of optimizer=",
    ),
    # Several processes.
    # A mate opens the store while its owner has it open: a single slot is unclean then.
    Row(
        SHARE,
        "IO(single_slot=True)",
        lambda f: f.has_mates and f.config.share == "on" and f.config.commit_steps == 0,
        "meaning",
        "whose store only the process that writes it can open",
        "leave one of them out",
    ),
    Row(
        SHARDS,
        "Parallel(share=False)",
        lambda f: f.config.gather == "shards" and f.config.share != "on",
        "meaning",
        "",
        "add share=True, or leave gather= out",
        "{one} needs share=True and several processes on the machine, which then copy parts of the"
        " same parameters: {way_out}",
        ModelError,
    ),
    Row(
        SHARDS,
        "device='cpu'",
        lambda f: f.config.gather == "shards" and _device.parse(f.config.device)[0] == "cpu",
        "meaning",
        "",
        "leave gather= out",
        "{one} needs an accelerator in each process, for example device='cuda': on the CPU, blocks"
        " are read where they are, so {way_out}",
        ModelError,
    ),
    # Activations on SSD pass through main memory.
    Row(
        "io.activation_ssd_bytes {c.swap_ssd_bytes}",
        "activation_offload_bytes=None",
        lambda f: f.config.swap_ssd_bytes and not f.config.swap_bytes,
        "meaning",
        "",
        "set activation_offload_bytes, too",
        "{one}: activations go to SSD through main memory: {way_out}",
        ModelError,
    ),
    Row(
        "io.activation_ssd_bytes 0",
        "device='cpu'",
        lambda f: (
            f.config.swap_bytes
            and f.config.swap_ssd_bytes == 0
            and _device.parse(f.config.device)[0] == "cpu"
        ),
        "meaning",
        "",
        "set it above 0",
        "{one}: the model runs on the CPU, so activations are already in main memory and can only"
        " be swapped to SSD: {way_out}",
        ModelError,
    ),
)


def check(facts: Facts) -> None:
    """Reject a call of `lohan.wrap` that combines what cannot be combined.

    Raises:
        UnsupportedError, ModelError: names both settings, and what to do instead.
    """
    for row in ROWS:
        if row.is_so(facts):
            raise row.error(row.message(facts))
