"""What `lohan doctor` finds: facts, and problems with the command that mends each."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that does not work. needed: lohan does not run without it."""

    what: str
    mend: str
    needed: bool


@dataclasses.dataclass
class Diagnosis:
    """What was found: facts by topic, and problems."""

    facts: dict[str, Any]
    problems: list[Problem]

    @property
    def is_well(self) -> bool:
        """True where everything that is needed works."""
        return not any(problem.needed for problem in self.problems)

    def complain(self, what: str, mend: str, needed: bool = False) -> None:
        """Add a problem."""
        self.problems.append(Problem(what, mend, needed))

    def as_json(self) -> dict[str, Any]:
        """Facts, problems and the verdict, for `--json`."""
        problems = [dataclasses.asdict(problem) for problem in self.problems]
        return {"ok": self.is_well, **self.facts, "problems": problems}
