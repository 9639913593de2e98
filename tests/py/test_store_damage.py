"""Damage to what describes a store: one bad block costs nothing, no step is given up unasked."""

from __future__ import annotations

import pathlib
import re
import struct

import crash_worker
import lohan
import pytest
from lohan import errors
from test_bad_input import FILE_NAME, check_whole, flip, patch, trained, wrap


def test_a_damaged_header_has_a_copy_and_without_it_is_refused_by_its_checksum(
    store_dir: pathlib.Path,
) -> None:
    digests = trained(store_dir, 1)
    path = store_dir / FILE_NAME
    flip(path, 60)
    assert "header" in lohan.verify(store_dir).note
    flip(path, (320 << 10) + 60)
    with pytest.raises(errors.ChecksumError, match=FILE_NAME):
        wrap(store_dir, resume=True)
    flip(path, (320 << 10) + 60)
    check_whole(store_dir, digests[-1])
    assert lohan.verify(store_dir).note == "", "it was not written again"


def manifests(path: pathlib.Path) -> dict[int, list[int]]:
    """Step to the offsets of its manifest's copies in a store's first file."""
    data = path.read_bytes()[: 4 << 20]
    found: dict[int, list[int]] = {}
    for at in range(0, len(data), 64 << 10):
        if data[at : at + 8] == b"LOHANMAN":
            found.setdefault(struct.unpack_from("<Q", data, at + 40)[0], []).append(at)
    return found


def test_a_wrong_bit_in_one_copy_of_the_newest_manifest_costs_nothing(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    digests = trained(store_dir, 4)
    path = store_dir / FILE_NAME
    for index in range(2):
        flip(path, manifests(path)[4][index] + 90)
        model = wrap(store_dir, resume=True)
        assert model.lohan.step == 4 and crash_worker.digest(model) == digests[4]
        assert re.search(r"^lohan: .*manifest.*other copy", capfd.readouterr().err, re.M)
        model.lohan.close()
    wrap(store_dir, resume=True).lohan.close()
    assert "manifest" not in capfd.readouterr().err, "it was not written again"


def damage_newest(store: pathlib.Path) -> list[int]:
    """Damage both copies of step 4's manifest; return their offsets."""
    path = store / FILE_NAME
    found = manifests(path)
    assert sorted(found) == [3, 4] and [len(copies) for copies in found.values()] == [2, 2]
    for offset in found[4]:
        flip(path, offset + 90)
    return found[4]


def test_a_damaged_newest_step_is_gone_back_from_only_by_naming_the_one_before_it(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    digests = trained(store_dir, 4)
    damage_newest(store_dir)
    with pytest.raises(errors.ChecksumError, match=r"step 4 .*manifest.*resume_step=3 "):
        wrap(store_dir, resume=True)
    for step in (2, 4, 5):
        with pytest.raises(errors.StoreError, match=rf"step {step}; .*are: 3; .*manifest"):
            wrap(store_dir, resume=step)
    fallback = r"^lohan: .*step 4 cannot be read.*the step before it, 3"
    capfd.readouterr()
    assert lohan.verify(store_dir).step == 3
    assert re.search(fallback, capfd.readouterr().err, re.M)
    lohan.export(store_dir, store_dir / "out")
    assert re.search(fallback, capfd.readouterr().err, re.M)
    model = wrap(store_dir, resume=3)
    assert model.lohan.step == 3 and crash_worker.digest(model) == digests[3]
    crash_worker.train_step(model, 3)
    assert crash_worker.digest(model) == digests[4]
    model.lohan.close()
    check_whole(store_dir, digests[4])


def test_a_whole_newest_step_may_be_named_or_gone_back_from(store_dir: pathlib.Path) -> None:
    digests = trained(store_dir, 4)
    model = wrap(store_dir, resume=4)
    assert model.lohan.step == 4 and crash_worker.digest(model) == digests[4]
    model.lohan.close()
    model = wrap(store_dir, resume="step 3")
    assert model.lohan.step == 3 and crash_worker.digest(model) == digests[3]
    model.lohan.close()
    check_whole(store_dir, digests[3])
    for wrong in (-1, 2.0, "3", object()):
        with pytest.raises(errors.ModelError, match="number of the step"):
            wrap(store_dir, resume=wrong)


def test_a_copy_to_a_place_with_a_damaged_store_removes_nothing(store_dir: pathlib.Path) -> None:
    source, place = store_dir / "source", store_dir / "place"
    trained(source, 1)
    trained(place, 0)
    path = place / FILE_NAME
    kept = path.read_bytes()
    # Without the newest step nothing was ever in it, and without headers it looks as just begun.
    superblocks = [(64 + 64 * number + 128 * copy) << 10 for number in (0, 1) for copy in (0, 1)]
    newest = [at for at in superblocks if struct.unpack_from("<Q", kept, at + 32)[0] == 3]
    assert len(newest) == 2
    for offsets in (newest, [0, 320 << 10]):
        path.write_bytes(kept)
        for at in offsets:
            patch(path, at, bytes(4096))
        before = path.read_bytes()
        with pytest.raises(errors.StoreExistsError):
            lohan.snapshot(source, place)
        assert path.read_bytes() == before
    with pytest.raises(errors.ChecksumError, match="holds commits"):
        wrap(place, resume=True)


def test_wrong_bits_in_both_manifests_are_refused(store_dir: pathlib.Path) -> None:
    digests = trained(store_dir, 4)
    path = store_dir / FILE_NAME
    offsets = [at for copies in manifests(path).values() for at in copies]
    for offset in offsets:
        flip(path, offset + 90)
    with pytest.raises(errors.ChecksumError, match=f"manifest.*{FILE_NAME}|{FILE_NAME}.*manifest"):
        wrap(store_dir, resume=True)
    for offset in offsets:
        flip(path, offset + 90)
    check_whole(store_dir, digests[-1])
