"""Frozen parameters in foreign files: where they are, what is copied, what is rejected."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import lohan
import numpy as np
import pytest
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import (
    ChecksumError,
    ModelError,
    StoreError,
    StoreMismatchError,
    UnsupportedError,
)
from lohan.layout._block import Param
from lohan.layout._files import read_folder
from lohan.layout._in_place import BLOCK
from lohan.layout._in_place_units import place
from lohan.layout._packed import Entry
from safetensors.torch import load_file, save_file
from torch import nn

WIDTH = 528  # a weight has more than 1 MiB, and its size is not a multiple of a block
X = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


class Tower(nn.Module):
    """Frozen layers, each followed by a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"base": nn.Linear(WIDTH, WIDTH), "scale": nn.Linear(WIDTH, 1)})
            for _ in range(3)
        )
        for block in self.blocks:
            block["base"].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block["base"](x)) * (1 + block["scale"](x))
        return x


def tower() -> Tower:
    torch.manual_seed(3)
    return Tower()


def save(folder: Path, **changed: torch.Tensor) -> Path:
    """Write the frozen weights of a tower to two files."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v for k, v in tower().state_dict().items() if "base" in k}
    state.update(changed)
    names = sorted(state)
    save_file({k: state[k] for k in names[:3]}, folder / "a.safetensors")
    save_file({k: state[k] for k in names[3:]}, folder / "b.safetensors")
    return folder


def train(model: Any, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    return losses


def in_place(model: Any) -> list[str]:
    layout = inside(model).layout
    return [p.name for p in layout.params if layout.units[p.unit].runs]


def test_a_layout_in_place_has_every_parameter_s_bytes_aligned() -> None:
    generator = random.Random(5)
    for _ in range(200):
        files = [np.random.default_rng(9).integers(0, 256, 90_000, np.uint8) for _ in range(2)]
        params, ends = [], [0, 0]
        for index in range(generator.randint(1, 9)):
            file = generator.randint(0, 1)
            begin = ends[file] + generator.choice([0, 0, 2, 6, 64, 4096, 30_000]) % 8000
            nbytes = generator.choice([2, 30, 64, 1000, 4096, 9000])
            if begin + nbytes > 90_000:
                continue
            ends[file] = begin + nbytes
            param = Param(
                "p", nn.Parameter(torch.empty(nbytes // 2, dtype=torch.int16), False), 0, 0, index
            )
            param.source = Entry(file, begin, nbytes, "I16", (nbytes // 2,))
            params.append(param)
        generator.shuffle(params)
        runs, moves = place(params)
        memory = np.zeros(sum(run.nbytes for run in runs), np.uint8)
        at = 0
        for run in runs:
            assert run.offset == at and run.file_offset % BLOCK == 0 and run.nbytes % BLOCK == 0
            piece = files[run.file][run.file_offset : run.file_offset + run.nbytes]
            memory[at : at + len(piece)] = piece
            at += run.nbytes
        left = 0
        for move in moves:
            assert left <= move.to <= move.begin < move.to + _core.IN_PLACE_ALIGN
            memory[move.to : move.to + move.nbytes] = memory[
                move.begin : move.begin + move.nbytes
            ].copy()
            left = move.to + move.nbytes
        for param in params:
            source = param.source
            assert source is not None and param.first % _core.IN_PLACE_ALIGN == 0
            wanted = files[source.file][source.offset : source.offset + source.nbytes]
            assert np.array_equal(memory[param.first : param.first + source.nbytes], wanted)
        assert at <= sum(p.source.nbytes + 2 * BLOCK for p in params if p.source) + 5 * BLOCK * 9


def test_parameters_that_lie_together_are_read_together(tmp_path: Path, store_dir: Path) -> None:
    model = lohan.wrap(tower(), store=store_dir, weights=save(tmp_path / "w"))
    units = [unit for unit in inside(model).layout.units if unit.runs]
    waste = sum(unit.nbytes for unit in units) - sum(
        param.count * 4 for unit in units for param in unit.params
    )
    assert len(in_place(model)) == 6
    assert sum(len(unit.runs) for unit in units) == 4, (
        "a unit of each block, one of them in two files"
    )
    assert waste <= 4 * 2 * BLOCK
    model.lohan.close()


@pytest.mark.parametrize("frozen", ["in_place", "copy"])
def test_the_files_may_be_anywhere_and_the_bits_are_the_same(
    frozen: Any, tmp_path: Path, store_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = lohan.wrap(tower(), store=store_dir / "plain", lr=1e-2)
    expected = train(plain)
    plain.lohan.close()
    model = lohan.wrap(
        tower(), store=store_dir / "s", weights=save(tmp_path / "w"), lr=1e-2, frozen=frozen
    )
    assert bool(in_place(model)) == (frozen == "in_place")
    assert "6 as given" in capsys.readouterr().err, "the trained ones keep their values"
    assert train(model) == expected
    model.lohan.close()
    if frozen == "copy":
        shutil.rmtree(tmp_path / "w")
    again = lohan.wrap(tower(), store=store_dir / "s", resume=True)
    train(again, 1)
    again.lohan.close()


def test_what_cannot_be_read_in_place_is_copied_and_told(
    tmp_path: Path, store_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tower().state_dict()
    half = {"blocks.1.base.weight": state["blocks.1.base.weight"].half()}
    folder = save(tmp_path / "w", **half)
    model = lohan.wrap(tower(), store=store_dir, weights=folder)
    said = capsys.readouterr().err
    assert "1 parameters (1.1 MB) are copied into the store: F16 in the files, float32" in said
    assert set(in_place(model)) == {k for k in state if "base" in k} - set(half)
    assert torch.equal(
        model.state_dict()["blocks.1.base.weight"], next(iter(half.values())).float()
    )
    model.lohan.close()


def test_what_a_failed_call_left_empty_is_not_taken_for_values(
    tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    with lohan.empty():
        model = Tower()
    for name in ("a", "b"):
        with pytest.raises(ModelError, match="no value for 6 parameters"):
            lohan.wrap(model, store=store_dir / name, weights=folder)
    model = nn.Sequential(tower(), nn.Linear(WIDTH, 1))
    model[1].bias = nn.Parameter(torch.tensor(0.25))  # a scalar that has a value
    model = lohan.wrap(model, store=store_dir / "c", weights=folder)
    assert model.state_dict()["1.bias"] == 0.25
    model.lohan.close()


def test_pickles_are_refused_with_the_way_out(tmp_path: Path, store_dir: Path) -> None:
    torch.save(tower().state_dict(), tmp_path / "pytorch_model.bin")
    for where in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(
            UnsupportedError, match=r"pickle.*save_pretrained\(.*safe_serialization"
        ):
            lohan.wrap(tower(), store=store_dir / "s", weights=where)
    assert not (store_dir / "s").exists()


def test_a_file_that_is_cut_is_named(tmp_path: Path, store_dir: Path) -> None:
    folder = save(tmp_path / "w")
    with (folder / "b.safetensors").open("r+b") as file:
        file.truncate((folder / "b.safetensors").stat().st_size - 4)
    with pytest.raises(StoreError, match=r"b\.safetensors ends inside"):
        lohan.wrap(tower(), store=store_dir, weights=folder)


def test_a_file_that_is_another_one_is_refused_when_the_run_continues(
    tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    plain = lohan.wrap(tower(), store=tmp_path / "plain", lr=1e-2)
    expected = train(plain, 3)
    plain.lohan.close()
    model = lohan.wrap(tower(), store=store_dir, weights=folder, lr=1e-2)
    assert train(model) == expected[:2]
    model.lohan.close()
    path = folder / "a.safetensors"
    good, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)

    def resume(**settings: Any) -> Any:
        return lohan.wrap(tower(), store=store_dir, resume=True, lr=1e-2, **settings)

    path.unlink()
    with pytest.raises(StoreError, match=r"a\.safetensors does not exist.*weights=FOLDER"):
        resume()
    path.write_bytes(good + b"0")
    with pytest.raises(
        StoreMismatchError, match=rf"bytes is {len(good) + 1:,}, but was {len(good):,}"
    ):
        resume()
    spoilt = bytearray(good)
    spoilt[-5] ^= 1
    path.write_bytes(spoilt)  # the size and header are the same, but the time is different
    with pytest.raises(StoreMismatchError, match=r"bytes of 'blocks\.\d' in a\.safetensors"):
        resume()
    renamed = good.replace(b"blocks.0.base.bias", b"blocks.9.base.bias")
    path.write_bytes(renamed)
    with pytest.raises(StoreMismatchError, match="header_crc32c"):
        resume()
    path.write_bytes(good)  # the bytes are the same, but the time is different
    again = resume()
    again.lohan.close()
    os.utime(path, ns=times)
    moved = folder.rename(tmp_path / "moved")
    again = resume(weights=moved)
    assert train(again, 1) == expected[2:]
    again.lohan.close()


def test_a_file_that_changes_while_the_run_continues_is_found(
    tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    model = lohan.wrap(tower(), store=store_dir, weights=folder)
    path = folder / "a.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 900_000)
        file.write(b"oh")
    with pytest.raises(ChecksumError, match=r"blocks\.\d.*a\.safetensors.*changed since"):
        train(model)
    with pytest.raises(ChecksumError):
        model.lohan.close()
    with pytest.raises(ChecksumError, match=r"a\.safetensors, offset \d+.*'blocks\.\d\.base"):
        lohan.unwrap(model)


def test_a_frozen_parameter_that_is_read_in_place_cannot_become_another(
    tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    model = lohan.wrap(tower(), store=store_dir, weights=folder, lr=1e-2)
    state = model.state_dict()
    assert model.load_state_dict(state).missing_keys == []
    other = {**state, "blocks.1.base.bias": state["blocks.1.base.bias"] + 1}
    with pytest.raises(UnsupportedError, match=r"'blocks\.1\.base\.bias'.*[ab]\.safetensors.*copy"):
        model.load_state_dict(other)
    with pytest.raises(UnsupportedError, match="read in place"), torch.no_grad():
        for name, param in model.named_parameters():
            if name == "blocks.2.base.weight":
                param.mul_(2)
    found = model.state_dict()
    assert all(torch.equal(found[name], state[name]) for name in state)
    train(model, 1)
    model.lohan.close()


def test_the_store_says_where_the_bytes_of_its_frozen_parameters_are(
    tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    model = lohan.wrap(tower(), store=store_dir, weights=folder)
    state = model.state_dict()
    with inside(model).exclusive([]) as store:
        meta = json.loads(store.describe()["meta"])
    model.lohan.close()
    said = meta["in_place"]
    raws = [Path(file["path"]).read_bytes() for file in said["files"]]
    count = 0
    for (name, shape, _, trainable), source in zip(meta["params"], said["params"], strict=True):
        assert (source is None) == trainable
        if source is None:
            continue
        file, offset, nbytes = source
        values = np.frombuffer(raws[file][offset : offset + nbytes], np.float32).reshape(shape)
        assert np.array_equal(values, state[name].numpy()), name
        count += 1
    assert count == 6
    for file, raw in zip(said["files"], raws, strict=True):
        length = 8 + struct.unpack("<Q", raw[:8])[0]
        assert file["header_crc32c"] == _core.crc32c(raw[:length])
    for index, runs in said["units"].items():
        assert sum(nbytes for *_, nbytes in runs) == meta["units"][int(index)][3]
    assert len(read_folder(folder).files) == len(said["files"])


def test_a_store_whose_frozen_weights_are_in_place_is_exported_verified_and_copied(
    tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    model = lohan.wrap(tower(), store=store_dir / "s", weights=folder, lr=1e-2)
    train(model)
    state = model.state_dict()
    lohan.export(model, tmp_path / "live")
    model.lohan.snapshot(tmp_path / "copy").wait()
    model.lohan.close()
    for source, out in (("s", "a"), ("s", "wide")):
        dtype = "float32" if out == "wide" else None
        lohan.export(store_dir / source, tmp_path / out, dtype=dtype)
    lohan.export(tmp_path / "copy", tmp_path / "b")
    for out in ("live", "a", "wide", "b"):
        found = load_file(tmp_path / out / "model.safetensors")
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state), out
    verified = lohan.verify(store_dir / "s")
    assert verified.is_whole and verified.read_bytes > sum(
        p.count * 4 for p in inside(model).layout.params
    )
    again = lohan.wrap(tower(), store=tmp_path / "copy", resume=True)
    assert in_place(again) and again.lohan.step == 2
    train(again, 1)
    again.lohan.close()
    path = folder / "b.safetensors"
    with path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"oh")
    (bad,) = lohan.verify(store_dir / "s").bad
    assert bad.param == "blocks.2.base.weight" and bad.path == str(path)
    assert bad.offset % BLOCK == 0
    with pytest.raises(ChecksumError, match=r"'blocks\.2\.base\.weight'"):
        lohan.export(store_dir / "s", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def _resident() -> list[tuple[int, int, int]]:
    """Return the first and last address of each mapping of this process, and its resident bytes."""
    found, begin, end = [], 0, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if first == "Rss:":
            found.append((begin, end, 1024 * int(rest[0])))
        elif not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
    return found


def _open_and_use(folder: Path, width: int) -> tuple[int, int, int]:
    """Return the bytes of the arena, and those resident after wrap() and after a forward.

    Memory of the whole process would depend on what earlier tests have left to be freed.
    """
    weight = torch.rand(width, width)
    save_file({"weight": weight}, folder / "model.safetensors")
    with lohan.empty():
        model = nn.Linear(width, width, bias=False).requires_grad_(False)
    x = torch.rand(2, width)
    expected = nn.functional.linear(x, weight)
    wrapped = lohan.wrap(model, weights=folder, store=folder / "store", frozen="in_place")
    opened = _resident()
    where: list[int] = []
    wrapped.register_forward_pre_hook(lambda module, _: where.append(module.weight.data_ptr()))
    assert torch.equal(wrapped(x), expected)
    taken = _resident()
    arena = wrapped.lohan.status()["arena_bytes"]
    wrapped.lohan.close()
    of_arena = [
        next(rss for begin, end, rss in found if begin <= where[0] < end)
        for found in (opened, taken)
    ]
    return arena, *of_arena


def test_the_memory_of_a_frozen_base_is_not_touched_before_its_first_use(
    store_dir: Path,
) -> None:
    arena, opened, taken = _open_and_use(store_dir, 3000)
    weight_bytes = 3000 * 3000 * 4
    assert arena >= weight_bytes > 4 * opened
    assert taken >= weight_bytes


def test_a_store_without_any_values_is_resumed_before_its_first_forward(
    tmp_path: Path, store_dir: Path
) -> None:
    folder, expected = save(tmp_path / "w"), tower()(X)
    for is_resumed in (False, True):
        model = tower().requires_grad_(False)
        model = lohan.wrap(model, store=store_dir / "s", weights=folder, resume=is_resumed)
        if is_resumed:
            assert torch.equal(model(X), expected)
        model.lohan.close()
