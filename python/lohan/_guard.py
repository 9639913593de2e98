"""What a wrapped model's own methods do: real values out and in, and named errors.

Instance attributes shadow methods of the class: `wrap` returns the same module, of the same class.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lohan import _export, _names, _peft, _store
from lohan._compile import Traced, Uncompiled
from lohan._hollow import HollowClasses, show
from lohan._session import Session
from lohan._tensor import ReadParameters, bits_checksum, is_same, without_classes
from lohan.errors import FrozenParameterError, LentError, UnsupportedError


def _refuse(what: str, way_out: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{what} of a wrapped model is not possible: {way_out}")

    return refuse


class Guard:
    """Installs and removes the shadows on one model."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.session = session
        self.model = weakref.ref(model)
        self.index = {id(p.tensor): p.index for p in session.layout.params}
        self.handles: list[Any] = []
        self.shadowed: list[tuple[weakref.ref[nn.Module], str]] = []
        self.watched: list[weakref.ref[nn.Module]] = []
        self.filled: tuple[int, dict[int, str]] = (0, {})  # id of a state dict, names in it
        self.has_said_added = False
        self.leaves_out: frozenset[int] = frozenset()  # parameters that a state dict leaves hollow
        self.only_names = False  # loops over parameters are for names and shapes, till zero_grad()

    def shadow(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        """Put an instance attribute over a method."""
        object.__setattr__(module, name, function)
        self.shadowed.append((weakref.ref(module), name))

    def install(self) -> None:
        """Shadow what cannot work as it is, and hook what can."""
        model = self.model()
        assert model is not None
        self.hide()
        uncompiled = Uncompiled(model, self.shadow)
        if _peft.is_peft(model):
            self.shadow(model, "save_pretrained", self._save_adapters(model))
        for module in model.modules():
            self.shadow(module, "zero_grad", self._zero_grad(module))
            named_parameters = Traced(self._named_parameters(module), uncompiled.on_trace)
            self.shadow(module, "named_parameters", named_parameters)
            self.shadow(module, "compile", uncompiled.compile)
            self.shadow(module, "load_state_dict", self._load_state_dict(module))
            self.shadow(module, "_apply", self._apply(module))
            self.shadow(
                module,
                "__deepcopy__",
                _refuse("deepcopy", "copy model.state_dict(), or wrap a second model"),
            )
            self.shadow(
                module,
                "__reduce_ex__",
                _refuse(
                    "pickle", "save model.state_dict(), or use the store, which is a checkpoint"
                ),
            )
            if _names.is_hugging_face(module):
                self.shadow(module, "save_pretrained", self._save_pretrained(module))
            if any(p is not None for p in module._parameters.values()):
                # torch marks the hook with an attribute, which a bound method cannot carry.
                hook = functools.partial(self._fill_state_dict)
                register: Any = module.register_state_dict_post_hook
                self.handles.append(register(hook))
                self.shadow(module, "_save_to_state_dict", self._save_to_state_dict(module))
                self.watch(module)

        self.handles.append(model.register_forward_pre_hook(self._look_for_added))

    def _look_for_added(self, module: nn.Module, args: Any) -> None:
        """Say once that a parameter came after wrap: its gradient has nowhere to go."""
        if self.has_said_added or not torch.is_grad_enabled():
            return
        for name, part in module.named_modules():
            for own, param in part._parameters.items():
                is_new = param is not None and id(param) not in self.index
                if is_new and param.requires_grad and param.numel() > 0:
                    self.has_said_added = True
                    print(
                        f"lohan: parameter {f'{name}.{own}' if name else own!r} came after"
                        " lohan.wrap(), and model.optimizer does not train it: lohan.unwrap(model),"
                        " then wrap it as it is to be",
                        file=sys.stderr,
                    )
                    return

    def hide(self) -> None:
        """Give every parameter the class that refuses to be read while it is hollow."""
        classes = HollowClasses(self.session)
        for param in self.session.layout.params:
            pair = classes.hide(param.tensor)
            if pair is not None:
                self.session.classes(param.index, *pair)

    def watch(self, module: nn.Module) -> None:
        """Have the engine told when a parameter of the module is read."""
        reads = {
            name: self.session.reader(self.index[id(tensor)])
            for name, tensor in module._parameters.items()
            if id(tensor) in self.index
        }
        object.__setattr__(module, "_parameters", ReadParameters(module._parameters, reads))
        self.watched.append(weakref.ref(module))

    def remove(self) -> None:
        """Take everything off again."""
        for handle in self.handles:
            handle.remove()
        for reference, name in self.shadowed:
            module = reference()
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

    def _named_parameters(self, module: nn.Module) -> Callable[..., Iterator[tuple[str, Any]]]:
        """Parameters have their real data while the loop is at them, unless a step is under way."""
        plain = type(module).named_parameters
        reference = weakref.ref(module)

        def named_parameters(
            prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, nn.Parameter]]:
            owner = reference()
            assert owner is not None
            for name, tensor in plain(owner, prefix, recurse, remove_duplicate):
                is_other = id(tensor) not in self.index or self.session.closed
                if is_other or self.only_names or self.session.is_underway:
                    yield name, tensor
                    continue
                yield from self._show(name, tensor)

        return named_parameters

    def _zero_grad(self, module: nn.Module) -> Callable[..., None]:
        """Without values: nothing needs to be in memory for it."""
        plain = type(module).named_parameters
        reference = weakref.ref(module)

        def zero_grad(set_to_none: bool = True) -> None:
            owner = reference()
            assert owner is not None
            self.only_names = False
            self.session.zero_grad(tensor for _, tensor in plain(owner))

        return zero_grad

    def _show(self, name: str, tensor: nn.Parameter) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameter with its real data; what is changed meanwhile goes to the store."""
        index = self.index[id(tensor)]
        after: torch.Tensor | None = None
        try:
            with self.session.resident(index):
                before = bits_checksum(tensor)
                shape, dtype = tensor.shape, tensor.dtype
                # What the loop computes is saved as handles: the parameter itself turns hollow.
                self.session.saved.enter()
                try:
                    yield name, tensor
                finally:
                    self.session.saved.leave()
                    if bits_checksum(tensor) != before or tensor.shape != shape:
                        after = tensor.detach().clone()
        finally:
            if after is not None:
                if after.shape != shape or after.dtype != dtype:
                    raise UnsupportedError(
                        f"parameter {name!r} of a wrapped model cannot become"
                        f" {tuple(after.shape)} {after.dtype}: its place is for"
                        f" {tuple(shape)} {dtype}"
                    )
                try:
                    self._write({name: after}, {name: index})
                except (LentError, UnsupportedError):
                    self.session.undo_edit(index)
                    raise

    def _save_to_state_dict(self, module: nn.Module) -> Callable[..., None]:
        """Let torch put hollow parameters into a state dict, where _fill_state_dict finds them."""
        plain = type(module)._save_to_state_dict
        reference = weakref.ref(module)

        def save(*args: Any, **kwargs: Any) -> None:
            owner = reference()
            assert owner is not None
            with without_classes():
                plain(owner, *args, **kwargs)

        return save

    def _fill_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Put real values where a module's hollow parameters are: tied names share a tensor."""
        if self.filled[0] != id(state):
            self.filled = (id(state), {})
        first_names = self.filled[1]
        for name, tensor in module._parameters.items():
            key = prefix + name
            if tensor is None or key not in state or id(tensor) not in self.index:
                continue
            index = self.index[id(tensor)]
            if index in self.leaves_out:
                state[key] = tensor  # hollow: whoever reads it is told its name
                continue
            value = self.session.lend(index).cpu()
            # The dict may be another one by now, or from before a step: the bits tell.
            if first_names.get(index) not in state:
                first_names[index] = key  # of another dict, which had this one's place
            first = first_names[index]
            is_shared = first != key and is_same(state.get(first), value)
            state[key] = state[first] if is_shared else value.clone()

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
            _export.save_pretrained(owner, self.session, self.index, save_directory, **options)

        return save_pretrained

    def _save_adapters(self, model: nn.Module) -> Callable[..., Any]:
        """Peft's own, of a state dict without the base weights: they are as large as the model."""
        plain: Any = type(model).save_pretrained  # type: ignore[attr-defined]
        reference = weakref.ref(model)

        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            owner = reference()
            assert owner is not None
            if kwargs.get("state_dict") is None:
                asked = kwargs.get("save_embedding_layers", "auto")
                kwargs["state_dict"] = self._state_without_base(owner, asked)
            return plain(owner, *args, **kwargs)

        return save_pretrained

    def _state_without_base(self, model: nn.Module, asked: Any) -> dict[str, Any]:
        layout = self.session.layout
        kept = _peft.embeddings(model) if _peft.needs_embeddings(model, asked) else set()
        self.leaves_out = frozenset(
            param.index
            for param in layout.params
            if not layout.units[param.unit].trainable
            and param.stream is None
            and id(param.tensor) not in kept
        )
        try:
            return model.state_dict()
        finally:
            self.leaves_out = frozenset()

    def _load_state_dict(self, module: nn.Module) -> Callable[..., Any]:
        reference = weakref.ref(module)

        def load_state_dict(
            state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
        ) -> Any:
            owner = reference()
            assert owner is not None
            return self._load(owner, state_dict, strict)

        return load_state_dict

    def _load(self, model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Put values into the store (moments stay as they are), buffers into the module."""
        names: dict[str, int] = {}
        for module_name, module in model.named_modules(remove_duplicate=False):
            for name, tensor in module._parameters.items():
                if tensor is not None and id(tensor) in self.index:
                    full = f"{module_name}.{name}" if module_name else name
                    names[full] = self.index[id(tensor)]
        rest = {k: v for k, v in state_dict.items() if k not in names}
        given = {k: v for k, v in state_dict.items() if k in names}
        missing = [k for k in names if k not in given]
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
        news = self._news(self._without_in_place(given, names), names)
        self._write(news, names)
        if rest and not news:
            self.session.edited_buffers()
        return type(result)(missing, result.unexpected_keys)

    def _news(self, given: Mapping[str, Any], names: Mapping[str, int]) -> dict[str, Any]:
        """Leave out what is there already: an fp32 master below a 16-bit value stays as it is.

        Raises:
            FrozenParameterError: a frozen parameter would get another value.
        """
        layout = self.session.layout
        news = {}
        for key, value in given.items():
            param = layout.params[names[key]]
            is_trainable = layout.units[param.unit].trainable
            mine = self.session.lend(param.index).cpu()
            theirs = value.detach().cpu() if is_trainable else value.detach().to(mine)
            if is_same(theirs.contiguous(), mine):
                continue
            if param.stream is not None:
                self.session.check_edit()
            if not is_trainable:
                raise FrozenParameterError(
                    f"load_state_dict() has other values for {key!r}, which was frozen at"
                    " lohan.wrap() and lies where nothing is written again: lohan.unwrap() the"
                    " model, load them, and wrap it with a new store"
                )
            news[key] = value
        return news

    def _write(self, given: Mapping[str, Any], names: Mapping[str, int]) -> None:
        session = self.session
        layout = session.layout
        given = self._without_in_place(given, names)
        if not given:
            return
        session.check_edit()
        changed = sorted({layout.params[names[key]].unit for key in given})
        with session.exclusive(changed) as store:
            for key, value in given.items():
                param = layout.params[names[key]]
                unit = layout.units[param.unit]
                places = session.extents.units[param.unit]
                _store.write_param(store, unit, places, param.first, value.cpu(), is_fresh=False)
            session.edited(store)

    def _without_in_place(
        self, given: Mapping[str, Any], names: Mapping[str, int]
    ) -> dict[str, Any]:
        """What has to be written: files that are read in place have their values already."""
        session = self.session
        left = {}
        for key, value in given.items():
            param = session.layout.params[names[key]]
            is_moved = param.stream is not None  # files have what it was
            if is_moved or not session.layout.units[param.unit].runs:
                left[key] = value
                continue
            values = session.layout.in_place.read(session.layout, param)
            if not is_same(value.detach().to("cpu", values.dtype).contiguous(), values):
                raise UnsupportedError(
                    f"parameter {param.name!r} is frozen and read in place: it cannot become"
                    f" another, as lohan never writes to {session.layout.in_place.path(param)}:"
                    ' wrap with frozen="copy" to change it'
                )
        return left

    def _apply(self, module: nn.Module) -> Callable[..., nn.Module]:
        """`.to()`, `.half()`, `.cuda()`: places are lohan's business, dtypes cannot change."""
        reference = weakref.ref(module)  # a module that holds itself would outlive `del model`
        # Some forwards convert a module of theirs each time, which does nothing from then on.
        owned = (each._parameters.values() for each in module.modules())
        dtypes = {param.dtype for params in owned for param in params if param is not None}

        def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            for dtype in dtypes:
                probe = fn(torch.zeros(1, dtype=dtype))
                if probe.dtype != dtype:
                    raise UnsupportedError(
                        f"changing the dtype of a wrapped model ({dtype} to {probe.dtype}) is not"
                        " possible: convert before lohan.wrap()"
                    )
            owner = reference()
            assert owner is not None
            return owner

        return apply


def _load_buffers(model: nn.Module, state: dict[str, Any], params: set[str]) -> Any:
    """Load buffers with torch's own method; parameters are not its business here."""
    plain = nn.Module.load_state_dict(model, state, strict=False)
    missing = [key for key in plain.missing_keys if key not in params]
    return type(plain)(missing, plain.unexpected_keys)
