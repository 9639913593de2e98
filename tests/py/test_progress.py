"""Calls that take longer than two seconds show how far they have come."""

from __future__ import annotations

import functools
import itertools
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import kit
import lohan
import pytest
import torch
from lohan.common import _bar, _log
from notes_helper import notes
from safetensors.torch import save_file


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Between two looks at the clock, three seconds pass."""
    seconds = itertools.count(0.0, 3.0)
    monkeypatch.setattr(_bar, "time", type("Clock", (), {"monotonic": lambda: next(seconds)}))
    yield
    _log.logger.setLevel(logging.INFO)


def store_of(folder: pathlib.Path, **given: Any) -> pathlib.Path:
    model = lohan.wrap(kit.linears(64, 2), store=folder, **given)
    model(torch.ones(2, 64)).sum().backward()
    model.optimizer.step()
    model.lohan.close()
    return folder


def _filled_from_files(folder: pathlib.Path) -> None:
    weights = folder / "weights"
    weights.mkdir()
    save_file(kit.linears(64, 2).state_dict(), weights / "model.safetensors")
    with lohan.empty():
        model = kit.linears(64, 2)
    model[0].requires_grad_(False)  # type: ignore[index]
    lohan.wrap(model, store=folder / "new", weights=weights, method="mezo").lohan.close()


def _waits(folder: pathlib.Path) -> None:
    model = lohan.wrap(kit.linears(64, 2), store=folder / "new")
    copy = model.lohan.snapshot(folder / "copy")
    copy._over.clear()  # it is not over at the first look
    copy.wait(timeout_s=0.5)
    copy._over.set()
    model.lohan.close()


CALLS: dict[str, Callable[[pathlib.Path], Any]] = {
    "filling the store": lambda at: lohan.wrap(kit.linears(64, 2), store=at / "new").lohan.close(),
    "computing checksums of weights=": _filled_from_files,
    "verifying": lambda at: lohan.verify(at / "store"),
    "the export to": lambda at: lohan.export(at / "store", at / "out"),
    "the snapshot to": lambda at: lohan.snapshot(at / "store", at / "copy"),
    "the snapshot to {}/copy": _waits,
    "the conversion to": lambda at: lohan.convert(at / "store", at / "copy", states="bf16"),
    "the new stores in": lambda at: lohan.reshard(at / "store", at / "parts", parts=2),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_long_call_says_how_far_it_is(
    what: str, store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str], slow: None
) -> None:
    store_of(store_dir / "store")
    capfd.readouterr()
    CALLS[what](store_dir)
    lines = notes(capfd.readouterr().err).splitlines()
    begin = f"lohan: {what.format(store_dir)}"
    found = [line for line in lines if line.startswith(begin)]
    assert found and " of " in found[-1]
    assert what.endswith("copy") or ("B/s, " in found[-1] and "s left" in found[-1])


def test_a_short_call_says_nothing(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lohan.verify(store_of(store_dir / "store"))
    assert notes(capfd.readouterr().err) == ""


def test_a_caller_s_display_gets_everything_and_nothing_is_printed(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str], slow: None
) -> None:
    store_of(store_dir / "store")
    capfd.readouterr()
    seen: list[tuple[int, int]] = []
    show = functools.partial(lambda done, total: seen.append((done, total)))
    found = lohan.verify(store_dir / "store", progress=show)
    assert seen[-1] == (found.read_bytes, found.read_bytes)
    assert capfd.readouterr().err == ""


def test_lines_of_a_file_become_rarer_and_those_of_a_terminal_are_erased(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(_bar, "time", type("Clock", (), {"monotonic": lambda: now[0]}))

    def shown() -> list[str]:
        now[0] = 0.0
        with _bar.Bar("work") as bar:
            for _ in range(100):
                now[0] += 1.0
                bar.add(10**9, 100 * 10**9)
        return capfd.readouterr().err.rstrip("\n").split("\n")

    lines = shown()
    assert lines[0] == "lohan: work: 2 GB of 100 GB (2%), 1 GB/s, 98 s left"
    assert [line.split()[2] for line in lines] == ["2", "4", "8", "16", "32", "64"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    (line,) = shown()
    assert line.count("\x1b[K") == 100 and line.endswith("\x1b[K"), "it is erased at the end"
    monkeypatch.setenv("RANK", "1")
    assert shown() == [""], "another process prints it"
    monkeypatch.delenv("RANK")
    _log.logger.setLevel(logging.WARNING)
    assert shown() == [""]
    _log.logger.setLevel(logging.INFO)


def test_a_policy_says_that_it_profiles_unless_it_has_a_profile(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = lohan.wrap(kit.linears(64, 2), store=store_dir / "a", activations="auto")
    assert "two steps are profiled" in capfd.readouterr().err
    while model.lohan.plan() is None:
        model(torch.ones(2, 64)).sum().backward()
        model.optimizer.step()
    model.lohan.close()
    lohan.wrap(
        kit.linears(64, 2), store=store_dir / "a", activations="auto", resume=True
    ).lohan.close()
    assert "two steps are profiled" not in capfd.readouterr().err
