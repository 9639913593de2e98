"""Tensors that only describe other tensors raise an error with their name; their address is 0.

DTensor (fully_shard, torch.distributed.checkpoint) and torchao's quantized tensors call themselves
strided tensors on the CPU. A class of this file does the same; the DTensors are torch's.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import lohan
import pytest
import torch
import torch.distributed
from lohan.errors import ModelError
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


class Doubled(torch.Tensor):
    """A tensor whose values are twice those of another one, as a quantized tensor's are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def dequantize(self) -> torch.Tensor:
        return self.inner * 2

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        plain = [each.dequantize() if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


@pytest.fixture
def one_process(tmp_path: pathlib.Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "rendezvous"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded(values: torch.Tensor) -> torch.Tensor:
    """Return values as a DTensor, as fully_shard() makes parameters."""
    return distribute_tensor(values.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])


def freed(values: torch.Tensor) -> torch.Tensor:
    """Free the storage of a tensor, which keeps its shape, as FullyShardedDataParallel does."""
    values.untyped_storage().resize_(0)
    return values


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def test_a_frozen_parameter_of_another_class_is_rejected_at_wrap(store_dir: pathlib.Path) -> None:
    model = build()
    model[0].weight = nn.Parameter(Doubled(torch.randn(8, 8)), requires_grad=False)
    with pytest.raises(ModelError, match=r"'0\.weight' is .*Doubled.*dequantize\(\)"):
        lohan.wrap(model, store=store_dir / "s", host_bytes=10_000_000)
    assert not (store_dir / "s").exists()


@pytest.mark.usefixtures("one_process")
def test_sharded_moments_are_rejected_and_full_ones_are_taken(store_dir: pathlib.Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    weight = model[0].weight
    plain = optimizer.state[weight]["exp_avg"]
    optimizer.state[weight]["exp_avg"] = sharded(plain)
    with pytest.raises(ModelError, match=r"exp_avg of parameter '0\.weight'.*full_tensor"):
        lohan.wrap(model, store=store_dir / "a", optimizer=optimizer, host_bytes=10_000_000)
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].full_tensor()
    wrapped = lohan.wrap(model, store=store_dir / "b", optimizer=optimizer, host_bytes=10_000_000)
    lohan.unwrap(wrapped)
    assert torch.equal(optimizer.state[weight]["exp_avg"], plain)


@pytest.mark.usefixtures("one_process")
def test_a_sharded_state_dict_is_rejected_and_changes_nothing(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(build(), store=store_dir / "s", host_bytes=10_000_000)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = {name: value + 1 for name, value in before.items()}
    state = {name: sharded(value) for name, value in other.items()}
    with pytest.raises(ModelError, match=r"'0\.weight' in the state dict.*full_tensor\(\)"):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict({name: value.full_tensor() for name, value in state.items()})
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    model.lohan.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.empty(8, 8, device="meta"), "meta device"),
        (torch.ones(8, 8).to_sparse(), r"sparse.*to_dense\(\)"),
        ([[1.0] * 8] * 8, "list.*pass a tensor"),
        (freed(torch.ones(8, 8)), "no memory of its own.*pass a plain tensor"),
    ],
    ids=["meta", "sparse", "list", "freed"],
)
def test_values_without_bytes_in_a_state_dict_are_rejected(
    store_dir: pathlib.Path, given: Any, message: str
) -> None:
    model = lohan.wrap(build(), store=store_dir / "s", host_bytes=10_000_000)
    state = {**model.state_dict(), "0.weight": given}
    with pytest.raises(ModelError, match=message):
        model.load_state_dict(state)
    model.lohan.close()


def test_negated_views_are_loaded_with_their_sign(store_dir: pathlib.Path) -> None:
    # The imaginary part of a conjugate shares the bytes of the original, which have the other sign.
    model = lohan.wrap(build(), store=store_dir / "s", host_bytes=10_000_000)
    given = torch.randn(8, 8, dtype=torch.complex64).conj().imag
    assert given.is_neg()
    model.load_state_dict({**model.state_dict(), "0.weight": given})
    assert torch.equal(model.state_dict()["0.weight"], given)
    model.lohan.close()


def test_persistent_buffers_of_another_class_are_rejected_and_others_are_not_read(
    store_dir: pathlib.Path,
) -> None:
    with lohan.empty():  # as detectors replace batch norms: wrap then looks for buffers left empty
        torch.empty(3).copy_(nn.LayerNorm(3).weight)
    model = build()
    model.register_buffer("table", Doubled(torch.ones(3)))
    with pytest.raises(ModelError, match=r"buffer 'table' is .*Doubled"):
        lohan.wrap(model, store=store_dir / "s", host_bytes=10_000_000)
    del model.table
    model.register_buffer("table", torch.eye(3).to_sparse(), persistent=False)
    model.register_buffer("large", torch.ones(4_000_000))  # commits leave out all buffers then
    model.register_buffer("graph", torch.eye(3).to_sparse())
    wrapped = lohan.wrap(model, store=store_dir / "s", host_bytes=10_000_000)
    wrapped(torch.ones(1, 8)).sum().backward()
    wrapped.optimizer.step()
    wrapped.lohan.close()


@pytest.mark.parametrize(
    "replace", [Doubled, freed, sharded, lambda values: values.diag().to_sparse()]
)
def test_a_buffer_that_is_replaced_by_a_tensor_without_bytes_is_rejected_at_the_step(
    replace: Any, one_process: None, store_dir: pathlib.Path
) -> None:
    """Its address is 0, so that the commit would read it there; the step is not lost."""
    model = build()
    model.register_buffer("table", torch.ones(3))
    wrapped = lohan.wrap(model, store=store_dir / "s", host_bytes=20_000_000)
    wrapped(torch.ones(1, 8)).sum().backward()
    plain = wrapped._buffers["table"]
    wrapped._buffers["table"] = replace(torch.ones(3))
    with pytest.raises(ModelError, match=r"buffer 'table' is .* no memory of its own"):
        wrapped.optimizer.step()
    wrapped._buffers["table"] = plain
    wrapped.optimizer.step()
    assert wrapped.lohan.step == 1
    wrapped.lohan.close()
