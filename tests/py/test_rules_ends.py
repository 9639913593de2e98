"""An edit of parameters is kept if the program continues with it, and lost if it fails."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import lohan
import program_server
import pytest
import torch
from lohan.common import _mounts
from lohan.common._inside import inside
from lohan.errors import (
    StaleGraphError,
    StaleStateError,
    StoreError,
    StoreExistsError,
    StoreMismatchError,
)
from lohan.store import _directories
from notes_helper import notes
from rules_helper import (
    Stack,
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
)
from torch import nn

HERE = pathlib.Path(__file__).resolve().parent
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def prepared() -> Iterator[tuple[pathlib.Path, State]]:
    """A store after three steps, made once; each test uses a copy."""
    parent = HERE.parent.parent / "build" / "tmp"
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"edits-{os.getpid()}"
    model = lohan.wrap(build(Stack), store=folder, lr=1e-2)
    for step in range(3):
        train_step(model, step)
    state = dict(model.state_dict())
    model.lohan.close()
    yield folder, state
    shutil.rmtree(folder)


def end(edit: str, how: str, store: pathlib.Path, *settings: str) -> tuple[int, str]:
    """Run a program that edits and ends; return its status and what it wrote to stderr."""
    done = program_server.run([str(HERE / "edits_worker.py"), edit, how, str(store), *settings])
    return done.returncode, done.stderr


def state_of(store: pathlib.Path, **settings: Any) -> tuple[int, State]:
    model = lohan.wrap(build(Stack), store=store, resume=True, **settings)
    found = model.lohan.step, dict(model.state_dict())
    model.lohan.close()
    return found


@pytest.mark.parametrize(
    ("edit", "how", "status"),
    [
        ("load", "uncaught", 1),
        ("loop", "uncaught", 1),
        ("half", "end", 1),
        ("load", "evaluated", 1),
        ("load", "interrupted", -2),
        ("load", "terminated", 143),
        ("load", "exit_status", 1),
        ("load", "exit_raised_again", 3),
        ("load", "exit_in_thread", 0),
        ("load", "closed_finally", 1),
        ("load", "closed_by_with", 1),
        ("load", "closed_by_atexit", 1),
        ("load", "in_thread", 0),
        ("load", "killed", 3),
        ("load", "refused_and_dropped", 0),
    ],
)
def test_a_program_that_fails_drops_its_edits_and_says_so(
    edit: str, how: str, status: int, prepared: Any, store_dir: pathlib.Path
) -> None:
    folder, state = prepared
    store = store_dir / "run"
    shutil.copytree(folder, store)
    was, said = end(edit, how, store)
    assert was == status, said
    lines = [line for line in said.splitlines() if "the program failed after" in line]
    assert len(lines) == (how != "killed"), said
    assert all("stays as it was at step 3" in line for line in lines)
    step, found = state_of(store)
    assert step == 3
    assert_same_state(found, state)


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("end", 0),
        ("exit_zero", 0),
        ("exit_caught", 0),
        ("exit_kept", 0),
        ("exit_caught_in_thread", 0),
        ("exit_in_other_thread", 0),
        ("collected", 0),
        ("closed", 0),
        ("edited_in_handler", 0),
        ("edited_after_sigterm", 0),
        ("caught", 0),
        ("committed", 1),
        ("trained", 1),
        ("at_prompt", 0),
        ("other_thread", 0),
    ],
)
def test_a_program_that_means_its_edits_keeps_them(
    how: str, status: int, prepared: Any, store_dir: pathlib.Path
) -> None:
    folder, state = prepared
    store = store_dir / "run"
    shutil.copytree(folder, store)
    was, said = end("load", how, store)
    assert was == status and "the program failed" not in said, said
    step, found = state_of(store)
    assert step == 3
    assert_same_state(found, {name: value * 2 for name, value in state.items()})


def test_a_program_that_trains_on_after_a_refusal_keeps_its_edits(
    prepared: Any, store_dir: pathlib.Path
) -> None:
    folder, state = prepared
    shutil.copytree(folder, store_dir / "run")
    shutil.copytree(folder, store_dir / "expected")
    status, said = end("load", "refused_and_trained", store_dir / "run")
    assert status == 0 and "the program failed" not in said, said
    model = lohan.wrap(build(Stack), store=store_dir / "expected", resume=True)
    model.load_state_dict({name: value * 2 for name, value in state.items()})
    train_step(model, 3)
    model.lohan.close()
    step, expected = state_of(store_dir / "expected")
    assert step == 4
    step, found = state_of(store_dir / "run")
    assert step == 4
    assert_same_state(found, expected)


def test_one_slot_cannot_drop_an_edit_and_says_so(store_dir: pathlib.Path) -> None:
    store = store_dir / "run"
    model = lohan.wrap(build(Stack), store=store, lr=1e-2, commit_every="never")
    train_step(model, 0)
    state = dict(model.state_dict())
    model.lohan.close()
    status, said = end("load", "uncaught", store, "commit_every=never")
    assert status == 1 and "is in the store anyway" in said
    _, found = state_of(store, commit_every="never")
    assert_same_state(found, {name: value * 2 for name, value in state.items()})


def test_an_edit_is_undone_with_nothing_where_a_step_after_it_dies(workshop: Workshop) -> None:
    """The first backward commits the edit, so that a step that dies is rolled back to it."""

    def die(gradient: torch.Tensor) -> None:
        raise ValueError("planned")

    model = workshop.wrap(build())
    for step in range(2):
        train_step(model, step)
    doubled = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(doubled)
    hook = model.blocks[0].up._parameters["weight"].register_hook(die)
    for step in (2, 2):
        with pytest.raises(ValueError, match="planned"):
            square_loss(model, step).backward()
        assert_same_state(model.state_dict(), doubled)
    hook.remove()
    train_step(model, 2)
    assert model.lohan.step == 3 and not inside(model).edits.is_pending


def test_a_graph_from_before_an_edit_stays_stale(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    train_step(model, 0)
    loss = square_loss(model, 1)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    with pytest.raises(StaleGraphError):
        loss.backward()


# --- The checkpoint of a plain script ------------------------------------------------------------


def trained_with_checkpoint(workshop: Workshop, steps: int = 3) -> tuple[Any, Any, State]:
    """A closed store, what the script saved two steps before its end, and its last state."""
    model = workshop.wrap(build())
    for step in range(steps - 1):
        train_step(model, step)
    file = workshop.folder / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": model.optimizer.state_dict()}, file)
    train_step(model, steps - 1)
    state = dict(model.state_dict())
    model.lohan.close()
    return file, workshop.folder / "store0", state


def resumed(workshop: Workshop, store: pathlib.Path) -> nn.Module:
    workshop.made.append(lohan.wrap(build(), store=store, resume=True))
    return workshop.made[-1]


def whole(model: nn.Module, saved: State, assign: bool) -> Any:
    return model.load_state_dict(saved, assign=assign)


def partial(model: nn.Module, saved: State, assign: bool) -> Any:
    for key in [*saved][2:]:
        del saved[key]
    return model.load_state_dict(saved, strict=False, assign=assign)


def of_module(model: nn.Module, saved: State, assign: bool) -> Any:
    """Extract a module's state dict from that of the model."""
    prefix = "blocks.1."
    state = type(saved)((k[len(prefix) :], v) for k, v in saved.items() if k.startswith(prefix))
    state._metadata = {"": saved._metadata["blocks.1"]}  # type: ignore[attr-defined]
    return model.blocks[1].load_state_dict(state, assign=assign)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("way", [whole, partial, of_module])
@pytest.mark.parametrize("weights_only", [False, True])
def test_the_older_checkpoint_of_a_resumed_run_is_refused_before_anything_changes(
    weights_only: bool, way: Callable[..., Any], assign: bool, workshop: Workshop
) -> None:
    file, store, state = trained_with_checkpoint(workshop)
    model = resumed(workshop, store)
    saved = torch.load(file, weights_only=weights_only)
    with pytest.raises(StaleStateError, match=r"of step 3 with those of step 2.*delete") as told:
        way(model, saved["model"], assign)
    for line in ("torch.load()", "model.load_state_dict()", "optimizer.load_state_dict()"):
        assert line in str(told.value)
    with pytest.raises(StaleStateError, match=r"of step 2, but the session is at step 3.*delete"):
        model.optimizer.load_state_dict(saved["optimizer"])
    assert not inside(model).edits.is_pending
    assert_same_state(model.state_dict(), state)
    train_step(model, 3)
    assert_same_state(model.state_dict(), workshop.train(range(4)))


def test_the_checkpoint_of_the_very_step_is_loaded_without_a_word(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    model = workshop.wrap(build())
    for step in range(3):
        train_step(model, step)
    saved = {"model": model.state_dict(), "optimizer": model.optimizer.state_dict()}
    model.lohan.close()
    for order in (["model", "optimizer"], ["optimizer", "model"]):
        again = resumed(workshop, workshop.folder / "store0")
        for name in order:
            (again if name == "model" else again.optimizer).load_state_dict(saved[name])
        assert not inside(again).edits.is_pending
        again.lohan.close()
    assert "lohan:" not in notes(capfd.readouterr().err)


def test_weights_that_do_not_say_their_step_are_warned_of_once_resumed(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    file, store, state = trained_with_checkpoint(workshop)
    saved = dict(torch.load(file)["model"])
    model = resumed(workshop, store)
    model.load_state_dict(dict(state))
    assert "right after the resume" not in capfd.readouterr().err, "they are the same"
    model.load_state_dict(saved)
    said = capfd.readouterr().err
    assert "of step 3 of the store, right after the resume" in said and "delete what" in said
    assert_same_state(model.state_dict(), saved)
    plain = build()
    other = torch.optim.AdamW(plain.parameters())
    with pytest.raises(StoreMismatchError, match=r"not that of a wrapped model.*delete"):
        model.optimizer.load_state_dict(other.state_dict())
    train_step(model, 3)
    model.load_state_dict(saved)
    assert "right after the resume" not in capfd.readouterr().err


def test_best_weights_are_loaded_back_in_the_run_that_had_them(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    """Early stopping loads an older state of the same session on purpose."""
    model = workshop.wrap(build())
    train_step(model, 0)
    best = model.state_dict()
    train_step(model, 1)
    model.load_state_dict(best)
    model.lohan.close()
    assert "lohan:" not in notes(capfd.readouterr().err)
    step, found = state_of(workshop.folder / "store0")
    assert step == 2
    assert_same_state(found, best)


def test_a_checkpoint_of_a_newer_step_than_the_store_is_refused(
    workshop: Workshop,
) -> None:
    model = workshop.wrap(build(), commit_every="manual")
    train_step(model, 0)
    model.lohan.commit()
    train_step(model, 1)
    saved = model.state_dict()
    model.lohan.close()
    again = resumed(workshop, workshop.folder / "store0")
    with pytest.raises(StaleStateError, match=r"of step 1 with those of step 2"):
        again.load_state_dict(saved)


def test_buffers_of_an_older_step_are_stale_too(workshop: Workshop) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32, affine=False))

    model = workshop.wrap(build(make))
    train_step(model, 0)
    saved = model.state_dict()
    # torch returns the buffer itself, not a copy
    saved["1.running_mean"] = saved["1.running_mean"].clone()
    train_step(model, 1)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.lohan.close()
    again = lohan.wrap(build(make), store=workshop.folder / "store0", resume=True)
    workshop.made.append(again)
    for name in ("0.weight", "0.bias"):
        saved.pop(name)
    with pytest.raises(StaleStateError, match=r"1\.running_mean"):
        again.load_state_dict(saved, strict=False)
    assert_same_state(dict(again.named_buffers()), buffers)


# --- What is said --------------------------------------------------------------------------------


def test_a_close_after_backwards_says_how_many_are_forgotten(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    model = workshop.wrap(build())
    train_step(model, 0)
    square_loss(model, 1).backward()
    model.lohan.close()
    said = capfd.readouterr().err
    assert "the gradients of 1 backward are dropped" in said
    assert "that step is discarded, and the store is at step 1" in said
    model = workshop.wrap(build(), accumulate=4)
    for step in range(3):
        square_loss(model, step).backward()
    model.lohan.close()
    assert "the gradients of 3 backwards are dropped" in capfd.readouterr().err
    model = workshop.wrap(build())
    train_step(model, 0)
    square_loss(model, 1)
    model.lohan.close()
    assert "lohan:" not in notes(capfd.readouterr().err)


def test_directories_that_the_store_does_not_have_are_named(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    model.lohan.close()
    (workshop.folder / "other").mkdir()
    with pytest.raises(StoreError, match=r"store0, but store= names 2.*other has no part") as told:
        lohan.wrap(
            build(), store=[workshop.folder / "store0", workshop.folder / "other"], resume=True
        )
    assert "omit resume=True" not in str(told.value)
    with pytest.raises(StoreError, match="omit resume=True"):
        lohan.wrap(build(), store=workshop.folder / "other", resume=True)


def test_a_new_store_below_a_missing_place_of_drives_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_directories, "MOUNTED_IN", {str(workshop.folder)})
    missing = workshop.folder / "nvme0" / "project"
    wanted = rf"{missing / 'run'} cannot be created, because {missing} does not exist:.* is not"
    wanted += rf" mounted: mount it\. Otherwise run: mkdir -p {missing / 'run'}$"
    model = workshop.wrap(build())
    train_step(model, 0)
    calls: list[Callable[[], Any]] = [
        lambda: lohan.wrap(build(), store=missing / "run"),
        lambda: lohan.wrap(build(), store=[workshop.folder / "first", str(missing / "run")]),
        lambda: model.lohan.snapshot(missing / "run"),
        lambda: model.lohan.snapshot([workshop.folder / "first", missing / "run"]),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=wanted) as told:
            call()
        assert told.value.errno == errno.ENOENT
    store = inside(model).directories[0]
    model.lohan.close()
    for call in (
        lambda: lohan.snapshot(store, missing / "run"),
        lambda: lohan.convert(store, missing / "run", states="bf16"),
        lambda: lohan.reshard(store, missing / "run", parts=2),
    ):
        with pytest.raises(StoreError, match=wanted):
            call()
    assert not missing.parent.exists() and not (workshop.folder / "first").exists()
    (missing / "run").mkdir(parents=True)  # what the message names
    workshop.made.append(lohan.wrap(build(), store=missing / "run"))


@pytest.mark.parametrize("place", ["/nope", "/mnt/nope", "/media/nope"])
def test_a_drive_that_is_not_mounted_is_named(place: str) -> None:
    with pytest.raises(StoreError, match=rf"because {place}/nvme0 does not exist.*mkdir -p"):
        lohan.wrap(build(), store=f"{place}/nvme0/run")
    assert not os.path.exists(place)


@pytest.mark.parametrize("listed", ["nvme0", "my drive", ""], ids=str)
def test_a_new_store_in_the_place_of_a_drive_that_is_not_mounted_is_refused(
    listed: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive is in /etc/fstab, or its mount point is an empty directory of those for drives."""
    point = workshop.folder / (listed or "nvme0")
    fstab = workshop.folder / "fstab"
    escaped = str(point).replace(" ", "\\040")
    fstab.write_text(
        f"# drives\nUUID=1 / ext4 defaults 0 1\nnone {workshop.folder} tmpfs\n"
        + f"UUID=2 none swap sw 0 0\nUUID=3 {escaped} ext4 defaults,nofail 0 2\n" * bool(listed)
    )
    monkeypatch.setattr(_directories, "FSTAB", fstab)
    monkeypatch.setattr(_directories, "MOUNTED_IN", {str(workshop.folder)})
    monkeypatch.setattr(_directories, "_is_container", lambda: False)
    point.mkdir()
    if listed:  # what a run without this rule has left there does not matter
        monkeypatch.setattr(_directories, "MOUNTED_IN", set())
        (point / "other").touch()
    why = "is the mount point of a drive in /etc/fstab" if listed else "is empty"
    model = workshop.wrap(build())
    train_step(model, 0)
    calls: list[Callable[[pathlib.Path], Any]] = [
        lambda place: lohan.wrap(build(), store=place),
        lambda place: lohan.wrap(build(), store=[workshop.folder / "first", place]),
        lambda place: model.lohan.snapshot(place),
    ]
    for call in calls:
        wanted = rf"{point} {why}, and no drive is mounted there.*mkdir -p '?{point}/run'?"
        with pytest.raises(StoreError, match=wanted + "$") as told:
            call(point / "run")
        assert told.value.errno == errno.ENOENT
        with pytest.raises(StoreError, match=wanted + rf" and pass store='{point}/run'$"):
            call(point)
    assert not (workshop.folder / "first").exists() and not (point / "run").exists()
    (point / "run").mkdir()  # what the message names
    workshop.made.append(lohan.wrap(build(), store=point / "run"))


def test_mounted_drives_and_containers_are_not_mistaken_for_unmounted_drives(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = workshop.folder / "nvme0"
    fstab = workshop.folder / "fstab"
    fstab.write_text(f"UUID=3 {point} ext4 defaults 0 2\n")
    point.mkdir()
    monkeypatch.setattr(_directories, "FSTAB", fstab)
    monkeypatch.setattr(_directories, "MOUNTED_IN", {str(workshop.folder)})
    monkeypatch.setattr(_directories, "_is_container", lambda: False)
    with pytest.raises(StoreError, match="no drive is mounted there"):
        _directories.refuse_unmounted(point / "run")
    for is_point in (str(point), str(workshop.folder)):
        with monkeypatch.context() as patched:
            mounted = (is_point, "ext4", "/dev/nvme0n1")
            patched.setattr(_mounts, "mount_of", lambda _, found=mounted: found)
            patched.setattr(os.path, "ismount", lambda path, found=is_point: str(path) == found)
            if is_point == str(workshop.folder):
                fstab.write_text("")  # a drive that is mounted at, say, /mnt has directories
                _directories.refuse_unmounted(workshop.folder / "missing" / "run")
            _directories.refuse_unmounted(point / "run")
    fstab.write_text(f"UUID=3 {point} ext4 defaults 0 2\n")
    monkeypatch.setattr(_directories, "_is_container", lambda: True)
    _directories.refuse_unmounted(point / "run")


def test_parents_elsewhere_are_made(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.folder)
    model = lohan.wrap(build(), store="runs/of/today")
    workshop.made.append(model)
    assert inside(model).directories == [str(workshop.folder / "runs/of/today")]
    workshop.made.append(lohan.wrap(build(), store=workshop.folder / "others" / "second"))
    copy = model.lohan.snapshot("copies/of/it")
    copy.wait()
    assert (workshop.folder / "copies/of/it/lohan.data").exists()


def test_a_store_of_one_directory_that_is_resumed_with_two_is_named(workshop: Workshop) -> None:
    one, other = workshop.folder / "store0", workshop.folder / "other"
    model = workshop.wrap(build())
    train_step(model, 0)
    model.lohan.close()
    other.mkdir()
    said = rf"created with 1 directory, {one}, but store= names 2: {other} has no part of it\."
    for store in ([one, other], [other, one]):
        with pytest.raises(StoreError, match=said) as told:
            lohan.wrap(build(), store=store, resume=True)
        assert f"Pass store='{one}'" in str(told.value)
        assert "resume=True" not in str(told.value) and "new store" not in str(told.value)
    assert [*other.iterdir()] == []
    pair = [workshop.folder / "a", workshop.folder / "b"]
    lohan.wrap(build(), store=pair).lohan.close()
    with pytest.raises(StoreError, match=r"has 2 directories.*pass exactly the directories that"):
        lohan.wrap(build(), store=pair[1], resume=True)
    with pytest.raises(StoreError, match=r"created with 2 directories.*names 3"):
        lohan.wrap(build(), store=[*pair, other], resume=True)


def test_the_advice_for_a_store_that_exists_is_given_once(workshop: Workshop) -> None:
    workshop.wrap(build()).lohan.close()
    with pytest.raises(StoreExistsError) as told:
        lohan.wrap(build(), store=workshop.folder / "store0")
    assert str(told.value).count("resume") == 2  # pass resume=True to resume it
    assert str(told.value).endswith("pass resume=True to resume it, or choose another directory")
