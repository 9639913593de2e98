"""Parameters without storage, of which `lohan.empty()` makes a model.

[Note: Empty parameters] An empty parameter is a tensor on the meta device of a class of its own. It
calls itself a tensor on the CPU, because libraries that add modules to a model (adapters, heads,
prompts) move them to the device of its parameters: on the meta device they would lose their values.
It also keeps what a loader copies into it, which a plain meta tensor drops silently. Values are
kept if they are given as a whole (`copy_`, `.data =`, load_state_dict). Other writes with values
are an error, or, in the middle of a constructor, are recorded: wrap() then rejects a parameter
whose values come from nowhere else. What is written without values (zeros_(), normal_()) is
recorded: initial() repeats it where the parameter is fresh. So it is initialised as its
constructor, or that of a module around it, does it. The values of `nn.Parameter(values)` count as
such a write: one number if all are equal, otherwise a copy of up to 64 MiB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from lohan.errors import ModelError
from lohan.torch_glue._buffers import building
from lohan.torch_glue._tensor import without_classes

_CPU = torch.device("cpu")
_DEVICE = torch.Tensor.device.__get__
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# What wrap() asks thousands of times; the answers are neither tensors nor values.
_Tensor: Any = torch.Tensor
_FACTS = {
    *(_Tensor.shape.__get__, _Tensor.dtype.__get__, _Tensor.nbytes.__get__, _Tensor.numel),
    *(_Tensor.requires_grad.__get__, _Tensor.stride, _Tensor.is_contiguous),
}
_WHOLE = {_GET_DATA, torch.Tensor.detach, torch.detach, torch.Tensor.requires_grad_}
_MOVES = {torch.Tensor.to, torch.Tensor.cpu}
# Functions whose results do not depend on values: constructors make buffers with them.
_FILLED = {torch.zeros_like, torch.ones_like, torch.full_like}
# Functions whose results a program uses as numbers. Decompositions are those from which adapters
# take their initial values (PiSSA, OLoRA, ...).
_READERS = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"),
    *("svd", "linalg_svd", "svd_lowrank", "pca_lowrank", "qr", "linalg_qr", "linalg_eigh"),
    *("linalg_svdvals", "equal", "allclose"),
}

# What lohan calls again to initialise a module's parameters.
_REPEATED = {"reset_parameters", "_init_weights"}
# Functions that set all elements of a tensor without other tensors, with those of torch.nn.init.
_FILLS = {
    *("zero_", "fill_", "normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "random_"),
    *("constant_", "ones_", "zeros_", "eye_", "dirac_", "trunc_normal_", "kaiming_normal_"),
    *("kaiming_uniform_", "xavier_normal_", "xavier_uniform_"),
}
# Those that change the elements which another one has set.
_CHANGES = {"erfinv_", "mul_", "div_", "add_", "sub_", "clamp_", "exp_", "log_", "neg_"}

# Functions that make tensors without setting their values.
_UNSET = {
    *(torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default),
    *(torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty.default),
    torch.ops.aten.new_empty_strided.default,
}
# The most bytes of values that a parameter keeps from its constructor.
_BUILT_BYTES = 64 << 20


def is_building() -> bool:
    """Return whether this thread is inside `lohan.empty()`."""
    return getattr(building, "depth", 0) > 0


class Building:
    """A context in which modules are built without storage."""

    def __init__(self) -> None:
        self._marks: Any = _Marks()  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        building.depth = getattr(building, "depth", 0) + 1
        self._marks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._marks.__exit__(None, None, None)
        building.depth -= 1


class _Marks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the memory of tensors that are made without values (torch.empty())."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _UNSET and not made.is_meta and made.layout is torch.strided:
            made.untyped_storage()._lohan_unset = True
        return made


def _built(param: torch.Tensor) -> tuple[Callable[[torch.Tensor], Any], ...]:
    """Return the write that repeats the values with which a parameter was made; (): unknown."""
    with without_classes(), torch.no_grad():
        values = param.detach()
        # Tensors made in inference mode do not count the writes to them.
        is_written = not param.is_inference() and param._version > 0
        is_unset = getattr(param.untyped_storage(), "_lohan_unset", False) and not is_written
        if is_unset or not values.is_floating_point() or values.itemsize < 2 or not values.numel():
            return ()
        least, largest = (bound.item() for bound in values.aminmax())
        if least == largest:
            return (lambda tensor: tensor.fill_(least),)
        if values.nbytes > _BUILT_BYTES:
            return ()
        kept = values.clone()
        return (lambda tensor: tensor.copy_(kept),)


class Empty(torch.Tensor):
    """An empty parameter, or a tensor computed from one; see [Note: Empty parameters].

    Attributes:
        given: the values that the parameter was given as a whole, or None.
        is_loaded: whether they were loaded into the finished module, and not set as it was built.
        is_in_part: whether values were written to a part of it, which are lost.
        writes: the writes without values after which the parameter is initialised; see initial().
        rows: "mean" or "module" if transformers resized it: how it initialises new rows, from the
            others or as those of a new module; otherwise "".
    """

    given: torch.Tensor | None = None
    is_loaded = False
    is_in_part = False
    writes: tuple[Callable[[torch.Tensor], Any], ...] = ()
    rows = ""
    _is_param = False  # set by torch.nn.Parameter()
    _root: Empty | None = None  # the parameter that this is a view of, or made of
    _is_whole = False  # whether this is all of it

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, **_: Any) -> Empty:
        """Make an empty parameter of the shape and dtype of a tensor, whose values are dropped."""
        with without_classes():
            plain = data.detach().to("meta").as_subclass(torch.Tensor)
            made: Any = torch.Tensor._make_subclass(cls, plain, requires_grad)
        made._is_param = True
        return made  # type: ignore[no-any-return]

    @property
    def root(self) -> Empty:
        """The parameter that this is, or that this was made of."""
        return self if self._is_param or self._root is None else self._root

    @property
    def is_whole(self) -> bool:
        """Whether this is an empty parameter, or an alias of all of it."""
        return self._is_whole or self.root is self

    def __deepcopy__(self, memo: dict[int, Any]) -> Empty:
        """Return a copy, with its own values if there are any."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        made = Empty(self, self.requires_grad)
        made.given = None if self.given is None else self.given.clone()
        made.is_loaded, made.is_in_part = self.is_loaded, self.is_in_part
        made.rows, made.writes = self.rows, self.writes
        memo[id(self)] = made
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Empty(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute shapes, as on the meta device, and keep values that are copied to a parameter.

        Raises:
            ModelError: the function needs values, or would lose some.
        """
        kwargs = kwargs or {}
        if func in _FACTS:
            with without_classes():
                return func(*args, **kwargs)
        if func == _DEVICE:
            return _CPU
        if func == _IS_META:  # torch's warning that loading has no effect would be wrong
            caller = sys._getframe(1)
            if caller.f_code.co_name == "_no_grad_trunc_normal_":  # which skips a meta tensor
                words = [caller.f_locals[name] for name in ("mean", "std", "a", "b")]
                _note(args[0], nn.init.trunc_normal_, words, {})
            if caller.f_code.co_name == "reset_deft_parameters":  # it leaves a matrix uninitialised
                _unset(caller.f_locals["R_param"])
            return caller.f_code.co_name != "_load_from_state_dict"
        if func == _SET_DATA and isinstance(args[0], Empty):
            return _set_data(args[0], args[1])
        name = str(getattr(func, "__name__", func))
        if name == "__bool__" and _resizes():
            return False  # whether a covariance is positive definite; wrap() computes it
        if name in _READERS:
            raise _no_values(_first(args, kwargs), name)
        if func in _FILLED and is_building():
            with without_classes():
                return func(*tree_map(_meta, args), **{"device": _CPU, **kwargs})
        if func in _MOVES and isinstance(args[0], Empty):
            return _moved(args[0], *args[1:], **kwargs)
        target = args[0] if args else None
        is_write = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if is_write and isinstance(target, Empty):
            values = [v for v in tree_iter((args[1:], kwargs)) if _is_real(v)]
            others = [v for v in tree_iter((args[1:], kwargs)) if isinstance(v, Empty)]
            if values:
                _write(target, func, values[-1])
            if others and not target.root.rows:
                target.root.rows = "module"
            if values or others:
                return target
            if not others:
                _note(target, func, args[1:], kwargs)
        elif is_write and _is_real(target):
            if func == torch.Tensor.copy_ and is_building() and _copied(target, args[1]):
                return target
            raise _no_values(_first(args, kwargs), name)
        elif is_write and not args and isinstance(kwargs.get("tensor"), Empty):  # of torch.nn.init
            _note(kwargs["tensor"], func, (), {k: v for k, v in kwargs.items() if k != "tensor"})
        with without_classes():
            made = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        if made is target:
            return made
        first = _first(args, kwargs)
        root, is_whole = first.root, func in _WHOLE and first.is_whole
        return tree_map(lambda value: _derived(value, root, is_whole=is_whole), made)


def _copied(target: Any, source: Any) -> bool:
    """Note a buffer that a constructor copies from an empty parameter; return False if it does not.

    Detectors replace batch norms by modules whose weights are buffers. The files have their values;
    until those are read, the buffer is NaN.
    """
    is_all = isinstance(source, Empty) and source.is_whole and source.shape == target.shape
    if not is_all or not target.is_floating_point():
        return False
    with torch.no_grad():
        target.fill_(float("nan"))
    building.has_copied = True
    return True


def _unset(target: torch.Tensor) -> None:
    """Fill a tensor with NaN, by which lohan.wrap() recognizes that no values were loaded."""
    with without_classes(), torch.no_grad():
        target.fill_(float("nan"))


def _resizes() -> bool:
    """Return whether transformers computes the rows of new tokens, and if so, note which.

    resize_token_embeddings() computes them from the others, which are not in memory.
    """
    for frame in _frames():
        if frame.f_code.co_name == "_init_added_embeddings_weights_with_mean":
            made = frame.f_locals["new_embeddings"].weight
            if isinstance(made, Empty):
                made.rows = "mean"
                return True
            return False
    return False


def _is_real(value: Any) -> bool:
    """Return whether value is a tensor with elements that have values."""
    return isinstance(value, torch.Tensor) and not value.is_meta and value.numel() > 0


def _meta(value: Any) -> Any:
    """Replace a tensor with values by its shape: torch does not mix devices."""
    return value.detach().to("meta") if _is_real(value) else value


def _first(args: Any, kwargs: Any) -> Empty:
    return next(value for value in tree_iter((args, kwargs)) if isinstance(value, Empty))


def _derived(value: Any, root: Empty, *, is_whole: bool) -> Any:
    if type(value) is not torch.Tensor or not value.is_meta:
        return value
    made: Any = value.as_subclass(Empty)
    made._root, made._is_whole = root, is_whole and root.shape == value.shape
    return made


def _what(param: Empty) -> str:
    said = param.root
    return f"an empty parameter of shape {tuple(said.shape)} ({said.dtype})"


def _no_values(param: Empty, name: str) -> ModelError:
    return ModelError(
        f"{name}() needs the values of {_what(param)}, which lohan.empty() does not create. If an"
        " adapter is initialised from the base's values (PiSSA, OLoRA, LoftQ, EVA, ...), call"
        " get_peft_model on a base that is in memory (from_pretrained), and lohan.wrap without"
        " weights=. Call resize_token_embeddings() inside lohan.empty(). Otherwise create its"
        " module outside of lohan.empty(), or compute with the values after lohan.wrap()"
    )


def _moved(param: Empty, *args: Any, **kwargs: Any) -> Any:
    """Convert the dtype; the parameter is nominally on the CPU already."""
    options = {key: value for key, value in kwargs.items() if key != "copy"}
    with without_classes():
        device, dtype, _, _ = torch._C._nn._parse_to(*tree_map(_meta, args), **options)
        if device is not None and device.type not in ("cpu", "meta"):
            raise ModelError(
                f"{_what(param)} cannot be moved to {device}: wrap the model first; lohan moves"
                " parameters to the device that device= names"
            )
        made = param if dtype in (None, param.dtype) else torch.Tensor.to(param, dtype)
    return made if made is param else _derived(made, param.root, is_whole=param.is_whole)


def _set_data(param: Empty, value: torch.Tensor) -> None:
    """Handle `param.data = value`: keep the value, if there is one."""
    root = value.root if isinstance(value, Empty) and value.is_whole else None
    if root is not None:
        param.rows, param.writes = root.rows, root.writes
    given = value.detach() if _is_real(value) else None
    if root is not None and root is not param:
        given = root.given
    if given is not None:
        param.given, param.is_loaded = given, not is_building()
    elif param.shape != value.shape:
        if param.given is not None and param.is_loaded:
            raise _lost(param, "a change of its shape")
        param.given = None
        if root is None:
            param.writes = ()
    with without_classes():
        _SET_DATA(param, value.detach().to("meta").as_subclass(torch.Tensor))


def _lost(param: Empty, what: str) -> ModelError:
    return ModelError(
        f"values were given to {_what(param)}, and {what} would lose them. Write to it after"
        " lohan.wrap(): in a loop over model.named_parameters(), or with model.load_state_dict()"
    )


def _write(target: Empty, func: Callable[..., Any], value: torch.Tensor) -> None:
    """Keep values that are copied to all of a parameter.

    Raises:
        ModelError: they are for a part of it, or are combined with its own.
    """
    root = target.root
    if func == torch.Tensor.copy_ and target.is_whole:
        with without_classes(), torch.no_grad():
            root.given = value.detach().to(root.dtype).expand(root.shape).clone()
        root.writes, root.is_in_part = (), False
        root.is_loaded = not is_building() or _is_in_loader()
    elif func == torch.Tensor.copy_ and _is_in_loader() and _storage(target) != _storage(root):
        with without_classes(), torch.no_grad():  # a buffer that was computed from a parameter
            target.given = value.detach().to(target.dtype).expand(target.shape).clone()
    elif not is_building() or _is_in_loader():
        raise _lost(target, f"{getattr(func, '__name__', func)}(), which writes to a part of it,")
    elif not _is_repeated():
        root.is_in_part = True


def _note(target: Empty, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Record a write without values, which torch ignores on the meta device."""
    root, name = target.root, getattr(func, "__name__", "")
    if name not in _FILLS and name not in _CHANGES:
        return
    if target.is_whole and root.given is not None:
        with torch.no_grad():
            func(root.given, *args, **kwargs)
    elif target.is_whole and (name in _FILLS or root.writes):
        before = () if name in _FILLS else root.writes
        root.writes = (*before, lambda tensor: func(tensor, *args, **kwargs))
        root.is_in_part = root.is_in_part and name not in _FILLS
    elif _storage(target) == _storage(root):
        root.writes, root.is_in_part = (), not _is_repeated()


def _storage(tensor: torch.Tensor) -> int:
    with without_classes():
        return int(tensor.untyped_storage()._cdata)


def _is_repeated() -> bool:
    return any(frame.f_code.co_name in _REPEATED for frame in _frames())


def initial(param: torch.Tensor | None, values: torch.Tensor) -> bool:
    """Repeat what a constructor has written to an empty parameter; return whether it is known."""
    writes = param.writes if isinstance(param, Empty) else ()
    for write in writes:
        write(values)
    return bool(writes)


def _frames() -> Iterator[Any]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _is_in_loader() -> bool:
    """Return whether a state dict is being loaded."""
    return any(frame.f_code.co_name == "_load_from_state_dict" for frame in _frames())


def is_of_peft() -> bool:
    """Return whether peft registers the parameter: its adapters are small, and keep their values.

    The innermost caller outside of torch and lohan decides: peft also builds whole models.
    """
    for frame in _frames():
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in ("torch", "lohan"):
            return name.partition(".")[0] == "peft"
    return False


def register(module: nn.Module, name: str, plain: Callable[..., None], param: Any) -> None:
    """Register a parameter without storage in place of one with values.

    If it takes the place of another one (a script or a loader assigns values), its values are kept.
    A parameter that peft registers is left unchanged.
    """
    is_given = module._parameters.get(name) is not None
    plain(module, name, param)
    made: Any = module._parameters[name]
    if made is None or isinstance(made, Empty | nn.parameter.UninitializedParameter):
        return
    if made.is_meta or not is_of_peft():
        is_new = not hasattr(made, "_lohan_empty")
        empty = module._parameters[name] = _instead(made)
        if is_new and not is_given and not made.is_meta:
            empty.writes = _built(made)
        if is_given and not made.is_meta:
            empty.given, empty.is_loaded = made.detach(), _is_in_loader()


def _instead(param: Any) -> Any:
    """Return the empty parameter that replaces one, wherever that one is registered."""
    if not hasattr(param, "_lohan_empty"):
        param._lohan_empty = Empty(param, param.requires_grad)
    return param._lohan_empty


def given(param: torch.Tensor) -> torch.Tensor | None:
    """Return the values of an empty parameter that was given some, in its dtype; otherwise None."""
    values = param.given if isinstance(param, Empty) else None
    return None if values is None else values.to(param.dtype)


def set_loaded_buffers(model: nn.Module) -> None:
    """Give buffers that were computed from empty parameters the values that were loaded since."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            values = None if buffer is None else given(buffer)
            if values is not None:
                module._buffers[name] = values


def is_loaded(param: torch.Tensor) -> bool:
    """Return whether values were loaded into an empty parameter after its module was built."""
    return isinstance(param, Empty) and param.is_loaded


def is_in_part(param: torch.Tensor) -> bool:
    """Return whether values that were written to a part of an empty parameter are lost."""
    return isinstance(param, Empty) and param.is_in_part


def is_computed(param: torch.Tensor) -> bool:
    """Return whether an empty parameter was made of a part of another one, or computed from it."""
    if not isinstance(param, Empty) or param._root is None or param.rows:
        return False
    return param._is_param and not param._is_whole and param.given is None
