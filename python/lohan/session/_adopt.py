"""`wrap(optimizer=...)`: training goes on where a torch.optim.AdamW stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core
from lohan.errors import ModelError, UnsupportedError
from lohan.store import _scalars
from lohan.torch_glue._tensor import nbytes_of

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.store._store import Extents

MOMENTS = ("exp_avg", "exp_avg_sq")

# What a script may have hung on the optimizer: shared, so that removing one works on either.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# Methods that would answer for an optimizer that is empty now; torch itself refuses step().
_SHADOWED = ("state_dict", "load_state_dict", "add_param_group")


def check(optimizer: object, besides: dict[str, Any], *, resume: bool) -> None:
    """Refuse an optimizer whose numbers lohan's AdamW would not go on with.

    Args:
        optimizer: what wrap() was given; None: there is none.
        besides: arguments of wrap() that it answers itself, None where they were not given.
        resume: the store has moments.

    Raises:
        UnsupportedError: another class or rule.
        ModelError: something else says what it says, too.
    """
    if optimizer is None:
        return
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    # Not isinstance: a class of its own may have a rule of its own.
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise UnsupportedError(
            f"optimizer= is a {kind}: lohan's rule is AdamW's, and goes on from a"
            " torch.optim.AdamW, or a torch.optim.Adam without weight decay. To train with AdamW"
            " from here on leave optimizer= out: lr=, weight_decay= and params= say the rest"
        )
    assert isinstance(optimizer, torch.optim.Optimizer)
    given = [name for name, value in besides.items() if value is not None]
    if given:
        raise ModelError(
            f"{'=, '.join(given)}= besides optimizer=: its param_groups say that, change them there"
        )
    for group in optimizer.param_groups:
        if group.get("capturable"):
            raise UnsupportedError(
                "capturable=True in a parameter group is for graphs of an accelerator, and rounds"
                " in another order: set it to False in optimizer.param_groups"
            )
    if resume and optimizer.state:
        raise ModelError(
            "resume=True goes on with the moments in the store, and optimizer= has some for"
            f" {len(optimizer.state)} parameters: pass one that has made no step, or a new store"
            " without resume="
        )


def _moment(name: str, key: str, param: torch.Tensor, value: Any) -> torch.Tensor:
    """One moment as the store keeps it: fp32 on the CPU."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or value.is_meta:
        what = (
            f"{tuple(value.shape)} on {value.device}"
            if isinstance(value, torch.Tensor)
            else repr(value)
        )
        raise ModelError(
            f"{key} of parameter {name!r} in optimizer.state is {what}, not values of shape"
            f" {tuple(param.shape)}: load the state once the model has its values"
        )
    return value.detach().to("cpu", torch.float32).contiguous()


def write_state(
    optimizer: torch.optim.Optimizer, layout: Layout, extents: Extents, store: _core.Store
) -> bytes:
    """Write the moments of all trainable parameters to a new store.

    A parameter without state has made no step: zeros, as in torch.

    Returns:
        What the store's first commit carries: how often each parameter was updated.

    Raises:
        ModelError: the state is not AdamW's.
    """
    steps = [0] * len(layout.params)
    for param in layout.params:
        state = optimizer.state.get(param.tensor)
        if not state or not layout.units[param.unit].trainable:
            continue
        places = extents.units[param.unit]
        for key, extent in zip(MOMENTS, (places.moment1, places.moment2), strict=True):
            values = param.flat(_moment(param.name, key, param.tensor, state.get(key)))
            store.write(extent, param.first * 4, values.data_ptr(), nbytes_of(values))
        steps[param.index] = int(state["step"])
    return _core.scalars_make(steps, b"")


def share_hooks(optimizer: torch.optim.Optimizer, origin: torch.optim.Optimizer) -> None:
    """Let optimizer call what was registered with origin."""
    for name in _HOOKS:
        setattr(optimizer, name, getattr(origin, name))


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{name}() of the optimizer that lohan.wrap(optimizer=) took over: its moments are in"
            f" the store, and model.optimizer stands for it; model.optimizer.{name}()"
        )

    return refuse


def retire(origin: torch.optim.Optimizer, layout: Layout) -> None:
    """Empty an optimizer whose state is in a store; what it can no longer answer it refuses."""
    for param in layout.params:
        if layout.units[param.unit].trainable:
            origin.state.pop(param.tensor, None)
    for name in _SHADOWED:
        setattr(origin, name, _refuse(name))


def read_state(layout: Layout, extents: Extents, store: _core.Store) -> dict[int, dict[str, Any]]:
    """What a torch.optim.AdamW would have in its state, by parameter, in the parameters' dtypes.

    Args:
        layout: of the model.
        extents: of the store.
        store: at a commit of the engine's, or of write_state().
    """
    steps = _scalars.steps(store.describe()["scalars"], len(layout.params))
    found: dict[int, dict[str, Any]] = {}
    for param in layout.params:
        if not layout.units[param.unit].trainable or steps[param.index] == 0:
            continue
        state: dict[str, Any] = {"step": torch.tensor(float(steps[param.index]))}
        places = extents.units[param.unit]
        for key, extent in zip(MOMENTS, (places.moment1, places.moment2), strict=True):
            values = param.shaped(torch.empty(param.count))
            store.read(extent, param.first * 4, values.data_ptr(), nbytes_of(values))
            state[key] = values.to(param.tensor.dtype)
        found[param.index] = state
    return found


def release(
    origin: torch.optim.Optimizer, layout: Layout, states: dict[int, dict[str, Any]]
) -> None:
    """Undo retire(): give origin its methods back, and the states that read_state() found."""
    for name in _SHADOWED:
        origin.__dict__.pop(name, None)
    for index, state in states.items():
        origin.state[layout.params[index].tensor] = state
