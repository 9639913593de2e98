"""The result of `lohan doctor`: facts, and problems with the command that fixes each."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that does not work.

    Attributes:
        what: a description of the problem.
        fix: the command or the change that fixes it.
        needed: True if lohan does not run without it.
    """

    what: str
    fix: str
    needed: bool


@dataclasses.dataclass
class Diagnosis:
    """A diagnosis of this machine: facts by topic, and problems."""

    facts: dict[str, Any]
    problems: list[Problem]

    @property
    def is_well(self) -> bool:
        """True if everything that lohan needs works."""
        return not any(problem.needed for problem in self.problems)

    def complain(self, what: str, fix: str, needed: bool = False) -> None:
        """Add a problem."""
        self.problems.append(Problem(what, fix, needed))

    def as_json(self) -> dict[str, Any]:
        """Return the verdict, the facts and the problems, for `--json`."""
        problems = [dataclasses.asdict(problem) for problem in self.problems]
        return {"ok": self.is_well, **self.facts, "problems": problems}
