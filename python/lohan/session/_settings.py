"""Checks of the settings of `lohan.wrap`: names of keywords, and ranges of values."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from lohan.activations import _activations, _swap
from lohan.common import _setting
from lohan.config import SCHEDULES_AT_STEP, Config
from lohan.errors import ModelError, UnsupportedError
from lohan.layout import _experts
from lohan.layout._experts import Apart
from lohan.planning import _wear
from lohan.session import _average, _block_swap, _order
from lohan.torch_glue import _device
from lohan.world._rendezvous import process_count

# Names of the same settings in other libraries.
_ELSEWHERE = {
    "learning_rate": "lr",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clipping": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "nvme_path": "store",
    "offload_folder": "store",
    "gradient_checkpointing": "activations",
}
_NEAR = 0.6


def make(config: Config | None, settings: dict[str, Any], call: Callable[..., Any]) -> Config:
    """Merge the config= of a call with the settings that it passed as keywords.

    Args:
        config: the value of config=; None means the defaults.
        settings: the keywords that are not parameters of call.
        call: `lohan.wrap`, whose parameters are suggested for mistyped keywords, too.

    Raises:
        ModelError: a keyword is unknown; the message names the closest one.
    """
    fields = [field.name for field in dataclasses.fields(Config)]
    own = [
        name
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for name in settings:
        if name in fields:
            continue
        near = difflib.get_close_matches(name, [*own, *fields], n=1, cutoff=_NEAR)
        meant = _ELSEWHERE.get(name, near[0] if near else None)
        way_out = f"did you mean {meant}=?" if meant else "help(lohan.Config) lists the settings"
        raise ModelError(
            f"{name}= is not a keyword of lohan.wrap or a field of lohan.Config: {way_out}"
        )
    return dataclasses.replace(config or Config(), **settings)


def check(config: Config) -> None:
    """Reject invalid values of settings.

    Raises:
        ModelError: a setting is invalid; the message says which values are valid.
    """
    _setting.check(config)
    if config.frozen == "packed" and config.share == "on":
        raise UnsupportedError(
            "frozen='packed' is not supported with share='on', whose processes read the decoded"
            " parameters of one process: pass share='off', or leave frozen= out"
        )
    parts = config.ablate if isinstance(config.ablate, tuple | list) else (config.ablate,)
    for part in parts:
        if part not in ("overlap", "reuse", "deferred") or parts is not config.ablate:
            raise ModelError(
                f"ablate {part!r} must be a tuple of 'overlap', 'reuse' and 'deferred'"
            )
    if not isinstance(config.device, str | None):
        raise ModelError(
            f"device {config.device!r} must be None, 'cpu', 'cuda', 'cuda:INDEX', 'emu', or a"
            " torch.device"
        )
    _wear.limit_of(config.wear_budget)
    _activations.check(config.activations)
    _check_order(config)
    _device.check(config)
    _check_gather(config)
    _swap.check(config)


def checked(config: Config, max_grad_norm: float | None, model: nn.Module) -> Config:
    """Check the config, and make updates wait for step() if they need gradient norms or sums.

    Both are known only after the last backward. The device may be the one that a trainer chose for
    the model ([Note: Block swap]).
    """
    config = _block_swap.with_device(model, config)
    check(config)
    is_waiting = config.sums_gradients or config.loss_scaling or max_grad_norm is not None
    if config.schedule in SCHEDULES_AT_STEP or not is_waiting:
        is_alone = process_count() == 1  # several processes are refused in split()
        if config.on_nan == "skip" and config.schedule not in SCHEDULES_AT_STEP and is_alone:
            raise UnsupportedError(
                f"on_nan='skip' is not supported with schedule={config.schedule!r}, whose updates"
                " begin before all gradients are known: pass schedule='deferred', or max_grad_norm="
            )
        return config
    if max_grad_norm is not None and config.schedule not in (Config().schedule, "auto"):
        raise ModelError(
            f"schedule {config.schedule!r} updates before the norm of all gradients is known:"
            f" with max_grad_norm, use {' or '.join(map(repr, SCHEDULES_AT_STEP))}"
        )
    return dataclasses.replace(config, schedule="deferred")


def _check_order(config: Config) -> None:
    if config.order != "vertical":
        return
    if reason := _order.why_no_turns():
        raise UnsupportedError(reason)
    if config.accumulate == 1:
        raise ModelError(
            "order='vertical' needs several micro-batches in a step: pass accumulate= to"
            " lohan.wrap(), and run them with model.lohan.accumulate()"
        )
    if config.has_policy:
        raise UnsupportedError(
            f"order='vertical' is not supported with activations={config.activations!r}, a policy"
            " that measures one micro-batch at a time: pass 'recompute', or a dict of patterns"
        )


def _check_gather(config: Config) -> None:
    if config.gather == "shards" and config.share != "on":
        raise ModelError(
            "gather='shards' needs share='on' and several processes on the machine, which then"
            " copy parts of the same parameters: add share='on', or leave gather= out"
        )
    if config.gather == "shards" and _device.parse(config.device)[0] == "cpu":
        raise ModelError(
            "gather='shards' needs an accelerator in each process, for example device='cuda': on"
            " the CPU, blocks are read where they are, so leave gather= out"
        )


_SKIP = "pass idle='skip', with which an expert without tokens is not updated"


def split(
    model: nn.Module,
    config: Config,
    experts: Any,
    idle: Any,
    method: str,
    states: str,
    world: object,
    optimizer: object,
) -> tuple[Apart, Config]:
    """Check combinations of settings, and make experts blocks of their own, if asked to.

    Args:
        model: the model to be wrapped.
        config: the settings that wrap() was given.
        experts: experts= of wrap().
        idle: idle= of wrap().
        method: method= of wrap().
        states: states= of wrap().
        world: the processes of the run; None: there is only one.
        optimizer: optimizer= of wrap().

    Returns:
        The experts, and the config with a schedule that they support.

    Raises:
        ModelError: experts= or idle= is invalid, or the model has no module of experts.
        UnsupportedError: another setting cannot be combined with this one.
    """
    if experts not in ("together", "apart"):
        raise ModelError(f"experts {experts!r} must be 'together' or 'apart'")
    if idle not in ("exact", "skip"):
        raise ModelError(f"idle {idle!r} must be 'exact' or 'skip'")
    if experts == "together" and idle == "skip":
        raise ModelError("idle='skip' needs experts='apart': a layer's experts are one tensor")
    reasons = {
        "method='mezo'": method != "adamw",
        "several processes": world is not None,
        "experts='apart'": experts != "together",
    }
    _average.check(config, reasons)
    if config.on_nan != "raise":
        reasons = {"method='mezo'": method != "adamw"}
        reasons |= {"several processes": world is not None and config.on_nan == "skip"}
        way_out = "leave it out, and a step that is not finite raises an error"
        _refuse_with(f"on_nan={config.on_nan!r}", reasons, way_out)
    if experts == "together":
        return Apart().adapt(model), config
    reasons = {
        "method='mezo'": method != "adamw",
        "order='vertical'": config.order != "horizontal",
        "several processes": world is not None,
    }
    _refuse_with("experts='apart'", reasons, "leave experts= out")
    with _experts.split(model, owes=idle == "exact").adapt(model) as made:
        if made.trained is None:
            return made, config
        way_out = "pass params= instead, or create the Trainer without optimizers="
        reasons = {"optimizer=": optimizer is not None}
        _refuse_with("experts='apart', if they are trained,", reasons, way_out)
        if idle == "skip":
            return made, config
        reasons = {f"states={states!r}": states != "fp32"}
        reasons |= {"schedule='naive'": config.schedule == "naive"}
        _refuse_with("experts='apart' with idle='exact'", reasons, _SKIP)
    if config.schedule == "auto":
        config = dataclasses.replace(config, schedule="optimized")
    return made, config


def _refuse_with(what: str, reasons: dict[str, bool], way_out: str) -> None:
    for reason, is_so in reasons.items():
        if is_so:
            raise UnsupportedError(f"{what} is not supported with {reason}: {way_out}")
