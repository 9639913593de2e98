"""The page of models that have been tried is made from the record of the sweep."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

FOLDER = pathlib.Path(__file__).parents[1] / "sweep"


def made() -> Any:
    spec = importlib.util.spec_from_file_location("sweep_record", FOLDER / "record.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_record() -> None:
    record = json.loads((FOLDER / "record.json").read_text())
    text = made().PAGE.read_text()
    assert made().page(text, record) == text, "run python tests/sweep/record.py SWEEP.jsonl"


def test_a_record_counts_each_class_once_and_names_what_differs() -> None:
    same = dict.fromkeys(made().STEPS, "same")
    rows: list[dict[str, Any]] = [
        {"kind": "k", "class": "A", "built": "ratio16", **same, "train": "losses"},
        {"kind": "k", "class": "A", "built": "ratio16", **same},
        {"kind": "k", "class": "B", "built": "ratio16", **same, "read": "1 outputs"},
        {"kind": "k", "class": "C", "built": "ratio16: ImportError: timm"},
    ]
    record = made().of_rows(rows, {"k": ["A", "B", "C", "D"]})
    assert record["kinds"] == {"k": {"listed": 4, "tried": 3, "built": 2, "same": 1}}
    assert record["different"] == {"B": "read: 1 outputs"}
    assert list(record["not_built"]) == ["C"]


def test_the_record_reaches_its_bar() -> None:
    kinds = json.loads((FOLDER / "record.json").read_text())["kinds"].values()
    built, same = (sum(each[key] for each in kinds) for key in ("built", "same"))
    assert same >= 0.97 * built
