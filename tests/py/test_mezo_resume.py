"""A zeroth-order run resumes, however it ended and whatever the size of main memory is now."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import time
from typing import Any

import lohan
import pytest
import torch
from lohan.commands import _inspect
from lohan.common._inside import inside
from lohan.errors import BudgetError, StoreMismatchError
from mezo_helper import (
    EPS,
    LR,
    SEED,
    Plain,
    Settings,
    batches,
    differing,
    gpt2,
    loss_of,
    opt,
    plain_run,
    steps,
)
from program_server import Program, preload
from rich.console import Console
from test_mezo import least_of, wrapped
from test_mezo_storage import PlainKept
from torch import nn

WORKER = """
import json
import sys
import lohan
from mezo_helper import batches, loss_of, opt
model = lohan.wrap(opt(), store=sys.argv[1], method="mezo", **json.loads(sys.argv[2]))
print("ready", flush=True)
for batch in batches(1000)[model.lohan.step:]:
    model.zo_step(lambda: loss_of(model, batch))
    print(model.lohan.step, flush=True)
"""
LEAST = -1
preload("transformers.models.opt.modeling_opt")
HOW: dict[str, dict[str, Any]] = {
    "never written": {},
    "written each step": {"write_every": 1},
    "in fewer bits": {"write_every": 2, "storage": "bf16", "host_bytes": LEAST},
}


@pytest.mark.parametrize("moments", [2, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", HOW)
def test_a_killed_run_resumes_bit_for_bit(how: str, moments: int, store_dir: pathlib.Path) -> None:
    path = f"{pathlib.Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    asked = dict(HOW[how])
    if asked.get("host_bytes") == LEAST:
        asked["host_bytes"] = least_of(opt(), storage=asked["storage"], write_every=2)
    for moment in range(moments):
        begun = {"lr": LR, "eps": EPS, "seed": SEED, **asked}
        resumed = {"resume": True, "host_bytes": asked.get("host_bytes")}
        settings = resumed if moment else begun
        worker = Program(["-c", WORKER, str(store_dir), json.dumps(settings)], {"PYTHONPATH": path})
        for _ in range(2 + moment % 3):
            worker.stdout.readline()
        time.sleep(0.003 * (moment % 7))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.close()
    model = lohan.wrap(opt(), store=store_dir, method="mezo", resume=True)
    done = model.lohan.step
    assert done >= moments
    if "storage" in asked:
        _, values = PlainKept(opt(), asked["storage"]).run(batches(done))
    else:
        _, values = plain_run(opt, done, Settings())
    assert differing(model, values) == []
    assert model.optimizer.param_groups[0]["lr"] == LR
    model.lohan.close()


@pytest.mark.parametrize("only", ["", "c_attn"])
def test_blocks_are_split_as_they_were_then_whatever_the_budget(
    only: str, store_dir: pathlib.Path
) -> None:
    def made() -> nn.Module:
        model = gpt2()
        for name, param in model.named_parameters():
            param.requires_grad_(only in name)
        return model

    data = batches(4)
    plain = Plain(made(), Settings())
    losses = [float(torch.tensor(plain.step(lambda b=b: loss_of(plain.model, b)))) for b in data]
    model = wrapped(made(), store_dir, "least")
    assert steps(model, data[:2]) == losses[:2]
    units = len(inside(model).layout.units)
    model.lohan.close()
    free = wrapped(made(), store_dir / "free")
    assert units > len(inside(free).layout.units)
    free.lohan.close()
    with pytest.raises(BudgetError, match=r"these are the store's blocks\. A new store"):
        lohan.wrap(
            made(),
            store=store_dir / "free",
            method="mezo",
            resume=True,
            host_bytes=least_of(made()),
        )
    model = lohan.wrap(made(), store=store_dir, method="mezo", resume=True)
    assert len(inside(model).layout.units) == units
    assert steps(model, data[2:]) == losses[2:]
    assert differing(model, plain.values()) == []
    model.lohan.close()
    with pytest.raises(StoreMismatchError, match="in other blocks: omit blocks="):
        lohan.wrap(
            (again := made()),
            store=store_dir,
            method="mezo",
            resume=True,
            blocks=[again.transformer.h[0]],
        )


def test_inspect_knows_what_moves_and_what_is_written(store_dir: pathlib.Path) -> None:
    said = {}
    for name, more in (("never", {}), ("third", {"write_every": 3, "storage": "bf16"})):
        model: Any = opt()
        model.model.decoder.final_layer_norm.requires_grad_(False)
        wrapped(model, store_dir / name, **more).lohan.close()
        found = _inspect.describe([str(store_dir / name)])
        shown = io.StringIO()
        _inspect.show(found, Console(file=shown, width=200))
        said[name] = shown.getvalue()
        assert found["param_count"] - found["trainable_count"] == 64
        assert "(64 frozen)" in said[name]
    assert "64 bytes per direction; parameters are never written" in said["never"]
    assert "every 3 steps, a step writes" in said["third"]
    assert {param.get("kept") for param in found["params"]} == {"bf16", None}
    moved = sum(param["count"] for param in found["params"] if param["trainable"])
    assert 2 * moved < found["written_bytes_per_step"] < 4 * moved + 200_000
