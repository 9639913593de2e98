"""Experts that are slices of one parameter, made blocks of their own.

transformers keeps the weights of all experts of a layer in parameters whose first dimension is the
expert. The layer then has to be in memory as a whole, although a batch uses few of its experts.

[Note: Experts apart] split() gives each expert a small module with its slices as parameters. All of
lohan (blocks, units, the store, files that are read in place, exports) then treats an expert like
any other block. The class's own forward, which transformers calls "eager", computes one expert at a
time, and refers to its weights only as `self.gate_up_proj[expert]`; a Slices in the place of the
parameter answers this with the expert's own parameter. So every class with transformers' interface
of experts is computed by its own code, with the bits of experts_implementation="eager". A fused
name, as in the model before it was wrapped, remains in state dicts and in saved models.

When the router has chosen, the forward announces the experts to the engine, which prefetches them
in this order ([Note: Uses that are announced] in csrc/sched/expect.h); and in backward, when the
gradient of the layer's output is there, in the opposite order.

[Note: Adapters of parameters] An adapter of a single parameter (peft's target_parameters=) puts the
sum of the parameter and the adapter in its place in each forward, as a parametrization. To register
one, torch calls `parameter.set_(parameter)`. That changes nothing but the parameter's version, by
which lohan notices writes that would be lost; so the version is set back. The sum exists only while
peft's wrapper runs, so the wrapper is a block as a whole. If experts are apart, a Slices adds the
adapter's part to the parameter of the expert that it is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lohan.common._inside import inside
from lohan.errors import ModelError
from lohan.layout import IS_BLOCK

# The parameters of transformers' interface of experts that can have a slice for each expert.
_NAMES = tuple(
    name + suffix for name in ("gate_up_proj", "up_proj", "down_proj") for suffix in ("", "_bias")
)
_FLAGS = ("has_gate", "has_bias", "is_transposed")


class Expert(nn.Module):
    """The parameters of one expert. It computes nothing: the module around it does.

    Args:
        family: a number that the experts of a layer share.
        owes: whether an expert without tokens owes an update with a gradient of zeros.
    """

    def __init__(self, family: int, *, owes: bool) -> None:
        super().__init__()
        self.family = family
        self.owes = owes


class Slices:
    """What the forward of a module of experts finds in the place of a fused parameter."""

    def __init__(self, experts: Sequence[nn.Module], name: str) -> None:
        self._experts = experts
        self._name = name
        # Returns what is computed with in the place of parameters; None: the parameters themselves.
        self.lent: Callable[[Sequence[nn.Parameter]], list[nn.Parameter]] | None = None
        # For each adapter that is added: left and right matrices of each expert, and a factor.
        self.adapters: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], float]] = []

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        first: torch.Tensor = getattr(self._experts[0], self._name)
        return first.dtype

    def __getitem__(self, number: Any) -> torch.Tensor:
        """Return one expert's values, by its number or a tensor with the number."""
        at = int(number)
        param: nn.Parameter = getattr(self._experts[at], self._name)
        found: torch.Tensor = param if self.lent is None else self.lent([param])[0]
        with torch.autocast(found.device.type, enabled=False):
            for left, right, factor in self.adapters:
                found = torch.addmm(found, left[at], right[at], alpha=factor)
        return found


@dataclasses.dataclass
class Split:
    """A module of experts that was split.

    Attributes:
        name: the module's name in the model.
        module: the module, by a weak reference.
        wholes: the fused parameters that it had, by name.
        order: the names of all parameters that it had, in order.
        experts: the modules of its experts.
    """

    name: str
    module: weakref.ref[nn.Module]
    wholes: dict[str, nn.Parameter]
    order: list[str]
    experts: list[nn.Module]
    # Called with the numbers of the experts that are used next, in order.
    announce: Callable[[Sequence[int]], None] | None = None

    def values(self, name: str) -> list[nn.Parameter]:
        """Return the experts' parameters that make up a fused one."""
        return [expert._parameters[name] for expert in self.experts]  # type: ignore[misc]


def _is_splittable(module: nn.Module) -> bool:
    """Return whether a module has transformers' interface of experts and fused parameters."""
    has_forward = hasattr(type(module).forward, "__wrapped__")
    has_flags = all(hasattr(module, flag) for flag in _FLAGS)
    return has_forward and has_flags and bool(_wholes(module))


def _wholes(module: nn.Module) -> dict[str, nn.Parameter]:
    count = getattr(module, "num_experts", None)
    found = {name: module._parameters.get(name) for name in _NAMES}
    return {
        name: param
        for name, param in found.items()
        if param is not None and param.dim() >= 2 and param.shape[0] == count
    }


def _slice(whole: nn.Parameter, number: int) -> nn.Parameter:
    return nn.Parameter(whole.detach()[number], requires_grad=whole.requires_grad)


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape without memory, whose values are NaN."""
    return torch.full((), float("nan"), dtype=tensor.dtype).expand(tensor.shape)


class Apart:
    """The modules of experts of a model that were split.

    Args:
        owes: whether experts without tokens owe updates.
    """

    def __init__(self, *, owes: bool = False) -> None:
        self.owes = owes
        self.splits: list[Split] = []
        self.handles: list[Any] = []
        self.adapted: list[nn.Module] = []

    def adapt(self, model: nn.Module) -> Apart:
        """Prepare adapters of single parameters ([Note: Adapters of parameters])."""
        for module in model.modules():
            if not any(cls.__name__ == "ParamWrapper" for cls in type(module).__mro__):
                continue  # of peft, which may not be installed
            object.__setattr__(module, "_activate_lora", functools.partial(_activate, module))
            if not all_of(module):
                object.__setattr__(module, IS_BLOCK, True)
            self.adapted.append(module)
        return self

    def add(self, name: str, module: nn.Module) -> None:
        """Split a module of experts; its values stay where they are."""
        wholes = _wholes(module)
        count = next(iter(wholes.values())).shape[0]
        trained = any(whole.requires_grad for whole in wholes.values())
        family = len(self.splits) + 1
        owes = self.owes and trained
        experts: list[nn.Module] = [Expert(family, owes=owes) for _ in range(count)]
        split = Split(name, weakref.ref(module), wholes, [*module._parameters], experts)
        self.splits.append(split)
        for own, whole in wholes.items():
            del module._parameters[own]
            object.__setattr__(module, own, Slices(experts, own))
            for number, expert in enumerate(experts):
                expert.register_parameter(own, _slice(whole, number))
        for number, expert in enumerate(experts):
            expert.train(module.training)
            module.add_module(str(number), expert)
        forward = functools.partial(_forward, split)
        object.__setattr__(module, "forward", forward)

    def groups(self, params: Any, model: nn.Module) -> Any:
        """Return params= of wrap() with the experts' parameters in the place of fused ones."""
        if callable(params):
            params = params(model)
        if not self.splits or isinstance(params, str | bytes | dict | torch.Tensor):
            return params
        slices = {id(whole): parts for whole, parts in self.wholes()}

        def parts(members: Any) -> Any:
            if isinstance(members, torch.Tensor):
                members = [members]
            if isinstance(members, str | bytes | dict) or not isinstance(members, Iterable):
                return members  # wrap() refuses it
            found: list[Any] = []
            for each in members:
                if isinstance(each, dict) and "params" in each:
                    found.append({**each, "params": parts(each["params"])})
                else:  # a parameter, or its name and itself
                    tensor = each[1] if isinstance(each, tuple) and len(each) == 2 else each
                    found += slices.get(id(tensor), [each])
            return found

        return parts(params)

    def wholes(self) -> Iterator[tuple[nn.Parameter, list[nn.Parameter]]]:
        """Yield each fused parameter, and the experts' parameters that make it up."""
        for split in self.splits:
            for name, whole in split.wholes.items():
                yield whole, split.values(name)

    @property
    def trained(self) -> str | None:
        """The name of a fused parameter that was split and requires a gradient; None: no such."""
        names = (
            f"{split.name}.{name}"
            for split in self.splits
            for name, whole in split.wholes.items()
            if whole.requires_grad
        )
        return next(names, None)

    def __enter__(self) -> Apart:
        """Undo the splits if what follows raises an exception."""
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """See __enter__()."""
        if kind is not None:
            self.undo()

    def begin(self, model: nn.Module) -> nn.Module:
        """Announce experts to the session of a model that was just wrapped; return the model."""
        if not self.splits and not self.adapted:
            return model
        session: Any = inside(model)
        session.apart = self
        units = {param.name: param.unit for param in session.layout.params}
        for split in self.splits:
            mine = [
                sorted({units[f"{split.name}.{number}.{name}"] for name in split.wholes})
                for number in range(len(split.experts))
            ]
            split.announce = functools.partial(_announce, weakref.ref(session), mine)
            for whole in split.wholes.values():  # its values are in the store now
                if not whole.is_meta:
                    whole.data = _nothing(whole)
            module: Any = split.module()
            for name in split.wholes:
                module.__dict__[name].lent = session.runs.lent
            hook: Any = functools.partial(_fuse, split)
            self.handles.append(module.register_state_dict_post_hook(hook))
        return model

    def undo(self) -> list[tuple[nn.Parameter, list[nn.Parameter]]]:
        """Give each module its fused parameters back, with the current values of the experts.

        Returns:
            Each fused parameter, and the experts' parameters that made it up.
        """
        joined: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        while self.adapted:
            own = vars(self.adapted.pop())
            own.pop("_activate_lora", None)
            own.pop(IS_BLOCK, None)
        while self.splits:
            split = self.splits.pop()
            module = split.module()
            if module is None:
                continue
            for name, whole in split.wholes.items():
                module.__dict__.pop(name, None)
                parts = split.values(name)
                whole.requires_grad_(parts[0].requires_grad)
                module._parameters[name] = now = _joined(whole, parts)
                joined.append((now, parts))
            for name in split.order:
                module._parameters[name] = module._parameters.pop(name)
            for number in range(len(split.experts)):
                del module._modules[str(number)]
            module.__dict__.pop("forward", None)
        return joined

    def unfused(self, state: Mapping[str, Any], root: nn.Module) -> Mapping[str, Any]:
        """Return a state dict with the experts' entries in place of those of fused parameters.

        Args:
            state: a state dict of the model or of a module in it.
            root: that module.
        """
        if not self.splits:
            return state
        made = dict(state)
        names = {id(part): name for name, part in root.named_modules()}
        for split in self.splits:
            own = names.get(id(split.module()))
            prefix = f"{own}." if own else ""
            for name, whole in split.wholes.items():
                value = made.get(prefix + name)
                is_fit = isinstance(value, torch.Tensor) and value.shape == whole.shape
                if own is None or value is None or not is_fit:
                    continue  # a fused tensor of another shape is reported as unexpected
                del made[prefix + name]
                made |= {f"{prefix}{number}.{name}": part for number, part in enumerate(value)}
        return made


def _joined(whole: nn.Parameter, slices: Sequence[nn.Parameter]) -> nn.Parameter:
    """Return the fused parameter with the values of its slices."""
    if any(each.is_meta for each in slices):
        return whole
    if not whole.is_meta and all(
        each.data_ptr() == part.data_ptr()
        for each, part in zip(slices, whole.detach(), strict=True)
    ):
        return whole  # nothing was moved
    values = torch.stack([each.detach() for each in slices])
    if whole.is_meta:
        return nn.Parameter(values, requires_grad=whole.requires_grad)
    whole.data = values
    return whole


def _announce(session: weakref.ref[Any], units: list[list[int]], numbers: Sequence[int]) -> None:
    """Announce the experts that are used next."""
    owner = session()
    if owner is not None and not owner.closed:
        owner.engine.announce([unit for number in numbers for unit in units[number]])


def _fuse(split: Split, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    """Replace the experts' entries of a state dict by fused ones."""
    for name in split.wholes:
        keys = [f"{prefix}{number}.{name}" for number in range(len(split.experts))]
        values = [state.pop(key) for key in keys if key in state]
        if len(values) < len(keys):
            continue
        # A state dict of adapters leaves the base hollow, and so is this entry.
        is_hollow = values[0] is split.values(name)[0]
        state[prefix + name] = values[0] if is_hollow else torch.stack(values)


def _chosen(split: Split, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the experts that the router has chosen, in the order of their use."""
    chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
    count = len(split.experts)
    return [number for number in torch.unique(chosen).tolist() if number < count]


def _forward(split: Split, *args: Any, **kwargs: Any) -> Any:
    """Compute a module of experts by its class's own code, and announce the experts."""
    module = split.module()
    assert module is not None
    announce = split.announce
    numbers = _chosen(split, args, kwargs) if announce is not None else []
    if announce is not None:
        announce(numbers)
    plain: Any = type(module).forward
    output = plain.__wrapped__(module, *args, **kwargs)
    if announce is not None and isinstance(output, torch.Tensor) and output.requires_grad:
        backward = numbers[::-1]

        def on_gradient(gradient: torch.Tensor) -> None:
            announce(backward)

        output.register_hook(on_gradient)  # type: ignore[no-untyped-call]
    return output


@contextlib.contextmanager
def _activate(module: Any, names: Sequence[str]) -> Iterator[None]:
    """Return a context in which a module's parameter has adapters added to it.

    Args:
        module: peft's wrapper of the module with the parameter.
        names: the names of the adapters.
    """
    param = module.get_param()
    if isinstance(param, Slices):
        for name in names:
            if name in module.lora_A:
                if param.lent is not None:
                    param.lent([module.lora_A[name].weight, module.lora_B[name].weight])
                # Copies, because views would keep the adapter in memory until backward.
                *both, factor = module.get_delta_factors(name)
                left, right = (each.clone().unbind() for each in both)
                param.adapters.append((left, right, factor))
        try:
            yield
        finally:
            param.adapters.clear()
        return
    plain = type(module)._activate_lora(module, names)
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(param):
        plain.__enter__()
    try:
        yield
    finally:
        plain.__exit__(None, None, None)


def split(model: nn.Module, *, owes: bool) -> Apart:
    """Split the modules of experts of a model.

    Args:
        model: the model to be wrapped.
        owes: whether trained experts without tokens owe updates.

    Raises:
        ModelError: the model has no such module.
    """
    made = Apart(owes=owes)
    found = [(name, part) for name, part in model.named_modules() if _is_splittable(part)]
    if not found:
        raise ModelError(
            "experts='apart' needs a transformers model whose layers keep their experts in one"
            " parameter; pass experts that are modules of their own in blocks=, or leave experts="
            " out"
        )
    try:
        for name, module in found:
            made.add(name, module)
    except BaseException:
        made.undo()
        raise
    return made


def parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[Expert]]]:
    """Yield the name of each module of experts that was split, the module, and its experts."""
    for name, module in model.named_modules():
        experts = [c for c in module._modules.values() if isinstance(c, Expert)]
        if experts:
            yield name, module, experts


def all_of(model: nn.Module) -> list[Expert]:
    """Return all experts that were split off."""
    return [expert for _, _, experts in parts(model) for expert in experts]


def advice(theirs: str, ours: str) -> str:
    """Return what to do if one of two names is an expert's part of the other; "" if neither is."""
    fused = [re.sub(r"\.\d+(\.[^.]+)$", r"\1", name) for name in (theirs, ours)]
    if theirs == ours or fused[0] != fused[1]:
        return ""
    if theirs == fused[0]:
        return ": the store was created without experts='apart': omit it"
    return ": the store was created with experts='apart': pass it, and idle= if it was passed"
