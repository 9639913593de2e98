"""Check that the simulator detects protocols that are wrong: of a store, or between processes.

Each protocol of the table below differs from lohan's own in one place: a missing sync, a reversed
order, an ignored error, a wake-up that is missing. It is applied to a copy of the sources in
build/wrong, and sim_power has to fail for one of the first 200 seeds, or sim_world for one of 800.
The unchanged sources have to pass all of them.

    wrong_protocols.py [NAME ...]    try all protocols, or these
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TREE = ROOT / "build" / "wrong"
COPIED = (
    "csrc",
    "tests/sim",
    "tests/c/lh_test.h",
    "tests/run.py",
    "tools/cbuild.py",
    "tools/core.map",
)
SEED_COUNTS = {"sim_power": 200, "sim_world": 800}
BUILD = """
import sys
sys.path.insert(0, "tests")
import run
print(run.build_programs("release", "tests/sim", "sim_*.c", sys.argv[1].__eq__)[0][1])
"""


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A protocol: in each file, what is replaced (it must be there exactly once) by what.

    program is the simulation that has to fail.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    program: str = "sim_power"


def between(name: str, file: str, old: str, new: str) -> Wrong:
    """Return a protocol between processes."""
    return Wrong(name, ((file, old, new),), "sim_world")


COMMIT = "csrc/store/commit.c"
TEAM = "csrc/team/team.c"
MATES = "csrc/sched/mates.c"
BORROW = "csrc/sched/borrow.c"
GIVEN = "csrc/sched/given.c"
SYNC_ALL = """        for (count = 0; count < store->file_count; count++)
            requests[count] = sync_request(count);
"""
SYNC_FILE_0 = "    requests[0] = sync_request(0);\n    return 1;\n"

PROTOCOLS = (
    Wrong("no sync of data", ((COMMIT, SYNC_ALL, ""),)),
    Wrong(
        "sync of one file's data only",
        ((COMMIT, SYNC_ALL, SYNC_ALL.replace("store->file_count", "1")),),
    ),
    Wrong(
        "no sync of the manifest",
        (
            (
                COMMIT,
                SYNC_FILE_0,
                "    if (store->phase == LH_STORE_PHASE_SYNC_MANIFEST)\n        return 0;\n"
                + SYNC_FILE_0,
            ),
        ),
    ),
    Wrong(
        "no sync of the superblock",
        (
            (
                COMMIT,
                SYNC_FILE_0,
                "    if (store->phase != LH_STORE_PHASE_SYNC_MANIFEST)\n        return 0;\n"
                + SYNC_FILE_0,
            ),
        ),
    ),
    Wrong(
        "superblock before manifest",
        (
            (COMMIT, "    case LH_STORE_PHASE_MANIFEST:\n", "    case 99:\n"),
            (
                COMMIT,
                "    case LH_STORE_PHASE_SUPERBLOCK:\n",
                "    case LH_STORE_PHASE_MANIFEST:\n",
            ),
            (COMMIT, "    case 99:\n", "    case LH_STORE_PHASE_SUPERBLOCK:\n"),
        ),
    ),
    Wrong(
        "the manifest's area in use",
        (
            (
                COMMIT,
                "uint32_t area = 1 - store->superblock.manifest_area;",
                "uint32_t area = store->superblock.manifest_area;",
            ),
        ),
    ),
    Wrong(
        "always superblock 0",
        (
            (
                COMMIT,
                "return LH_STORE_SUPERBLOCK_OFFSET(store->next.sequence % 2, copy);",
                "return LH_STORE_SUPERBLOCK_OFFSET(0, copy);",
            ),
        ),
    ),
    Wrong(
        "failed syncs ignored",
        (
            (
                COMMIT,
                "        if (request->result >= 0)\n            continue;\n",
                "        if (request->result >= 0 || request->kind == LH_IO_KIND_SYNC)\n"
                "            continue;\n",
            ),
        ),
    ),
    Wrong(
        "open for writing without a sync",
        (
            (
                "csrc/store/repair.c",
                "    for (uint32_t file = 0; file < store->file_count; file++)\n"
                "        LH_TRY(lh_store_file_sync(store, file, err));\n",
                "    if (rejected_sequence == 0)\n        return 0;\n",
            ),
        ),
    ),
    Wrong(
        "creation without syncs",
        (
            (
                "csrc/store/file.c",
                "    int rc = store->fs->ops->sync(store->fs, store->io_files[file_index].fd);\n",
                "    int rc = store->superblock.sequence > 2 ? store->fs->ops->sync(store->fs,"
                " store->io_files[file_index].fd) : 0;\n",
            ),
        ),
    ),
    Wrong(
        "directories not synced",
        (
            (
                "csrc/store/file.c",
                "        int rc = store->fs->ops->sync_directory(store->fs, path);\n",
                "        int rc = 0;\n",
            ),
        ),
    ),
    Wrong(
        "edits without the rest of their group",
        (
            (
                "csrc/store/sync.c",
                "source_slot != target_slot)\n            LH_TRY(extent_copy(",
                "source_slot > target_slot + 1)\n            LH_TRY(extent_copy(",
            ),
        ),
    ),
    Wrong(
        "edits not forgotten in memory",
        (
            (
                "csrc/sched/calls.c",
                "    if (unit->state == LH_UNIT_STATE_READY)\n"
                "        lh_unit_forget(engine, index);\n",
                "",
            ),
        ),
    ),
    Wrong(
        "edits in the committed slot",
        (
            (
                "csrc/store/sync.c",
                "    LH_TRY(group_stage(store, group, err));\n"
                "    uint32_t slot = lh_store_write_slot(store, group);\n",
                "    LH_TRY(group_stage(store, group, err));\n"
                "    uint32_t slot = store->superblock.sequence > 4\n"
                "                        ? lh_store_committed_slot(store, group)\n"
                "                        : lh_store_write_slot(store, group);\n",
            ),
        ),
    ),
    Wrong(
        "commits while a snapshot holds them",
        (
            (
                "csrc/sched/step.c",
                "    return atomic_load(&engine->holds_commits) &&\n",
                "    return engine->step == 0 && atomic_load(&engine->holds_commits) &&\n",
            ),
        ),
    ),
    Wrong(
        "header before the rest of a new store",
        (
            (
                "csrc/store/create.c",
                "    store->superblock.manifest_area = 1;\n",
                "    LH_TRY(headers_write(store, 0, err));\n"
                "    store->superblock.manifest_area = 1;\n",
            ),
        ),
    ),
    between(
        "pinned units are taken away",
        TEAM,
        "        bool is_lent = (word & PINS) > 0 || ((word & READY) &&"
        " atomic_load(&unit->wants) != 0);\n",
        "        bool is_lent = (word & READY) && atomic_load(&unit->wants) != 0;\n",
    ),
    between(
        "wanted units are taken away",
        TEAM,
        "        bool is_lent = (word & PINS) > 0 || ((word & READY) &&"
        " atomic_load(&unit->wants) != 0);\n",
        "        bool is_lent = (word & PINS) > 0;\n",
    ),
    Wrong(
        "a mate that waits wakes no owner",
        (
            (
                TEAM,
                "        atomic_fetch_add(&team->map->want_count, 1);\n        ring(team, 0);\n",
                "        atomic_fetch_add(&team->map->want_count, 1);\n",
            ),
            (
                TEAM,
                "    if (atomic_exchange(&team->map->mates[team->mate].waits, waits) != waits)\n"
                "        ring(team, 0);\n",
                "    atomic_exchange(&team->map->mates[team->mate].waits, waits);\n",
            ),
        ),
        "sim_world",
    ),
    between(
        "a published unit wakes no mate",
        TEAM,
        "        if (wants >> mate & 1)\n",
        "        if (wants >> mate & 1 && unit->offset > team->region_bytes)\n",
    ),
    between(
        "the last pin wakes no owner",
        TEAM,
        "    if (is_asked || (is_last && (word & WANTED)))\n",
        "    if (is_asked)\n",
    ),
    between(
        "a pin at the owner's last place",
        TEAM,
        "    atomic_store(&unit->offset, offset);\n",
        "    if (atomic_load(&unit->offset) == 0)\n        atomic_store(&unit->offset, offset);\n",
    ),
    between(
        "a step that is announced before its units are taken away",
        MATES,
        "        if (is_shown && !lh_team_claim(team, i))\n",
        "        if (is_shown && false)\n",
    ),
    between(
        "a unit that mates may read before its update",
        MATES,
        "    if (lh_unit_is_stale(engine, unit))\n        return;",
        "    if (false)\n        return;",
    ),
    between(
        "no room for a unit that has to be updated",
        MATES,
        "        is_awaited |= lh_unit_is_awaited(engine, unit) || is_owed_update(unit);\n",
        "        is_awaited |= lh_unit_is_awaited(engine, unit);\n",
    ),
    between(
        "wants of late mates ignored",
        MATES,
        "        unit->parts->mates.is_wanted = true;\n",
        "        unit->parts->mates.is_wanted = false;\n",
    ),
    between(
        "updates in spite of pins",
        MATES,
        "    .unit_may_claim = unit_may_claim,\n",
        "",
    ),
    between(
        "the owner never asks for room",
        MATES,
        "        lh_team_room_ask(engine->opts.team, true);\n",
        "        lh_team_room_ask(engine->opts.team, false);\n",
    ),
    between(
        "a mate that waits says it does not",
        BORROW,
        "        if (lh_unit_is_awaited(engine, unit) && unit->state != LH_UNIT_STATE_READY)\n",
        "        if (lh_unit_is_awaited(engine, unit) && unit->state == LH_UNIT_STATE_LOADING)\n",
    ),
    between(
        "room for what mates read ahead",
        MATES,
        "    if (is_any_awaited(engine))\n",
        "    if (is_any_wanted(engine))\n",
    ),
    between(
        "pins keep copies on an accelerator",
        "csrc/sched/region.c",
        "    is_lent &= !is_device(engine, region);"
        " /* a unit is lent where it is in main memory */\n",
        "",
    ),
    between(
        "a mate keeps what it does not use",
        BORROW,
        "    if (is_short)\n        idle_give_back(engine);\n",
        "",
    ),
    between(
        "a mate gives nothing back",
        BORROW,
        "        if (unit->state == LH_UNIT_STATE_READY)\n"
        "            lh_unit_forget(engine, i);\n"
        "    }\n"
        "    LH_ASSERT(engine->borrow->waiting_count == 0);\n",
        "    }\n    LH_ASSERT(engine->borrow->waiting_count == 0);\n",
    ),
    between(
        "a mate reads at its own plan's place",
        BORROW,
        "    unit->memory = team->region + offset;\n",
        "    unit->memory = team->region + unit->offset;\n",
    ),
    between(
        "an evicted unit stays pinned",
        BORROW,
        "    lh_team_unpin(engine->opts.team, (uint32_t)(unit - engine->units));\n",
        "",
    ),
    between(
        "updates before the values are there",
        GIVEN,
        "    return !lh_unit_is_given(unit) || unit->parts->given.is_there;\n",
        "    return true;\n",
    ),
    between(
        "values of the step before",
        GIVEN,
        "    .step_forgotten = step_forgotten,\n",
        "",
    ),
    between(
        "values without their last element",
        GIVEN,
        "               segment->count * element_bytes);\n",
        "               (segment->count - 1) * element_bytes);\n",
    ),
    between(
        "checksums of the old values",
        GIVEN,
        "    for (uint64_t at = 0; at < bytes; at += LH_CHECKSUM_BYTES)\n",
        "    for (uint64_t at = bytes; at < bytes; at += LH_CHECKSUM_BYTES)\n",
    ),
)


def copy_tree() -> None:
    """Copy the sources that the program is made from.

    Only what differs is written: what was built from the rest stays, and a file that the last run
    had changed becomes newer than what was built from it.
    """
    wanted = set()
    for name in COPIED:
        top = ROOT / name
        for source in [top] if top.is_file() else sorted(top.rglob("*.*")):
            target = TREE / source.relative_to(ROOT)
            if not source.is_file() or "__pycache__" in source.parts:
                continue
            wanted.add(target)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
    for left in [path for path in TREE.rglob("*.[ch]") if path not in wanted]:
        left.unlink()


def build(program: str) -> pathlib.Path:
    """Build a simulation from the copy; return its path."""
    environment = {**os.environ, "LOHAN_BUILD": str(TREE / "build")}
    answer = subprocess.run(
        [sys.executable, "-c", BUILD, program],
        cwd=TREE,
        capture_output=True,
        text=True,
        env=environment,
    )
    if answer.returncode != 0:
        raise SystemExit(answer.stdout + answer.stderr)
    return pathlib.Path(answer.stdout.strip().splitlines()[-1])


def first_failure(program: pathlib.Path) -> tuple[int | None, str]:
    """Return the first seed that fails, and its message."""
    answer = subprocess.run(
        [program, f"0:{SEED_COUNTS[program.name]}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if answer.returncode == 0:
        return None, ""
    seed = int(re.findall(r"^at (\d+)$", answer.stdout, re.MULTILINE)[-1])
    said = [x for x in answer.stdout.splitlines() if x and not re.match(r"at \d+$|count ", x)]
    return seed, said[-1] if said else f"exit status {answer.returncode}"


def apply(wrong: Wrong) -> dict[pathlib.Path, str]:
    """Change the copy; return the previous contents of its files."""
    before: dict[pathlib.Path, str] = {}
    for name, old, new in wrong.edits:
        path = TREE / name
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{wrong.name}: {name} must contain this exactly once: {old}")
        before.setdefault(path, text)
        path.write_text(text.replace(old, new))
    return before


def main(names: list[str]) -> int:
    """Try them; return 1 if one was not detected, or if the unchanged sources fail."""
    missed = []
    copy_tree()
    chosen = [wrong for wrong in PROTOCOLS if not names or wrong.name in names]
    for program in sorted({wrong.program for wrong in chosen}):
        seed, said = first_failure(build(program))
        found = "passes" if seed is None else f"FAILS at seed {seed}: {said}"
        print(f"{program + ' as it is':34} {found}")
        if seed is not None:
            missed.append(f"{program} as it is")
    for wrong in chosen:
        started = time.monotonic()
        before = apply(wrong)
        try:
            seed, said = first_failure(build(wrong.program))
        finally:
            for path, text in before.items():
                path.write_text(text)
        if seed is None:
            missed.append(wrong.name)
        found = f"seed {seed}: {said[:150]}" if seed is not None else "NOT DETECTED"
        print(f"{wrong.name:34} {found} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(missed)} are wrong: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
