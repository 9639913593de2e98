"""Deleted stores are noticed, and half-copied stores are to be copied again."""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import Any

import kit
import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import StoreDeletedError, StoreError, StoreUncleanError
from torch import nn

WIDTH = 64


def _train(model: Any, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(2, WIDTH)).square().mean().backward()
        model.optimizer.step()


# --- Deleted stores -----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"commit_every": 3}, {"commit_every": "manual"}])
def test_a_deleted_store_ends_the_run_with_an_error(
    store_dir: pathlib.Path, settings: dict[str, Any]
) -> None:
    model = lohan.wrap(kit.linears(WIDTH, 4), store=store_dir / "run", **settings)
    _train(model, 2)
    model.lohan.flush()
    shutil.rmtree(store_dir / "run")
    with pytest.raises(StoreDeletedError, match=r"run/lohan\.data was deleted while it was open"):
        _train(model, 4)
        model.lohan.close()
    if not inside(model).closed:
        with pytest.raises(StoreDeletedError):
            model.lohan.close()


def test_a_store_that_is_deleted_after_its_last_step_is_missed_at_the_close(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(kit.linears(WIDTH, 4), store=store_dir / "run")
    _train(model, 2)
    model.lohan.commit()
    shutil.rmtree(store_dir / "run")
    with pytest.raises(StoreDeletedError, match=f"/proc/{os.getpid()}/fd/"):
        model.lohan.close()
    assert inside(model).closed


def test_a_store_that_is_moved_while_a_run_uses_it_resumes_at_its_new_place(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(kit.linears(WIDTH, 4), store=store_dir / "run")
    _train(model, 2)
    (store_dir / "run").rename(store_dir / "moved")
    _train(model, 1)
    model.lohan.close()
    model = lohan.wrap(kit.linears(WIDTH, 4), store=store_dir / "moved", resume=True)
    assert model.lohan.step == 3
    model.lohan.close()


# --- Half-copied stores -------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 100, 1 << 20, -4096])
def test_a_store_that_was_half_copied_is_to_be_copied_again(
    store_dir: pathlib.Path, kept: int
) -> None:
    lohan.wrap(kit.linears(WIDTH, 4), store=store_dir / "run").lohan.close()
    (store_dir / "copy").mkdir()
    data = (store_dir / "run" / "lohan.data").read_bytes()
    (store_dir / "copy" / "lohan.data").write_bytes(data[:kept])
    with pytest.raises(StoreError) as caught:
        lohan.wrap(kit.linears(WIDTH, 4), store=store_dir / "copy", resume=True)
    said = str(caught.value)
    assert "copy the store again" in said
    for other in ("remove", "restore it", "delete"):
        assert other not in said.partition("copy the store again")[0]


def test_a_store_whose_weights_were_never_written_is_to_be_copied_again(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(nn.Linear(4, 4), store=store_dir / "run")
    raw = inside(model).store
    assert not raw.describe()["is_empty"]
    model.lohan.close()
    from lohan.store import _same

    class Empty:
        def describe(self) -> dict[str, Any]:
            return {"is_empty": True, "files": [("/copy/lohan.data", 1, True)]}

    with pytest.raises(StoreUncleanError, match="copy the store again if this is a copy"):
        _same.check_same_model(Empty(), inside(model).layout)  # type: ignore[arg-type]
