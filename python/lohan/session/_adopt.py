"""`wrap(optimizer=...)`: training continues where another optimizer stopped."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core
from lohan.common._rules import ADAMW, RULES, Rule
from lohan.errors import ModelError, UnsupportedError
from lohan.session._optim import NoState
from lohan.store import _scalars
from lohan.torch_glue._tensor import check_bytes

if TYPE_CHECKING:
    from torch import nn

    from lohan.layout._block import Layout, Param, Unit
    from lohan.layout._experts import Apart
    from lohan.store._store import Extents

# What the state of a parameter has that is of its shape, under any rule.
_MOMENTS = {key for rule in RULES.values() for key in rule.moments.values()}

# Dicts of hooks that a script may have registered. Both optimizers share the dicts, so that a hook
# can be removed through either one.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# Methods that would return or do something wrong for the emptied optimizer. step() needs no
# replacement: it raises an error when it reads a hollow gradient or parameter.
_SHADOWED = ("state_dict", "load_state_dict", "add_param_group")

# Classes of torch whose rule does not depend on weight decay, with its name.
_OTHERS: dict[type, str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adafactor: "adafactor",
}


def is_torchs(optimizer: object) -> bool:
    """Return whether an optimizer is one of torch's whose rule lohan has."""
    # Not isinstance: a subclass may have a different rule.
    return type(optimizer) in (torch.optim.AdamW, torch.optim.Adam, *_OTHERS)


def moments_count(optimizer: torch.optim.Optimizer) -> int:
    """Return for how many parameters an optimizer has moments that a step has made.

    torch.optim.Adagrad has state from the beginning, of step 0. SGD does not count steps.
    """
    states = optimizer.state.values()
    return sum(bool(state) and int(state.get("step", 1)) > 0 for state in states)


def rule_of(optimizer: Any, method: str | None) -> tuple[str, str]:
    """Return the method= and the rule of an optimizer.

    Without weight decay, Adam has the rule of AdamW, unless the method says "adam".

    Args:
        optimizer: the optimizer= of wrap().
        method: the method= of wrap(); None: it was not given.

    Raises:
        UnsupportedError: lohan cannot continue from an optimizer of this class.
        ModelError: the method is not that of the optimizer.
    """
    _check_kind(optimizer)
    groups = optimizer.param_groups
    found = "adamw", "adamw"
    if name := _OTHERS.get(type(optimizer)):
        has_momentum = any(group.get("momentum") for group in groups)
        found = name, f"{name}_momentum" if has_momentum else name
    elif type(optimizer) is torch.optim.Adam and not any(
        group.get("decoupled_weight_decay") for group in groups
    ):
        has_decay = any(group["weight_decay"] != 0 for group in groups)
        found = ("adam", "adam") if has_decay or method == "adam" else found
    if method not in (None, found[0]):
        raise ModelError(
            f"method={method!r} is not the rule of optimizer={type(optimizer).__qualname__}(...)"
            f" (method={found[0]!r}): leave method= out to continue with the optimizer's rule, or"
            " optimizer= to begin with that of method="
        )
    return found


def _check_kind(optimizer: Any) -> None:
    """Reject an optimizer of a class from which lohan cannot continue.

    Raises:
        UnsupportedError: it is one.
    """
    from lohan.session import _adopt_8bit

    if is_torchs(optimizer) or _adopt_8bit.is_known(optimizer):
        return
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    why = (
        f"a {kind}, but lohan can only continue from a torch.optim.AdamW, Adam, SGD, Adagrad,"
        " RMSprop or Adafactor, or from an AdamW of bitsandbytes or torchao. To begin with a"
        " rule of lohan's, omit optimizer= and pass method=, lr=, weight_decay= and params="
        " instead"
    )
    if kind == "accelerate.optimizer.AcceleratedOptimizer":
        why = (
            "what accelerator.prepare() has returned: pass its .optimizer, which is the"
            f" {type(optimizer.optimizer).__name__} inside. prepare() has loaded the state in"
            " the dtypes of the parameters: where these have 16 bits, moments in fp32 have been"
            " rounded. To keep such moments, wrap with an optimizer that was never prepared"
        )
    raise UnsupportedError(f"optimizer= is {why}")


def check(optimizer: Any, besides: dict[str, Any], *, resume: bool) -> None:
    """Reject an optimizer from which none of lohan's rules can continue with the same numbers.

    Args:
        optimizer: the optimizer= of wrap(), or None.
        besides: the arguments of wrap() that the optimizer replaces; None for those not given.
        resume: whether the store exists and has moments.

    Raises:
        UnsupportedError: the optimizer has a different class or update rule.
        ModelError: another argument conflicts with the optimizer.
    """
    if optimizer is None:
        return
    from lohan.session import _adopt_8bit

    _check_kind(optimizer)
    if _adopt_8bit.is_known(optimizer):
        _adopt_8bit.check(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    given = [name for name, value in besides.items() if value is not None]
    if given:
        raise ModelError(
            f"{'=, '.join(given)}= cannot be combined with optimizer=: change its param_groups"
            " instead"
        )
    for group in optimizer.param_groups:
        if group.get("capturable"):
            raise UnsupportedError(
                "capturable=True in a parameter group is for CUDA graphs and changes the order of"
                " rounding: set it to False in optimizer.param_groups"
            )
        _check_sums(optimizer, group)
    if resume and (count := moments_count(optimizer)) > 0:
        raise ModelError(
            "resume=True continues with the moments in the store, but optimizer= also has moments"
            f" for {count} parameters: pass an optimizer that has made no step, or"
            " a new store without resume="
        )


def _check_sums(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Reject a group of Adagrad that names another beginning of its sums than torch gave them.

    Raises:
        UnsupportedError: it does.
    """
    name = "initial_accumulator_value"
    begun = optimizer.defaults.get(name)
    if type(optimizer) is torch.optim.Adagrad and group[name] != begun:
        raise UnsupportedError(
            f"a parameter group of Adagrad has {name}={group[name]}, but torch begins the sums of"
            f" all groups with {begun}, which its constructor was given: set it to {begun} in"
            " optimizer.param_groups"
        )


def split(origin: torch.optim.Optimizer, apart: Apart) -> Callable[[], None]:
    """Give an optimizer the experts' parts of parameters that were split, with views of its state.

    Returns:
        A function that undoes it, and what wrap() does with the optimizer after that.
    """
    before = [(group, group["params"]) for group in origin.param_groups]
    states = dict(origin.state)
    parts = {id(whole): each for whole, each in apart.wholes()}
    for group, params in before:
        group["params"] = [part for each in params for part in parts.get(id(each), [each])]
    for whole, slices in apart.wholes():
        state = origin.state.pop(whole, None)
        if not state:
            continue
        for number, part in enumerate(slices):
            origin.state[part] = {
                key: value[number] if key in _MOMENTS and value is not None else value
                for key, value in state.items()
            }

    def undo() -> None:
        for group, params in before:
            group["params"] = params
        origin.state.clear()
        origin.state.update(states)

    return undo


def join(
    origin: torch.optim.Optimizer, joined: Sequence[tuple[nn.Parameter, list[nn.Parameter]]]
) -> None:
    """Give an optimizer fused parameters in the place of their parts, with the state of these.

    Args:
        origin: the optimizer.
        joined: what Apart.undo() has returned.
    """
    first = {id(parts[0]): whole for whole, parts in joined}
    others = {id(part) for _, parts in joined for part in parts[1:]}
    for group in origin.param_groups:
        params = [first.get(id(each), each) for each in group["params"] if id(each) not in others]
        group["params"] = params
    for whole, parts in joined:
        states = [origin.state.pop(part, None) for part in parts]
        found = [state for state in states if state]
        if found:  # all of them have made the same steps
            origin.state[whole] = {
                key: torch.stack([state[key] for state in found]) if key in _MOMENTS else value
                for key, value in found[0].items()
            }


def _moment(name: str, key: str, param: torch.Tensor, value: Any) -> torch.Tensor:
    """Return one moment as the store keeps it: in fp32, on the CPU."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or value.is_meta:
        what = (
            f"{tuple(value.shape)} on {value.device}"
            if isinstance(value, torch.Tensor)
            else repr(value)
        )
        raise ModelError(
            f"{key} of parameter {name!r} in optimizer.state is {what}, not values of shape"
            f" {tuple(param.shape)}: load the state after the model has its values"
        )
    check_bytes(value, f"{key} of parameter {name!r} in optimizer.state")
    return value.detach().to("cpu", torch.float32).resolve_neg().contiguous()


def _values_of(rule: Rule, state: dict[str, Any]) -> dict[str, Any]:
    """Return the moments of a parameter by the names of a rule's arrays, decoded to fp32."""
    from lohan.session import _adopt_8bit

    if rule.moments == ADAMW.moments:
        return dict(zip(rule.moments, _adopt_8bit.moments(state), strict=True))
    found = {name: state.get(key) for name, key in rule.moments.items()}
    if rule.counts_steps and "momentum" in rule.defaults and found["moment1"] is None:
        found["moment1"] = torch.zeros_like(state["square_avg"])  # a group without momentum
    return found


def write_state(
    optimizer: torch.optim.Optimizer, layout: Layout, extents: Extents, store: _core.Store
) -> bytes:
    """Write the moments of all trainable parameters to a new store.

    The moments of a parameter without state, which has not been updated yet, are zeros.

    Returns:
        The data for the store's first commit, with the number of updates of each parameter.

    Raises:
        ModelError: the state is not that of the rule.
    """
    from lohan.store import _moments

    steps, rule = [0] * len(layout.params), RULES[layout.rule]
    for param in layout.params:
        state, unit = optimizer.state.get(param.tensor), layout.units[param.unit]
        if not state or not unit.trainable:
            continue
        if rule.has_factors:
            steps[param.index] = int(state["step"])
            if unit.has_states:
                _write_factors(param, unit, extents, store, state)
            continue
        found = _values_of(rule, state)
        if found and all(value is None for value in found.values()):
            continue  # SGD's buffer before the first step
        steps[param.index] = int(state.get("step", 1))  # SGD does not count steps
        if steps[param.index] == 0 and "initial_accumulator_value" in rule.defaults:
            continue  # the first step begins the sum
        if not unit.has_states:
            continue  # the process that has them writes them
        places = extents.units[param.unit]
        m, v = (
            param.flat(_moment(param.name, rule.moments[name], param.tensor, found[name]))
            if name in found
            else torch.zeros(param.count)
            for name in ("moment1", "moment2")
        )
        _moments.write(store, unit, places, param, (m, v))
    return _core.scalars_make(steps, b"")


def _write_factors(
    param: Param, unit: Unit, extents: Extents, store: _core.Store, state: dict[str, Any]
) -> None:
    from lohan.store import _factors

    found = {
        key: _moment(param.name, key, torch.empty(shape, device="meta"), state.get(key))
        for key, shape in _factors.shapes(param).items()
    }
    _factors.write(store, unit, extents.units[param.unit], param, found)


def share_hooks(optimizer: torch.optim.Optimizer, origin: torch.optim.Optimizer) -> None:
    """Make optimizer call the hooks that are registered with origin."""
    for name in _HOOKS:
        setattr(optimizer, name, getattr(origin, name))


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{name}() cannot be called on the optimizer that lohan.wrap(optimizer=) took over: its"
            f" moments are in the store; call model.optimizer.{name}() instead"
        )

    return refuse


def retire(origin: torch.optim.Optimizer, layout: Layout) -> None:
    """Empty an optimizer whose state is in a store, and make methods that need the state fail."""
    for param in layout.params:
        if layout.units[param.unit].trainable:
            origin.state.pop(param.tensor, None)
    origin.state = NoState(dict, origin.state)
    for name in _SHADOWED:
        setattr(origin, name, _refuse(name))


def read_state(layout: Layout, extents: Extents, store: _core.Store) -> dict[int, dict[str, Any]]:
    """Return the state that torch's optimizer of the rule would have, in the parameters' dtypes.

    Args:
        layout: the model's layout.
        extents: the store's extents.
        store: a store at a commit of the engine or of write_state().

    Returns:
        The states of the updated parameters, by the parameters' indices.

    Raises:
        UnsupportedError: another process has the states of some parameters.
    """
    from lohan.store import _factors, _moments

    if layout.part[1] > 1:
        raise UnsupportedError(
            "the optimizer's states cannot be returned: with shard_optimizer=True each process has"
            " a part of them. Keep the model wrapped, or use lohan.export() for the parameters"
        )
    steps = _scalars.steps(store.describe()["scalars"], len(layout.params))
    rule = RULES[layout.rule]
    found: dict[int, dict[str, Any]] = {}
    for param in layout.params:
        has_states = bool(rule.moments) or rule.has_factors
        if not layout.units[param.unit].trainable or steps[param.index] == 0 or not has_states:
            continue
        state: dict[str, Any] = {"step": torch.tensor(float(steps[param.index]))}
        if not rule.counts_steps:
            state.clear()
        places = extents.units[param.unit]
        if rule.has_factors:
            found[param.index] = state
            kept = _factors.read(store, layout.units[param.unit], places, param)
            state |= {key: value.to(param.tensor.dtype) for key, value in kept.items()}
            continue
        moments = _moments.read(store, layout.units[param.unit], places, param)
        for name, values in zip(("moment1", "moment2"), moments, strict=True):
            if name in rule.moments:
                state[rule.moments[name]] = param.shaped(values).to(param.tensor.dtype)
        found[param.index] = state
    return found


def warn_of_lost_moments(origin: torch.optim.Optimizer) -> None:
    """Tell the user that an optimizer whose moments have a format of its own does not get them."""
    if not is_torchs(origin):
        warnings.warn(
            f"the {type(origin).__name__} that was passed to lohan.wrap(optimizer=) starts without"
            " moments: they stay in the store. To continue with them, wrap the model again with"
            " resume=True",
            stacklevel=3,
        )


def release(
    origin: torch.optim.Optimizer, layout: Layout, states: dict[int, dict[str, Any]]
) -> None:
    """Undo retire(): restore origin's methods, and set the states that read_state() returned."""
    for name in _SHADOWED:
        origin.__dict__.pop(name, None)
    origin.state = defaultdict(dict, origin.state)
    for index, state in states.items():
        origin.state[layout.params[index].tensor] = state
    if isinstance(origin, torch.optim.Adagrad):  # its step() needs the state that it begins with
        for group in origin.param_groups:
            for param in group["params"]:
                initial = torch.full_like(param, group["initial_accumulator_value"])
                origin.state.setdefault(param, {"step": torch.tensor(0.0), "sum": initial})
