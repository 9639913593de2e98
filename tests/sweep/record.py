"""The record of a sweep, and the tables of docs/supported-models.md, which are made from it.

python tests/sweep/record.py SWEEP.jsonl... adds results to record.json, and writes the page.
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
RECORD = HERE / "record.json"
PAGE = HERE.parent.parent / "docs" / "supported-models.md"
BEGIN, END = "<!-- tables of tests/sweep/record.json -->\n", "<!-- end of the tables -->\n"
STEPS = ("read", "frozen", "reference", "train", "saved", "exported")
NOT_BUILT = "not built: "
# Why a class was not built, by what the first attempt said.
REASONS = (
    (r"requires the (\w+) library", r"They need \1, which is not installed"),
    (r"^[^,:]+: \d+ elements", "They have more than 50 million elements in each small form"),
    (r"the library cannot load what", "Their library cannot load what it saved"),
    (r"^(not within|the process ended)", "They exceed the sweep's limits of time or memory"),
    (r"values that are not finite", "They compute values that are not finite"),
    (r"^[^,:]+: ", "No small configuration of them can be built"),
    (r"", "Their inputs are not known"),
)


def of_rows(
    rows: Iterable[Mapping[str, Any]], listed: Mapping[str, list[str]], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a sweep's results; a later result of a class takes precedence.

    Args:
        rows: the results.
        listed: all classes of each kind.
        before: the previous record, whose results remain for classes without a new one.
    """
    results = dict(before.get("results", {}))
    for row in rows:
        results[row["class"]] = [row["kind"], row["date"], row["code"], _result(row)]
    known = {name: kind for kind, members in listed.items() for name in members}
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "diffusers")}
    return {
        "versions": {**versions, "torch": importlib.metadata.version("torch").partition("+")[0]},
        "listed": {kind: len(members) for kind, members in listed.items()},
        "results": {n: [known[n], *r[1:]] for n, r in sorted(results.items()) if n in known},
    }


def _result(row: Mapping[str, Any]) -> str:
    """Return "same", why a class was not built, or the first step that differs."""
    if "read" not in row and "train_and_write" not in row:
        return NOT_BUILT + str(row["built"])
    left = [step for step in STEPS if row.get(step) != "same"]
    if not left:
        return "same"
    said = row.get(left[0]) or row.get("train_and_write", "no result")
    if row.get("library"):
        said += f" (from_pretrained itself {row['library']})"
    return f"{left[0]}: {said}"


def counts(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return, for each kind, how many classes are listed, tried, built small, and the same."""
    made = {kind: [count, 0, 0, 0] for kind, count in record["listed"].items()}
    for kind, _, _, result in record["results"].values():
        made[kind][1] += 1
        made[kind][2] += not result.startswith(NOT_BUILT)
        made[kind][3] += result == "same"
    return made


def _said(record: Mapping[str, Any]) -> str:
    """Return what the results are of."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    of: dict[tuple[str, str], int] = {}
    for _, date, code, _ in record["results"].values():
        of[date, code] = of.get((date, code), 0) + 1
    parts = [
        f"{count} of {date} with " + (f"the code {code}" if code else "earlier code")
        for (date, code), count in sorted(of.items(), key=lambda item: -item[1])
    ]
    return (
        f"Recorded with {versions}: {'; '.join(parts)}. `python tests/sweep/sweep.py --code` prints"
        " the code of this version, a fingerprint of the sources in csrc and python/lohan."
    )


def tables(record: Mapping[str, Any]) -> str:
    """Return the part of the page that is made from a record."""
    lines = [_said(record), ""]
    lines += ["| kind | classes | tried | built small | same bits in all six |"]
    lines += ["|---|---|---|---|---|"]
    kinds = counts(record)
    for kind, each in kinds.items():
        lines.append(f"| {kind} | {' | '.join(map(str, each))} |")
    total = [sum(column) for column in zip(*kinds.values(), strict=True)]
    share = 100 * total[3] / max(total[2], 1)
    lines += [f"| all | {' | '.join(map(str, total))} ({share:.1f} % of those built) |", ""]
    lines += [
        "## Classes with another result",
        "",
        "| class | first step that differs |",
        "|---|---|",
    ]
    results = {name: row[3] for name, row in record["results"].items()}
    for name, result in results.items():
        if result != "same" and not result.startswith(NOT_BUILT):
            lines.append(f"| {name} | {_cell(result)} |")
    lines += ["", "## Classes that were not built", ""]
    lines += [
        "The sweep knows no small configuration and inputs with which the library itself computes"
        " finite values and loads what it saved. tests/sweep/record.json has what each class said.",
        "",
    ]
    groups: dict[str, list[str]] = {}
    for name, result in results.items():
        if result.startswith(NOT_BUILT):
            groups.setdefault(_reason(result.removeprefix(NOT_BUILT)), []).append(name)
    for reason, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines += [f"* {reason}: {', '.join(members)}."]
    return "\n".join([*lines, ""])


def _reason(text: str) -> str:
    pattern, reason = next((p, r) for p, r in REASONS if re.search(p, text))
    found = re.search(pattern, text)
    assert found
    return found.expand(reason)


def _cell(text: str) -> str:
    text = re.sub(r"/\S*/lohan-sweep-\d+/files", "FOLDER", text)
    return text.replace("|", "/").replace("\n", " ")[:200]


def page(text: str, record: Mapping[str, Any]) -> str:
    """Return the page with the tables of a record."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + tables(record) + END + rest.partition(END)[2]


def text_of(record: Mapping[str, Any]) -> str:
    """Return a record as JSON, with a line for each class."""
    head = json.dumps({**record, "results": {}}, indent=1)
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in record["results"].items()]
    return head.removesuffix("{}\n}") + "{\n" + ",\n".join(rows) + "\n }\n}\n"


def main(paths: list[str]) -> None:
    """Write the record and the page."""
    rows = [
        json.loads(line) for path in paths for line in pathlib.Path(path).read_text().splitlines()
    ]
    sys.path.insert(0, str(HERE))
    import names

    listed = {**names.of_transformers(), **names.of_diffusers()}
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(text_of(of_rows(rows, listed, before)))
    PAGE.write_text(page(PAGE.read_text(), json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
