"""Compute what a disk may hold after a power cut, from a log of file calls (calls.h).

Everything that a sync has covered is there. Of everything else any part may be there:

* A write without a later sync of its file is lost, kept or torn: any of its sectors of 512 bytes
  may be missing. The same applies to changes of a file's size. Writes of one file may be reordered.
* A name that was made, changed or removed is durable after a sync of its directory. Before that,
  the changes of one directory are kept up to some point, and those of another one up to another. A
  rename from one directory to another is one change of both.
* A sync of a file does not cover its name.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import struct
from collections.abc import Iterator

SECTOR_BYTES = 512
_HEAD = struct.Struct("<IIQQQQ")
CREATE, MKDIR, WRITE, TRUNCATE, ALLOCATE, SYNC, RENAME, LINK, UNLINK, MARK = range(1, 11)


@dataclasses.dataclass
class Record:
    """A call or a mark of the log."""

    kind: int
    path: str
    file: int
    offset: int
    nbytes: int
    data: bytes


def read_log(path: pathlib.Path) -> list[Record]:
    """Return all records in order, without the last one if its process did not finish it."""
    raw = path.read_bytes()
    records = []
    at = 0
    while at + _HEAD.size <= len(raw):
        kind, path_bytes, file, offset, nbytes, data_bytes = _HEAD.unpack_from(raw, at)
        begin = at + _HEAD.size
        at = begin + path_bytes + data_bytes
        if at > len(raw):
            break
        name = os.fsdecode(raw[begin : begin + path_bytes])
        records.append(Record(kind, name, file, offset, nbytes, raw[begin + path_bytes : at]))
    return records


class File:
    """Bytes of a file that are durable, and changes that are not."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.pending: list[Record] = []

    def sync(self) -> None:
        """All of it is durable."""
        for record in self.pending:
            apply(self.durable, record)
        self.pending.clear()

    def after_cut(self, rng: random.Random, keep: float) -> bytearray:
        """Bytes of which what was pending is there in part."""
        found = bytearray(self.durable)
        for record in self.pending:
            dice = rng.random()
            if dice < keep:
                apply(found, record)
            elif record.kind == WRITE and 0 < keep < 1 and dice < (1 + keep) / 2:
                tear(found, record, rng)
        return found


def apply(target: bytearray, record: Record) -> None:
    """Change bytes as a call has."""
    if record.kind == TRUNCATE:
        if record.nbytes < len(target):
            del target[record.nbytes :]
        else:
            target.extend(bytes(record.nbytes - len(target)))
        return
    end = record.offset + (len(record.data) if record.kind == WRITE else record.nbytes)
    if end > len(target):
        target.extend(bytes(end - len(target)))
    if record.kind == WRITE:
        target[record.offset : end] = record.data


def tear(target: bytearray, record: Record, rng: random.Random) -> None:
    """Only some sectors of a write are there."""
    end = record.offset + len(record.data)
    at = record.offset
    while at < end:
        after = min((at // SECTOR_BYTES + 1) * SECTOR_BYTES, end)
        if rng.random() < 0.5:
            part = record.data[at - record.offset : after - record.offset]
            apply(target, Record(WRITE, "", 0, at, 0, part))
        at = after


class Folder:
    """The names in a directory: those that are durable, and the current ones."""

    def __init__(self) -> None:
        self.durable: dict[str, File | Folder] = {}
        self.live: dict[str, File | Folder] = {}


@dataclasses.dataclass
class Change:
    """A change of names in one directory, or in two at once."""

    removed: tuple[Folder, str] | None
    added: tuple[Folder, str, File | Folder] | None

    @property
    def folders(self) -> list[Folder]:
        """Return the directories whose names change."""
        return [each[0] for each in (self.removed, self.added) if each is not None]


class Disk:
    """A folder, rebuilt record by record from a log."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = str(root)
        self.top = Folder()
        self.files: dict[int, File | Folder] = {}
        self.changes: list[Change] = []
        # all directories that ever existed, because inode numbers are reused
        self.folders = [self.top]

    def _place(self, path: str) -> tuple[Folder, str]:
        parts = pathlib.PurePath(path).relative_to(self.root).parts
        folder = self.top
        for part in parts[:-1]:
            inner = folder.live[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, parts[-1]

    def _change(
        self,
        removed: tuple[Folder, str] | None,
        added: tuple[Folder, str, File | Folder] | None,
    ) -> None:
        if removed is not None:
            removed[0].live.pop(removed[1])
        if added is not None:
            added[0].live[added[1]] = added[2]
        self.changes.append(Change(removed, added))

    def take(self, record: Record) -> None:
        """Apply one call after the previous ones."""
        if record.kind in (CREATE, MKDIR):
            made: File | Folder = File() if record.kind == CREATE else Folder()
            self.files[record.file] = made
            if isinstance(made, Folder):
                self.folders.append(made)
            if record.path == self.root:
                self.files[record.file] = self.top
            elif record.path:
                self._change(None, (*self._place(record.path), made))
        elif record.kind == RENAME:
            place = self._place(record.path)
            moved = place[0].live[place[1]]
            self._change(place, (*self._place(os.fsdecode(record.data)), moved))
        elif record.kind == LINK:
            target = self._place(os.fsdecode(record.data))
            self._change(None, (*target, self.files[record.file]))
        elif record.kind == UNLINK:
            self._change(self._place(record.path), None)
        elif record.kind != MARK:
            self._take_file(record)

    def _take_file(self, record: Record) -> None:
        found = self.files.get(record.file)
        if isinstance(found, Folder):
            self._sync_folder(found)
        elif found is not None and record.kind == SYNC:
            found.sync()
        elif found is not None:
            found.pending.append(record)

    def _sync_folder(self, folder: Folder) -> None:
        """Its changes are durable, and earlier ones of the folders that they share with it."""
        covered = [folder]
        for change in reversed(self.changes):
            if any(each in covered for each in change.folders):
                covered += [each for each in change.folders if each not in covered]
        left = []
        for change in self.changes:
            if any(each in covered for each in change.folders):
                self._settle(change)
            else:
                left.append(change)
        self.changes = left

    @staticmethod
    def _settle(change: Change) -> None:
        if change.removed is not None:
            change.removed[0].durable.pop(change.removed[1], None)
        if change.added is not None:
            change.added[0].durable[change.added[1]] = change.added[2]

    def write_image(self, target: pathlib.Path, seed: int) -> None:
        """One of the images that a power cut now may leave."""
        rng = random.Random(seed)
        keep = rng.choice([0.0, 1.0, 0.5, 0.5, 0.2, 0.8, 0.95])
        names = {id(folder): dict(folder.durable) for folder in self.folders}
        blocked: list[Folder] = []
        for change in self.changes:
            is_held = any(each in blocked for each in change.folders)
            if is_held or rng.random() >= keep:
                blocked += change.folders
                continue
            if change.removed is not None:
                names[id(change.removed[0])].pop(change.removed[1], None)
            if change.added is not None:
                names[id(change.added[0])][change.added[1]] = change.added[2]
        self._write(self.top, target, names, rng, keep)

    def _write(
        self,
        folder: Folder,
        target: pathlib.Path,
        names: dict[int, dict[str, File | Folder]],
        rng: random.Random,
        keep: float,
    ) -> None:
        target.mkdir(mode=0o700)
        for name, inner in sorted(names[id(folder)].items()):
            if isinstance(inner, Folder):
                self._write(inner, target / name, names, rng, keep)
            else:
                (target / name).write_bytes(inner.after_cut(rng, keep))
                (target / name).chmod(0o600)

    def differences(self) -> Iterator[str]:
        """List where the folder differs from the log: calls that were not recorded."""
        expected: dict[str, bytes] = {}

        def walk(folder: Folder, path: pathlib.Path) -> None:
            for name, inner in folder.live.items():
                if isinstance(inner, Folder):
                    walk(inner, path / name)
                else:
                    whole = bytearray(inner.durable)
                    for record in inner.pending:
                        apply(whole, record)
                    expected[str(path / name)] = bytes(whole)

        walk(self.top, pathlib.Path(self.root))
        found = {str(p): p.read_bytes() for p in pathlib.Path(self.root).rglob("*") if p.is_file()}
        for path in sorted(expected.keys() | found.keys()):
            if expected.get(path) != found.get(path):
                sizes = [len(each[path]) if path in each else None for each in (expected, found)]
                yield f"{path}: {sizes[0]} bytes by the log, {sizes[1]} on disk"
