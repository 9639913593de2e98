"""The texts of errors and objects: sizes have units, and the suggested remedies work."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from click.testing import CliRunner
from lohan.cli import main
from lohan.common import _shown
from lohan.common._stats import LINKS, ReplicaStats, StepStats, Traffic
from lohan.errors import (
    BudgetError,
    DeviceMemoryError,
    LohanError,
    MachineError,
    ModelError,
    SecondBackwardError,
    StaleGraphError,
    StoreError,
    StoreExistsError,
    ZeroGradError,
)
from lohan.planning import _machines
from torch import nn

WIDTH = 64
STEPS = 3


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


# --- Two networks -----------------------------------------------------------------------------


def _gan(critic: nn.Module, optimizer: Any, steps: int = STEPS) -> list[torch.Tensor]:
    """A GAN's loop: the generator's backward leaves gradients in the critic; they are zeroed."""
    generator = _net()
    generator_optimizer = torch.optim.AdamW(generator.parameters(), lr=1e-3)
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        real, fake = torch.randn(8, WIDTH), generator(torch.randn(8, WIDTH))
        optimizer.zero_grad()
        loss = critic(real).square().mean() - critic(fake.detach()).square().mean()
        loss.backward()
        optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = critic(fake).square().mean()
        generator_loss.backward()
        generator_optimizer.step()
        seen += [loss.detach(), generator_loss.detach()]
    return seen


def test_a_gan_s_loop_is_told_of_the_schedule_that_takes_it_and_trains_by_it(
    store_dir: pathlib.Path,
) -> None:
    critic = lohan.wrap(_net(), store=store_dir / "a")
    with pytest.raises(ZeroGradError, match='schedule="deferred"'):
        _gan(critic, critic.optimizer)
    critic.lohan.close()
    plain = _net()
    wanted = _gan(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    for activations in ("keep", "recompute"):
        critic = lohan.wrap(
            _net(), store=store_dir / activations, schedule="deferred", activations=activations
        )
        seen = _gan(critic, critic.optimizer)
        assert critic.lohan.step == STEPS
        critic.lohan.close()
        assert torch.equal(seen[0], wanted[0])
        assert torch.equal(seen[1], wanted[1])
        for mine, theirs in zip(seen, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_forward_over_unwanted_gradients_is_told_of_zero_grad_by_deferred_updates(
    store_dir: pathlib.Path,
) -> None:
    x = torch.ones(2, WIDTH)
    model = lohan.wrap(_net(), store=store_dir / "a")
    model(x).sum().backward()
    with pytest.raises(SecondBackwardError, match=r'schedule="deferred".*zero_grad'):
        model(x)
    model.lohan.close()
    model = lohan.wrap(_net(), store=store_dir / "b", schedule="deferred")
    model(x).sum().backward()
    model.optimizer.zero_grad()
    assert torch.equal(model(x), _net()(x))
    model.lohan.close()


@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
def test_a_backward_through_an_updated_model_is_told_to_run_its_forward_again(
    schedule: str, store_dir: pathlib.Path
) -> None:
    model = lohan.wrap(_net(), store=store_dir, schedule=schedule)
    x = torch.ones(2, WIDTH)
    first, second = model(x), model(x)
    first.sum().backward()
    model.optimizer.step()
    with pytest.raises(StaleGraphError, match=r"run the forward again after step\(\)"):
        second.sum().backward()
    model.optimizer.zero_grad()
    model(x).sum().backward()
    model.optimizer.step()
    assert model.lohan.step == 2
    model.lohan.close()


# --- What is said -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("needs at least 7397456 (a 16384)", "needs at least 7397456 (7.4 MB) (a 16384)"),
        ("gpu_bytes 25769803776 is", "gpu_bytes 25769803776 (25.8 GB) is"),
        ("of 1200000000000 bytes.", "of 1200000000000 bytes (1.2 TB)."),
        ("takes 12,345,678 bytes, and", "takes 12,345,678 bytes (12.3 MB), and"),
        ("try device_bytes=123456789, or", "try device_bytes=123456789, or"),
        ("in /tmp/12345678/a", "in /tmp/12345678/a"),
        ("123456 and 999,999 are small", "123456 and 999,999 are small"),
        ("uuid a12345678b", "uuid a12345678b"),
    ],
)
def test_a_budget_s_large_numbers_have_their_units_once(text: str, said: str) -> None:
    error = BudgetError(text)
    assert str(error) == said
    assert str(BudgetError(str(error))) == said


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (StoreError, "has 12345678 bytes", "has 12345678 bytes (12.3 MB)"),
        (ModelError, "has 12,345,678 bytes, and", "has 12,345,678 bytes (12.3 MB), and"),
        (StoreError, "step 12345678, 123456 bytes", "step 12345678, 123456 bytes (123 kB)"),
        (BudgetError, "12,345 bytes of 123456", "12,345 bytes (12.3 kB) of 123456"),
        (LohanError, "blocks of 4096 bytes", "blocks of 4096 bytes"),
        (DeviceMemoryError, "of 12345678, with", "of 12345678 (12.3 MB), with"),
    ],
)
def test_large_byte_counts_of_every_error_have_their_units_once(
    kind: type[LohanError], text: str, said: str
) -> None:
    assert str(kind(text)) == said
    assert str(kind(f"{kind(text)}")) == said
    if issubclass(kind, OSError):
        assert str(kind(5, text)) == said


def test_an_error_of_the_system_is_quoted_without_its_number(tmp_path: pathlib.Path) -> None:
    with pytest.raises(MachineError, match="No such file") as caught:
        _machines.load(str(tmp_path / "none.toml"))
    assert "[Errno" not in str(caught.value)


def test_a_budget_that_is_too_small_is_said_in_bytes_and_in_units(store_dir: pathlib.Path) -> None:
    with pytest.raises(BudgetError, match=r"at least \d+ \([\d.]+ MB\)"):
        lohan.wrap(_net(), store=store_dir, host_bytes=1)


def test_errors_of_stores_say_each_thing_once_and_keep_the_number_for_programs(
    store_dir: pathlib.Path,
) -> None:
    lohan.wrap(_net(), store=store_dir).lohan.close()
    with pytest.raises(StoreExistsError) as exists:
        lohan.wrap(_net(), store=store_dir)
    # the message contains "pass resume=True to resume it"
    assert str(exists.value).count("resume") == 2
    assert exists.value.errno is not None
    calls: list[Callable[[], Any]] = [
        lambda: lohan.wrap(_net(), store=store_dir),
        lambda: lohan.wrap(_net(), store=store_dir / "none", resume=True),
        lambda: lohan.wrap(_net(), store=pathlib.Path(__file__)),
        lambda: lohan.export(store_dir / "none", store_dir / "out"),
        lambda: lohan.wrap(_net(), store=store_dir / "b", weights=store_dir / "none"),
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert "[Errno" not in str(caught.value)
        assert str(caught.value)


def test_a_session_and_its_stats_say_what_they_are_before_and_after_a_step(
    store_dir: pathlib.Path,
) -> None:
    for resume, before in ((False, 0), (True, 1)):
        model = lohan.wrap(_net(), store=store_dir, resume=resume)
        said = repr(model.lohan)
        for part in ("open", f"step {before}", "4 parameters (8,320 elements)", "'cpu'", " MB>"):
            assert part in said
        assert f"store {store_dir}, host memory" in said
        stats = model.lohan.stats()
        assert (stats.step, stats.read_bytes, stats.written_bytes, stats.wall_ns) == (0, 0, 0, 0)
        assert "no step of this session" in str(stats)
        model(torch.ones(2, WIDTH)).sum().backward()
        model.optimizer.step()
        model.lohan.flush()
        assert model.lohan.stats().step == before + 1
        assert "bound by" in str(model.lohan.stats())
        model.lohan.close()
        assert "closed" in repr(model.lohan)


def test_stats_are_shown_one_number_a_line_with_units() -> None:
    links = {**dict.fromkeys(LINKS, 0), "state_write": 84_100_000_000}
    none = StepStats.none(2)
    stats = dataclasses.replace(none, step=3, wall_ns=844_000_000, bytes=links)
    shown = [line.strip() for line in repr(stats).splitlines()]
    assert shown[0] == "StepStats of step 3, bound by compute"
    assert {"wall: 0.844 s", "updated_params: 0", "threads: 2"} <= {*shown}
    assert "bytes['state_write']: 84.1 GB (planned: 0 B)" in shown
    assert not [line for line in shown if "param_read" in line], "nothing was moved"
    assert len(shown) == len(dataclasses.fields(stats)) - 2 + 1, "all fields but bytes and step"
    values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    several = ReplicaStats(**values, traffic=Traffic(sent_bytes=1_500, peer_wait_ns=10**9))
    assert "traffic.sent_bytes: 1.5 kB" in repr(several)
    assert "traffic.peer_wait: 1.000 s" in repr(several)


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (84_100_000_000, "84.1 GB"),
    ],
)
def test_bytes_are_shown_with_three_digits(nbytes: int, said: str) -> None:
    assert _shown.of_bytes(nbytes) == said


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "--model", "opt-1.3b", "--batch", "0"],
        ["simulate", "--model", "opt-1.3b", "--batch", "-1"],
        ["simulate", "--model", "opt-1.3b", "--seq", "0"],
        ["plan", "--model", "opt-1.3b", "--batch", "0"],
    ],
)
def test_a_command_line_with_a_size_below_one_is_wrong_and_exits_with_2(words: list[str]) -> None:
    answer = CliRunner().invoke(main, words)
    assert answer.exit_code == 2, answer.output
    assert "range" in answer.output


def test_every_error_is_lohan_s() -> None:
    assert issubclass(BudgetError, LohanError)
    assert str(StoreError("a sentence")) == "a sentence"
    assert str(StoreError(2, "a sentence")) == "a sentence"
