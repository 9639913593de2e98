"""Impossible requests are rejected with numbers and a remedy; nothing is lost, nothing hangs."""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib
import re
import resource
import shutil
import struct
import subprocess
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import crash_worker
import lohan
import pytest
import torch
from lohan import errors
from lohan.common._inside import inside
from lohan.session import _notes
from notes_helper import notes
from patience import HUNG_S
from torch import nn

NOBODY = 65534
FILE_NAME = "lohan.data"
HEADER_BYTES = 4096
SYS_IO_URING_SETUP = 425


def wrap(store: pathlib.Path | None, **settings: Any) -> Any:
    return lohan.wrap(crash_worker.build(), store=store, lr=1e-2, **settings)


def trained(store: pathlib.Path, step_count: int, **settings: Any) -> list[str]:
    """Make a store and close it after step_count steps; the parameters' digest after each."""
    model = wrap(store, **settings)
    digests = [crash_worker.digest(model)]
    for step in range(step_count):
        crash_worker.train_step(model, step)
        digests.append(crash_worker.digest(model))
    model.lohan.close()
    return digests


def host_bytes_min(store: pathlib.Path) -> int:
    with pytest.raises(errors.BudgetError) as caught:
        wrap(store, host_bytes=1)
    found = re.search(
        r"host_bytes 1 is too small: this model needs at least (\d+)", str(caught.value)
    )
    assert found
    return int(found[1])


def check_whole(store: pathlib.Path, digest: str) -> None:
    """The store opens, and its parameters are those of digest."""
    model = wrap(store, resume=True)
    assert crash_worker.digest(model) == digest
    model.lohan.close()


# --- Models ---------------------------------------------------------------------------------


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(errors.ModelError, match=r"torch\.nn\.Module, not dict"):
        lohan.wrap({})  # type: ignore[arg-type]


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(errors.ModelError, match="Tanh has no parameters"):
        lohan.wrap(nn.Tanh())


@pytest.mark.parametrize(
    ("values", "requires_grad", "message"),
    [
        (torch.zeros(2, dtype=torch.complex64), True, "complex64"),
        (torch.zeros(2, 2).to_sparse(), True, "only dense"),
        (torch.zeros(2, dtype=torch.float8_e5m2), True, "float8_e5m2.*freeze it"),
        (torch.zeros(2, dtype=torch.float64), True, "float64.*convert the model"),
        (torch.zeros(2, device="meta"), True, "weights=FOLDER"),
    ],
    ids=["complex", "sparse", "float8", "float64", "meta"],
)
def test_a_parameter_that_cannot_be_trained_is_named(
    store_dir: pathlib.Path, values: torch.Tensor, requires_grad: bool, message: str
) -> None:
    model = nn.Linear(3, 3)
    model.extra = nn.Parameter(values, requires_grad=requires_grad)
    before = model.weight.detach().clone()
    with pytest.raises(errors.ModelError, match=f"'extra'.*{message}"):
        lohan.wrap(model, store=store_dir)
    assert torch.equal(model.weight, before)
    assert list(store_dir.iterdir()) == []


# --- Settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"io": "carrier-pigeon"}, "'carrier-pigeon'.*'io_uring'"),
        ({"commit_every": 0}, "commit_every 0.*at least 1"),
        ({"threads": 0}, "threads 0"),
        ({"io_depth": 0}, "io.depth 0"),
        ({"io_depth": 5000}, "io.depth 5000"),
        ({"transfer_bytes": 1000}, "transfer_bytes 1000.*1048576"),
        ({"nice": 40}, "nice 40"),
        ({"host_bytes": -5}, "host_bytes -5"),
        ({"trace_events": -1}, "trace_events -1"),
    ],
)
def test_a_setting_out_of_range_is_refused_before_a_store_is_made(
    store_dir: pathlib.Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.LohanError, match=message):
        wrap(store_dir, **settings)
    assert list(store_dir.iterdir()) == []


def test_a_budget_too_small_is_refused_with_one_that_fits(store_dir: pathlib.Path) -> None:
    least = host_bytes_min(store_dir)
    with pytest.raises(errors.BudgetError, match=f"at least {least}"):
        wrap(store_dir, host_bytes=least - 1)
    assert list(store_dir.iterdir()) == []
    model = wrap(store_dir, host_bytes=least)
    assert inside(model).budget["host_bytes"] <= least
    crash_worker.train_step(model, 0)
    crash_worker.train_step(model, 1)
    model.lohan.close()


# --- Stores ---------------------------------------------------------------------------------


def test_a_store_in_use_by_another_process_is_named_with_it(store_dir: pathlib.Path) -> None:
    process, pipe = crash_worker.start(crash_worker.hold, {"store": store_dir})
    assert pipe.poll(HUNG_S)
    pid = pipe.recv()
    for resume in (False, True):
        with pytest.raises(errors.StoreError, match=f"process {pid}|resume=True") as caught:
            wrap(store_dir, resume=resume)
        assert isinstance(caught.value, errors.StoreLockedError) or not resume
    pipe.send("end")
    assert pipe.poll(HUNG_S) and pipe.recv() == "closed"
    process.join(HUNG_S)
    wrap(store_dir, resume=True).lohan.close()


def test_a_store_that_this_process_has_open_says_to_close_it(store_dir: pathlib.Path) -> None:
    held = wrap(store_dir)
    with pytest.raises(errors.StoreLockedError, match=r"by this process: model\.lohan\.close\(\)"):
        wrap(store_dir, resume=True)
    held.lohan.close()
    wrap(store_dir, resume=True).lohan.close()


def test_a_directory_that_cannot_be_made_is_no_question_of_resume(store_dir: pathlib.Path) -> None:
    with pytest.raises(errors.StoreError, match="cannot make directory /proc/x") as caught:
        wrap(pathlib.Path("/proc/x"))
    assert "resume" not in str(caught.value)


def test_a_learning_rate_that_is_text_is_refused(store_dir: pathlib.Path) -> None:
    with pytest.raises(errors.HyperParameterError, match=r"lr '2e-5' is text.*YAML"):
        lohan.wrap(crash_worker.build(), store=store_dir / "s", lr="2e-5")
    assert not (store_dir / "s").exists()


def test_weights_that_are_a_name_of_the_hub_say_how_to_have_them(store_dir: pathlib.Path) -> None:
    with pytest.raises(errors.StoreError, match=r"no such folder.*snapshot_download"):
        wrap(store_dir / "s", weights="org/name")


def test_an_existing_store_is_not_overwritten(store_dir: pathlib.Path) -> None:
    digests = trained(store_dir, 1)
    with pytest.raises(errors.StoreExistsError, match="resume=True"):
        wrap(store_dir)
    check_whole(store_dir, digests[-1])


def test_resume_needs_a_store(store_dir: pathlib.Path) -> None:
    with pytest.raises(errors.StoreError, match=f"{store_dir}.*resume") as caught:
        wrap(store_dir, resume=True)
    assert caught.value.errno == errno.ENOENT
    assert list(store_dir.iterdir()) == []
    with pytest.raises(errors.StoreError, match="store="):
        wrap(None, resume=True)


def test_a_store_of_another_model_is_refused_by_its_first_difference(
    store_dir: pathlib.Path,
) -> None:
    digests = trained(store_dir, 1)
    other = crash_worker.build()
    other.head = nn.Linear(crash_worker.HIDDEN, 7)
    before = other.head.weight.detach().clone()
    with pytest.raises(errors.StoreMismatchError, match=r"'head\.weight' \[128, 32\].*\[7, 32\]"):
        lohan.wrap(other, store=store_dir, resume=True)
    assert torch.equal(other.head.weight, before)
    with pytest.raises(errors.StoreMismatchError, match=r"float32.*bfloat16"):
        lohan.wrap(crash_worker.build(torch.bfloat16), store=store_dir, resume=True)
    check_whole(store_dir, digests[-1])


def test_a_store_with_other_parameter_groups_is_refused(store_dir: pathlib.Path) -> None:
    digests = trained(store_dir, 1)
    model = crash_worker.build()
    groups = [{"params": list(model.head.parameters())}]
    groups.append({"params": [p for n, p in model.named_parameters() if "head" not in n]})
    with pytest.raises(errors.StoreMismatchError, match="1 parameter groups, but params= has 2"):
        lohan.wrap(model, store=store_dir, resume=True, params=groups)
    check_whole(store_dir, digests[-1])


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


def patch(path: pathlib.Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flip(path: pathlib.Path, offset: int, bit: int = 3) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    patch(path, offset, bytes([byte ^ (1 << bit)]))


def test_a_store_of_a_newer_version_is_refused_by_both_numbers(store_dir: pathlib.Path) -> None:
    digests = trained(store_dir, 1)
    path = store_dir / FILE_NAME
    header = path.read_bytes()[:HEADER_BYTES]
    newer = header[:8] + struct.pack("<I", 99) + header[12:-4]
    patch(path, 0, newer + struct.pack("<I", crc32c(newer)))
    with pytest.raises(errors.StoreVersionError, match=r"99.*\b2\b|\b2\b.*99"):
        wrap(store_dir, resume=True)
    patch(path, 0, header)
    check_whole(store_dir, digests[-1])


def test_a_truncated_store_is_refused_with_both_sizes(store_dir: pathlib.Path) -> None:
    trained(store_dir, 1)
    path = store_dir / FILE_NAME
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    with pytest.raises(errors.StoreError, match=f"truncated.*{size - 4096}.*{size}"):
        wrap(store_dir, resume=True)
    os.truncate(path, 100)
    with pytest.raises(errors.StoreError, match=FILE_NAME):
        wrap(store_dir, resume=True)


def places(session: Any, path: pathlib.Path) -> dict[tuple[int, int], tuple[int, int]]:
    """(extent, slot) to (offset, bytes) in a store of one small file: docs/store-format.md."""
    with path.open("rb") as file:
        (file_bytes,) = struct.unpack_from("<Q", file.read(HEADER_BYTES), 64)
    found = {}
    sizes = [
        ((extent, slot), nbytes)
        for extent, (nbytes, group) in enumerate(session.extents.table)
        for slot in range(session.extents.groups[group])
    ]
    at = file_bytes - sum(nbytes for _, nbytes in sizes)
    for key, nbytes in sizes:
        found[key] = (at, nbytes)
        at += nbytes
    return found


class Damage:
    """A bit flipped in both slots of one array of one block, and what the error has to say."""

    def __init__(self, session: Any, store: pathlib.Path, array: str, block: str) -> None:
        self.path = store / FILE_NAME
        unit = next(i for i, u in enumerate(session.layout.units) if u.name == block)
        extent = getattr(session.extents.units[unit], array.replace("master", "residual"))
        found = places(session, self.path)
        self.offsets = [found[extent, slot][0] for slot in (0, 1)]
        offsets = "|".join(str(offset) for offset in self.offsets)
        self.message = rf"(?s)block '{re.escape(block)}'.*{self.path}.*file offset ({offsets})\b"

    def flip(self) -> None:
        for offset in self.offsets:
            flip(self.path, offset + 133)


def check_failed(model: Any, first: BaseException) -> None:
    """Every later call raises the first error; close() releases everything."""
    session = inside(model)
    for call in (
        lambda: crash_worker.train_step(model, 9),
        session.commit,
        session.flush,
        model.state_dict,
        lambda: model(torch.zeros(1, 3, dtype=torch.long)),
    ):
        with pytest.raises(type(first), match=re.escape(str(first))):
            call()
    with pytest.raises(type(first), match=re.escape(str(first))):
        session.close()
    assert session.closed
    session.close()
    with pytest.raises(errors.SessionError, match="closed"):
        session.commit()


@pytest.mark.parametrize("array", ["param", "moment1", "moment2", "residual", "master"])
def test_a_wrong_bit_in_a_closed_store_is_found_where_it_is(
    store_dir: pathlib.Path, array: str
) -> None:
    dtype = {"residual": torch.bfloat16, "master": torch.float16}.get(array, torch.float32)
    model: Any = lohan.wrap(crash_worker.build(dtype), store=store_dir)
    for step in range(2):
        crash_worker.train_step(model, step)
    damage = Damage(inside(model), store_dir, array, "blocks.1")
    digest = crash_worker.digest(model)
    model.lohan.close()
    damage.flip()
    model = lohan.wrap(crash_worker.build(dtype), store=store_dir, resume=True)
    with pytest.raises(errors.ChecksumError, match=damage.message) as caught:
        crash_worker.train_step(model, 2)
        model.lohan.flush()
    check_failed(model, caught.value)
    damage.flip()
    model = lohan.wrap(crash_worker.build(dtype), store=store_dir, resume=True)
    assert model.lohan.step == 2
    assert crash_worker.digest(model) == digest
    model.lohan.close()


# Of what the least memory does not hold from one step to the next: the block before the last is
# evicted in backward; the moments of what is updated last are read last.
@pytest.mark.parametrize(("array", "block"), [("param", "blocks.2"), ("moment1", "embed")])
@pytest.mark.parametrize("io", ["auto", "threads"])
def test_a_bit_that_rots_while_training_is_found_on_the_next_read(
    store_dir: pathlib.Path, io: str, array: str, block: str
) -> None:
    model = wrap(store_dir, host_bytes=host_bytes_min(store_dir / "none"), io=io)
    for step in range(2):
        crash_worker.train_step(model, step)
    model.lohan.commit()
    damage = Damage(inside(model), store_dir, array, block)
    with pytest.raises(errors.ChecksumError, match=damage.message) as caught:
        for step in range(2, 9):
            damage.flip()
            crash_worker.train_step(model, step)
            model.lohan.flush()
    check_failed(model, caught.value)


def test_a_file_truncated_while_training_ends_it_with_its_name(store_dir: pathlib.Path) -> None:
    model = wrap(store_dir, host_bytes=host_bytes_min(store_dir / "none"))
    crash_worker.train_step(model, 0)
    model.lohan.commit()
    path = store_dir / FILE_NAME
    found = places(inside(model), path)
    with pytest.raises(errors.StoreError, match=str(path)) as caught:
        for step in range(1, 9):
            os.truncate(path, min(at for at, _ in found.values()))
            crash_worker.train_step(model, step)
            model.lohan.flush()
    check_failed(model, caught.value)
    with pytest.raises(errors.StoreError, match=r"truncated|checksum"):
        crash_worker.train_step(wrap(store_dir, resume=True), 0)


# --- Machines -------------------------------------------------------------------------------


@pytest.fixture
def public_dir() -> Iterator[pathlib.Path]:
    """A folder on a disk that every user may reach and write."""
    folder = pathlib.Path(tempfile.mkdtemp(dir="/var/tmp", prefix="lohan-test-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def become_nobody() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def become_nobody_without_memlock() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    become_nobody()


class BpfInstruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class BpfProgram(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("first", ctypes.POINTER(BpfInstruction)))


def forbid_io_uring() -> None:
    """As container runtimes do, a seccomp filter makes io_uring_setup fail with EPERM."""
    load_number, jump_if_equal, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    instructions = (BpfInstruction * 4)(
        BpfInstruction(load_number, 0, 0, 0),
        BpfInstruction(jump_if_equal, 0, 1, SYS_IO_URING_SETUP),
        BpfInstruction(answer, 0, 0, refuse),
        BpfInstruction(answer, 0, 0, allow),
    )
    program = BpfProgram(4, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_no_new_privs, pr_set_seccomp, mode_filter = 38, 22, 2
    assert libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) == 0
    assert libc.prctl(pr_set_seccomp, mode_filter, ctypes.byref(program)) == 0


def attempt(prepare: Any, **settings: Any) -> tuple[str, Any]:
    process, pipe = crash_worker.start(crash_worker.attempt, prepare, settings)
    assert pipe.poll(HUNG_S), "the child hangs"
    answer: tuple[str, Any] = pipe.recv()
    process.join(HUNG_S)
    assert process.exitcode == 0
    return answer


def test_a_directory_that_cannot_be_written_is_named(public_dir: pathlib.Path) -> None:
    public_dir.chmod(0o555)
    kind, message = attempt(become_nobody, store=public_dir)
    assert kind == "StoreError"
    assert str(public_dir) in message and "Permission denied" in message


def test_a_full_directory_is_refused_with_the_bytes_missing(tmp_path: pathlib.Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "lohan-test", tmp_path], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mount is refused: {mounted.stderr.decode().strip()}")
    try:
        model = crash_worker.build()
        before = model.head.weight.detach().clone()
        with pytest.raises(errors.StoreError, match=rf"{tmp_path}.*\d+ bytes.*missing") as caught:
            lohan.wrap(model, store=tmp_path, allow_tmpfs=True)
        assert caught.value.errno == errno.ENOSPC
        assert torch.equal(model.head.weight, before)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_store_in_main_memory_has_to_be_asked_for() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with pytest.raises(errors.StoreError, match=r"tmpfs.*allow_tmpfs"):
            wrap(pathlib.Path(folder))
        assert os.listdir(folder) == []
        wrap(pathlib.Path(folder), allow_tmpfs=True).lohan.close()


def test_without_lockable_memory_it_works_and_says_what_it_could_not_have(
    public_dir: pathlib.Path,
) -> None:
    kind, status = attempt(become_nobody_without_memlock, store=public_dir)
    assert kind == "", status
    assert status["io"] != "io_uring" or "RLIMIT_MEMLOCK" in status["io_note"]


def test_without_io_uring_it_falls_back_and_says_why(store_dir: pathlib.Path) -> None:
    kind, status = attempt(forbid_io_uring, store=store_dir)
    assert kind == "", status
    assert status["io"] in ("libaio", "threads")
    assert re.search(r"io_uring: .*seccomp", status["io_reason"])
    session: Any = types.SimpleNamespace(
        status=lambda: status,
        store=types.SimpleNamespace(describe=lambda: {"note": ""}),
        config=lohan.Config(),
        directories=[str(store_dir)],
    )
    first, *_, last = _notes.lines(session)
    assert re.match(rf"io_uring: .*seccomp.*; using {status['io']} instead", first)
    assert f"lohan doctor {store_dir}" in last


def test_without_direct_io_it_continues_and_says_so_or_is_refused(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mounted = subprocess.run(["mount", "-t", "ramfs", "lohan-test", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mount is refused: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(errors.StoreError, match="refuses O_DIRECT"):
            wrap(tmp_path / "a", allow_tmpfs=True, allow_buffered=False)
        assert capfd.readouterr().err == ""
        model = wrap(tmp_path / "b", allow_tmpfs=True)
        crash_worker.train_step(model, 0)
        model.lohan.close()
        assert "O_DIRECT is refused" in capfd.readouterr().err
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_where_nothing_is_missing_nothing_is_said(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = wrap(store_dir)
    status = model.lohan.status()
    model.lohan.close()
    assert (notes(capfd.readouterr().err) == "") == (status["io_reason"] == "")


def test_io_uring_by_name_where_it_is_forbidden_is_refused_and_the_weights_are_kept(
    store_dir: pathlib.Path,
) -> None:
    kind, message = attempt(forbid_io_uring, store=store_dir, io="io_uring")
    assert kind == "StoreError"
    assert "seccomp" in message
    model = wrap(store_dir, resume=True)
    plain = crash_worker.build().state_dict()
    assert all(torch.equal(plain[name], value) for name, value in model.state_dict().items())
    model.lohan.close()
