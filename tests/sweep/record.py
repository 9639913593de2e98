"""The record of a sweep, and the tables of docs/supported-models.md, which are made from it.

python tests/sweep/record.py SWEEP.jsonl... writes record.json and the page.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
RECORD = HERE / "record.json"
PAGE = HERE.parent.parent / "docs" / "supported-models.md"
BEGIN, END = "<!-- tables of tests/sweep/record.json -->\n", "<!-- end of the tables -->\n"
COUNTS = ("listed", "tried", "built", "same")
STEPS = ("read", "frozen", "reference", "train", "saved", "exported")


def of_rows(rows: list[dict[str, Any]], listed: dict[str, list[str]]) -> dict[str, Any]:
    """Return the record of a sweep's results; a later result of a class takes precedence.

    Args:
        rows: the results.
        listed: all classes of each kind.
    """
    newest = {row["class"]: row for row in rows}
    kinds = {
        kind: {"listed": len(members), "tried": 0, "built": 0, "same": 0}
        for kind, members in listed.items()
    }
    different: dict[str, str] = {}
    not_built: dict[str, str] = {}
    for name, row in newest.items():
        counts = kinds[row["kind"]]
        counts["tried"] += 1
        if "read" not in row and "train_and_write" not in row:
            not_built[name] = row["built"]
            continue
        counts["built"] += 1
        left = [step for step in STEPS if row.get(step) != "same"]
        counts["same"] += not left
        if left:
            said = row.get(left[0]) or row.get("train_and_write", "no result")
            if row.get("library"):
                said += f" (from_pretrained itself {row['library']})"
            different[name] = f"{left[0]}: {said}"
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "diffusers")}
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {**versions, "torch": importlib.metadata.version("torch").partition("+")[0]},
        "kinds": kinds,
        "different": dict(sorted(different.items())),
        "not_built": dict(sorted(not_built.items())),
    }


def tables(record: dict[str, Any]) -> str:
    """Return the part of the page that is made from a record."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [f"Recorded on {record['date']} with {versions}.", ""]
    lines += ["| kind | classes | tried | built small | same bits in all six |"]
    lines += ["|---|---|---|---|---|"]
    for kind, each in record["kinds"].items():
        lines.append(f"| {kind} | {' | '.join(str(each[key]) for key in COUNTS)} |")
    total = {key: sum(each[key] for each in record["kinds"].values()) for key in COUNTS}
    share = 100 * total["same"] / max(total["built"], 1)
    counts = " | ".join(str(total[key]) for key in COUNTS)
    lines += [f"| all | {counts} ({share:.1f} % of those built) |", ""]
    lines += [
        "## Classes with another result",
        "",
        "| class | first step that differs |",
        "|---|---|",
    ]
    for name, why in record["different"].items():
        lines.append(f"| {name} | {_cell(why)} |")
    lines += ["", "## Classes that were not built", ""]
    lines.append(
        "The sweep knows no small configuration and inputs with which the library itself computes"
        " finite values, or cannot load what the library saved."
    )
    lines += ["", ", ".join(record["not_built"]) + ".", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    place = text.find("/dev/shm")
    if place >= 0:
        text = text[:place] + "FOLDER" + text[text.find("/files", place) + len("/files") :]
    return text.replace("|", "/").replace("\n", " ")[:200]


def page(text: str, record: dict[str, Any]) -> str:
    """Return the page with the tables of a record."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + tables(record) + END + rest.partition(END)[2]


def main(paths: list[str]) -> None:
    """Write the record and the page."""
    rows = [
        json.loads(line) for path in paths for line in pathlib.Path(path).read_text().splitlines()
    ]
    sys.path.insert(0, str(HERE))
    import names

    listed = {**names.of_transformers(), **names.of_diffusers()}
    RECORD.write_text(json.dumps(of_rows(rows, listed), indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
