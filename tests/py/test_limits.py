"""The table of what cannot be combined: each row refuses, and docs/limits.md shows them all."""

from __future__ import annotations

import itertools
import pathlib
import sys
from typing import Any

import lohan
import pytest
import torch
from lohan.opening import _combination

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import doc_tables  # noqa: E402  (its folder has just been named)

# What a call may pass; each row of the table refuses one of these, or two of them together.
FEATURES: list[dict[str, Any]] = [
    *doc_tables.LINES.values(),
    *doc_tables.COLUMNS.values(),
    *({"given": frozenset({name})} for name in ("seed", "rng", "storage", "num_samples")),
    *({"given": frozenset({name})} for name in ("betas", "optimizer", "groups", "max_grad_norm")),
    *({"given": frozenset({name})} for name in ("eps",)),
    *(
        {"method": method, "rule": method}
        for method in ("lion", "sgd", "adagrad", "adam_mini", "adafactor")
    ),
    *({"config": {"schedule": "naive", "on_nan": on_nan}} for on_nan in ("raise", "skip")),
    *({"config": {"swap_bytes": low, "swap_ssd_bytes": 1 - low}} for low in (0, 1)),
    *({"config": {"gather": "shards", "device": device}} for device in ("cpu", "emu")),
    {"config": {"gather": "shards", "share": "on"}},
    {"config": {"replicas": "parameters"}},
    {"config": {"share": "on", "commit_every": "never"}, "has_mates": True},
    {"config": {"ema": 0.9}},
    {"config": {"ablate": ("reuse",), "device": "cuda"}},
    {"experts": "apart", "trains_experts": True, "origin": dict},
    {"config": {"loss_scaling": True}},
    {"config": {"order": "vertical"}},
    {"experts": "together", "idle": "skip"},
    {"experts": "apart", "idle": "skip", "trains_experts": True},
    {"experts": "apart", "rng": "torch"},
    {"given": frozenset({"groups"}), "processes": 2},
    {"config": {"on_nan": "skip"}},
    {"config": {"clip": "repeat"}},
    *({"config": {"sum_order": "tree", "accumulate": count}} for count in (2, "manual")),
    {"states": "4bit"},
]


def test_each_pair_of_the_table_is_refused_with_both_names_and_a_way_out() -> None:
    unseen = dict.fromkeys(range(len(_combination.ROWS)))
    for features in itertools.product(FEATURES, FEATURES):
        facts = doc_tables.facts_of(*features)
        for number in [n for n in unseen if _combination.ROWS[n].is_so(facts)]:
            row = _combination.ROWS[number]
            said = row.message(facts)
            assert "{" not in said and row.way_out and row.way_out.format(f=facts) in said, said
            assert row.reason in ("meaning", "not built")
            del unseen[number]
    left = [(_combination.ROWS[n].one, _combination.ROWS[n].other) for n in unseen]
    assert not left, f"no call is refused by these: {left}"
    assert not doc_tables.refusing(), "the defaults are refused"


def test_the_tables_of_limits_are_those_that_refuse() -> None:
    text = doc_tables.LIMITS.read_text(encoding="utf-8")
    assert doc_tables.limits_page(text) == text, "run tools/doc_tables.py --write"
    assert doc_tables.matrix() in text and doc_tables.rows_table() in text


def test_a_refused_call_leaves_the_model_as_it_was(store_dir: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(lohan.errors.UnsupportedError, match="order= has no meaning with method"):
        lohan.wrap(model, store=store_dir / "s", method="mezo", order="vertical")
    assert not (store_dir / "s").exists() and model.weight.requires_grad
