"""Whatever is in the place of a request for a copy, training continues."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import lohan
import pytest
from lohan.store import _requests
from rules_helper import Stack, build, train_step
from torch import nn

LIMIT_S = 30
NOBODY = 65534


@pytest.fixture
def model(store_dir: pathlib.Path) -> Iterator[nn.Module]:
    made = lohan.wrap(build(Stack), store=store_dir / "s", lr=1e-2)
    signal.alarm(LIMIT_S)  # if a step waited for a FIFO's writer, this would end the test
    yield made
    signal.alarm(0)
    made.lohan.close()


def fifo(path: pathlib.Path) -> None:
    os.mkfifo(path)


def a_socket(path: pathlib.Path) -> None:
    place = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(f"/proc/self/fd/{place}/{path.name}")  # because sun_path has only 108 bytes
    os.close(place)


def link(path: pathlib.Path) -> None:
    target = path.parent.parent / "target"
    target.write_text(json.dumps({"id": "0" * 32, "out": [str(path.parent.parent / "copy")]}))
    path.symlink_to(target)


def dangling_link(path: pathlib.Path) -> None:
    path.symlink_to("/nowhere/at/all")


def directory(path: pathlib.Path) -> None:
    path.mkdir()


def device(path: pathlib.Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # this is /dev/zero, which has no end


def huge(path: pathlib.Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def not_json(path: pathlib.Path) -> None:
    path.write_bytes(b"\xff\xfe{")


def deep(path: pathlib.Path) -> None:
    path.write_text("[" * 100_000)


def a_list(path: pathlib.Path) -> None:
    path.write_text("[]")


def number_as_id(path: pathlib.Path) -> None:
    path.write_text(json.dumps({"id": int("1" * 32), "out": []}))


def of_somebody_else(path: pathlib.Path) -> None:
    path.write_text(json.dumps({"id": "0" * 32, "out": [str(path.parent.parent / "copy")]}))
    os.chown(path, NOBODY, NOBODY)


STAYS = {directory, of_somebody_else}


@pytest.mark.parametrize(
    "make",
    [
        fifo,
        a_socket,
        link,
        dangling_link,
        directory,
        device,
        huge,
        not_json,
        deep,
        a_list,
        number_as_id,
        of_somebody_else,
    ],
)
def test_what_is_no_request_is_ignored_with_one_line(
    make: Callable[[pathlib.Path], None],
    model: nn.Module,
    store_dir: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = store_dir / "s" / _requests.REQUEST
    train_step(model, 0)
    try:
        make(path)
    except PermissionError:
        pytest.skip("only root can make that")
    capfd.readouterr()
    for step in range(1, 4):
        train_step(model, step)
    said = [line for line in capfd.readouterr().err.splitlines() if "lohan.request" in line]
    assert len(said) == 1 and said[0].startswith(f"lohan: {path} is not a valid request for a copy")
    assert os.path.lexists(path) == (make in STAYS)
    assert ("removed" in said[0]) == (make not in STAYS)
    assert model.lohan.step == 4
    assert not (store_dir / "copy").exists()
    assert not list((store_dir / "s").glob("lohan.answer-*"))


def test_a_request_after_a_bad_one_is_answered(model: nn.Module, store_dir: pathlib.Path) -> None:
    place = store_dir / "s"
    fifo(place / _requests.REQUEST)
    train_step(model, 0)
    wish = {"id": "1" * 32, "pid": os.getpid(), "out": [str(store_dir / "copy")]}
    _requests._put(str(place / _requests.REQUEST), wish)
    train_step(model, 1)
    model.lohan.close()
    answer: dict[str, Any] = json.loads((place / f"{_requests.ANSWER}{'1' * 32}").read_text())
    assert answer["state"] == "done", answer
    (place / f"{_requests.ANSWER}{'1' * 32}").unlink()
    assert (store_dir / "copy" / "lohan.data").exists()


def test_files_are_written_under_a_name_that_nobody_can_foresee(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store_dir / "lohan.answer-0"
    victim = store_dir / "victim"
    victim.write_text("mine")
    (store_dir / f"lohan.answer-0.{os.getpid()}.new").symlink_to(victim)
    path.symlink_to(victim)
    opened: list[tuple[str, int]] = []
    plain = os.open

    def watch(name: Any, flags: int, *rest: Any) -> int:
        opened.append((str(name), flags))
        return plain(name, flags, *rest)

    monkeypatch.setattr(os, "open", watch)
    for _ in range(2):
        _requests._put(str(path), {"state": "done"})
    assert victim.read_text() == "mine" and not path.is_symlink()
    assert _requests._get(str(path)) == {"state": "done"}
    names = [name for name, flags in opened if flags & os.O_CREAT]
    assert len({*names}) == 2
    assert all(f & os.O_EXCL and f & os.O_NOFOLLOW for _, f in opened if f & os.O_CREAT)
