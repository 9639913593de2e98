"""lohan.convert: the same parameters and step, with moments in another format.

The file is also the program that is killed while it converts.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import lohan
import pytest
import torch
from click.testing import CliRunner
from lohan import cli
from lohan.config import Config
from lohan.errors import ModelError, StoreExistsError, StoreUncleanError, UnsupportedError
from lohan.store import _contents, _moments
from lohan.store._export import open_to_read
from torch import nn

FORMATS = ("fp32", "bf16", "8bit")
CHANGES = [
    *itertools.permutations(FORMATS, 2),
    *(("fp32", "4bit"), ("4bit", "fp32"), ("4bit", "8bit")),
]
WIDTH = 200


def build(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers).to(dtype)


def train(model: nn.Module, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).dtype)
        (model(x).float() - 0.1).square().mean().backward()
        model.optimizer.step()


def make(folder: pathlib.Path, states: str, dtype: torch.dtype = torch.bfloat16) -> pathlib.Path:
    model = lohan.wrap(build(dtype), store=folder / states, states=states, lr=1e-2)
    train(model, range(3))
    model.lohan.close()
    return folder / states


Arrays = dict[str, torch.Tensor]


def arrays_of(store: pathlib.Path) -> Arrays:
    """Return the masters and moments of all parameters, and the number of updates."""
    opened = open_to_read([str(store)], Config(allow_buffered=True))
    contents = _contents.read(opened, str(store))
    found: Arrays = {"step": torch.tensor(opened.describe()["step"])}
    for param in contents.layout.params:
        unit, places = contents.layout.units[param.unit], contents.extents.units[param.unit]
        pieces = _contents.pieces(opened, unit, places, param, is_master=True)
        found[f"{param.name} p"] = torch.cat([*pieces])
        m, v = _moments.read(opened, unit, places, param)
        found[f"{param.name} m"], found[f"{param.name} v"] = m, v
    opened.close()
    return found


def check_converted(before: Arrays, after: Arrays, states: str) -> None:
    assert before.keys() == after.keys()
    for name, values in before.items():
        if states == "fp32" or name[-1] not in "mv":
            assert torch.equal(values, after[name]), name
            continue
        assert bool(values.any()) and (after[name] >= 0).all() == (values >= 0).all()
        power = 1 if name[-1] == "m" else 0.5
        was, now = values.abs() ** power, after[name].abs() ** power
        relative, of_most = {
            "bf16": (1 / 128, 0),
            "8bit": (1 / 15, 1 / 250),
            "4bit": (1 / 3, 1 / 15),
        }[states]
        bound = was * relative + was.max() * of_most
        assert ((now - was).abs() <= bound).all(), name


def digest(store: pathlib.Path) -> str:
    return hashlib.sha256((store / "lohan.data").read_bytes()).hexdigest()


@pytest.mark.parametrize(("was", "now"), CHANGES)
def test_a_converted_store_continues_with_its_moments(
    was: str, now: str, store_dir: pathlib.Path
) -> None:
    dtype = torch.float16 if (was, now) == ("fp32", "bf16") else torch.bfloat16
    store = make(store_dir, was, dtype)
    bytes_before = digest(store)
    seen: list[tuple[int, int]] = []
    made = lohan.convert(store, store_dir / "new", states=now, progress=lambda *at: seen.append(at))
    assert made.step == 3 and made.directories == [str(store_dir / "new")]
    assert seen[-1] == (made.total_bytes, made.total_bytes)
    assert digest(store) == bytes_before
    check_converted(arrays_of(store), arrays_of(store_dir / "new"), now)
    assert lohan.verify(store_dir / "new").is_whole
    model = lohan.wrap(build(dtype), store=store_dir / "new", resume=True, states=now, lr=1e-2)
    assert model.lohan.step == 3
    train(model, range(3, 5))
    model.lohan.close()
    model = lohan.wrap(build(dtype), store=store, resume=True, states=was, lr=1e-2)
    model.lohan.close()


def test_narrow_moments_survive_a_way_through_fp32(store_dir: pathlib.Path) -> None:
    store = make(store_dir, "8bit")
    lohan.convert(store, store_dir / "wide", states="fp32")
    lohan.convert(store_dir / "wide", store_dir / "narrow", states="8bit")
    before, after = arrays_of(store), arrays_of(store_dir / "narrow")
    assert all(torch.equal(values, after[name]) for name, values in before.items())


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_many_pieces_are_as_one(
    states: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(store_dir, "fp32")
    lohan.convert(store, store_dir / "one", states=states)
    monkeypatch.setattr(_contents, "PIECE_ELEMENTS", 1024)
    lohan.convert(store, store_dir / "many", states=states)
    one, many = arrays_of(store_dir / "one"), arrays_of(store_dir / "many")
    assert all(torch.equal(values, many[name]) for name, values in one.items())


def test_killed_at_any_moment_it_leaves_the_old_store(store_dir: pathlib.Path) -> None:
    store = make(store_dir, "fp32")
    bytes_before = digest(store)
    command = [sys.executable, __file__, str(store), str(store_dir / "new")]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    kills = int(answer.stdout)
    assert kills >= 8
    assert digest(store) == bytes_before
    with pytest.raises(StoreUncleanError):
        lohan.wrap(build(), store=store_dir / "new", resume=True, states="8bit")
    lohan.convert(store, store_dir / "new", states="8bit")
    check_converted(arrays_of(store), arrays_of(store_dir / "new"), "8bit")


def test_an_error_leaves_no_new_store(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(store_dir, "fp32")
    monkeypatch.chdir(store_dir)

    def fail(*_: int) -> None:
        raise RuntimeError("as if the disk were full")

    with pytest.raises(RuntimeError, match="as if"):
        lohan.convert(store, "a/b", states="8bit", progress=fail)
    assert not (store_dir / "a").exists()


def test_what_cannot_be_converted_is_rejected(store_dir: pathlib.Path) -> None:
    store = make(store_dir, "bf16")
    out: Any = store_dir / "new"
    with pytest.raises(UnsupportedError, match="moments='bf16' already"):
        lohan.convert(store, out, states="bf16")
    with pytest.raises(ModelError, match="states='int8'"):
        lohan.convert(store, out, states="int8")
    with pytest.raises(StoreExistsError, match="choose another"):
        lohan.convert(store, store, states="8bit")
    lohan.convert(store, out, states="8bit")
    with pytest.raises(StoreExistsError, match="choose another"):
        lohan.convert(store, out, states="8bit")
    lohan.wrap(build(), store=store_dir / "zo", method="mezo").lohan.close()
    with pytest.raises(UnsupportedError, match="has no moments"):
        lohan.convert(store_dir / "zo", store_dir / "zo2", states="8bit")


def test_the_command_converts(store_dir: pathlib.Path) -> None:
    store = make(store_dir, "fp32")
    words = ["convert", str(store), str(store_dir / "a"), "--and", str(store_dir / "b")]
    answer = CliRunner().invoke(cli.main, [*words, "--states", "8bit"])
    assert answer.exit_code == 0, answer.output
    assert answer.output.startswith("step 3: ")
    assert (store_dir / "a" / "lohan.data").exists() and (store_dir / "b" / "lohan.data").exists()


def main() -> None:
    """Convert in child processes, each killed one piece later than the previous one."""
    store, out = sys.argv[1:]
    for count in itertools.count(1):
        pid = os.fork()
        if pid == 0:
            left = itertools.count(1)

            def kill(*_: int, count: int = count, left: Any = left) -> None:
                if next(left) == count:
                    os.kill(os.getpid(), signal.SIGKILL)

            lohan.convert(store, out, states="8bit", progress=kill)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):  # it had no piece left
            os.unlink(os.path.join(out, "lohan.data"))
            break
    pid = os.fork()
    if pid == 0:
        lohan.convert(store, out, states="8bit", progress=lambda *_: os.kill(os.getpid(), 9))
    os.waitpid(pid, 0)
    print(count - 1)


if __name__ == "__main__":
    main()
