"""tools/structure.py counts what it says that it counts."""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import structure  # noqa: E402  (its folder has just been named)

BODIES = {
    "inner": "    uint32_t first, second;\n    struct inner *next;\n",
    "outer": (
        "    struct inner one;\n    struct inner several[4];\n    const struct inner *pointer;\n"
        "    bool (*call)(int first, int second);\n    uint64_t array[8];\n"
        "    struct {\n        int a;\n        struct elsewhere b;\n    } here;\n"
    ),
}


def test_leaves_are_counted_through_structs_but_not_through_pointers() -> None:
    assert structure.leaves("inner", BODIES) == 3
    assert structure.leaves("outer", BODIES) == 3 + 3 + 1 + 1 + 1 + 2


def test_the_engine_names_its_features() -> None:
    stems = structure.feature_stems()
    assert {"settle", "spill", "gather", "idle", "packed"} <= stems
    assert not stems & {"engine", "step", "unit", "create"}
    assert {"spill", "norm", "idle"} <= structure.feature_parts(stems)
