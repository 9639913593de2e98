"""What a step may still read after an update has begun, and what is rejected."""

from __future__ import annotations

import pathlib

import lohan
import pytest
import torch
from kit import host_bytes_min
from lohan.common._inside import inside
from lohan.errors import SessionError, StaleGraphError, StepError
from torch import nn
from torch.utils.checkpoint import checkpoint


class Coded(nn.Module):
    """A checkpointed encoder reads a codebook without differentiating it; the head trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.encoder = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.code = nn.Linear(8, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.code(x)
        return torch.tanh(self.encoder(x)) + shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.encode, self.first(x), use_reentrant=False)
        return self.code(torch.tanh(self.middle(x)))


def build() -> Coded:
    torch.manual_seed(0)
    return Coded()


def blocks_of(model: Coded) -> list[nn.Module]:
    return [model.first, model.encoder, model.middle, model.code]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_unit_that_a_checkpoint_reads_again_after_its_update_began_is_refused(
    store_dir: pathlib.Path,
) -> None:
    plain = build()
    model = lohan.wrap(plain, blocks=blocks_of(plain), store=store_dir / "s", lr=0.1)
    with pytest.raises(StaleGraphError, match=r"'code'.*deferred"):
        train(model, model.optimizer)


class Shift(nn.Module):
    """A module whose parameters autograd does not save: graphs stay valid after a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.randn(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift).square().mean()


def train_late(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        losses = [model(torch.full((4096,), float(i))) for i in range(3)]
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("schedule", ["optimized", "deferred", "serial"])
def test_a_graph_that_saved_no_parameter_may_run_after_a_step(
    schedule: str, store_dir: pathlib.Path
) -> None:
    reference = Shift()
    model = lohan.wrap(Shift(), store=store_dir / "s", lr=0.1, schedule=schedule)
    train_late(model, model.optimizer)
    train_late(reference, torch.optim.AdamW(reference.parameters(), lr=0.1))
    state = dict(model.state_dict())
    model.lohan.close()
    torch.testing.assert_close(state["shift"], reference.shift.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["deferred", "serial"])
def test_where_updates_wait_for_step_it_may(schedule: str, store_dir: pathlib.Path) -> None:
    plain, reference = build(), build()
    model = lohan.wrap(
        plain, blocks=blocks_of(plain), store=store_dir / "s", lr=0.1, schedule=schedule
    )
    train(model, model.optimizer)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.1))
    state = dict(model.state_dict())
    model.lohan.close()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_with_one_slot_a_step_that_died_after_updates_began_is_not_called_rolled_back(
    store_dir: pathlib.Path,
) -> None:
    class Dies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            model.lohan.flush()
            raise RuntimeError("died")

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    plain = nn.Module()
    plain.layers = layers
    plain.forward = lambda x: layers[3](layers[2](layers[1](Dies.apply(layers[0](x)))))
    model = lohan.wrap(plain, store=store_dir / "s", lr=0.1, commit_every="never")
    with pytest.raises(RuntimeError, match="died"):
        model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(SessionError, match="one slot"):
        model.optimizer.zero_grad()


def test_a_commit_that_cannot_be_says_so(store_dir: pathlib.Path) -> None:
    plain = build()
    settings = {"blocks": blocks_of(plain), "commit_every": 10, "lr": 0.1}
    model = lohan.wrap(plain, store=store_dir / "s", **settings)
    for _ in range(3):
        model.middle(torch.ones(2, 8)).sum().backward()
        model.optimizer.step()
    model.middle(torch.ones(2, 8)).sum().backward()
    with pytest.raises(StepError, match="step 3 cannot be committed"):
        model.lohan.commit()
    model.optimizer.step()
    model.lohan.commit()
    assert inside(model).store.describe()["step"] == 4
    model.lohan.close()


class Mixed(nn.Module):
    """A block with four units: two dtypes, trained and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for dtype in (torch.float32, torch.bfloat16):
            for trained in (True, False):
                self.parts.append(nn.Linear(64, 64).to(dtype).requires_grad_(trained))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x.to(part.weight.dtype)).to(x.dtype)
        return x


def test_the_least_budget_holds_all_units_of_a_block_at_once(store_dir: pathlib.Path) -> None:
    def mixed() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Mixed() for _ in range(6)))

    plain = mixed()
    least = host_bytes_min(plain, store_dir, blocks=list(plain))
    model = lohan.wrap(plain, blocks=list(plain), store=store_dir / "s", host_bytes=least)
    for _ in range(3):
        model(torch.ones(2, 64)).square().mean().backward()
        model.optimizer.step()
    model.lohan.close()
