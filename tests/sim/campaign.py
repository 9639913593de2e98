"""Run many seeds of the simulator, and report outcomes, faults and failures.

    campaign.py --seeds 0:200000         run them, or those that are left; stop with ctrl-C
    campaign.py --table                  print build/campaign.json as a table
    campaign.py --shrink 417             find the shortest script that still fails

A process runs a batch of seeds (tests/sim/sim_power.c and sim_step.c). A seed that fails is run
again, shrunk, and recorded in the state with its message and the command that repeats it; then the
batch continues with the next seed. The state is written after every batch, so that a campaign
resumes where it was stopped. It is valid for one version of the sources: a new version starts over,
and keeps only the number of seeds and the failed seeds of earlier versions.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import run  # noqa: E402  (its folder has just been named)

STATE = ROOT / "build" / "campaign.json"
BATCH = 200
BATCH_TIMEOUT_S = 600
SEED_TIMEOUT_S = 120
FAULTS = (
    "spike reorder error space short flip misdirect drop lie lost stale hang dead kill power torn"
    " bit zeros truncate old"
).split()
WORLDS = ("edits", "snapshots")  # parts of a seed's world that --without can disable, too
LIFE = re.compile(r"^life (\d+) \(crash (\d+):(\d+):(\d+):(\d+)\)", re.MULTILINE)
CRASH_NEVER = 0
LIFE_COUNT_MAX = 7  # that can end in a crash (tests/sim/sim_power.c)


@dataclasses.dataclass
class Batch:
    """The result of one process."""

    done: int  # seeds that passed
    counts: dict[str, int]
    failed: int | None  # the seed
    message: str


def run_batch(program: pathlib.Path, first: int, end: int) -> Batch:
    """Run seeds first to end - 1, up to the first one that fails."""
    try:
        answer = subprocess.run(
            [program, f"{first}:{end}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BATCH_TIMEOUT_S,
        )
        code, output = answer.returncode, answer.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        code, output = -1, (late.stdout or b"").decode(errors="replace") + "\ntimeout: killed"
    counts = {
        name: int(count) for name, count in re.findall(r"^count (.*) (\d+)$", output, re.MULTILINE)
    }
    if code == 0:
        return Batch(end - first, counts, None, "")
    seeds = re.findall(r"^at (\d+)$", output, re.MULTILINE)
    seed = int(seeds[-1]) if seeds else first
    lines = [x for x in output.splitlines() if x and not re.match(r"at \d+$|count ", x)]
    return Batch(seed - first, counts, seed, "\n".join(lines[-6:]) or f"exit status {code}")


class Shrinker:
    """Shrink a failing seed: fewer lives, fewer kinds of fault, earlier crashes."""

    def __init__(self, program: pathlib.Path, seed: int) -> None:
        self.program, self.seed = program, seed
        self.options: list[str] = []
        self.output = ""

    def fails(self, options: list[str]) -> bool:
        """Return whether the seed fails with these options; if so, keep them and the output."""
        try:
            answer = subprocess.run(
                [self.program, *options, str(self.seed)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SEED_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return False
        if answer.returncode in (0, 2):
            return False
        self.options = options
        self.output = answer.stdout.decode(errors="replace")
        return True

    def crash_shrink(self, life: str, where: str, commit: str, after: int, kill: str) -> None:
        """Find by bisection the earliest end of a life with which the seed still fails."""
        low, high = 0, after
        while low < high:
            middle = (low + high) // 2
            crash = f"{life}:{where}:{commit}:{middle}:{kill}"
            if self.fails([*self.options, "--crash", crash]):
                high = middle
                self.options = [*self.options[:-2]]
            else:
                low = middle + 1
        if high < after:
            self.fails([*self.options, "--crash", f"{life}:{where}:{commit}:{high}:{kill}"])

    def shrink(self) -> str:
        """Return the shortest command found that repeats the failure."""
        if not self.fails([]):
            return f"{self.program.relative_to(ROOT)} {self.seed}  # does not fail on its own"
        for lives in range(LIFE_COUNT_MAX):
            if self.fails(["--lives", str(lives)]):
                break
        for fault in (x for x in (*WORLDS, *FAULTS) if x not in ("kill", "power")):
            self.fails([*self.options, "--without", fault])
        for life, where, commit, after, kill in LIFE.findall(self.output):
            if int(where) != CRASH_NEVER:
                self.crash_shrink(life, where, commit, int(after), kill)
        return f"{self.program.relative_to(ROOT)} {' '.join(self.options)} {self.seed}"


def version() -> str:
    """Hash everything from which the programs are built."""
    digest = hashlib.sha256()
    for folder in ("csrc", "tests/sim"):
        for path in sorted((ROOT / folder).rglob("*.[ch]")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Campaign:
    """The seeds that were run, by program."""

    def __init__(self, name: str) -> None:
        self.lock = threading.Lock()
        self.name = name
        self.state = {"version": version(), "programs": {}, "earlier": []}
        if STATE.exists():
            read = json.loads(STATE.read_text())
            if read["version"] == self.state["version"]:
                self.state = read
            else:
                self.state["earlier"] = [*read["earlier"], *self.summaries(read)]
        self.mine = self.state["programs"].setdefault(
            name, {"batches": [], "counts": {}, "failures": {}, "seconds": 0.0}
        )

    @staticmethod
    def summaries(state: dict) -> list[dict]:
        """Summarize the campaign of another version."""
        return [
            {
                "version": state["version"],
                "program": name,
                "seeds": sum(end - first for first, end in program["batches"]),
                "failed": sorted(int(seed) for seed in program["failures"]),
            }
            for name, program in state["programs"].items()
        ]

    def is_done(self, first: int, end: int) -> bool:
        """Return whether the batch has already been run."""
        return [first, end] in self.mine["batches"]

    def add(self, first: int, end: int, batches: list[Batch], failures: dict, s: float) -> None:
        """Record a finished batch."""
        with self.lock:
            counts = collections.Counter(self.mine["counts"])
            for batch in batches:
                counts.update(batch.counts)
            self.mine["counts"] = dict(counts)
            self.mine["failures"].update(failures)
            self.mine["batches"].append([first, end])
            self.mine["seconds"] += s
            part = STATE.with_suffix(".part")
            part.write_text(json.dumps(self.state, indent=1))
            part.replace(STATE)

    def table(self) -> str:
        """Format the counts as a table."""
        seeds = sum(end - first for first, end in self.mine["batches"])
        rate = seeds / max(self.mine["seconds"], 1e-9)
        failures = self.mine["failures"]
        before = [e for e in self.state["earlier"] if e["program"] == self.name]
        lines = [f"{self.name}: {seeds} seeds, {len(failures)} failed, {rate:.0f}/s per process"]
        if before:
            lines.append(
                f"  and {sum(e['seeds'] for e in before)} seeds of {len(before)} earlier versions"
            )
        counts = self.mine["counts"]
        for fault in FAULTS:
            key = f"fault {fault}"
            if key in counts:
                lines.append(
                    f"  {fault:36}{counts[key]:>12} in {counts[f'seeds with {fault}']} seeds"
                )
        for key, count in counts.items():
            if not key.startswith(("fault ", "seeds")):
                lines.append(f"  {key.removeprefix('outcome '):36}{count:>12}")
        for seed, failure in failures.items():
            lines.append(f"  seed {seed}: {failure['message']}\n    {failure['script']}")
        return "\n".join(lines)


def run_range(campaign: Campaign, program: pathlib.Path, first: int, end: int, most: int) -> None:
    """Run one batch, continuing after each seed that fails."""
    started, at, batches, failures = time.monotonic(), first, [], {}
    while at < end:
        batch = run_batch(program, at, end)
        batches.append(batch)
        if batch.failed is None:
            break
        script = "not shrunk: --shrink-most was reached"
        if len(campaign.mine["failures"]) + len(failures) < most:
            script = Shrinker(program, batch.failed).shrink()
        failures[str(batch.failed)] = {"message": batch.message, "script": script}
        print(f"seed {batch.failed}: {batch.message}\n  {script}", flush=True)
        at = batch.failed + 1
    campaign.add(first, end, batches, failures, time.monotonic() - started)


def main() -> int:
    """Run the remaining seeds; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--program", default="sim_power", choices=["sim_power", "sim_step"])
    parser.add_argument("--seeds", default="0:200000", help="FROM:TO")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel processes")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no batch after this time"
    )
    parser.add_argument(
        "--shrink-most", type=int, default=20, help="maximum number of failures to shrink"
    )
    parser.add_argument("--table", action="store_true", help="only print the counts")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="only shrink this seed")
    arguments = parser.parse_args()
    first, end = (int(x) for x in arguments.seeds.split(":"))
    campaign = Campaign(arguments.program)
    if arguments.table:
        print(campaign.table())
        return 0
    built = run.build_programs("release", "tests/sim", "sim_*.c", arguments.program.__eq__)
    # Run a copy, so that the sources can be edited meanwhile.
    program = ROOT / "build" / "campaign" / campaign.state["version"] / arguments.program
    program.parent.mkdir(parents=True, exist_ok=True)
    if not program.exists():
        shutil.copy2(built[0][1], program)
    if arguments.shrink is not None:
        print(Shrinker(program, arguments.shrink).shrink())
        return 0
    started = time.monotonic()

    def run_one(at: int) -> None:
        stop = min(at + BATCH, end)
        if time.monotonic() - started < arguments.seconds and not campaign.is_done(at, stop):
            run_range(campaign, program, at, stop, arguments.shrink_most)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run_one, range(first, end, BATCH)))
    print(campaign.table())
    return 1 if campaign.mine["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
