"""torch.func and forward-mode AD on a wrapped model: torch's values, or a named error."""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import UnsupportedError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd import functional as autograd_functional
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx

WIDTH = 64
ROWS = 32
SETTINGS: dict[str, dict[str, Any]] = {
    "keep": {"activations": "keep"},
    "recompute": {"activations": "recompute"},
    "swap": {"activations": {"*": "swap"}, "swap_bytes": "64MB", "swap_ssd_bytes": "64MB"},
    "auto": {"activations": "auto"},
    "emu": {"activations": "auto", "device": "emu"},
}


def _build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
    ]
    return nn.Sequential(*blocks)


_generator = torch.Generator().manual_seed(1)
X = torch.randn(ROWS, WIDTH, generator=_generator)
T = torch.randn(ROWS, WIDTH, generator=_generator)
PARAMS = {name: value.detach() * 0.5 for name, value in _build().named_parameters()}


def _no_grad(call: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return call()


def _forward_ad(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, T))).tangent


def _dual_params(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(v, v * 0.5) for name, v in PARAMS.items()}
        return forward_ad.unpack_dual(functional_call(model, duals, (X,))).tangent


def _gradient_through(call: Callable[[nn.Module, torch.Tensor], Any]) -> Any:
    def compute(model: nn.Module) -> Any:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(call(model, x).square().sum(), [x])[0]

    return compute


def _gradient_of_others(model: nn.Module) -> Any:
    given = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
    loss = functional_call(model, given, (X,)).square().sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(given.values()))])


WORK: dict[str, Callable[[nn.Module], Any]] = {
    "vmap": lambda m: vmap(m)(X),
    "vmap without gradients": lambda m: _no_grad(lambda: vmap(m)(X)),
    "vmap of parameters": lambda m: vmap(lambda p: functional_call(m, p, (X,)))(
        {name: torch.stack([v, 2 * v]) for name, v in PARAMS.items()}
    ),
    "jvp": lambda m: jvp(m, (X,), (T,))[1],
    "jacfwd": lambda m: jacfwd(m)(X[0]),
    "dual": _forward_ad,
    "dual parameters": _dual_params,
    "functional_call": lambda m: functional_call(m, PARAMS, (X,)),
    "parameters of another model": lambda m: functional_call(
        m, {name: nn.Parameter(value) for name, value in PARAMS.items()}, (X,)
    ),
    "gradient of other parameters": _gradient_of_others,
    "gradient through vmap": _gradient_through(lambda m, x: vmap(m)(x)),
    "gradient through jvp": _gradient_through(lambda m, x: jvp(m, (x,), (T,))[1]),
    "autograd jvp": lambda m: autograd_functional.jvp(m, X, T)[1],
    "autograd vjp": lambda m: autograd_functional.vjp(m, X, T)[1],
    "autograd jacobian": lambda m: autograd_functional.jacobian(m, X[0]),
    "autograd vectorized": lambda m: autograd_functional.jacobian(m, X[0], vectorize=True),
    "autograd hessian": lambda m: autograd_functional.hessian(lambda y: m(y).sum(), X[0]),
}
REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: grad(lambda y: m(y).sum())(X),
    "vjp": lambda m: vjp(m, X)[1](T),
    "jacrev": lambda m: jacrev(m)(X[0]),
    "hessian": lambda m: hessian(lambda y: m(y).sum())(X[0]),
    "vmap of grad": lambda m: vmap(grad(lambda y: m(y).sum()))(X),
    "grad of parameters": lambda m: grad(lambda p: functional_call(m, p, (X,)).sum())(PARAMS),
    "grad of its own": lambda m: grad(lambda p: functional_call(m, p, (X,)).sum())(
        {name: value.detach().clone() for name, value in m.state_dict().items()}
    ),
    "jvp of parameters": lambda m: jvp(lambda p: functional_call(m, p, (X,)), (PARAMS,), (PARAMS,)),
}


def _fake(model: nn.Module) -> Any:
    with FakeTensorMode() as mode:
        return model(mode.from_tensor(X))


TRACED: dict[str, Callable[[nn.Module], Any]] = {
    "linearize": lambda m: linearize(m, X)[1](T),
    "make_fx": lambda m: make_fx(m)(X),
    "make_fx of a block": lambda m: make_fx(m[0], tracing_mode="fake")(X),
    "fake": _fake,
}


@pytest.fixture(params=SETTINGS)
def model(request: Any, store_dir: pathlib.Path) -> Iterator[nn.Module]:
    made = lohan.wrap(
        _build(), store=store_dir, lr=0.0, weight_decay=0.0, **SETTINGS[request.param]
    )
    with contextlib.closing(made.lohan):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield made


def _step(model: nn.Module) -> torch.Tensor:
    """A step that changes no values: the learning rate is 0."""
    out: torch.Tensor = model(X)
    out.square().mean().backward()
    model.optimizer.step()
    return out.detach()


@pytest.mark.parametrize("name", WORK)
def test_a_transform_that_works_has_plain_torch_s_values_before_and_in_the_middle_of_training(
    name: str, model: nn.Module
) -> None:
    wanted, out = WORK[name](_build()), _build()(X)
    for _ in range(4):
        assert torch.equal(WORK[name](model), wanted)
        assert torch.equal(_step(model), out)


@pytest.mark.parametrize("name", REFUSED)
def test_a_transform_that_cannot_work_is_refused_by_name_and_training_continues(
    name: str, model: nn.Module
) -> None:
    out = _build()(X)
    REFUSED[name](_build())
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"torch\.func\.grad.*lohan\.unwrap"):
            REFUSED[name](model)
        assert torch.equal(_step(model), out)


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_is_refused_by_name_and_training_goes_on(name: str, model: nn.Module) -> None:
    out = _build()(X)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"cannot be traced.*lohan\.unwrap"):
            TRACED[name](model)
        assert torch.equal(_step(model), out)


class _Inside(nn.Module):
    """A model whose forward differentiates a layer."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.second, self.first(x))


@pytest.mark.parametrize("name", ["jacrev", "grad", "vjp", "hessian"])
def test_a_transform_inside_the_forward_is_explained_with_those_that_work(
    name: str, store_dir: pathlib.Path
) -> None:
    refused = {
        "jacrev": lambda f, x: jacrev(f)(x[0]),
        "grad": lambda f, x: grad(lambda y: f(y).sum())(x),
        "vjp": lambda f, x: vjp(f, x)[0],
        "hessian": lambda f, x: hessian(lambda y: f(y).square().sum())(x[0]),
    }
    wrapped: Any = lohan.wrap(_Inside(refused[name]), store=store_dir / "refused", lr=1e-3)
    with pytest.raises(RuntimeError, match=r"torch\.func") as caught:
        wrapped(torch.ones(2, 4))
    (note,) = caught.value.__notes__
    assert note.startswith("lohan: the forward of a wrapped model cannot use torch.func.grad")
    wrapped.lohan.close()
    ways: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
        "jacfwd": lambda f, x: f(x) * jacfwd(f)(x[0]).sum(),
        "jacobian": lambda f, x: f(x) * autograd_functional.jacobian(f, x[0]).sum(),
    }
    for way, function in ways.items():
        plain, other = _Inside(function), _Inside(function)
        other.load_state_dict(plain.state_dict())
        wrapped = lohan.wrap(other, store=store_dir / way, lr=1e-3)
        out = wrapped(torch.ones(2, 4))
        assert torch.equal(out, plain(torch.ones(2, 4)))
        out.sum().backward()
        wrapped.optimizer.step()
        wrapped.lohan.close()


def test_gradients_of_parameters_through_vmap_are_those_of_the_plain_forward(
    model: nn.Module,
) -> None:
    plain = _build()
    vmap(plain)(X).square().mean().backward()
    seen: dict[str, torch.Tensor] = {}
    for name, param in nn.Module.named_parameters(model):
        param.register_hook(lambda g, name=name: seen.update({name: g.clone()}))
    vmap(model)(X).square().mean().backward()
    model.optimizer.step()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        assert torch.equal(seen[name], param.grad), name
    assert model.lohan.step == 1
