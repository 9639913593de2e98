"""profile.json is a cache: whatever it contains, training continues with the same numbers."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import lohan
import pytest
import torch
from lohan.activations._profile import Profile
from lohan.errors import LohanError
from lohan.session._guard import Guard
from notes_helper import notes
from torch import nn

WIDTH = 64
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
WRONG = [None, True, -1, 0, 1.5, 1e400, float("nan"), 10**30, 2**63, "x", [], {}, [[]], [-1]]
WRONG += [[10**30], [[1, 2, 3]], [[-7, -7]], [[99999, 99999]], {"a": 1}, [None]]


class Block(nn.Module):
    """A block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(2)])


def _wrap(folder: pathlib.Path, **settings: Any) -> nn.Module:
    return lohan.wrap(
        _build(), store=folder, lr=0.0, weight_decay=0.0, activations="lohan", **settings
    )


def _steps(model: nn.Module, count: int) -> list[torch.Tensor]:
    outs = []
    for _ in range(count):
        out = model(X)
        out.square().mean().backward()
        model.optimizer.step()
        outs.append(out.detach())
    return outs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pathlib.Path, str]]:
    """A store whose run has written a profile, and what is in it."""
    folder = tmp_path_factory.mktemp("profiled") / "store"
    model = _wrap(folder, allow_tmpfs=True)
    _steps(model, 4)
    model.lohan.close()
    yield folder, (folder / "profile.json").read_text()


def _changed(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    """Return the text with its first profile changed; change may return a replacement."""
    read = json.loads(text)
    key = next(iter(read))
    shape = next(iter(read[key]))
    profile = json.loads(read[key][shape])
    replaced = change(profile)
    read[key][shape] = json.dumps(profile if replaced is None else replaced)
    return json.dumps(read)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the places of values, but not of every item of every list."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = list(enumerate(value))[:1] + list(enumerate(value))[-1:]
    for name, item in items:
        yield from _places(item, (*at, name))


def _set(profile: dict[str, Any], at: tuple[Any, ...], value: Any) -> None:
    for name in at[:-1]:
        profile = profile[name]
    profile[at[-1]] = value


def _check_continues(folder: pathlib.Path, text: str | None, steps: int = 1) -> None:
    if text is not None:
        (folder / "profile.json").write_text(text)
    model = _wrap(folder, resume=True, allow_tmpfs=True)
    with contextlib.closing(model.lohan):
        wanted = _build()(X)
        assert all(torch.equal(out, wanted) for out in _steps(model, steps))


def test_a_profile_with_any_value_of_another_type_or_range_is_ignored_or_makes_a_plan(
    trained: tuple[pathlib.Path, str],
) -> None:
    """Each place of the file with each wrong value: what is accepted must be possible."""
    folder, text = trained
    profile = json.loads(next(iter(next(iter(json.loads(text).values())).values())))
    assert Profile.from_json(json.dumps(profile)) is not None
    accepted = []
    for at in _places(profile):
        for wrong in WRONG:
            changed = copy.deepcopy(profile)
            _set(changed, at, wrong)
            if Profile.from_json(json.dumps(changed)) is not None:
                accepted.append(changed)
        removed = copy.deepcopy(profile)
        inner = removed
        for name in at[:-1]:
            inner = inner[name]
        del inner[at[-1]]
        if Profile.from_json(json.dumps(removed)) is not None:
            accepted.append(removed)
    assert accepted, "an empty list of inputs is fine, for example"
    for changed in accepted:
        _check_continues(folder, _changed(text, lambda _, made=changed: made))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("storages", [-1]),
        ("storages", "x"),
        ("visits", [[1, 2, 3]]),
        ("visits", [None]),
        ("visits", []),
        ("compute_ns", "x"),
        ("compute_ns", []),
        ("outside", [[1, 2, 3]]),
        ("saves", [[99999, 99999]] * 3),
        ("saves", [[-7, -7]] * 2),
        ("ns", []),
        ("inputs", [10**9]),
        ("names", []),
        ("block", "no block"),
        ("flop", [2**70]),
    ],
)
def test_a_wrong_profile_is_measured_again(
    field: str, value: Any, trained: tuple[pathlib.Path, str]
) -> None:
    def change(profile: dict[str, Any]) -> None:
        (profile if field in profile else profile["visits"][0])[field] = value

    _check_continues(trained[0], _changed(trained[1], change), steps=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"a":' * 50_000,
        "null",
        "[1]",
        "NaN",
        "1" * 10_000,
        "\ud800".encode("utf-8", "surrogatepass"),
        b"\x00\xff" * 100,
        "half",
        "another version",
        "as a string",
    ],
    ids=lambda text: repr(text)[:12],
)
def test_a_file_that_is_no_profile_is_ignored(
    text: str | bytes, trained: tuple[pathlib.Path, str], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, good = trained
    if text == "half":
        text = good[: len(good) // 2]
    elif text == "another version":
        text = _changed(good, lambda profile: profile.update(format=2))
    elif text == "as a string":
        text = json.dumps(good)
    data = text.encode() if isinstance(text, str) else text
    (folder / "profile.json").write_bytes(data)
    _check_continues(folder, None)
    assert len(notes(capfd.readouterr().err).splitlines()) <= 1


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "loop", "sparse"])
def test_what_is_no_plain_file_is_neither_read_nor_waited_for(
    kind: str, trained: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    folder, good = trained
    path, other = folder / "profile.json", tmp_path / "other"
    path.unlink(missing_ok=True)
    other.write_text(good)
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to(other if kind == "link" else path)
    try:
        _check_continues(folder, None, steps=4)
        assert other.read_text() == good
        assert not list(folder.glob("profile.json.*"))
    finally:
        if kind == "directory":
            path.rmdir()
        else:
            path.unlink()


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_wrap_that_fails_at_its_end_releases_the_store_and_gives_the_values_back(
    kind: type[BaseException], store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _build()
    with monkeypatch.context() as patch:

        def fail(self: Guard) -> None:
            install(self)
            raise kind("at the end")

        install = Guard.install
        patch.setattr(Guard, "install", fail)
        with pytest.raises(kind, match="at the end") as caught:
            lohan.wrap(model, store=store_dir / "a", activations="recompute")
    assert torch.equal(model(X), _build()(X))  # it is a plain model again
    model(X).sum().backward()
    assert "lohan" not in model.__dict__
    again = lohan.wrap(_build(), store=store_dir / "a", resume=True)
    assert torch.equal(again(X), _build()(X))
    again.lohan.close()
    assert caught.value is not None  # this keeps the traceback alive until here
    with pytest.raises(LohanError, match="resume"):
        lohan.wrap(_build(), store=store_dir / "a")
