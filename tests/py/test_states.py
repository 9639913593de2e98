"""AdamW's moments in bf16, 8 and 4 bits: the same bits in every setting, and a store that resumes.

The file is also the program that is killed while it trains.
"""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.config import Config
from lohan.errors import ModelError, StoreMismatchError
from lohan.store import _contents
from lohan.store._export import open_to_read
from torch import nn

STATES = ("bf16", "8bit", "4bit")
# Bytes that a step reads and writes of R, M, V and scales, per padded element of a bf16 unit.
STATE_BYTES = {"fp32": 20, "bf16": 12, "8bit": 8.125, "4bit": 6.125}
WIDTH = 1100  # a Linear of this width has more elements than a chunk
STEPS = range(5)


class Block(nn.Module):
    """Two layers in one unit; the second is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, 60)

    def forward(self, x: torch.Tensor, is_whole: bool) -> torch.Tensor:
        y = torch.tanh(self.always(x))
        return torch.cat((y[:, :-60], self.sometimes(x)), 1) if is_whole else y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, is_whole: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, is_whole)
        return x


def build(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return Net().to(dtype).train()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batch = helper.normal(step, 8, WIDTH).to(torch.bfloat16)
    loss: torch.Tensor = (model(batch, step % 2 == 0).float() - 0.1).square().mean()
    return loss


EXPECTED: dict[str, helper.Trained] = {}


def expected(states: str, folder: pathlib.Path) -> helper.Trained:
    """Return the result with everything in memory, computed once per format."""
    if states not in EXPECTED:
        model = lohan.wrap(build(), store=folder / "e", states=states, threads=1, **helper.HYPER)
        EXPECTED[states] = helper.train(model, STEPS, loss_of)
    return EXPECTED[states]


@pytest.mark.parametrize("states", STATES)
def test_blocks_do_not_change_the_bits(states: str, store_dir: pathlib.Path) -> None:
    model = build()
    blocks = [layer for block in model.blocks for layer in (block.sometimes, block.always)]
    model = lohan.wrap(model, store=store_dir / "s", blocks=blocks, states=states, **helper.HYPER)
    assert len(inside(model).layout.units) == len(blocks)
    helper.assert_same(helper.train(model, STEPS, loss_of), expected(states, store_dir))


@pytest.mark.parametrize("states", STATE_BYTES)
def test_a_step_moves_the_bytes_of_its_format(states: str, store_dir: pathlib.Path) -> None:
    least = helper.host_bytes_min(build(), store_dir, states=states)
    model = lohan.wrap(
        build(), store=store_dir / "s", host_bytes=least, states=states, **helper.HYPER
    )
    for step in (0, 2, 4):
        loss_of(model, step).backward()
        model.optimizer.step()
    elements = sum(unit.elements for unit in inside(model).layout.units)
    model.lohan.flush()
    stats = model.lohan.stats()
    model.lohan.close()
    assert stats.bytes == stats.planned_bytes
    moved = stats.bytes["state_read"] + stats.bytes["state_write"]
    assert moved == STATE_BYTES[states] * elements


@pytest.mark.parametrize("states", STATES)
def test_killed_and_resumed_it_ends_at_the_same_bits(states: str, store_dir: pathlib.Path) -> None:
    command = [sys.executable, __file__, str(store_dir / "killed"), states]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [line.split()[0] for line in lines] == ["0", "1", "2"], lines
    model = lohan.wrap(
        build(), store=store_dir / "killed", resume=True, states=states, **helper.HYPER
    )
    begin = model.lohan.step
    assert begin >= 2
    for step in range(begin, begin + 3):
        loss_of(model, step).backward()
        model.optimizer.step()
    actual = helper.digest(model)
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "whole", states=states, **helper.HYPER)
    for step in range(begin + 3):
        loss_of(model, step).backward()
        model.optimizer.step()
    assert helper.digest(model) == actual
    model.lohan.close()


@pytest.mark.parametrize("states", STATES)
def test_it_learns_like_fp32(states: str, store_dir: pathlib.Path) -> None:
    losses = {}
    for kind in ("fp32", states):
        model = lohan.wrap(
            helper.build("gpt2", torch.bfloat16), store=store_dir / kind, states=kind, lr=3e-3
        )
        last = []
        for step in range(150):
            loss = helper.language_loss(model, step % 4)
            loss.backward()
            model.optimizer.step()
            last = [*last[-3:], loss.item()]
        model.lohan.close()
        losses[kind] = sum(last) / len(last)
    assert losses["fp32"] < 2.5
    assert losses[states] < losses["fp32"] + 0.1


@pytest.mark.parametrize("states", STATES)
def test_an_adopted_optimizer_keeps_its_moments(states: str, store_dir: pathlib.Path) -> None:
    model = build(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **helper.HYPER)
    model(torch.randn(4, WIDTH), True).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [
        [state[key].clone() for key in ("exp_avg", "exp_avg_sq")]
        for state in optimizer.state.values()
    ]
    model = lohan.wrap(model, store=store_dir / "s", states=states, optimizer=optimizer)
    lohan.unwrap(model)
    after = [
        [state[key] for key in ("exp_avg", "exp_avg_sq")] for state in optimizer.state.values()
    ]
    assert len(before) == len(after) == 12
    # An 8-bit code is up to 1 / 16 of the value, or 1 / 500 of the largest; a 4-bit one up to
    # 1 / 3 of the value, or 1 / 44 of the largest, and that of a root 1 / 16 of the largest.
    of_value, of_most, of_root = (
        (1 / 3, 1 / 40, 1 / 15) if states == "4bit" else (1 / 16, 1 / 500, 1 / 250)
    )
    for (m, v), (m_after, v_after) in zip(before, after, strict=True):
        assert ((m_after - m).abs() <= m.abs() * of_value + m.abs().max() * of_most).all()
        root, root_after = v.sqrt(), v_after.sqrt()
        assert ((root_after - root).abs() <= root / 100 + root.max() * of_root).all()
        assert (v_after > 0)[v > 0].all()


def test_another_format_on_resume_is_rejected_with_the_remedy(store_dir: pathlib.Path) -> None:
    lohan.wrap(build(), store=store_dir / "s", states="8bit").lohan.close()
    with pytest.raises(StoreMismatchError, match=r"created with moments='8bit', not 'fp32'") as e:
        lohan.wrap(build(), store=store_dir / "s", resume=True)
    assert "moments='8bit'" in str(e.value)
    assert "lohan convert STORE OUT --states fp32" in str(e.value)
    lohan.wrap(build(), store=store_dir / "s", resume=True, states="8bit").lohan.close()


def test_a_store_of_fp32_moments_is_what_it_was(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(build(), store=store_dir / "s")
    meta = inside(model).store.describe()["meta"]
    text = meta if isinstance(meta, str) else bytes(meta).decode()
    assert '"lohan": 1,' in text and "states" not in text
    model.lohan.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"states": "int8"}, 'must be "fp32", "bf16", "8bit" or "4bit"'),
        ({"states": "8bit", "method": "mezo"}, "has none"),
    ],
)
def test_what_has_no_such_states_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        lohan.wrap(nn.Linear(4, 4), **settings)


def test_a_place_in_the_scales_has_its_parameters_name(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(build(), store=store_dir / "s", states="8bit")
    extent = inside(model).extents.units[1].scales
    model.lohan.close()
    store = open_to_read([str(store_dir / "s")], Config())
    contents = _contents.read(store, "s")
    store.close()
    first = _core.SCALES_ELEMENTS // 16
    assert contents.extents.table[extent][0] == first
    assert contents.name_at(extent, 0) == ("blocks.1.always.weight", "scales")
    last = (WIDTH * WIDTH + WIDTH) // 16 + 8 - first
    assert contents.name_at(extent + 1, last) == ("blocks.1.sometimes.weight", "scales")


def main() -> None:
    """Train and print the number of each step, until killed."""
    folder, states = sys.argv[1:]
    model = lohan.wrap(
        build(), store=folder, states=states, host_bytes="60MB", schedule="deferred", **helper.HYPER
    )
    for step in range(1000):
        loss_of(model, step).backward()
        model.optimizer.step()
        print(step, flush=True)


if __name__ == "__main__":
    main()
