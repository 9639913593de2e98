"""Replacements for a wrapped model's methods, which load and store real values or raise errors.

The replacements are instance attributes that shadow methods of the class, so that `wrap` returns
the same module, of the same class.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.errors import (
    FrozenParameterError,
    LentError,
    StaleStateError,
    StepError,
    UnsupportedError,
)
from lohan.layout import _names
from lohan.session._forward import refuse_read
from lohan.session._outside import Outside, refuse_replicas
from lohan.store import _store
from lohan.store._block_writer import BlockWriter
from lohan.torch_glue import _peft
from lohan.torch_glue._compile import Traced, Uncompiled, skip_lohan
from lohan.torch_glue._hollow import NO_DDP, HollowClasses, show
from lohan.torch_glue._tensor import ReadParameters, check_bytes, is_same, without_classes

if TYPE_CHECKING:
    from lohan.session._training import Training


def _refuse(what: str, way_out: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{what} of a wrapped model is not supported: {way_out}")

    return refuse


_REFUSED = {
    "to_empty": _refuse(
        "to_empty()",
        "it would discard the values: build the model in lohan.empty() and wrap it with"
        " init='model', or change values in a loop over model.named_parameters()",
    ),
    "__deepcopy__": _refuse(
        "deepcopy",
        "copy model.state_dict(), or wrap a second model. For averages of its parameters"
        " (AveragedModel, ModelEma), pass ema=DECAY to lohan.wrap()",
    ),
    "__reduce_ex__": _refuse(
        "pickle (torch.save, copy.copy)",
        "save model.state_dict(), or use the store, which is a checkpoint",
    ),
}

_REFUSED_OF_ADAPTERS = _refuse(
    "merging adapters (merge_adapter, merge_and_unload, fuse_lora)",
    "it would change the frozen base weights. Evaluation and generation need no merge. For merged"
    " weights, call lohan.unwrap(model) first, if memory holds the whole model; or save the adapter"
    ' with model.save_pretrained("adapter"), and merge it in a program without lohan',
)


class _RefuseDdp:
    """What DistributedDataParallel reads of a module first: the names of parameters to ignore."""

    def __iter__(self) -> Iterator[str]:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(NO_DDP)


def _bound(method: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Bind a method to a module by a weak reference, so that `del model` can free the module."""
    return functools.partial(method, weakref.ref(module))


def _has_no_tensors(module: nn.Module) -> bool:
    """Return whether a module has neither parameters nor buffers.

    Several models may share one: some classes of transformers have functions of activation as
    modules that exist once in a process.
    """
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


def _owner(reference: weakref.ref[nn.Module]) -> nn.Module:
    owner = reference()
    assert owner is not None
    return owner


class Guard:
    """The shadows of one model's methods: this class installs and removes them."""

    def __init__(
        self, model: nn.Module, session: Training, save_pretrained: Callable[..., None]
    ) -> None:
        self.save = save_pretrained
        self.session = session
        self.model = weakref.ref(model)
        self.index = {id(p.tensor): p.index for p in session.layout.params}
        self.handles: list[Any] = []
        self.shadowed: list[tuple[weakref.ref[nn.Module], list[str]]] = []
        self.watched: list[weakref.ref[nn.Module]] = []
        self.readers: dict[int, Callable[[], bool]] = {}  # by the unit's index
        self.filled: tuple[int, dict[int, str]] = (0, {})  # id of a state dict, names in it
        self.leaves_out: frozenset[int] = frozenset()  # parameters that a state dict leaves hollow
        self.closer: weakref.finalize[Any, nn.Module] | None = None  # closes the session
        # The hollow class of torch's own parameters. A user's class may read values in ways that
        # HollowParameter does not notice, so that a loop loads them at once.
        self.plain_hollow: type | None = None
        self.outside = Outside(model, self.index)
        self.only_names = False  # whether loops load no values, until zero_grad()

    def shadow(self, module: nn.Module, name: str, function: object) -> None:
        """Shadow an attribute of a module's class with one of the module."""
        object.__setattr__(module, name, function)
        reference = weakref.ref(module)
        if not self.shadowed or self.shadowed[-1][0] is not reference:
            self.shadowed.append((reference, []))
        self.shadowed[-1][1].append(name)

    def install(self) -> None:
        """Install the shadows and hooks on the model and its modules."""
        model = self.model()
        assert model is not None
        self.hide()
        skip_lohan()
        uncompiled = Uncompiled(model, self.shadow)
        if _peft.is_peft(model):
            self.shadow(model, "save_pretrained", self._save_adapters(model))
        # torch marks the hook with an attribute, which a bound method cannot carry.
        fill: Any = functools.partial(self._fill_state_dict)
        named_parameters, on_trace = self._named_parameters, uncompiled.on_trace
        save = self._save_to_state_dict
        same: dict[str, Callable[..., Any]] = {"compile": uncompiled.compile, **_REFUSED}
        methods: dict[str, Callable[..., Any]] = {
            "zero_grad": self._zero_grad,
            "load_state_dict": self._load_state_dict,
            "_apply": self._apply,
        }
        for module in model.modules():
            if module is not model and _has_no_tensors(module):
                continue
            for name, function in same.items():
                self.shadow(module, name, function)
            self.shadow(module, "_ddp_params_and_buffers_to_ignore", _RefuseDdp())
            for name, method in methods.items():
                self.shadow(module, name, _bound(method, module))
            traced = Traced(named_parameters, weakref.ref(module))
            traced.on_trace = on_trace
            self.shadow(module, "named_parameters", traced)
            if _names.is_hugging_face(module) or _names.is_diffusers(module):
                self.shadow(module, "save_pretrained", self._save_pretrained(module))
            if hasattr(module, "merge") and hasattr(module, "unmerge"):  # a layer with adapters
                self.shadow(module, "merge", _REFUSED_OF_ADAPTERS)
            if hasattr(module, "save_lora_adapter"):  # of diffusers
                self.shadow(module, "save_lora_adapter", self._save_lora_adapter(module))
            if any(p is not None for p in module._parameters.values()):
                register: Any = module.register_state_dict_post_hook
                self.handles.append(register(fill))
                self.shadow(module, "_save_to_state_dict", _bound(save, module))
                self.shadow(module, "_load_from_state_dict", _bound(self._load_module, module))
                self.watch(module)

        self.handles.append(model.register_forward_pre_hook(self.outside.before_forward))

    def hide(self) -> None:
        """Give every parameter a class that raises an error if it is read while it is hollow."""
        classes = HollowClasses(self.session)
        for param in self.session.layout.params:
            pair = classes.hide(param.tensor)
            if pair is not None and pair[0] is nn.Parameter:
                self.plain_hollow = pair[1]
            if pair is not None:
                self.session.engine.classes(param.index, *pair)
                self.session.forwards.autocast.mark(param.index, param.tensor, pair[0])

    def watch(self, module: nn.Module) -> None:
        """Make the module notify the engine when one of its parameters is read."""
        reads = {
            name: self.reader(self.index[id(tensor)])
            for name, tensor in module._parameters.items()
            if id(tensor) in self.index
        }
        object.__setattr__(module, "_parameters", ReadParameters(module._parameters, reads))
        self.watched.append(weakref.ref(module))

    def reader(self, index: int) -> Callable[[], bool]:
        """Return the function to call when the parameter is read as an attribute of its module."""
        unit = self.session.layout.params[index].unit
        if unit not in self.readers:
            self.readers[unit] = self.session.reader(unit)
        return self.readers[unit]

    def remove(self) -> None:
        """Remove all shadows and hooks."""
        for handle in self.handles:
            handle.remove()
        for reference, names in self.shadowed:
            module = reference()
            for name in names:
                if module is not None and name in module.__dict__:
                    object.__delattr__(module, name)
        for watched in self.watched:
            module = watched()
            if module is not None:
                object.__setattr__(module, "_parameters", dict(module._parameters))
        for param in self.session.layout.params:
            show(param.tensor)
        self.handles.clear()
        self.shadowed.clear()
        self.watched.clear()

    def _named_parameters(
        self,
        reference: weakref.ref[nn.Module],
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters. Between steps, their values come when they are used."""
        from lohan.session._loop import Loop

        refuse_replicas()
        owner = _owner(reference)
        session = self.session
        with Loop(session, self._write_changed) as loop:
            plain = type(owner).named_parameters
            for name, tensor in plain(owner, prefix, recurse, remove_duplicate):
                index = self.index.get(id(tensor))
                is_other = session.closed or self.only_names
                if index is None or is_other or (not loop.is_begun and session.is_underway):
                    loop.end()
                else:
                    if not loop.is_begun:
                        refuse_read()
                    loop.begin(index, name, tensor)
                    if type(tensor) is not self.plain_hollow and not session.is_underway:
                        loop.load()
                yield name, tensor

    def _zero_grad(self, reference: weakref.ref[nn.Module], set_to_none: bool = True) -> None:
        """Clear gradients without loading any values."""
        owner = _owner(reference)
        self.only_names = False
        tensors = (tensor for _, tensor in type(owner).named_parameters(owner))
        self.session.open_step.zero_grad(tensors)

    def _write_changed(self, index: int, name: str, value: torch.Tensor) -> None:
        """Write what a loop over parameters has changed."""
        layout = self.session.layout
        param = layout.params[index]
        unit = layout.units[param.unit]
        is_fixed = not unit.trainable and not unit.runs and param.stream is None
        try:
            if is_fixed and self.session.config.commit_every != "never":
                self.session.edits.check()  # in several processes, the others may have read it
                raise FrozenParameterError(
                    f"parameter {name!r} was frozen at lohan.wrap() and cannot be written again:"
                    " call lohan.unwrap(model), change it, and wrap the model with a new store"
                )
            self.write({name: value}, {name: index})
        except (FrozenParameterError, LentError, StepError, UnsupportedError):
            self.session.commits.undo_edit(index)
            raise

    def _save_to_state_dict(
        self, reference: weakref.ref[nn.Module], *args: Any, **kwargs: Any
    ) -> None:
        """Let torch put hollow parameters into a state dict, where _fill_state_dict finds them."""
        owner = _owner(reference)
        with without_classes():
            type(owner)._save_to_state_dict(owner, *args, **kwargs)

    def _fill_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Replace a state dict's hollow parameters by real values; tied names share one tensor."""
        from lohan.store import _stale

        metadata[_stale.KEY] = _stale.stamp(self.session)
        if self.filled[0] != id(state):
            self.filled = (id(state), {})
        first_names = self.filled[1]
        for name, tensor in module._parameters.items():
            key = prefix + name
            if tensor is None or key not in state or id(tensor) not in self.index:
                continue
            index = self.index[id(tensor)]
            if index in self.leaves_out:
                state[key] = tensor  # hollow: reading it raises an error with its name
                continue
            value = self.session.parameters.value(index)
            # Compare values: the dict may be another one with the same id, or be older than a step.
            if first_names.get(index) not in state:
                first_names[index] = key  # the old name is from an earlier dict with the same id
            first = first_names[index]
            is_shared = first != key and is_same(state.get(first), value)
            state[key] = state[first] if is_shared else value

    def _save_pretrained(self, module: nn.Module) -> Callable[..., None]:
        reference = weakref.ref(module)

        def save_pretrained(
            save_directory: str,
            is_main_process: bool = True,
            state_dict: Any = None,
            **options: Any,
        ) -> None:
            owner = reference()
            assert owner is not None
            options = {**options, "is_main_process": is_main_process, "state_dict": state_dict}
            self.save(owner, self.session, self.index, save_directory, **options)

        return save_pretrained

    def _save_adapters(self, model: nn.Module) -> Callable[..., Any]:
        """Make peft's save_pretrained use a state dict without the base weights.

        The base weights are almost as large as the model, and peft does not save them.
        """
        plain: Any = type(model).save_pretrained  # type: ignore[attr-defined]
        reference = weakref.ref(model)

        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            owner = reference()
            assert owner is not None
            if kwargs.get("state_dict") is None:
                kwargs["state_dict"] = self._state_without_base(owner, kwargs)
            return plain(owner, *args, **kwargs)

        return save_pretrained

    def _save_lora_adapter(self, module: nn.Module) -> Callable[..., Any]:
        """Make diffusers' save_lora_adapter, which reads a whole state dict, leave the base out."""
        plain: Any = type(module).save_lora_adapter  # type: ignore[attr-defined]
        reference = weakref.ref(module)

        def save_lora_adapter(*args: Any, **kwargs: Any) -> Any:
            owner = reference()
            assert owner is not None
            try:
                self.leaves_out = self._frozen(set())
                return plain(owner, *args, **kwargs)
            finally:
                self.leaves_out = frozenset()

        return save_lora_adapter

    def _state_without_base(self, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        kept = _peft.saved(model, dict(_names.walk(model)), options)
        try:
            self.leaves_out = self._frozen(kept)
            return model.state_dict()
        finally:
            self.leaves_out = frozenset()

    def _frozen(self, kept: set[int]) -> frozenset[int]:
        """Return the indices of the frozen parameters, except for those with the ids in kept."""
        layout = self.session.layout
        return frozenset(
            param.index
            for param in layout.params
            if not layout.units[param.unit].trainable
            and param.stream is None
            and id(param.tensor) not in kept
        )

    def _load_state_dict(
        self,
        reference: weakref.ref[nn.Module],
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Write values to the store (moments do not change) and buffers to the module."""
        from lohan.store import _stale

        model = _owner(reference)
        state_dict = self.session.apart.unfused(state_dict, model)
        names: dict[str, int] = {}
        for module_name, module in model.named_modules(remove_duplicate=False):
            for name, tensor in module._parameters.items():
                if tensor is not None and id(tensor) in self.index:
                    full = f"{module_name}.{name}" if module_name else name
                    names[full] = self.index[id(tensor)]
        rest = {k: v for k, v in state_dict.items() if k not in names}
        given = {k: v for k, v in state_dict.items() if k in names}
        for key, value in given.items():
            check_bytes(value, f"{key!r} in the state dict of load_state_dict()")
        missing = [k for k in names if k not in given]
        if _stale.is_fresh(self.session):
            different = self.first_difference(model, state_dict, names)
            if different is not None:
                self.check_stale(state_dict, different)
        before = [(b, b.clone()) for n, b in model.named_buffers() if n in rest]
        result = _load_buffers(model, rest, set(names))
        missing += result.missing_keys
        params = self.session.layout.params
        problems = [
            f"{key}: {tuple(value.shape)} for {tuple(params[names[key]].tensor.shape)}"
            for key, value in given.items()
            if value.shape != params[names[key]].tensor.shape
        ]
        if strict and (missing or result.unexpected_keys):
            problems += [f"missing {missing}", f"unexpected {result.unexpected_keys}"]
        if problems:
            raise RuntimeError("load_state_dict: " + "; ".join(problems))
        news = self.news(given, names)
        self.write(news, names)
        if not news and any(not is_same(old, new) for new, old in before):
            self.session.edits.made_of_buffers()
        return type(result)(missing, result.unexpected_keys)

    def _load_module(self, reference: weakref.ref[nn.Module], *args: Any) -> None:
        """Load the module's values from the state dict of a module that contains the model."""
        from lohan.session import _loading

        _loading.load_module(self, _owner(reference), *args)

    def first_difference(
        self, model: nn.Module, state_dict: Mapping[str, Any], names: Mapping[str, int]
    ) -> str | None:
        """Return the name of a parameter or buffer that the state dict would change, or None."""
        buffers = dict(model.named_buffers())
        for key, value in state_dict.items():
            if not isinstance(value, torch.Tensor):
                continue
            if key in names:
                mine = self.session.parameters.host_value(names[key])
            elif key in buffers:
                mine = buffers[key].detach().cpu()
            else:
                continue
            if value.shape != mine.shape:
                continue  # reported by a different error
            if not is_same(value.detach().to(mine).contiguous(), mine.contiguous()):
                return key
        return None

    def check_stale(self, state_dict: Mapping[str, Any], name: str) -> None:
        """Reject values of another step right after a resume; see _stale.check_weights()."""
        from lohan.store import _stale

        try:
            _stale.check_weights(self.session, state_dict, name)
        except StaleStateError:
            self.session.edits.refuse()
            raise

    def news(self, given: Mapping[str, Any], names: Mapping[str, int]) -> dict[str, Any]:
        """Return only the values that differ, so that fp32 masters of equal 16-bit values stay.

        Raises:
            FrozenParameterError: the value of a frozen parameter would change.
        """
        layout = self.session.layout
        news = {}
        for key, value in self._without_in_place(given, names).items():
            param = layout.params[names[key]]
            is_trainable = layout.units[param.unit].trainable
            mine = self.session.parameters.host_value(param.index).contiguous()
            theirs = value.detach().cpu() if is_trainable else value.detach().to(mine)
            if is_same(theirs.contiguous(), mine):
                continue
            if param.stream is not None:
                self.session.edits.check()
            if not is_trainable:
                raise FrozenParameterError(
                    f"load_state_dict() has other values for {key!r}, which was frozen at"
                    " lohan.wrap() and cannot be written again: call lohan.unwrap(model), load the"
                    " values, and wrap the model with a new store"
                )
            news[key] = value
        return news

    def write(self, given: Mapping[str, Any], names: Mapping[str, int]) -> None:
        """Write values of parameters to the store.

        Args:
            given: the values by name.
            names: the parameters' indices by name.
        """
        session = self.session
        layout = session.layout
        given = self._without_in_place(given, names)
        if not given:
            return
        session.edits.check()
        session.forwards.end_interrupted()
        changed = sorted({layout.params[names[key]].unit for key in given})
        with session.exclusive(changed) as store:
            writer = BlockWriter(store)
            for key, value in given.items():
                param = layout.params[names[key]]
                unit = layout.units[param.unit]
                places = session.extents.units[param.unit]
                flat = param.flat(value.cpu())
                _store.write_param(writer, unit, places, param.first, flat, is_fresh=False)
            writer.flush()
            session.edits.made(store)

    def _without_in_place(
        self, given: Mapping[str, Any], names: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the values without those of parameters read in place, which must be equal."""
        session = self.session
        left = {}
        for key, value in given.items():
            param = session.layout.params[names[key]]
            is_moved = param.stream is not None  # the files have its initial value
            if is_moved or not session.layout.units[param.unit].runs:
                left[key] = value
                continue
            values = session.layout.in_place.read(session.layout, param)
            if not is_same(value.detach().to("cpu", values.dtype).contiguous(), values):
                raise UnsupportedError(
                    f"parameter {param.name!r} is frozen and read in place, so it cannot be"
                    f" changed: lohan never writes to {session.layout.in_place.path(param)}. Wrap"
                    ' with IO(frozen="copy") to change it'
                )
        return left

    def _apply(
        self,
        reference: weakref.ref[nn.Module],
        fn: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> nn.Module:
        """Handle `.to()`, `.half()` and `.cuda()`: lohan manages devices; dtypes cannot change.

        Some models call to() on a module in every forward; after wrap, such a call has no effect.
        """
        owner = _owner(reference)
        owned = (each._parameters.values() for each in owner.modules())
        for dtype in {param.dtype for params in owned for param in params if param is not None}:
            given = torch.ones(1).to(dtype)
            probe = fn(given)
            if why := _why_not_applied(given, probe):
                raise UnsupportedError(why)
        return owner


def _why_not_applied(given: torch.Tensor, made: torch.Tensor) -> str:
    """Return why a function cannot be applied to parameters in a store, or "" if it can.

    Args:
        given: a tensor whose only element is 1.
        made: the result of applying the function to it.
    """
    if made.is_meta:
        return (
            'moving a wrapped model to "meta" is not supported, and not needed: its values are in'
            " the store, not in memory, while it does not compute. model.lohan.close() ends the"
            " session; lohan.unwrap(model) loads the values into memory"
        )
    # For torch, memory of an accelerator always counts as shared.
    if made.device.type == "cpu" and made.is_shared():  # type: ignore[no-untyped-call]
        return (
            "share_memory() of a wrapped model is not supported: its parameters are in memory only"
            " while they are used, and only one process trains it. Give other processes"
            " model.state_dict(), or a copy of the store made by lohan.snapshot()"
        )
    if made.shape != given.shape or not torch.equal(made.detach().cpu().float(), given.float()):
        return (
            "a function that changes values cannot be applied to all parameters of a wrapped model:"
            " change them in a loop over model.named_parameters(), or with model.load_state_dict()"
        )
    if made.dtype != given.dtype:
        return (
            f"changing the dtype of a wrapped model ({given.dtype} to {made.dtype}) is not"
            " supported: convert the model before lohan.wrap()"
        )
    return ""


def _load_buffers(model: nn.Module, state: dict[str, Any], params: set[str]) -> Any:
    """Load buffers with torch's own method; state has no parameters, which may thus be missing."""
    plain = nn.Module.load_state_dict(model, state, strict=False)
    missing = [key for key in plain.missing_keys if key not in params]
    return type(plain)(missing, plain.unexpected_keys)
