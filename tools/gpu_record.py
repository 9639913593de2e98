"""What has run on a GPU, as tests/cuda/ran.json records it, and whether that code is today's.

    gpu_record.py             print the fingerprints of the code in this checkout
    gpu_record.py COMMIT      print those of a commit

After a run of benchmarks/gpu.sh on a GPU, change tests/cuda/ran.json by hand: the date, the commit,
the machine, how many tests of each file passed, and what this program prints. tools/measured.py
then writes the pages, in which everything is marked as stale whose code has another fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "cuda" / "ran.json"
# The folders that hold the code of a record.
TOP = ("csrc", "cuda", "python", "tests")
NOT_A_TEST = "\u2013"
SUFFIXES = (".c", ".cu", ".h", ".py")
Record = dict[str, Any]


def _listed(commit: str | None) -> list[str]:
    if commit is None:
        top = [path for name in TOP for path in (ROOT / name).rglob("*")]
        found = [path for path in top if path.suffix in SUFFIXES]
        return [path.relative_to(ROOT).as_posix() for path in found]
    command = ["git", "ls-tree", "-r", "--name-only", commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.splitlines() if path.endswith(SUFFIXES)]


def _reader(commit: str | None) -> Callable[[str], bytes]:
    if commit is None:
        return lambda path: (ROOT / path).read_bytes()
    return lambda path: (
        subprocess.run(
            ["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, check=True
        ).stdout
    )


def fingerprints(names: list[str], commit: str | None = None) -> dict[str, str]:
    """Return the fingerprint of each file or folder.

    Args:
        names: files and folders, relative to the project.
        commit: the commit whose files are read; None: the files of this checkout.
    """
    listed, read = sorted(_listed(commit)), _reader(commit)
    made = {}
    for name in names:
        digest = hashlib.sha256()
        for path in listed:
            if path == name or path.startswith(f"{name}/"):
                digest.update(path.encode() + b"\0" + hashlib.sha256(read(path)).digest())
        made[name] = digest.hexdigest()[:16]
    return made


def read() -> Record:
    """Return the record."""
    record: Record = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def changed(record: Record, today: dict[str, str]) -> list[str]:
    """Return the files and folders whose code is not that which ran."""
    return [name for name, mark in record["code"].items() if today[name] != mark]


def sentence(record: Record, today: dict[str, str]) -> str:
    """Return what ran, when and where, for a sentence of a page."""
    count = sum(record["passed"].values())
    text = f"{count} GPU tests passed on one {record['gpu']} on {record['date']}"
    if changed(record, today):
        text += " (stale: the code has changed since)"
    return text


def table(record: Record, today: dict[str, str]) -> str:
    """Return what ran, file by file, and whether it is the code of today."""
    stale = changed(record, today)
    rows = ["| what | passed | today's code |", "|---|---|---|"]
    for name in record["code"]:
        passed = record["passed"].get(name, "all" if name.startswith("tests/") else NOT_A_TEST)
        state = "stale: changed since" if name in stale else "the same"
        rows.append(f"| {name} | {passed} | {state} |")
    return "\n".join(rows)


def texts() -> dict[str, str]:
    """Return the text of each mark of the pages."""
    record = read()
    today = fingerprints(list(record["code"]))
    return {"sentence": sentence(record, today), "table": table(record, today)}


def main() -> None:
    """Print fingerprints."""
    commit = sys.argv[1] if len(sys.argv) > 1 else None
    print(json.dumps(fingerprints(list(read()["code"]), commit), indent=2))


if __name__ == "__main__":
    main()
