"""Several copies of a store are kept, and a run goes back to any of them with its states."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import crash_worker
import lohan
import pytest
from lohan.common._inside import inside
from lohan.errors import ModelError, StoreError, StoreExistsError
from lohan.store import _snapshot


def trained(folder: pathlib.Path, copies: pathlib.Path, **kept: Any) -> tuple[Any, list[str]]:
    """Train six steps and keep a copy after each; return the model and the digests."""
    model: Any = lohan.wrap(crash_worker.build(), store=folder, lr=1e-2)
    digests = []
    for step in range(6):
        crash_worker.train_step(model, step)
        model.lohan.keep(copies, **kept)
        digests.append(crash_worker.digest(model))
    inside(model).commits.snapshot_now.wait()
    return model, digests


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_copies_stay_and_each_continues_with_the_bits_of_the_run(
    store_dir: pathlib.Path,
) -> None:
    copies = store_dir / "copies"
    model, digests = trained(store_dir / "s", copies, last=2)
    assert names(copies) == ["step-5", "step-6"]
    model.lohan.keep(copies, name="best").wait()
    model.lohan.close()
    assert names(copies) == ["best", "step-5", "step-6"]
    again: Any = lohan.wrap(crash_worker.build(), store=copies / "step-5", resume=True)
    assert crash_worker.digest(again) == digests[4]
    crash_worker.train_step(again, 5)
    assert crash_worker.digest(again) == digests[5]
    # The copy's own copies are of the same run, and so are those of the store that it was made of.
    crash_worker.train_step(again, 6)
    again.lohan.keep(copies, last=2).wait()
    again.lohan.close()
    assert names(copies) == ["best", "step-5", "step-6", "step-7"]  # step-5 was in use
    again = lohan.wrap(crash_worker.build(), store=copies / "step-7", resume=True)
    crash_worker.train_step(again, 7)
    again.lohan.keep(copies, last=1).wait()
    again.lohan.close()
    # step-7 was in use, and in step-5 a run has trained.
    assert names(copies) == ["best", "step-5", "step-7", "step-8"]


@pytest.mark.parametrize("kept", [{"last": 1}, {"name": "best"}], ids=str)
def test_a_copy_in_which_a_run_has_trained_is_not_removed(
    store_dir: pathlib.Path, kept: dict[str, Any]
) -> None:
    copies = store_dir / "copies"
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", lr=1e-2)
    model.lohan.keep(copies, **kept).wait()
    (name,) = names(copies)
    other: Any = lohan.wrap(crash_worker.build(), store=copies / name, resume=True)
    crash_worker.train_step(other, 5)
    digest = crash_worker.digest(other)
    other.lohan.close()
    crash_worker.train_step(model, 0)
    if "name" in kept:
        with pytest.raises(StoreExistsError, match="trained since it was copied"):
            model.lohan.keep(copies, **kept)
    else:
        model.lohan.keep(copies, **kept).wait()
        assert names(copies) == [name, "step-1"]
    model.lohan.close()
    other = lohan.wrap(crash_worker.build(), store=copies / name, resume=True)
    assert (other.lohan.step, crash_worker.digest(other)) == (1, digest)
    other.lohan.close()


def test_what_is_not_a_copy_of_this_run_is_left_alone(store_dir: pathlib.Path) -> None:
    copies = store_dir / "copies"
    other: Any = lohan.wrap(crash_worker.build(), store=store_dir / "other")
    other.lohan.keep(copies, name="theirs").wait()
    other.lohan.close()
    (copies / "theirs").rename(copies / "step-1")  # a copy of another run
    (copies / "step-0").mkdir()
    (copies / "step-0" / "lohan.data").write_bytes(b"unfinished")
    (copies / "step-notes").write_text("mine")
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s")
    for step in range(3):
        crash_worker.train_step(model, step)
        if step > 0:
            model.lohan.keep(copies, last=1).wait()
    assert names(copies) == ["step-0", "step-1", "step-3", "step-notes"]
    with pytest.raises(StoreExistsError, match="not a copy of this run: choose another name="):
        model.lohan.keep(copies.parent, name="s")
    with pytest.raises(ModelError, match="None must be a path"):
        model.lohan.keep(None)
    bad = ({"name": name} for name in ("a/b", "..", "step-9", 3))
    for wrong in ({"last": 0}, {"last": True}, *bad):
        with pytest.raises(ModelError, match=rf"keep\({next(iter(wrong))}="):
            model.lohan.keep(copies, **wrong)
    model.lohan.close()


def test_a_folder_for_copies_that_cannot_be_made_is_named(store_dir: pathlib.Path) -> None:
    (store_dir / "file").touch()
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", lr=1e-2)
    with pytest.raises(StoreError, match=r"cannot create .*file/copies: Not a directory"):
        model.lohan.keep(store_dir / "file" / "copies")
    crash_worker.train_step(model, 0)
    model.lohan.close()


def test_a_copy_of_the_same_name_replaces_the_older_one_when_it_is_complete(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = store_dir / "copies"
    model, digests = trained(store_dir / "s", copies, name="best")
    (copies / "best" / "notes").write_text("mine")
    assert names(copies) == ["best"]
    crash_worker.train_step(model, 6)
    monkeypatch.setattr(_snapshot._Copy, "_move", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.lohan.keep(copies, name="best").wait()
    monkeypatch.undo()
    assert names(copies) == ["best"]
    model.lohan.close()
    again: Any = lohan.wrap(crash_worker.build(), store=copies / "best", resume=True)
    assert crash_worker.digest(again) == digests[5]
    with pytest.raises(StoreExistsError, match="in use"):
        again.lohan.keep(copies, name="best")
    again.lohan.close()
    model = lohan.wrap(crash_worker.build(), store=store_dir / "s", resume=True)
    model.lohan.keep(copies, name="best").wait()
    model.lohan.close()
    assert names(copies / "best") == ["lohan.data", "notes"]
    assert lohan.verify(copies / "best").step == 7


def test_after_a_copy_that_failed_another_one_can_be_kept(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = store_dir / "copies"
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", lr=1e-2)
    crash_worker.train_step(model, 0)
    monkeypatch.setattr(_snapshot._Copy, "_move", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.lohan.keep(copies).wait()
    monkeypatch.undo()
    model.lohan.keep(copies).wait()
    model.lohan.close()
    assert lohan.verify(copies / "step-1").step == 1


def test_files_of_others_beside_a_new_copy_do_not_keep_it_from_its_place(
    store_dir: pathlib.Path,
) -> None:
    copies = store_dir / "copies"
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", lr=1e-2)
    model.lohan.keep(copies, name="best").wait()
    (copies / ".best.new").mkdir()
    (copies / ".best.new" / "notes").write_text("mine")
    crash_worker.train_step(model, 0)
    model.lohan.keep(copies, name="best").wait()
    model.lohan.close()
    assert names(copies / ".best.new") == ["notes"]
    assert lohan.verify(copies / "best").step == 1


def test_a_folder_that_disappears_during_a_copy_is_an_error_and_no_hang(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = store_dir / "copies"
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", lr=1e-2)
    crash_worker.train_step(model, 0)
    move = _snapshot._Copy._move

    def lose(copy: Any) -> None:
        move(copy)
        shutil.rmtree(copies)

    monkeypatch.setattr(_snapshot._Copy, "_move", lose)
    copy = model.lohan.keep(copies, last=1)
    with pytest.raises(OSError):
        copy.wait(60)
    assert copy.is_done
    model.lohan.close()
