"""The tables, the diagrams and the code of the engine's state machines agree."""

from __future__ import annotations

import pathlib
import re

import pytest

SCHED = pathlib.Path(__file__).resolve().parents[2] / "csrc" / "sched"
# A machine's enumerators, and the header whose head has its diagram.
MACHINES = {
    "unit": "unit.h",
    "chunk": "chunk.h",
    "step": "step.h",
    "copy": "device.h",
    "spill": "spill.h",
    "norm": "norm.h",
    "saved": "saved_private.h",
}


def table(machine: str) -> set[tuple[str, str]]:
    """Return the transitions that a machine's setter allows."""
    text = (SCHED / "states.c").read_text()
    body = re.search(rf"lh_states_{machine}\[\] = .*?\n\}};", text, re.DOTALL)
    assert body is not None
    prefix = f"LH_{machine.upper()}_STATE_"
    return set(re.findall(rf"\{{{prefix}(\w+), {prefix}(\w+)\}}", body[0]))


def diagram(machine: str) -> list[tuple[str, str, str]]:
    """Return the transitions that a header draws for a machine, and their functions."""
    text = (SCHED / MACHINES[machine]).read_text()
    return re.findall(r"^ \* +([A-Z]+) -> ([A-Z]+) +(\w+)", text, re.MULTILINE)


def function_names() -> set[str]:
    found: set[str] = set()
    for path in SCHED.glob("*.c"):
        found |= set(re.findall(r"^[a-z][\w \*]*?\b(\w+)\([^;]*?\)\n\{", path.read_text(), re.M))
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_the_diagram_of_a_machine_draws_the_transitions_of_its_table(machine: str) -> None:
    drawn = diagram(machine)
    assert {(source, target) for source, target, _ in drawn} == table(machine)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_functions_that_a_diagram_names_exist(machine: str) -> None:
    assert {function for _, _, function in diagram(machine)} <= function_names()


def test_a_state_is_changed_by_its_setter_alone() -> None:
    places = []
    for path in sorted(SCHED.glob("*.c")):
        text = path.read_text()
        for found in re.finditer(r"(?:->|\w\.)(?:state|step_state) = [^=]", text):
            function = re.findall(r"^\w[^;\n]*?\b(\w+)\(", text[: found.start()], re.M)[-1]
            places.append((path.name, function))
    setters = {"lh_unit_state_set", "lh_chunk_state_set", "state_set"}
    assert {function for _, function in places} == setters
