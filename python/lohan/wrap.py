"""`lohan.wrap` (LoHan IV-E, active gradient offloading: IV-C; "mezo": ZO2 alg. 1)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from lohan.common import _arguments, _exit
from lohan.common._inside import inside
from lohan.errors import ModelError
from lohan.layout import _names

if TYPE_CHECKING:
    from lohan.common._keywords import SGD, Adafactor, Adagrad, MeZO, Muon, RMSprop, Settings
    from lohan.session._guard import Guard

PathLike = str | os.PathLike[str]


@_arguments.keywords_only
def wrap(
    model: nn.Module,
    *,
    store: PathLike | Sequence[PathLike] | None = None,
    resume: bool = False,
    resume_step: int | None = None,
    lr: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | tuple[float | None, float] | None = None,
    weight_decay: float | None = None,
    max_grad_norm: float | None = None,
    params: Iterable[dict[str, Any]] | Callable[[nn.Module], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: Sequence[nn.Module] | None = None,
    weights: PathLike | None = None,
    init: str | Callable[[nn.Module], None] | None = None,
    method: str | MeZO | SGD | Adagrad | RMSprop | Adafactor | Muon | None = None,
    moments: str = "fp32",
    experts: str = "together",
    idle: str = "exact",
    **settings: Unpack[Settings],
) -> nn.Module:
    """Prepare a model for training as by an fp32 optimizer, with parameters and states on SSD.

    Args:
        model: a module with parameters on the CPU (fp32, bf16 or fp16), or of `lohan.empty()`.
        store: a directory, or a list of one per disk. None: a temporary store, removed at exit.
        resume: True to resume the last committed step.
        resume_step: the step to go back to instead, permanently (docs/checkpoints.md).
        lr: learning rate of groups that do not set their own. None: that of the rule
            (docs/update-rules.md), such as 1e-3 for AdamW.
        betas: decay rates of the moments. None: (0.9, 0.999) (method="lion": (0.9, 0.99)).
        eps: added to the root of the second moment. None: 1e-8 (method="adagrad": 1e-10). For
            method="adafactor" two numbers, by default (None, 1e-3).
        weight_decay: weight decay. None: 1e-2 for "adamw" and "adam_mini", 0.1 for the matrices of
            "muon", otherwise 0.
        max_grad_norm: clip the gradients as torch.nn.utils.clip_grad_norm_ does, in `step()`.
        params: parameter groups, or a function of the model that returns them; None: one group.
        optimizer: a torch.optim.AdamW, Adam, SGD, Adagrad, RMSprop or Adafactor to continue from,
            instead of lr to params. It is emptied; its scheduler keeps working. With resume=, only
            its groups are used.
        blocks: modules to use as blocks. None: blocks are found by the model's structure.
        weights: folder or file of safetensors, or GGUF file; frozen parameters are read in place.
        init: "model" (the model's own initialisation), or a function called with each module.
        method: "adamw", "adam", "lion", "sgd", "adagrad", "rmsprop", "adam_mini", "adafactor",
            "muon", or a lohan.SGD, lohan.Adagrad, lohan.RMSprop, lohan.Adafactor or lohan.Muon
            (docs/update-rules.md), or "mezo" or a lohan.MeZO (zeroth-order,
            `model.zo_step(closure)`; docs/zeroth-order.md). None: the rule of optimizer=, or
            "adamw".
        moments: their format: "fp32", "bf16", "8bit" or "4bit" (docs/low-precision-states.md).
        experts: "apart": each expert of a mixture is a block (docs/larger-than-memory.md).
        idle: "skip": with experts="apart", an expert without tokens is not updated.
        **settings: keywords that do not change the numbers (host_bytes=, activations=,
            commit_every=, ...); see lohan.Settings and docs/settings.md.

    Returns:
        The same module, with `model.optimizer` (a torch optimizer) and `model.lohan` (the session).

    Raises:
        ModelError, UnsupportedError, BudgetError, StoreError: the message says what to change.
    """
    given = locals()
    from lohan.opening import _opening, _request

    return _opening.wrapped(_request.of(wrap, **given))


def wrap_flat(model: nn.Module, given: dict[str, Any]) -> nn.Module:
    """Call wrap() with settings that lohan.common._keywords.flat() has translated."""
    from lohan.opening import _opening, _request

    return _opening.wrapped(_request.of_flat(wrap, model, given))


@torch.inference_mode(False)  # the values are for training
def unwrap(model: nn.Module) -> nn.Module:
    """Load a wrapped model's parameters back into memory and close its session.

    Args:
        model: a wrapped model whose parameters fit in memory. If its session is already closed,
            the parameters are those of the store's last commit.

    Returns:
        The same module on the CPU, which any optimizer can train again. The moments stay in the
        store; torch's optimizer that was passed to wrap(optimizer=) also gets their values back.

    Raises:
        ModelError: the model is not wrapped.
        StoreError: the session is closed and the store cannot be read.
    """
    from lohan.opening import _attached

    session = inside(model)
    guard: Guard | None = model.__dict__.get("_lohan_guard")
    if session is None or guard is None:
        raise ModelError("the model is not wrapped")
    origin: torch.optim.Optimizer | None = model.__dict__["optimizer"].origin
    layout, extents = session.layout, session.extents
    states: dict[int, Any] = {}
    if origin is not None:
        from lohan.session import _adopt
    if not session.closed:
        session.commits.settle()
    is_late = session.peers.is_mate  # the store is another process's until that has closed it
    if origin is not None and _adopt.is_torchs(origin) and not is_late:
        with session.commits.reading() as store:
            states = _adopt.read_state(layout, extents, store)
    values = session.values()
    if not session.closed:
        session.part()
    session.close()
    if origin is not None and _adopt.is_torchs(origin) and is_late:
        with session.commits.reading() as store:
            states = _adopt.read_state(layout, extents, store)
    _exit.sessions.discard(session)
    session.unhook()
    guard.remove()
    if origin is not None:
        _adopt.release(origin, layout, states)
        _adopt.warn_of_lost_moments(origin)
    for param, value in zip(layout.params, values, strict=True):
        param.tensor.data = value
        if param.stream is not None:
            param.tensor.requires_grad_(True)
    joined = session.apart.undo()
    if joined and origin is not None:
        _adopt.join(origin, joined)
    session.device.give_buffers(model)
    _names.after_unwrap(model)
    _attached.remove_attributes(model)
    return model
