"""Run code that can import only some distributions and Python's own modules.

python tests/py/import_worker.py torch,pytest {python code} [ARGUMENTS]: torch and pytest, and their
requirements, can be imported; all other modules look as if they were not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# What an installation of torch may bring beside its declared requirements: CUDA's bindings, and
# what setuptools installs or replaces.
BESIDE_TORCH = {"torch", "torchgen", "functorch", "triton", "nvidia", "cuda", "_distutils_hack"}


def requirements(name: str, found: set[str]) -> set[str]:
    """Names of the distributions that one needs, and of those that they need; itself included."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return found
    try:
        needed = importlib.metadata.requires(key) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    found.add(key)
    for line in needed:
        match = re.match(r"[\w.-]+", line)
        if match and "extra ==" not in line:
            requirements(match[0], found)
    return found


class Only(importlib.abc.MetaPathFinder):
    """Finds what is theirs and Python's as the finders of before do, and nothing else."""

    def __init__(self, names: Sequence[str]) -> None:
        self.finders = list(sys.meta_path)
        distributions: set[str] = set()
        for name in names:
            requirements(name, distributions)
        packages = importlib.metadata.packages_distributions()
        self.allowed = {"lohan", *BESIDE_TORCH, *sys.stdlib_module_names}
        for package, owners in packages.items():
            keys = {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
            if keys & distributions:
                self.allowed.add(package)
        self.allowed -= {"numpy"}  # torch works with and without it

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Reject every module that is not allowed; see importlib.abc.MetaPathFinder."""
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        spec = next((spec for spec in found if spec is not None), None)
        is_ours = spec is not None and self._is_of_this_project(spec)
        generated = ("__editable__", "_sysconfigdata")
        if is_ours or name.partition(".")[0] in self.allowed or name.startswith(generated):
            return spec
        return None

    @staticmethod
    def _is_of_this_project(spec: ModuleSpec) -> bool:
        origin = spec.origin or ""
        return origin.startswith(f"{ROOT}/") and "site-packages" not in origin


if __name__ == "__main__":
    names, code, sys.argv = sys.argv[1], sys.argv[2], ["lohan", *sys.argv[3:]]
    sys.meta_path[:] = [Only(names.split(","))]
    exec(compile(code, "script", "exec"), {"__name__": "__main__"})
