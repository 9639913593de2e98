"""What a call of `lohan.wrap` asks for: every type and every range is checked here, once.

Without these checks, a wrong type would cause a TypeError or AttributeError in a line of code that
the caller does not know. Ranges and names of settings are declared in config.py.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lohan.activations import _activations, _swap
from lohan.common import _arguments, _log, _setting
from lohan.common._keywords import flat as translated
from lohan.common._rules import RULES
from lohan.config import SCHEDULES_AT_STEP, Config
from lohan.errors import ModelError, StoreError, UnsupportedError
from lohan.opening import _combination, _groups, _model_checks
from lohan.opening._combination import METHODS, OF_METHOD, Facts
from lohan.planning import _wear
from lohan.torch_glue import _device
from lohan.world._rendezvous import process_count

STATES = ("fp32", "bf16", "8bit", "4bit")
_PLAIN = Config()
_HYPER = tuple({name: None for rule in RULES.values() for name in rule.defaults})
_FIELDS = {field.name for field in dataclasses.fields(Config)}


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of `lohan.wrap`, whose values are valid by themselves and with each other.

    Attributes:
        model: the model to wrap.
        config: the settings.
        store: one or several paths, as the caller named them; None: a temporary store.
        is_resumed: whether the store exists.
        open_at: the step to resume; None: the last one.
        hyper: the hyper-parameters of any rule; None for those not given.
        of_method: the arguments that only method="mezo" accepts; None for those not given.
        max_grad_norm: the norm that gradients are clipped to, or None.
        params: the parameter groups, or a function of the model that returns them, or None.
        optimizer: the optimizer to continue from, or None.
        blocks: the modules to use as blocks, or None.
        weights: the path of safetensors or GGUF files, or None.
        init: "model", a function of a module, or None.
        method: one of METHODS; with an optimizer, its method.
        rule: the update rule, a key of RULES in common/_rules.py; AdamW's with method="mezo".
        states: the format of moments.
        groups: the process groups of modules, or None.
        experts: "together" or "apart".
        idle: "exact" or "skip".
    """

    model: nn.Module
    config: Config
    store: Any
    is_resumed: bool
    open_at: int | None
    hyper: dict[str, Any]
    of_method: dict[str, Any]
    max_grad_norm: float | None
    params: Any
    optimizer: torch.optim.Optimizer | None
    blocks: Any
    weights: Any
    init: Any
    method: str
    rule: str
    states: str
    groups: Any
    experts: str
    idle: str

    @property
    def is_filled(self) -> bool:
        """Whether parameters without storage get their values from elsewhere."""
        return self.is_resumed or self.weights is not None or self.init is not None

    def facts(self, **known: Any) -> Facts:
        """Return the facts for the table of combinations; `known` are the others of Facts."""
        given = {
            **self.hyper,
            **self.of_method,
            "max_grad_norm": self.max_grad_norm,
            "optimizer": self.optimizer,
            "groups": self.groups,
        }
        return Facts(
            self.config,
            self.method,
            self.states,
            self.experts,
            self.idle,
            frozenset(name for name, value in given.items() if value is not None),
            self.open_at,
            rng=self.of_method["rng"],
            rule=self.rule,
            origin=None if self.optimizer is None else type(self.optimizer),
            **known,
        )


def of(
    call: Callable[..., Any], *, model: nn.Module, settings: dict[str, Any], **given: Any
) -> Request:
    """Check the arguments of `lohan.wrap`, under the names that users write.

    Args:
        call: `lohan.wrap`, whose parameters are suggested for mistyped keywords.
        model: the model to be wrapped.
        settings: the keywords that are not parameters of the call.
        **given: the other arguments, by name.

    Raises:
        ModelError, UnsupportedError, HyperParameterError, StoreError: an argument is invalid; the
            message names it, its value, and what is valid.
    """
    return of_flat(call, model, flat({**given, **settings}, call))


def flat(given: dict[str, Any], call: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of a call under the names of Config and of of_flat()."""
    return translated(given, _defaults(call))


def of_flat(call: Callable[..., Any], model: nn.Module, given: dict[str, Any]) -> Request:
    """Check the arguments of `lohan.wrap`, as flat() returns them; see of()."""
    _model_checks.refuse_divided(model)
    given = {**flat(_defaults(call), call), "config": None, "groups": None, **given}
    hyper = {name: given.pop(name, None) for name in _HYPER}
    fields = {name: given.pop(name) for name in _FIELDS & given.keys()}
    of_method = {name: given.pop(name, None) for name in OF_METHOD}
    config = given.pop("config")
    _check_types(hyper, config, **given)
    made = dataclasses.replace(config or Config(), **fields)
    if swap := sys.modules.get("lohan.session._block_swap"):  # lohan.block_swap() loads it
        made = swap.with_device(model, made)
    is_resumed, open_at = _arguments.resume_of(given.pop("resume"))
    method = given["method"]
    given["method"] = METHODS[0] if method is None else method
    given["rule"] = _combination.rule_of(given["method"], hyper["momentum"])
    if given["optimizer"] is not None and given["method"] in RULES:
        from lohan.session import _adopt

        given["method"], given["rule"] = _adopt.rule_of(given["optimizer"], method)
    request = Request(
        model, made, given.pop("store"), is_resumed, open_at, hyper, of_method, **given
    )
    _check_names(request)
    check(request.facts(processes=1 if process_count() == 1 else None))
    if request.optimizer is not None:
        from lohan.session import _adopt

        _adopt.check(request.optimizer, {**hyper, "params": request.params}, resume=is_resumed)
    return request


def _defaults(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters of a call, with their defaults."""
    found = inspect.signature(call).parameters.values()
    return {each.name: each.default for each in found if each.kind is each.KEYWORD_ONLY}


def check(facts: Facts) -> None:
    """Reject invalid values of settings, and settings that cannot be combined.

    Raises:
        ModelError: a setting is invalid; the message says which values are valid.
        UnsupportedError: names two settings that cannot be combined.
    """
    config = facts.config
    _setting.check(config)
    parts = config.ablate if isinstance(config.ablate, tuple | list) else (config.ablate,)
    for part in parts:
        if part not in ("overlap", "reuse", "deferred") or parts is not config.ablate:
            raise ModelError(
                f"debug.ablate {part!r} must be a tuple of 'overlap', 'reuse' and 'deferred'"
            )
    if not isinstance(config.device, str | None):
        raise ModelError(
            f"device {config.device!r} must be None, 'cpu', 'cuda', 'cuda:INDEX', 'emu', or a"
            " torch.device"
        )
    _wear.limit_of(config.wear_budget)
    _activations.check(config.activations)
    _device.check(config)
    if config.order == "vertical":
        from lohan.session import _order

        if reason := _order.why_no_turns():
            raise UnsupportedError(reason)
    if facts.processes is not None:  # several check it when all learn of one's error
        _combination.check(facts)
    _swap.check(config)


def waiting(config: Config, request: Request, processes: int = 1) -> Config:
    """Make updates wait for step() if they need gradient norms or sums.

    Both are known only after the last backward. With IO(clip="repeat"), updates need not wait for
    the norm if every step commits, so that one can be undone.

    Args:
        config: the settings.
        request: the call that they are of.
        processes: the number of processes of the run.
    """
    is_waiting = config.sums_gradients or config.loss_scaling or request.max_grad_norm is not None
    if config.clip == "repeat":
        why = _why_clipping_waits(config, request, processes)
        if not why:
            return dataclasses.replace(config, commit_every=1)
        _log.note(f"IO(clip='repeat') has no effect, because of {why}: updates wait for the norm")
        config = dataclasses.replace(config, clip="wait")
    if config.schedule in SCHEDULES_AT_STEP or not is_waiting:
        return config
    return dataclasses.replace(config, schedule="deferred")


def _why_clipping_waits(config: Config, request: Request, processes: int) -> str:
    """Return the setting with which steps cannot be repeated; "" if there is none."""
    rule = RULES[request.rule]
    reasons = {
        "several processes": processes > 1,
        f"schedule={config.schedule!r}": config.schedule != _PLAIN.schedule,
        "gradient_accumulation_steps=": config.sums_gradients,
        "loss_scaling=True": config.loss_scaling,
        "IO(single_slot=True)": config.commit_every == "never",
        f"commit_every={config.commit_every!r}": config.commit_every not in ("auto", 1),
        "experts='apart'": request.experts == "apart",
        f"method={request.rule!r}": rule.is_of_whole,
    }
    return next((name for name, is_so in reasons.items() if is_so), "")


def _check_names(request: Request) -> None:
    if request.method not in METHODS:
        raise ModelError(f"method {request.method!r} must be one of {', '.join(METHODS)}")
    if request.experts not in ("together", "apart"):
        raise ModelError(f"experts {request.experts!r} must be 'together' or 'apart'")
    if request.idle not in ("exact", "skip"):
        raise ModelError(f"idle {request.idle!r} must be 'exact' or 'skip'")
    if request.states not in STATES:
        raise ModelError(f'moments {request.states!r} must be "fp32", "bf16", "8bit" or "4bit"')


def _check_working_directory() -> None:
    """Reject a deleted working directory where torch cannot import what its optimizers need."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        if "torch._dynamo" not in sys.modules:
            raise StoreError(
                errno.ENOENT,
                "the working directory was deleted, and torch.optim cannot be used in one that does"
                " not exist: change to another directory",
            ) from error


def _check_types(
    hyper: dict[str, Any],
    config: Any,
    *,
    store: Any,
    max_grad_norm: Any,
    blocks: Any,
    weights: Any,
    init: Any,
    method: Any,
    **_: Any,
) -> None:
    """Reject arguments of `lohan.wrap` that have a wrong type; see of()."""
    if store is not None:
        _arguments.directories_of(store)
    _check_working_directory()
    if weights is not None:
        _arguments.path_of("weights=", weights)
    if not (init is None or init == "model" or callable(init)):
        raise ModelError(f"init {init!r} must be 'model' or a function of a module")
    if not isinstance(method, str | None):
        raise ModelError(
            f"method {method!r} must be one of {', '.join(METHODS)}, or an object such as"
            " lohan.SGD(momentum=0.9)"
        )
    _groups.check_hyper(hyper)
    if max_grad_norm is not None:
        is_norm = _groups.is_number(max_grad_norm) and max_grad_norm > 0
        if not is_norm:
            raise ModelError(f"max_grad_norm {max_grad_norm!r} must be a number above 0, or None")
    if blocks is not None and not isinstance(blocks, Iterable):
        raise ModelError(
            f"blocks= is one {type(blocks).__name__}, but must be a list of modules of the model,"
            " such as blocks=list(model.layers)"
        )
    if isinstance(blocks, str):
        raise ModelError(
            f"blocks= {blocks!r} must be modules of the model, not their names:"
            f" blocks=list(model.get_submodule({blocks!r}))"
        )
    if not (config is None or isinstance(config, Config)):
        raise ModelError(
            f"config= is {repr(config)[:80]}, not a lohan.Config: pass the settings themselves as"
            " keywords (host_bytes=..., commit_every=...), such as lohan.wrap(model, **settings)"
        )
