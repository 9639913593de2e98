"""The page of models that have been tried is made from the record of the sweep."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

import torch

FOLDER = pathlib.Path(__file__).parents[1] / "sweep"


def made(name: str = "record") -> Any:
    spec = importlib.util.spec_from_file_location(f"sweep_{name}", FOLDER / f"{name}.py")
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
    common = {"kind": "k", "built": "ratio16", "code": "abc", "date": "2026-11-29"}
    rows: list[dict[str, Any]] = [
        {**common, "class": "A", **same, "train": "losses"},
        {**common, "class": "A", **same},
        {**common, "class": "B", **same, "read": "1 outputs"},
        {**common, "class": "C", "built": "ratio16: ImportError: it requires the timm library"},
    ]
    before = {
        "results": {"C": ["k", "2026-11-28", "", "same"], "D": ["k", "2026-11-28", "", "same"]}
    }
    record = made().of_rows(rows, {"k": ["A", "B", "C", "D", "E"]}, before)
    assert made().counts(record) == {"k": [5, 4, 3, 2]}
    assert record["results"]["B"][3] == "read: 1 outputs"
    assert record["results"]["D"] == ["k", "2026-11-28", "", "same"]
    assert json.loads(made().text_of(record)) == record
    text = made().tables(record)
    assert "3 of 2026-11-29 with the code abc; 1 of 2026-11-28 with earlier code" in text
    assert "* They need timm, which is not installed: C." in text


def test_the_record_reaches_its_bar() -> None:
    kinds = made().counts(json.loads((FOLDER / "record.json").read_text())).values()
    built, same = (sum(each[place] for each in kinds) for place in (2, 3))
    assert same >= 0.97 * built


def extended(value: Any) -> Iterator[str]:
    """Yield the parts that a form, and what is inside it, extends."""
    if isinstance(value, dict):
        yield from value.get("+", ())
        for each in value.values():
            yield from extended(each)


def test_each_form_is_of_a_class_and_each_part_of_a_form() -> None:
    record = json.loads((FOLDER / "record.json").read_text())
    forms = json.loads((FOLDER / "forms.json").read_text())
    assert {*extended(forms)} == forms["parts"].keys()
    patterns = [*forms["configs"], *forms["inputs"]]
    of_none = [p for p in patterns if not any(re.fullmatch(p, n) for n in record["results"])]
    assert of_none == []


def test_a_class_that_is_a_part_of_others_has_the_form_of_that_part() -> None:
    config = made("forms").config
    whole = config("RfDetrModel", "rf_detr")
    assert config("RfDetrDinov2Backbone", "rf_detr_dinov2") == whole["backbone_config"]
    assert config("RfDetrModel") == whole


def test_inputs_of_diffusers_have_scales_that_are_numbers_and_a_try_without_masks() -> None:
    class Classifier(torch.nn.Module):
        def forward(
            self, sample: Any, timestep: Any, conditioning_scale: Any, attention_mask: Any = None
        ) -> None: ...

    config = types.SimpleNamespace(in_channels=4, sample_size=16)
    tries = made("inputs").of_diffusers(Classifier(), config, 0)
    assert {each["conditioning_scale"] for each in tries} == {1.0}
    full = [each for each in tries if "attention_mask" in each]
    assert full
    for each in full:
        assert any(
            other.keys() == each.keys() - {"attention_mask"}
            and torch.equal(other["sample"], each["sample"])
            for other in tries
        )
