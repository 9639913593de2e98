"""What copies, exports and requests must not change, and their errors for unreadable input."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from click.testing import CliRunner
from lohan import errors
from lohan.cli import main
from lohan.errors import (
    ChecksumError,
    LohanError,
    StoreError,
    StoreExistsError,
    StoreLockedError,
    StoreUncleanError,
)
from lohan.layout import _safetensors
from lohan.store import _requests, _snapshot
from safetensors.torch import load_file, save_file
from torch import nn


def store(directory: Path) -> Path:
    """A closed store of a single layer."""
    lohan.wrap(nn.Linear(4, 4), store=directory).lohan.close()
    return directory


def begun(directory: Path, nbytes: int) -> Path:
    """Make the files that remain of a creation that was killed before it wrote a header."""
    directory.mkdir()
    (directory / "lohan.data").write_bytes(bytes(nbytes))
    return directory


def test_remains_of_a_copy_are_replaced_but_never_a_store_that_is_named_beside_them(
    store_dir: Path,
) -> None:
    source, other = store(store_dir / "s"), store(store_dir / "other")
    before = (other / "lohan.data").read_bytes()
    for name in ("a", "b"):
        begun(store_dir / name, 1 << 20)
    for out in ([store_dir / "a", other], [other, store_dir / "a"]):
        with pytest.raises(StoreExistsError):
            lohan.snapshot(source, out)
        assert (other / "lohan.data").read_bytes() == before, "another store was removed"
    begun(store_dir / "empty", 0)
    for name in ("a", "empty"):
        with pytest.raises(StoreUncleanError, match="creation was interrupted") as caught:
            lohan.verify(store_dir / name)
        assert caught.value.errno == errno.EINPROGRESS and "never" not in str(caught.value)
    out = [store_dir / "new", store_dir / "empty", store_dir / "b", store_dir / "a"]
    assert lohan.snapshot(source, out).is_whole and lohan.verify(out).is_whole
    assert not _snapshot.remove_unfinished([str(path) for path in out])


def test_a_copy_that_fails_leaves_no_directory_that_was_made_for_it(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = store(store_dir / "s"), store(store_dir / "other")
    monkeypatch.chdir(store_dir)
    with pytest.raises(StoreExistsError):
        lohan.snapshot(source, ["new/deep", other])
    assert not (store_dir / "new").exists()

    def advance(snapshot: Any, nbytes: int) -> None:
        raise StoreError(errno.EIO, "no")

    monkeypatch.setattr(_snapshot.Snapshot, "advance", advance)
    out = ["new/deep/a", "new/b", store_dir / "c"]
    with pytest.raises(StoreError, match="no"):
        lohan.snapshot(source, out)
    assert sorted(path.name for path in store_dir.iterdir()) == ["other", "s"]


def answered(model: Any, store_dir: Path, wish: dict[str, Any]) -> dict[str, Any] | None:
    """Return the session's reply to a request at the end of a step."""
    (store_dir / _requests.REQUEST).write_text(json.dumps({"id": "0" * 32, **wish}))
    model(torch.ones(1, 4)).sum().backward()
    model.optimizer.step()
    answer = store_dir / f"{_requests.ANSWER}{'0' * 32}"
    said = json.loads(answer.read_text()) if answer.exists() else None
    answer.unlink(missing_ok=True)
    return said


def test_no_request_ends_the_run_that_it_is_put_to(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store_dir)
    model = lohan.wrap(nn.Linear(4, 4), store=store_dir / "s")
    many = [str(store_dir / f"{number}") for number in range(17)]
    for out in ([], "abc", [""], ["here"], ["\0"], ["/\0"], [5], {"a": 1}, 5, None, many):
        said = answered(model, store_dir / "s", {"out": out})
        assert said is not None and said["state"] == "failed", out
    (store_dir / "s" / _requests.REQUEST).write_text("[" * 100_000)
    model(torch.ones(1, 4)).sum().backward()
    model.optimizer.step()
    assert sorted(path.name for path in store_dir.iterdir()) == ["s"]
    process = subprocess.Popen(["true"])
    process.wait()
    dead = {"pid": process.pid, "out": [str(store_dir / "copy")]}
    assert answered(model, store_dir / "s", dead) is None, "nobody takes the answer away"
    model.lohan.close()
    with pytest.raises(StoreError, match="17 directories: must be 1 to 16"):
        lohan.snapshot(store_dir / "s", many)


def test_the_process_that_is_asked_is_the_one_that_has_the_store(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(_requests, "_await", lambda answer, pid, *rest: asked.append(pid))
    said = f"{store_dir}/process 7/lohan.data is in use by process 4711; end it, or choose another"
    locked = StoreLockedError(errno.EBUSY, said)
    _requests.ask([str(store_dir)], ["/x"], locked, 1.0, None)
    assert asked == [4711]


class Adapted(nn.Module):
    """A frozen base and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.top = nn.Linear(64, 64), nn.Linear(64, 1)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.base(x)).sum()


def test_files_that_a_store_reads_in_place_are_not_replaced(
    tmp_path: Path, store_dir: Path
) -> None:
    for name in ("model.safetensors", "model-00001-of-00001.safetensors", "base.safetensors"):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        save_file(Adapted().state_dict(), folder / name)
        before = (folder / name).read_bytes()
        directory = store_dir / folder.name
        model = lohan.wrap(Adapted(), store=directory, weights=folder)
        link = tmp_path / f"link-{folder.name}"
        link.symlink_to(folder)
        is_safe = name == "base.safetensors"
        for source in (model, directory):
            if is_safe:
                lohan.export(source, link, overwrite=True)
                continue
            with pytest.raises(StoreExistsError, match=rf"has {name}, from which frozen"):
                lohan.export(source, link, overwrite=True)
        model.lohan.close()
        assert is_safe or os.listdir(folder) == [name]
        assert (folder / name).read_bytes() == before
        lohan.wrap(Adapted(), store=directory, resume=True).lohan.close()


def test_who_reads_a_store_that_is_not_there_or_in_use_is_told_what_to_do(store_dir: Path) -> None:
    none, out = store_dir / "none", store_dir / "out"
    words = [["export", none, out], ["snapshot", none, out], ["verify", none], ["inspect", none]]
    for command in words:
        answer = CliRunner().invoke(main, [str(word) for word in command])
        assert answer.exit_code == 1 and "pass the directories that store= had" in answer.output
        assert "resume" not in answer.output and not out.exists()
    model = lohan.wrap(nn.Linear(4, 4), store=store_dir / "s")
    answer = CliRunner().invoke(main, ["inspect", str(store_dir / "s")])
    assert answer.exit_code == 1 and "in use by this process" in answer.output
    assert "lohan snapshot STORE OUT" in answer.output
    model.lohan.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_byte_in_the_store_is_named_by_its_parameter(
    dtype: torch.dtype, tmp_path: Path, store_dir: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
    raw = model[1].weight.detach().clone().view(torch.uint8).numpy().tobytes()
    lohan.wrap(model, store=store_dir / "s").lohan.close()
    path = store_dir / "s" / "lohan.data"
    data = bytearray(path.read_bytes())
    data[data.index(raw)] ^= 1
    path.write_bytes(data)
    for read in (
        lambda: lohan.export(store_dir / "s", tmp_path / "out"),
        lambda: lohan.export(store_dir / "s", tmp_path / "out", dtype="float32"),
        lambda: lohan.unwrap(model),
    ):
        with pytest.raises(ChecksumError, match=r"'1\.\w+' \(param\) cannot.*lohan verify"):
            read()
    assert not (tmp_path / "out").exists()


def test_a_path_may_have_any_bytes_and_a_message_may_end_in_one(store_dir: Path) -> None:
    long = "ä" * 100
    for length in range(4):  # the limit in bytes is inside a character
        directory = store_dir / f"{'x' * length}{long}" / long / long
        other = store_dir / f"{length}"
        store(directory), store(other)
        with pytest.raises(StoreError, match="different stores"):
            lohan.verify([directory, other])
    odd = Path(os.fsdecode(os.fsencode(store_dir) + b"/\xff\xfe"))
    paths = [odd / "a", odd / "b"]
    model = lohan.wrap(nn.Linear(4, 4), store=paths)
    lohan.export(model, odd / "out")
    model.lohan.snapshot(odd / "copy").wait()
    model.lohan.close()
    assert lohan.verify(paths).is_whole and lohan.verify(odd / "copy").is_whole
    with pytest.raises(StoreError, match="there is no store"):
        lohan.verify(odd / "none")


def test_small_files_are_on_the_disk_before_the_first_one_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def moved(source: Path, target: Path) -> None:
        done.append("moved")
        replace(source, target)

    monkeypatch.setattr(_safetensors.os, "fsync", fsync)
    monkeypatch.setattr(_safetensors.os, "replace", moved)
    value = torch.ones(4)
    tensors = [
        _safetensors.Tensor(name, (4,), torch.float32, lambda: [value]) for name in ("a", "b")
    ]
    beside = lambda folder: (folder / "config.json").write_text("{}")  # noqa: E731
    _safetensors.write(tmp_path, tensors, max_shard_size=16, beside=beside)
    first = done.index("moved")
    wanted = {"config.json", "model.safetensors.index.json"}
    wanted |= {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert wanted <= set(done[:first])


@pytest.mark.parametrize("shard_bytes", [16, 1000])
@pytest.mark.parametrize("before_bytes", [16, 1000])
def test_who_is_killed_while_files_move_leaves_no_mixture_of_two_models(
    before_bytes: int, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(out: Path, number: int, nbytes: int) -> None:
        value = torch.full((4,), float(number))
        names = ("a", "b")
        tensors = [
            _safetensors.Tensor(name, (4,), torch.float32, lambda: [value]) for name in names
        ]
        text = f"{number}"
        _safetensors.write(
            out,
            tensors,
            max_shard_size=nbytes,
            beside=lambda folder: (folder / "config.json").write_text(text),
        )

    def found(out: Path) -> set[float]:
        """Return the files that from_pretrained would read."""
        config = {float((out / "config.json").read_text())}
        whole, index = out / "model.safetensors", out / "model.safetensors.index.json"
        if whole.exists():
            return config | {float(value[0]) for value in load_file(whole).values()}
        if not index.exists():
            return set()
        for name in set(json.loads(index.read_text())["weight_map"].values()):
            config |= {float(value[0]) for value in load_file(out / name).values()}
        return config

    seen = []
    for count in range(20):
        out = tmp_path / str(count)
        save(out, 1, before_bytes)
        left = [count]

        def killed(call: Any, *arguments: Any, left: list[int] = left) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            call(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(_safetensors.os, "replace", functools.partial(killed, os.replace))
            try:
                save(out, 2, shard_bytes)
            except KeyboardInterrupt:
                seen.append(found(out))
                continue
        assert found(out) == {2.0}
        break
    assert len(seen) >= 2 and all(one in (set(), {1.0}, {2.0}) for one in seen), seen


def test_every_error_of_a_copy_in_another_process_is_one_here() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, LohanError):
            said = {"state": "failed", "error": name, "pid": 1, "message": "no", "errno": None}
            with pytest.raises(kind):
                _requests._result(said)
