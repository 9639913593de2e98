"""The placeholders that `p.grad` holds between backward and step, and checks of `p.grad`.

A gradient that was sent to the optimizer cannot be read or changed. But if updates wait for
`step()`, the norm of all gradients is known exactly, and AdamW multiplies all gradients by one
factor anyway. torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler need no more than that: the
stand-ins implement the functions that these two call, and raise an error for all other functions.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lohan.errors import NonFiniteError, OffloadedGradientError, UnsupportedError
from lohan.torch_glue._tensor import in_backward, version_of, without_classes

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.session._step import Accumulation

LATE_HOOK = "register_post_accumulate_grad_hook"
_REFUSAL = (LATE_HOOK, "__getstate__")


def refuse_late_hooks(name: str, tensor: torch.Tensor) -> None:
    """Reject hooks that would find p.grad empty because lohan's own hook has taken the gradient.

    The replacement method is in the parameter's `__dict__`. `__getstate__` is replaced as well, so
    that copying or saving the parameter does not copy the replacements.
    """
    refuse = functools.partial(_refuse_late, name)
    state = functools.partial(_state, weakref.ref(tensor))
    tensor.__dict__.update(zip(_REFUSAL, (refuse, state), strict=True))


def _state(reference: weakref.ref[torch.Tensor]) -> dict[str, Any]:
    this = reference()
    assert this is not None
    return {k: v for k, v in this.__dict__.items() if k not in _REFUSAL}


def _refuse_late(name: str, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        f"{LATE_HOOK} of the wrapped parameter {name!r} is not supported: when such a hook runs,"
        " the gradient has already been sent to the optimizer. A hook of register_hook() runs"
        " earlier and may return a replacement; hooks registered before lohan.wrap() also work"
    )


def allow_late_hooks(tensor: torch.Tensor) -> None:
    """Undo refuse_late_hooks()."""
    for name in _REFUSAL:
        tensor.__dict__.pop(name, None)


def refuse_graphs() -> None:
    """Reject gradients that have a graph. A hook of the backward calls this."""
    if in_backward() and torch.is_grad_enabled():
        raise UnsupportedError(
            "backward(create_graph=True) is not supported: the gradients would keep their graph,"
            " and with it parameters that step() changes. Use torch.autograd.grad(...,"
            " create_graph=True) for the inner gradient, then backward() without it"
        )


class HollowGradients:
    """Stand-ins in p.grad for the gradients that were sent to the optimizer.

    Computing with a stand-in raises an error at once; replacing one raises an error at `step()`.
    """

    def __init__(self, layout: Layout, scale: StepScale) -> None:
        self._scale = scale
        self._params = [p for p in layout.params if layout.units[p.unit].trainable]
        self._made: dict[int, HollowGradient] = {}
        self._is_shown = False

    def show(self) -> None:
        """Put stand-ins into p.grad."""
        with without_classes():
            for param in self._params:
                if param.tensor.grad is not None:
                    continue
                if param.index not in self._made:
                    made = hollow_gradient(param.tensor, param.index, self._scale)
                    self._made[param.index] = made
                param.tensor.grad = self._made[param.index]
        self._is_shown = True

    def hide(self) -> None:
        """Remove the stand-ins from p.grad."""
        if not self._is_shown:
            return
        with without_classes():
            for param in self._params:
                param.tensor.grad = None
        self._is_shown = False

    def check(self, has_gradients: bool) -> None:
        """Reject a p.grad that the caller has set, since no update would use it.

        Args:
            has_gradients: whether the open step has gradients from a backward.

        Raises:
            OffloadedGradientError: a p.grad was set; the message names the first. After a backward,
                the change is undone, so that the next `step()` works without it.
        """
        with without_classes():
            gradients = [param.tensor.grad for param in self._params]
        for param, found in zip(self._params, gradients, strict=True):
            expected = self._made.get(param.index) if self._is_shown else None
            if found is expected:
                continue
            if not has_gradients:
                raise OffloadedGradientError(
                    f"p.grad of parameter {param.name!r} was set, but only gradients of a backward"
                    " reach the optimizer. Pass your own gradients with"
                    " torch.autograd.backward(parameters, gradients), or discard them with"
                    " model.optimizer.zero_grad()"
                )
            self._undo()
            raise OffloadedGradientError(
                f"p.grad of parameter {param.name!r} was"
                f" {'set to None' if found is None else 'replaced'} between backward and step(),"
                " but the update already uses the gradient of backward. Change gradients in"
                " param.register_hook(); exclude parameters with requires_grad_(False) before the"
                " forward. This change was undone: the next step() ignores it"
            )

    def _undo(self) -> None:
        was_shown = self._is_shown
        for param in self._params:
            param.tensor.grad = None
        if was_shown:
            self.show()


class StepScale:
    """The factor and the norm of the open step's gradients.

    Attributes:
        accumulation: the session's accumulation.
    """

    def __init__(
        self,
        names: dict[int, str],
        accumulation: Accumulation,
        square_sum: Callable[[], float] | None,
        mean: float = 1.0,
    ) -> None:
        """Begin with a factor of 1.

        Args:
            names: the names of the trainable parameters, by index.
            accumulation: the session's accumulation.
            square_sum: returns the sum of squares of the open step's gradients. None means that
                updates do not wait for `step()`.
            mean: a factor of the gradients in every step.
        """
        self.accumulation = accumulation
        self._mean = mean
        self._names = names
        self._square_sum = square_sum
        self.reset()

    @property
    def is_waiting(self) -> bool:
        """Whether updates wait for `step()`, so that gradients can be measured and scaled."""
        return self._square_sum is not None

    @property
    def is_finite(self) -> bool:
        """Whether no norm that was requested is infinite or NaN."""
        return math.isfinite(self._norm)

    def reset(self) -> None:
        """Reset the factors and the norm for the next step."""
        self._factors: dict[int, float] = {}
        self._norm = 0.0
        self._number: tuple[torch.Tensor, int, float] | None = None

    def number(self, name: str, value: Any) -> float:
        """Return the number that a script passed to a gradient's method.

        clip_grad_norm_ passes one tensor to the method of each gradient. Its value is read once,
        because reading it waits for an accelerator.

        Args:
            name: the method, for the error.
            value: a number, or a tensor with one element.

        Raises:
            UnsupportedError: it is another value.
        """
        if not isinstance(value, torch.Tensor) or value.is_inference():
            return _number(name, value)
        if self._number is not None and self._number[0] is value:
            _, version, number = self._number
            if version_of(value) == version:
                return number
        number = _number(name, value)
        self._number = (value, version_of(value), number)
        return number

    def multiply(self, indices: Iterable[int], factor: float) -> None:
        """Multiply the gradients of the given parameters by a factor."""
        for index in indices:
            self._factors[index] = self._factors.get(index, 1.0) * factor

    def factor(self) -> float:
        """Return the factor of all gradients.

        Raises:
            UnsupportedError: gradients have different factors.
            NonFiniteError: a norm that was requested is not finite.
        """
        if not self.is_finite:
            raise NonFiniteError(
                f"the norm of all gradients is {self._norm}: no update has begun. Call"
                " model.optimizer.zero_grad() to discard this step"
            )
        if not self._factors:
            return self._mean
        factors = {index: self._factors.get(index, 1.0) for index in self._names}
        least = min(factors, key=lambda index: factors[index])
        most = max(factors, key=lambda index: factors[index])
        if factors[least] != factors[most]:
            raise UnsupportedError(
                f"the gradient of {self._names[least]!r} was multiplied by {factors[least]}, that"
                f" of {self._names[most]!r} by {factors[most]}, but all must have the same factor."
                " Clip and scale all of model.parameters()"
            )
        return self._mean * factors[least]

    def measure(self) -> float:
        """Return the fp64 norm of all unscaled gradients; not finite if one gradient is not."""
        assert self._square_sum is not None
        self._norm = math.sqrt(self._square_sum())
        return self._norm

    def norm_of(self, indices: Sequence[int], order: float) -> float:
        """Return the norm of the given parameters' gradients, scaled as `step()` would use them.

        Raises:
            UnsupportedError: the requested norm is not the Euclidean norm of all gradients.
        """
        left = set(self._names).difference(indices)
        what = f"norm_type={order}" if order != 2 else ""
        if left and not what:
            what = f"the norm of only {len(set(indices))} of {len(self._names)} gradients (without"
            what += f" that of {self._names[min(left)]!r})"
        if what:
            raise UnsupportedError(
                f"{what} is not supported: lohan computes only the Euclidean norm, 2.0, of the"
                " gradients of all of model.parameters()"
            )
        norm = self.measure()
        return norm * self.factor() if math.isfinite(norm) else norm


class GradientNorm:
    """The norms of some stand-ins, which torch's clipping combines into the norm of all."""

    def __init__(self, scale: StepScale, indices: Sequence[int]) -> None:
        self.scale = scale
        self.indices = indices

    def to(self, *args: Any, **kwargs: Any) -> GradientNorm:
        """Return self, which is on no device."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Combine norms, or return the norm of all of them together.

        Raises:
            OffloadedGradientError: func is another function, or an argument is another tensor.
        """
        if func is torch.stack and all(isinstance(norm, cls) for norm in args[0]):
            norms: list[GradientNorm] = args[0]
            if all(norm.scale is norms[0].scale for norm in norms):
                return cls(norms[0].scale, [index for norm in norms for index in norm.indices])
        if func is torch.linalg.vector_norm and isinstance(args[0], cls):
            norm = args[0].scale.norm_of(args[0].indices, _order(args, kwargs))
            return torch.tensor(norm, dtype=torch.float64)
        raise OffloadedGradientError(
            f"{getattr(func, '__name__', func)} of norms of lohan's gradients is not supported:"
            " clip the parameters of a wrapped model, all of them and no others"
        )


_METADATA = {
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_sparse",
    "ndim",
    "is_leaf",
    "grad_fn",
    "names",
    "is_cuda",
    "is_meta",
    "is_cpu",
}
_METADATA_METHODS = {
    "size",
    "dim",
    "numel",
    "stride",
    "element_size",
    "is_floating_point",
    "__hash__",
}


class HollowGradient(torch.Tensor):
    """A stand-in for a gradient that was sent to the optimizer; computing with it is an error.

    Attributes:
        param: the parameter's index.
        scale: the session's StepScale.
        added: a gradient that autograd has added to the stand-in, for take_added().
    """

    param: int
    scale: StepScale
    added: torch.Tensor | None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Store a gradient that autograd adds while gradients are summed; reject everything else.

        Raises:
            SecondBackwardError: the open step does not allow the running backward.
            OffloadedGradientError: the operation is any other.
        """
        if in_backward():
            mine = next(value for value in args if isinstance(value, HollowGradient))
            mine.scale.accumulation.check_may_add()
            if func is torch.ops.aten.add_.Tensor and args[0] is mine:
                mine.added = args[1]
                return mine
        _refuse(str(func), is_waiting=False)

    def take_added(self) -> torch.Tensor | None:
        """Return the gradient that autograd has added, and drop the reference to it."""
        added, self.added = self.added, None
        return added

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return metadata; implement clipping and scaling of all gradients; reject the rest.

        Raises:
            OffloadedGradientError: func would read or change the gradient.
        """
        name = getattr(func, "__name__", str(func))
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if (name == "__get__" and owner in _METADATA) or name in _METADATA_METHODS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        mine = args[0] if args and isinstance(args[0], list | tuple) else list(args[:1])
        is_ours = bool(mine) and all(isinstance(each, HollowGradient) for each in mine)
        scale = mine[0].scale if is_ours else None
        answer = _ANSWERS.get(func)
        if answer is not None and scale is not None and scale.is_waiting and not in_backward():
            if all(each.scale is scale for each in mine):
                return answer(scale, mine, args, kwargs)
        is_property = name in {"__get__", "__set__"}
        _refuse(owner if is_property else name, is_waiting=scale is not None and scale.is_waiting)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a readable summary."""
        return f"HollowGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def hollow_gradient(data: torch.Tensor, index: int, scale: StepScale) -> HollowGradient:
    """Make a HollowGradient with data's shape and dtype, without memory of its own."""
    made: HollowGradient = torch.Tensor._make_wrapper_subclass(
        HollowGradient, data.shape, dtype=data.dtype, device=data.device
    )
    made.param = index
    made.scale = scale
    made.added = None
    return made


def _refuse(reader: str, *, is_waiting: bool) -> NoReturn:
    text = f"{reader} reads or changes a gradient that has already been sent to the optimizer"
    if "clamp" in reader:
        text += (
            ". Instead of clip_grad_value_, use param.register_hook(lambda gradient:"
            " gradient.clamp(-c, c)), before or after lohan.wrap()"
        )
    elif is_waiting:
        text += (
            ": torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler can scale all gradients, and"
            " param.register_hook() can change one before it is sent"
        )
    else:
        text += (
            "; only model.optimizer can use it. clip_grad_norm_ and GradScaler need updates that"
            ' wait for step(): lohan.wrap(..., schedule="deferred"), or max_grad_norm=..., which'
            " clips automatically, or loss_scaling=True"
        )
    raise OffloadedGradientError(text)


def _order(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> float:
    return float(args[1] if len(args) > 1 else (kwargs or {}).get("ord", 2))


def _number(name: str, value: Any) -> float:
    if isinstance(value, list | tuple) or (
        isinstance(value, torch.Tensor) and (value.numel() != 1 or type(value) is HollowGradient)
    ):
        _refuse(name, is_waiting=True)
    return float(value)


def _indices(mine: Sequence[HollowGradient]) -> list[int]:
    return [each.param for each in mine]


def _vector_norm(scale: StepScale, mine: Any, args: Any, kwargs: Any) -> GradientNorm:
    order = _order(args, kwargs)
    if order != 2 or len(args) > 2 or kwargs:
        scale.norm_of(_indices(mine), order)
        _refuse("vector_norm", is_waiting=True)
    return GradientNorm(scale, _indices(mine))


def _foreach_norm(scale: StepScale, mine: Any, args: Any, kwargs: Any) -> list[GradientNorm]:
    return [_vector_norm(scale, [each], (each, *args[1:]), kwargs) for each in mine]


def _multiply(scale: StepScale, mine: Any, args: Any, kwargs: Any) -> Any:
    scale.multiply(_indices(mine), scale.number("mul_", args[1]))
    return args[0]


def _unscale(scale: StepScale, mine: Any, args: Any, kwargs: Any) -> None:
    found_inf, inverse = args[1:]
    if not math.isfinite(scale.measure()):
        found_inf.fill_(1.0)
    scale.multiply(_indices(mine), scale.number("unscale_", inverse))


_ANSWERS: dict[Callable[..., Any], Callable[[StepScale, Any, Any, Any], Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch._foreach_norm: _foreach_norm,
    torch.Tensor.mul_: _multiply,
    torch._foreach_mul_: _multiply,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
