"""A model whose parameters move to and from a GPU has the bits of the model that stays there."""

from __future__ import annotations

import gc
import pathlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "python"))

import lohan
from lohan.common._inside import inside
from lohan.config import SCHEDULES, SCHEDULES_AT_STEP
from lohan.errors import ModelError
from torch.utils.checkpoint import checkpoint

WIDTH = 512
DEPTH = 12
ROWS = 16
STEPS = 4
BLOCK_BYTES = 4 * 2048 * -(-(WIDTH + 1) * WIDTH // 2048)
SMALL = 4 * BLOCK_BYTES  # a third of the twelve blocks
MIB = 1 << 20
# The workspaces of cuBLAS and cuBLASLt, for forward's thread and autograd's: 8 times 4 MiB each.
WORKSPACE_BYTES = 4 * 32 * MIB

pytestmark = pytest.mark.usefixtures("deterministic")


class Tower(nn.Module):
    """A model of equal blocks, with a buffer."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = x + torch.tanh(y) * self.scale
        return x.float().square().mean()


@pytest.fixture
def store(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "store"


def wrap(store: pathlib.Path, model: nn.Module | None = None, **settings: Any) -> nn.Module:
    settings = {"device": "cuda", "lr": 1e-3, "allow_tmpfs": True, **settings}
    return lohan.wrap(model if model is not None else Tower(), store=store, **settings)


def batch(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator).to("cuda", dtype)


def train(model: nn.Module, accumulate: int = 1, dtype: torch.dtype = torch.float32) -> list[float]:
    losses = []
    for step in range(STEPS):
        for i in range(accumulate):
            loss = model(batch(step * accumulate + i, dtype)) / accumulate
            loss.backward()
            losses.append(loss.item())
        model.optimizer.step()
    return losses


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


class Plain:
    """The reference: every block has its slot, and no update runs beside a backward."""

    def __init__(self, folder: pathlib.Path, **settings: Any) -> None:
        """Wrap a Tower, or settings' model."""
        self.model = wrap(folder, schedule="serial", **settings)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *args: object) -> None:
        self.model.lohan.close()


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("slots", [SMALL, None])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_first_gradients_are_plain_torchs(
    schedule: str, slots: int | None, is_checkpointed: bool, store: pathlib.Path
) -> None:
    """Gradients, seen by register_hook, are torch's bit for bit, from the very same parameters."""
    made = Tower(is_checkpointed=is_checkpointed)
    plain = Tower(is_checkpointed=is_checkpointed).cuda()
    seen: dict[str, torch.Tensor] = {}
    names = [name for name, _ in made.named_parameters()]
    for name, param in made.named_parameters():
        param.register_hook(lambda g, name=name: seen.__setitem__(name, g.detach().clone()))
    model = wrap(store, made, schedule=schedule, device_param_bytes=slots)
    try:
        for step in range(STEPS):
            plain.load_state_dict(state_of(model))
            plain.zero_grad()
            expected = plain(batch(step))
            expected.backward()
            loss = model(batch(step))
            loss.backward()
            assert torch.equal(loss, expected)
            for name, param in zip(names, plain.parameters(), strict=True):
                assert torch.equal(seen[name], param.grad), name
            model.optimizer.step()
            model.lohan.flush()
            stats = model.lohan.stats()
            assert stats.bytes == stats.planned_bytes
    finally:
        model.lohan.close()


class Integrated:
    """The properties of a GPU that is integrated, as any GPU may claim.

    Every GPU reads registered main memory. Where it has memory of its own, that is only slow.
    """

    is_integrated = True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_that_are_read_in_main_memory_have_the_same_bits(
    schedule: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Plain(tmp_path / "plain") as plain:
        losses = train(plain)
        state = state_of(plain)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: Integrated())
    model = wrap(tmp_path / "unified", schedule=schedule)
    try:
        assert inside(model).device.is_unified
        assert train(model) == losses
        assert_same(state_of(model), state)
        model.lohan.flush()
        assert model.lohan.stats().bytes["copy_in"] == 0
    finally:
        model.lohan.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slots_and_schedules_change_no_bit(
    schedule: str, dtype: torch.dtype, tmp_path: pathlib.Path
) -> None:
    with Plain(tmp_path / "plain", model=Tower().to(dtype)) as plain:
        losses = train(plain, dtype=dtype)
        expected = state_of(plain)
    model = wrap(tmp_path / "small", Tower().to(dtype), schedule=schedule, device_param_bytes=SMALL)
    try:
        assert train(model, dtype=dtype) == losses
        assert_same(state_of(model), expected)
    finally:
        model.lohan.close()


@pytest.mark.parametrize("schedule", SCHEDULES_AT_STEP)
def test_clipping_changes_no_bit_between_slots(schedule: str, tmp_path: pathlib.Path) -> None:
    with Plain(tmp_path / "plain", max_grad_norm=0.01) as plain:
        train(plain)
        norm, expected = plain.optimizer.grad_norm, state_of(plain)
    model = wrap(
        tmp_path / "small", schedule=schedule, device_param_bytes=SMALL, max_grad_norm=0.01
    )
    try:
        train(model)
        assert model.optimizer.grad_norm == norm
        assert_same(state_of(model), expected)
    finally:
        model.lohan.close()


def test_sums_of_gradients_are_those_of_p_grad(store: pathlib.Path) -> None:
    plain = Tower().cuda()
    twice = [plain(batch(i)) / 2 for i in range(2)]
    for loss in twice:
        loss.backward()
    norm = sum(float(p.grad.double().square().sum()) for p in plain.parameters()) ** 0.5
    model = wrap(store, accumulate=2, max_grad_norm=1e9, device_param_bytes=SMALL)
    try:
        for i in range(2):
            (model(batch(i)) / 2).backward()
        model.optimizer.step()
        assert model.optimizer.grad_norm == pytest.approx(norm, rel=1e-12)
    finally:
        model.lohan.close()


def test_a_loss_scaler_for_cuda_steps_and_skips(store: pathlib.Path) -> None:
    model = wrap(store, loss_scaling=True, device_param_bytes=SMALL)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    try:
        for scale, is_skipped in ((1.0, False), (float("inf"), True), (1.0, False)):
            before = state_of(model)
            scaler.scale(model(batch(0)) * scale).backward()
            scaler.step(model.optimizer)
            scaler.update()
            after = state_of(model)
            same = [torch.equal(before[name], value) for name, value in after.items()]
            assert all(same) is is_skipped
    finally:
        model.lohan.close()


def test_autocast_gives_the_bits_of_a_model_that_stays(store: pathlib.Path) -> None:
    plain = Tower().cuda()
    model = wrap(store, device_param_bytes=SMALL)
    try:
        with torch.autocast("cuda", torch.bfloat16):
            loss, expected = model(batch(0)), plain(batch(0))
        assert torch.equal(loss, expected)
        loss.backward()
        model.optimizer.step()
    finally:
        model.lohan.close()


def test_a_model_larger_than_the_memory_it_may_have_trains(store: pathlib.Path) -> None:
    """1 GiB of parameters under a cap of two thirds of it.

    The cap counts all that torch's allocator has: slots for parameters, at most three gradients
    (two that wait for their copies, one that is being made), cuBLAS's workspaces, and a rest for
    activations and for what the allocator rounds up.
    """
    wide, depth = 4096, 16

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(wide, wide) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return x.square().mean()

    nbytes = depth * (wide + 1) * wide * 4
    slots, gradient = nbytes // 4, wide * wide * 4
    cap = slots + 3 * gradient + WORKSPACE_BYTES + 64 * MIB
    assert cap < nbytes * 2 / 3
    gc.collect()  # free what earlier tests left
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    share = cap / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        model = wrap(store, Wide(), device_param_bytes=slots)
        try:
            for _ in range(2):
                model(torch.randn(ROWS, wide, device="cuda")).backward()
                model.optimizer.step()
            assert torch.cuda.max_memory_reserved() <= cap
        finally:
            model.lohan.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_evaluation_a_loop_and_a_state_dict_see_the_newest_values(store: pathlib.Path) -> None:
    model = wrap(store, device_param_bytes=SMALL)
    plain = Tower().cuda()
    try:
        for step in range(2):
            model(batch(step)).backward()
            model.optimizer.step()
            state = model.state_dict()
            plain.load_state_dict(state)
            with torch.no_grad():
                assert torch.equal(model(batch(9)), plain(batch(9)))
                for name, param in model.named_parameters():
                    assert param.is_cuda and state[name].device.type == "cpu"
                    assert torch.equal(param.cpu(), state[name])
                    param.mul_(0.5)
                for param in plain.parameters():
                    param.mul_(0.5)
                assert torch.equal(model(batch(9)), plain(batch(9)))
    finally:
        model.lohan.close()


def test_another_stream_than_the_default_is_ordered_too(tmp_path: pathlib.Path) -> None:
    with Plain(tmp_path / "plain") as plain:
        losses = train(plain)
        expected = state_of(plain)
    model = wrap(tmp_path / "stream", device_param_bytes=SMALL)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            assert train(model) == losses
            assert_same(state_of(model), expected)
    finally:
        torch.cuda.synchronize()
        model.lohan.close()


def test_views_outlive_the_session_and_unwrap_gives_the_cpu_its_model(
    store: pathlib.Path,
) -> None:
    model = wrap(store, device_param_bytes=SMALL)
    model(batch(0)).backward()
    model.optimizer.step()
    state = state_of(model)
    view = inside(model).parameters.lend(0)
    lohan.unwrap(model)
    assert view.is_cuda and bool(view.isfinite().all())
    del view
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert all(b.device.type == "cpu" for b in model.buffers())
    assert_same(state_of(model), state)


def test_a_gpu_that_is_not_there_is_refused_by_name(store: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"'cuda:99'.*torch finds"):
        wrap(store, device="cuda:99")
