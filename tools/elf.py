"""The requirements of a shared object: libraries, symbols and their versions."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re

C_LIBRARY = re.compile(r"(libc|libm|libpthread|libdl|librt|ld-linux[\w-]*)\.so\.\d+")
LIMITED_MINOR = 11
MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


@dataclasses.dataclass(frozen=True)
class Needs:
    """The requirements of one shared object."""

    machine: str
    needed: list[str]
    undefined: list[str]
    versions: list[str]


def read(path: pathlib.Path) -> Needs:
    """Read a file's machine, its libraries, its undefined symbols, and their versions."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        image = ELFFile(file)
        machine = MACHINES.get(image["e_machine"], image["e_machine"])
        dynamic = image.get_section_by_name(".dynamic")
        needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
        symbols = image.get_section_by_name(".dynsym").iter_symbols()
        undefined = [s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF" and s.name]
        versions = [
            version.name
            for _, every in image.get_section_by_name(".gnu.version_r").iter_versions()
            for version in every
        ]
    return Needs(machine, needed, undefined, versions)


@dataclasses.dataclass(frozen=True)
class Links:
    """How one shared object is linked: to which libraries, by which symbols."""

    needed: list[str]
    defined: set[str]
    undefined: dict[tuple[str, str], set[str]]  # by library and version, ("", "") if unversioned


def links(path: pathlib.Path) -> Links:
    """Read the libraries that a file needs, and its symbols with the versions they must have."""
    from elftools.elf.elffile import ELFFile

    defined: set[str] = set()
    undefined: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    with path.open("rb") as file:
        image = ELFFile(file)
        needed = [t.needed for t in image.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        requirements = image.get_section_by_name(".gnu.version_r")
        numbers = {
            version["vna_other"]: (library.name, version.name)
            for library, every in (requirements.iter_versions() if requirements else ())
            for version in every
        }
        versions = image.get_section_by_name(".gnu.version")
        for index, symbol in enumerate(image.get_section_by_name(".dynsym").iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF":
                defined.add(symbol.name)
            elif symbol.name:
                number = versions.get_symbol(index)["ndx"] if versions else 0
                undefined[numbers.get(number, ("", ""))].add(symbol.name)
    return Links(needed, defined, dict(undefined))


def is_of_the_c_library(name: str) -> bool:
    """Return whether a library is part of glibc, which every machine has."""
    return C_LIBRARY.fullmatch(name) is not None


def version_key(name: str) -> tuple[int, ...]:
    """Convert a version such as GLIBC_2.34 to (2, 34), for comparisons."""
    return tuple(int(part) for part in re.findall(r"\d+", name))


def outside_limited_api(symbols: list[str]) -> list[str]:
    """List the Python symbols that are not in the stable ABI of 3.11."""
    import abi3info
    from abi3info.models import PyVersion, Symbol

    newest = PyVersion(3, LIMITED_MINOR)
    tables = [table for name, table in vars(abi3info).items() if name.isupper()]
    known = {key: one for table in tables for key, one in table.items() if isinstance(key, Symbol)}
    outside = []
    for name in symbols:
        if re.match(r"_?Py", name):
            entry = known.get(Symbol(name))
            if entry is None or entry.added > newest:
                outside.append(name)
    return outside
