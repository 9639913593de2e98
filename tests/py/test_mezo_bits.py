"""No setting of zeroth-order training changes a bit: every two choices meet in a row of a table.

Each row is compared with MeZO that has everything in memory; its parameters are kept in a format.
"""

from __future__ import annotations

import pathlib
from typing import Any

import lohan
import pairwise
import pytest
from lohan.common._inside import inside
from lohan.errors import StoreMismatchError
from mezo_helper import Settings, batches, differing, gpt2, opt, opt_untied, plain_run, steps
from pairwise import Pair, Row
from test_mezo import least_of
from test_mezo_storage import bf16, fp16, kept_run, wrapped
from torch import nn

# A model, and the format of its dtype.
MODELS: dict[str, tuple[Any, str]] = {
    "opt": (opt, "fp32"),
    "untied": (opt_untied, "fp32"),
    "gpt2": (gpt2, "fp32"),
    "bf16": (bf16, "bf16"),
    "fp16": (fp16, "fp16"),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "storage": (None, "fp32", "bf16", "fp16", "fp8"),
    "rng": ("philox", "torch"),
    "spare_bytes": (None, 0, 40_000),  # of main memory; None: all parameters stay in it
    "device": ("cpu", "emu", "emu little"),
    "runs": ("together", "apart"),
    "ablate": ((), ("overlap",), ("deferred",)),
    "write_every": (None, 1, 3, "never"),
    "num_samples": (1, 3),
    "weight_decay": (0.0, 0.1),
    "blocks": (False, True),
    "resumes": (False, True),
}


def _pairs(one: str, choices: Any, other: str, others: Any) -> set[Pair]:
    return {frozenset([(one, a), (other, b)]) for a in choices for b in others}


REFUSED = (
    _pairs("rng", ["torch"], "storage", ["bf16", "fp16", "fp8"])
    | _pairs("rng", ["torch"], "model", ["bf16", "fp16"])
    | _pairs("ablate", FACTORS["ablate"][1:], "device", ["cpu"])
)
THREES = [("storage", "spare_bytes", "write_every", "resumes"), ("model", "storage", "device")]
ROWS = pairwise.covering(FACTORS, REFUSED, 1, THREES)
QUICK = pairwise.some(ROWS, lambda row: pairwise.pairs_of({k: row[k] for k in THREES[0]}))
DATA = batches(8)


def _expected(row: Row) -> Any:
    make, dtype = MODELS[row["model"]]
    kept = row["storage"] or dtype
    decay, samples = row["weight_decay"], row["num_samples"]
    if kept == dtype == "fp32":
        rule = Settings(decay=decay, samples=samples, rng=row["rng"])
        return plain_run(make, len(DATA), rule)
    return kept_run(make, kept, len(DATA), decay, samples)


def _made(row: Row) -> tuple[nn.Module, dict[str, Any]]:
    """Return a row's model, and its blocks as a setting if they are given."""
    model: nn.Module = MODELS[row["model"]][0]()
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    return model, {"blocks": [*blocks]} if row["blocks"] else {}


def _settings(row: Row, folder: pathlib.Path) -> dict[str, Any]:
    names = ("rng", "runs", "ablate", "write_every", "num_samples", "weight_decay", "storage")
    settings = {name: row[name] for name in names if row[name] is not None}
    if row["device"] != "cpu":
        model, blocks = _made(row)
        sizes = inside(wrapped(model, folder / "sizes", **blocks, **settings)).layout.units
        slots = 2 * sum(sorted(unit.place_bytes for unit in sizes)[-3:])
        settings |= {"device": "emu", "device_param_bytes": slots}
        settings |= {"device_bytes": 2 * slots} if row["device"] == "emu little" else {}
    if row["spare_bytes"] is not None:
        model, blocks = _made(row)
        settings["host_bytes"] = row["spare_bytes"] + least_of(model, **blocks, **settings)
    return settings


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row in QUICK else [pytest.mark.slow]) for row in ROWS],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_losses_and_parameters_are_mezo_s_in_every_setting(
    row: Row, store_dir: pathlib.Path
) -> None:
    losses, values = _expected(row)
    store, settings = store_dir / "run", _settings(row, store_dir)
    made, blocks = _made(row)
    model = wrapped(made, store, **blocks, **settings)
    count = 5 if row["resumes"] else len(DATA)
    assert steps(model, DATA[:count]) == losses[:count]
    if row["resumes"]:
        every = row["write_every"]
        writes = 0 if every == "never" else count // (every or 1)
        units = inside(model).layout.units
        written = model.optimizer.written_bytes
        assert every is None or written == writes * sum(unit.nbytes for unit in units)
        model.lohan.close()
        verified = lohan.verify(store)
        assert verified.is_whole
        assert every in (None, "never") or verified.step == writes * every
        lohan.snapshot(store, store_dir / "copy").wait()
        other = "bf16" if row["storage"] == "fp8" else "fp8"
        for place in (store, store_dir / "copy"):
            made, blocks = _made(row)
            model = lohan.wrap(made, store=place, method="mezo", resume=True, **blocks)
            assert model.lohan.step == count
            assert steps(model, DATA[count:]) == losses[count:]
            assert differing(model, values) == []
            model.lohan.close()
            with pytest.raises(StoreMismatchError, match=f"storage='{other}'"):
                lohan.wrap(_made(row)[0], store=place, method="mezo", resume=True, storage=other)
        return
    assert differing(model, values) == []
    model.lohan.close()


def test_every_two_choices_meet_and_every_three_of_some() -> None:
    assert set().union(*map(pairwise.pairs_of, ROWS)) == pairwise.all_pairs(FACTORS) - REFUSED
    for names in THREES:
        met = set().union(*(pairwise.triples_of(row, names) for row in ROWS))
        assert met == pairwise.all_triples(FACTORS, names, REFUSED)
    assert len(ROWS) < 130
