"""The figures of the pages are the newest lines of benchmarks/history.jsonl (tools/measured.py)."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import re
import sys
from typing import Any

import docs_helper as helper
import pytest

sys.path.insert(0, str(helper.ROOT / "tools"))
sys.path.insert(0, str(helper.ROOT / "benchmarks" / "py"))

import gpu_record
import measured

LINES = measured.read(measured.HISTORY.read_text(encoding="utf-8"))
FIGURE = re.compile(r"<!-- (?:ratio|ratio_min|ratio_max|value) (\S+) (AMD|Intel)(?: (\w+))? -->")
GPU_TEXTS = gpu_record.texts()
# The settings of an experiment: what a line with the same name must have in common.
SETTINGS = ("batch", "tokens", "disk_bytes_per_s", "link", "processes", "micro_batches", "layers")


def shown() -> list[tuple[str, str, str, str]]:
    """Return page, name, vendor and peer of every line that a page shows."""
    tables = [
        (page, row.name, vendor, row.peer)
        for page, rows in measured.TABLES.items()
        for row in rows
        for vendor in measured.VENDORS
    ]
    sentences = [
        (page, *match) for page, text in measured.pages().items() for match in FIGURE.findall(text)
    ]
    return list(dict.fromkeys(tables + sentences))


def newer(name: str, vendor: str, peer: str) -> dict[str, Any]:
    """Return a line that is newer than every other, as a benchmark would append it."""
    return {
        "date": "2100-01-01",
        "commit": "0000000",
        "machine": f"{vendor} processor, 2 cores, Linux 7",
        "name": name,
        "value": 98.7,
        "peer": f"{peer}, another setting",
        "ratio": 98.76,
        "ratio_min": 97.65,
        "ratio_max": 99.87,
    }


@pytest.mark.parametrize("page", list(measured.pages()))
def test_a_page_shows_the_newest_lines(page: str) -> None:
    text = measured.pages()[page]
    assert measured.written(page, text, LINES, GPU_TEXTS) == text, "run tools/measured.py"


@pytest.mark.parametrize(("page", "name", "vendor", "peer"), shown())
def test_a_page_is_stale_once_a_newer_line_exists(
    page: str, name: str, vendor: str, peer: str
) -> None:
    text = measured.pages()[page]
    made = measured.written(page, text, [*LINES, newer(name, vendor, peer)], GPU_TEXTS)
    assert made != text
    assert re.search(r"9[789]\.\d", made)


def test_an_older_line_that_is_appended_later_is_not_shown() -> None:
    """Lines of two branches meet in the file in any order."""
    older = {**newer("step", "AMD", measured.MASTERS), "date": "2000-01-01"}
    text = measured.pages()["README.md"]
    assert measured.written("README.md", text, [*LINES, older], GPU_TEXTS) == text


def test_a_line_of_another_processor_is_in_another_column() -> None:
    added = [*LINES, newer("step", "Intel", measured.MASTERS)]
    before, after = (measured.newest(lines, "step", "AMD") for lines in (LINES, added))
    assert before == after
    assert measured.newest(added, "step", "Intel") == added[-1]


def test_every_row_of_a_benchmark_is_in_a_table_of_the_tool() -> None:
    for page, text in measured.pages().items():
        rest = re.sub(r"(?s)<!-- measured -->.*?<!-- end -->", "", text)
        rows = re.findall(r"(?m)^\|.*\d\.\d.*`make bench.*$", rest)
        assert not rows, f"{page}: no record keeps these rows true"


def test_lines_of_one_name_are_of_one_experiment() -> None:
    for name in {line["name"] for line in LINES}:
        for key in SETTINGS:
            found = {str(line[key]) for line in LINES if line["name"] == name and key in line}
            assert len(found) <= 1, f"{name}: {key} is {found}: give each a name of its own"


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({}, "step"),
        ({"disk_rate": 400_000_000}, "step_disk_400mb_per_s"),
        ({"batch": 1, "length": 32}, "step_1x32"),
        ({"host_bytes": 500_000_000}, "step_500mb"),
        ({"schedule": "auto"}, "step_auto"),
    ],
)
def test_a_step_with_other_settings_is_recorded_with_another_name(
    setting: dict[str, Any], name: str
) -> None:
    bench_step = importlib.import_module("bench_step")
    usual = {
        "schedule": "optimized",
        "host_bytes": bench_step.HOST_BYTES,
        "batch": bench_step.BATCH,
        "length": bench_step.LENGTH,
        "disk_rate": 0,
    }
    assert bench_step.name_of(argparse.Namespace(**{**usual, **setting})) == name


def test_code_that_differs_from_what_ran_on_a_gpu_is_stale() -> None:
    record = gpu_record.read()
    same = dict(record["code"])
    assert "stale" not in gpu_record.sentence(record, same) + gpu_record.table(record, same)
    for name in same:
        other = {**same, name: "another"}
        assert "stale" in gpu_record.sentence(record, other)
        (row,) = [row for row in gpu_record.table(record, other).splitlines() if "stale" in row]
        assert row.startswith(f"| {name} |")


@pytest.mark.parametrize("change", ["content", "new file"])
def test_a_changed_file_has_another_fingerprint(
    change: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    folder = tmp_path / "csrc" / "dev"
    folder.mkdir(parents=True)
    (folder / "dev.c").write_text("int one;\n")
    before = gpu_record.fingerprints(["csrc/dev", "csrc/dev/dev.c"])
    changed = folder / ("dev.c" if change == "content" else "more.h")
    changed.write_text("int two;\n")
    after = gpu_record.fingerprints(["csrc/dev", "csrc/dev/dev.c"])
    assert before["csrc/dev"] != after["csrc/dev"]
    assert (before["csrc/dev/dev.c"] != after["csrc/dev/dev.c"]) is (change == "content")


def test_the_record_of_the_gpu_names_every_file_of_tests_that_passed() -> None:
    record = gpu_record.read()
    assert {"csrc/dev", "cuda", "python/lohan/torch_glue"} <= record["code"].keys()
    assert record["passed"].keys() <= record["code"].keys()
    assert all(name.startswith("tests/cuda/") for name in record["passed"])
