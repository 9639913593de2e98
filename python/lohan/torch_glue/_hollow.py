"""Parameters that are not in memory: their shape is known, but their values cannot be used.

While a unit is not in memory, its parameters have a class that supports what does not depend on
values, and raises an error with the parameter's name for everything else. The binding switches
`__class__` when it binds a unit (0.1 us per parameter); a parameter in memory has the same class as
before `lohan.wrap`.

Code below Python (C++ that was passed the tensor) bypasses these checks and reads NaN.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import torch
from torch import nn

from lohan.errors import HollowParameterError, UnsupportedError
from lohan.torch_glue._tensor import without_classes

if TYPE_CHECKING:
    from lohan import _core


class Reader(Protocol):
    """What loads the parameters of a session that are read."""

    def load_in_loop(self, tensor: nn.Parameter) -> bool:
        """Load the parameter if a loop over parameters is at it; otherwise return False."""

    def make_resident(self, tensors: Sequence[nn.Parameter]) -> bool:
        """Load the parameters if a forward runs; otherwise return False."""

    def scope_of(self, tensors: Sequence[torch.Tensor]) -> _core.Scope:
        """Return the scope in which the session's parameters among tensors are in memory."""


class Owner(Protocol):
    """The session whose parameters are hollow."""

    closed: bool

    @property
    def forwards(self) -> Reader:
        """What loads parameters."""

    @property
    def is_underway(self) -> bool:
        """Whether a forward or backward runs, or step() has to be called after a backward."""

    def param_names(self) -> dict[int, str]:
        """Return the name of each parameter, by the id of its tensor."""


_PROPERTIES = """
    shape dtype device layout requires_grad is_leaf ndim grad grad_fn names itemsize nbytes name
    output_nr retains_grad grad_dtype volatile is_cpu is_cuda is_meta is_sparse is_sparse_csr
    is_quantized is_nested is_mkldnn is_mps is_mtia is_xla is_xpu is_ipu is_vulkan is_maia
    _version _base _grad _backward_hooks _post_accumulate_grad_hooks
""".split()
_SET_PROPERTIES = """
    grad requires_grad grad_dtype _grad _backward_hooks _post_accumulate_grad_hooks
""".split()
_METHODS = """
    size dim ndimension numel nelement element_size get_device
    is_floating_point is_complex is_signed is_inference is_conj is_neg is_pinned
    is_shared is_same_size has_names requires_grad_ retain_grad register_hook _is_view
    register_post_accumulate_grad_hook new_empty new_empty_strided new_full new_ones new_tensor
    new_zeros __len__ __dlpack_device__
""".split()
# These are about the place of the values, which a hollow parameter has only nominally.
_PLACE_METHODS = "stride storage_offset data_ptr is_contiguous".split()
_FUNCTIONS = """
    numel is_floating_point is_complex is_signed is_same_size is_conj is_neg is_inference
    result_type get_device empty_like full_like ones_like rand_like randint_like randn_like
    zeros_like
""".split()


def _answered() -> set[Any]:
    """Return the functions that need no values, as torch passes them to `__torch_function__`."""
    found: set[Any] = {torch.autograd.grad, torch.autograd.backward}
    found |= {getattr(torch.Tensor, n).__get__ for n in _PROPERTIES if hasattr(torch.Tensor, n)}
    found |= {getattr(torch.Tensor, n).__set__ for n in _SET_PROPERTIES if hasattr(torch.Tensor, n)}
    found |= {getattr(torch.Tensor, n) for n in _METHODS if hasattr(torch.Tensor, n)}
    found |= _PLACES
    return found | {getattr(torch, n) for n in _FUNCTIONS if hasattr(torch, n)}


_PLACES: set[Any] = {getattr(torch.Tensor, name) for name in _PLACE_METHODS}
_ANSWERED = _answered()
# Functions in which another tensor takes the parameter's shape or dtype.
_FORM_OF = {getattr(torch.Tensor, n) for n in ("to", "type_as", "expand_as", "view_as")}
_FORM_OF.add(torch.Tensor.reshape_as)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _parameters_in(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parameters_in(value)
        elif isinstance(value, dict):
            yield from _parameters_in(value.values())


def _what(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return func's name, and whether it writes its first argument."""
    name = str(getattr(func, "__name__", func))
    if name in {"__get__", "__set__"}:
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return f".{owner}", name == "__set__"
    is_dunder = name.startswith("__") and name.endswith("__")
    writes = name.startswith("__i") if is_dunder else name.endswith("_")
    return f"{name}()", writes or name == "__setitem__"


NO_DDP = (
    "DistributedDataParallel cannot wrap a model of lohan, whose gradients go to its optimizer"
    " during backward and are exchanged by lohan: use the wrapped model without it. With"
    " Accelerate, call accelerator.prepare_model(model, evaluation_mode=True); with a Trainer, pass"
    " lohan.TrainerCallback"
)


def _refuse_sharding(depth: int) -> None:
    """Raise an error if torch's FSDP or DDP is among the callers of the caller, up to a depth.

    It would name a parameter's stride, a conversion or a read as the cause.
    """
    frame = sys._getframe(2)
    while frame is not None and depth > 0:
        where = frame.f_globals.get("__name__", "")
        if where == "torch.nn.parallel.distributed":
            raise UnsupportedError(NO_DDP)
        if where.startswith("torch.distributed.fsdp"):
            raise UnsupportedError(
                "fully_shard() and FullyShardedDataParallel cannot shard a wrapped model, whose"
                " parameters are in its store: use the model as it is. Several processes exchange"
                " gradients themselves, and lohan.Parallel divides what they"
                " hold (docs/several-processes.md)"
            )
        frame, depth = frame.f_back, depth - 1  # type: ignore[assignment]


# Classes that average parameters (EMAModel of diffusers, ModelEmaV3 of timm), and their functions.
_AVERAGES = re.compile(r"EMA|Ema|AveragedModel|\bema_|_ema\b|swa_utils")
_CALLER_COUNT = 12


def _hint_of_averages(what: str) -> str:
    """Return what to do instead if this or calling functions average parameters; "" otherwise."""
    frame: types.FrameType | None = sys._getframe(1)
    is_mean = "lerp" in what
    for _ in range(_CALLER_COUNT):
        if is_mean or (frame is not None and _AVERAGES.search(frame.f_code.co_qualname)):
            return (
                ". For an exponential moving average, pass ema=DECAY to lohan.wrap(): it is kept in"
                " the store, and lohan.ema(model) evaluates it"
            )
        frame = None if frame is None else frame.f_back
    return ""


class HollowParameter(nn.Parameter):
    """The class of a parameter while it is not in memory."""

    owner: ClassVar[weakref.ref[Any]]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        classes: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call functions that need no values; in a forward, load the values for other functions.

        Raises:
            HollowParameterError: func would read or write values outside a forward and a loop.
        """
        kwargs = kwargs or {}
        if func in _PLACES:
            if func is torch.Tensor.is_contiguous:
                _refuse_sharding(1)
            cls._load_in_loop(args[0])
        is_form = func in _FORM_OF and not isinstance(args[0], HollowParameter)
        if is_form or func in _ANSWERED:
            with without_classes():
                return func(*args, **kwargs)
        # A parameter that make_resident() loads gets its plain class back.
        given = list(_parameters_in([*args, *kwargs.values()]))
        # Their classes are asked for once: another thread that reads them gives them a plain one.
        kinds = zip(map(type, given), given, strict=True)
        found = [(kind, tensor) for kind, tensor in kinds if issubclass(kind, HollowParameter)]
        if not found:
            # torch found one among the arguments: another thread has loaded it since.
            if any(issubclass(cls, type(tensor)) for tensor in given):
                return func(*args, **kwargs)
            raise HollowParameterError(f"{_what(func)[0]} was given a parameter not in memory")
        missing = [(kind, tensor) for kind, tensor in found if not kind._load_in_loop(tensor)]
        if not missing:
            return func(*args, **kwargs)
        kind, tensor = missing[0]
        session: Owner | None = kind.owner()
        # Pass all parameters: those loaded for the previous operation would otherwise be evicted.
        if session is None or func == _SET_DATA or not session.forwards.make_resident(given):
            what, writes = _what(func)
            is_target = not args or any(tensor is t for t in _parameters_in(args[:1]))
            kind.refuse(tensor, what, writes and is_target)
        return func(*args, **kwargs)

    @classmethod
    def _load_in_loop(cls, tensor: Any) -> bool:
        """Return whether a loop is at a parameter; it is then loaded, and a plain one."""
        session: Owner | None = cls.owner()
        return session is not None and session.forwards.load_in_loop(tensor)

    @classmethod
    def refuse(cls, tensor: Any, what: str, writes: bool = False) -> NoReturn:
        """Raise the error for an operation on a parameter of this class.

        Args:
            tensor: the parameter.
            what: the operation.
            writes: whether it would change values.

        Raises:
            HollowParameterError: always; says what to do instead.
            UnsupportedError: FSDP or DDP does that.
        """
        _refuse_sharding(100)
        session: Owner | None = cls.owner()
        names = session.param_names() if session is not None else {}
        name = f"parameter {names.get(id(tensor), '')!r}"
        if session is None or session.closed:
            text = f"{name} no longer has values: its session is closed, and the store has them"
        elif writes:
            text = (
                f"{what} would write {name} while it is not in memory, which has no effect: write"
                " in a loop over model.named_parameters() before the forward or after step(), or"
                " with model.load_state_dict()"
            )
        elif session.is_underway:
            text = (
                f"{what} reads {name} between its forward and step(), when it is not in memory:"
                " read it in the forward of the module that owns it, or after"
                " model.optimizer.step() in a loop over model.named_parameters()"
            )
        else:
            text = (
                f"{what} reads {name} while it is not in memory: call the module that owns it (the"
                " module, not its forward()), compute in a loop over model.named_parameters(), or"
                " take a copy from model.state_dict()"
            )
        raise HollowParameterError(text + _hint_of_averages(what))

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy a parameter that a loop is at; otherwise, raise an error: there are no values."""
        kind = _hollow_class(self)
        if kind is not None and not kind._load_in_loop(self):
            kind.refuse(self, "deepcopy")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, save or copy a parameter that a loop is at; otherwise, raise an error."""
        kind = _hollow_class(self)
        if kind is not None and not kind._load_in_loop(self):
            kind.refuse(self, "pickle")
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a readable summary; with the values if a loop is at the parameter."""
        kind = _hollow_class(self)
        if kind is None or kind._load_in_loop(self):
            return repr(self)
        session = kind.owner()
        name = session.param_names().get(id(self), "") if session is not None else ""
        return f"HollowParameter({name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, form: str) -> str:
        """Return the formatted repr()."""
        kind = _hollow_class(self)
        if kind is None or kind._load_in_loop(self):
            return format(self, form)
        return format(repr(self), form)


def _hollow_class(tensor: object) -> type[HollowParameter] | None:
    """Return a tensor's class if it is hollow.

    A method of a hollow parameter asks once, since another thread that reads the parameter gives it
    a plain class, which has none of these methods.
    """
    kind = type(tensor)
    return kind if issubclass(kind, HollowParameter) else None


_Plain = torch._C.DisableTorchFunctionSubclass  # without_classes(), and one call less


def _attribute(plain: Any, can_set: bool) -> property:
    def read(self: HollowParameter) -> Any:
        with _Plain():
            return plain.__get__(self)

    def write(self: HollowParameter, value: Any) -> None:
        with _Plain():
            plain.__set__(self, value)

    return property(read, write if can_set else None)


def _method(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: HollowParameter, *args: Any, **kwargs: Any) -> Any:
        with _Plain():
            return plain(self, *args, **kwargs)

    return call


def _direct() -> dict[str, Any]:
    """Return attributes of torch.Tensor that need no values, for the class of torch's parameters.

    Without them, torch would call `__torch_function__` first, and a loop over all parameters that
    reads one attribute of each would take several times as long as that of a plain model.
    """
    found: dict[str, Any] = {}
    for name in _PROPERTIES:
        plain = inspect.getattr_static(torch.Tensor, name, None)
        if plain is not None:
            found[name] = _attribute(plain, name in _SET_PROPERTIES)
    for name in _METHODS:
        if hasattr(torch.Tensor, name):
            found[name] = _method(getattr(torch.Tensor, name))
    if "grad_dtype" in found:
        found["grad_dtype"] = _checked_grad_dtype(found["grad_dtype"])
    return found


def check_grad_dtype(name: str, dtype: torch.dtype, value: torch.dtype | None) -> None:
    """Reject a grad_dtype of a trained parameter that is not its dtype.

    Raises:
        UnsupportedError: the dtypes differ.
    """
    if value not in (None, dtype):
        raise UnsupportedError(
            f"parameter {name!r} is {dtype} and would have gradients of grad_dtype {value}, but"
            " lohan's plans and buffers have them in the dtype of the parameter: set its"
            " grad_dtype to None. Sums over several backwards (gradient_accumulation_steps=) are"
            " in float32 anyway"
        )


def _checked_grad_dtype(plain: property) -> property:
    assert plain.fset is not None
    write = plain.fset

    def checked(self: HollowParameter, value: torch.dtype | None) -> None:
        session = type(self).owner()
        if session is not None and not session.closed:
            check_grad_dtype(session.param_names().get(id(self), ""), self.dtype, value)
        write(self, value)

    return property(plain.fget, checked)


_DIRECT = _direct()


class HollowClasses:
    """The classes of one session's parameters while they are hollow."""

    def __init__(self, session: Owner) -> None:
        self._owner = weakref.ref(session)
        self._made: dict[type, type] = {}

    def hide(self, tensor: nn.Parameter) -> tuple[type, type] | None:
        """Change a parameter's class to a hollow one.

        Returns:
            The parameter's classes while it is in memory and while it is not; None if it has a
            user's class that cannot be changed.
        """
        plain = type(tensor)
        if plain not in self._made:
            is_torchs = plain is nn.Parameter
            bases = (HollowParameter,) if is_torchs else (HollowParameter, plain)
            direct = _DIRECT if is_torchs else {}
            try:
                made = types.new_class("HollowParameter", bases, None, lambda d: d.update(direct))
            except TypeError:
                return None
            made.owner = self._owner  # type: ignore[attr-defined]
            self._made[plain] = made
        try:
            tensor.__class__ = self._made[plain]
        except TypeError:
            return None
        return plain, self._made[plain]


def show(tensor: nn.Parameter) -> None:
    """Restore the class that a parameter had before it became hollow."""
    if isinstance(tensor, HollowParameter):
        tensor.__class__ = type(tensor).__mro__[2]


def scope_of(what: str, tensors: Sequence[torch.Tensor]) -> _core.Scope | None:
    """Return a scope for an operation that reads hollow parameters, in a forward or outside of one.

    Entered with an argument (`scope.enter(None)`), it is what the call of a module is that owns the
    parameters: outside of a forward it is a forward of its own. It must be left also if it cannot
    be entered.

    Args:
        what: the operation, for the error of a parameter that has no values any more.
        tensors: what the operation reads, of one session; other tensors need no scope.

    Returns:
        The scope, or None if no parameter is hollow.

    Raises:
        HollowParameterError: the session is closed.
    """
    for tensor in tensors:
        kind = type(tensor)
        if issubclass(kind, HollowParameter) and not kind._load_in_loop(tensor):
            session: Owner | None = kind.owner()
            if session is None or session.closed:
                kind.refuse(tensor, what)
            return session.forwards.scope_of(tensors)
    return None
