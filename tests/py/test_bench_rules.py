"""benchmarks/py/bench_rules.py has a row for every rule that it can compare, in every format."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from lohan.common._rules import RULES
from patience import HUNG_S

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_without_arguments_every_rule_that_needs_no_engine_is_measured_in_every_format() -> None:
    script = ROOT / "benchmarks" / "py" / "bench_rules.py"
    command = [sys.executable, str(script), "--elements", "100000", "--repetitions", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert run.returncode == 0, run.stderr
    names = {json.loads(line)["name"] for line in run.stdout.splitlines()}
    alone = [rule for rule in RULES.values() if not rule.is_of_whole]
    assert len(alone) >= 8
    for rule in alone:
        for states in rule.formats:
            form = "" if states == "fp32" else f"/{states}_moments"
            for dtype in ("fp32", "bf16_residual"):
                assert f"rules_py/{rule.name}/{dtype}/checksums{form}" in names
