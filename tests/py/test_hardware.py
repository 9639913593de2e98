"""What doctor reads about a machine, from copies of /sys and /proc that the tests make."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess

import lohan
import pytest
import torch
from lohan import _core
from lohan.commands import _doctor, _doctor_disks
from lohan.commands._diagnosis import Diagnosis
from lohan.common import _mounts
from lohan.errors import StoreError
from lohan.planning import _hardware

GPU = {"class": "0x030000", "vendor": "0x10de"}
SSD = {"class": "0x010802", "vendor": "0x144d"}


def pci_device(
    root: pathlib.Path, address: str, identity: dict[str, str], now: str, most: str, node: int = 0
) -> pathlib.Path:
    """Make a PCI device with a link; now and most have the form "GT/s lanes"."""
    folder = root / "sys/devices/pci0000:00" / address
    folder.mkdir(parents=True)
    texts = {**identity, "numa_node": str(node)}
    for name, said in (("current", now), ("max", most)):
        speed, width = said.split()
        texts[f"{name}_link_speed"] = f"{speed} GT/s PCIe"
        texts[f"{name}_link_width"] = width
    for name, text in texts.items():
        (folder / name).write_text(text + "\n")
    listed = root / "sys/bus/pci/devices"
    listed.mkdir(parents=True, exist_ok=True)
    (listed / address).symlink_to(folder)
    return folder


def drive(root: pathlib.Path, parent: pathlib.Path, name: str, number: int) -> pathlib.Path:
    """Make a block device with a number below a PCI device; return its folder."""
    folder = parent / "nvme" / name
    (folder / "queue").mkdir(parents=True)
    (folder / "device").mkdir()
    (folder / "queue/rotational").write_text("0\n")
    (folder / "device/model").write_text("Fast 4TB\n")
    blocks = root / "sys/dev/block"
    blocks.mkdir(parents=True, exist_ok=True)
    (blocks / f"{os.major(number)}:{os.minor(number)}").symlink_to(folder)
    return folder


def test_links_of_gpus_and_drives_have_generation_width_and_node(tmp_path: pathlib.Path) -> None:
    pci_device(tmp_path, "0000:01:00.0", GPU, "2.5 8", "16.0 16", node=1)
    pci_device(tmp_path, "0000:02:00.0", SSD, "16.0 4", "32.0 4", node=-1)
    pci_device(tmp_path, "0000:03:00.0", {"class": "0x020000", "vendor": "0x8086"}, "8 4", "8 4")
    found = _hardware.pci(tmp_path)
    (gpu,), (ssd,) = found["gpu"], found["nvme"]
    assert (gpu["generation_now"], gpu["width_now"], gpu["width_max"]) == (1, 8, 16)
    assert gpu["numa_node"] == 1 and ssd["numa_node"] is None
    assert _hardware.link_words(ssd) == "0000:02:00.0, PCIe 4.0 x4 (of 5.0 x4)"
    assert _hardware.link_words(gpu).endswith("PCIe 1.0 x8 (of 4.0 x16), NUMA node 1")
    assert _hardware.pci(tmp_path / "empty") == {"gpu": [], "nvme": []}


def test_a_directory_is_traced_to_its_drive_through_a_partition_and_a_raid(
    tmp_path: pathlib.Path,
) -> None:
    here = os.stat(tmp_path).st_dev
    device = pci_device(tmp_path, "0000:02:00.0", SSD, "16.0 4", "16.0 4", node=1)
    disk = drive(tmp_path, device, "nvme0n1", 259 << 8)
    (disk / "nvme0n1p1").mkdir()
    (disk / "nvme0n1p1/partition").write_text("1\n")
    raid = tmp_path / "sys/devices/virtual/block/md0"
    (raid / "slaves").mkdir(parents=True)
    (raid / "slaves/nvme0n1p1").symlink_to(disk / "nvme0n1p1")
    (tmp_path / f"sys/dev/block/{os.major(here)}:{os.minor(here)}").symlink_to(raid)
    (found,) = _hardware.disks_of(str(tmp_path), tmp_path)
    assert (found["name"], found["model"], found["numa_node"]) == ("nvme0n1", "Fast 4TB", 1)
    assert found["link"]["width_now"] == 4 and not found["is_rotational"]


def disk_facts(name: str, link: dict[str, object] | None, is_rotational: bool = False) -> dict:
    return {
        "disks": [
            {"name": name, "model": "M", "is_rotational": is_rotational, "link": link},
        ]
    }


def test_doctor_names_drives_that_are_shared_narrow_or_spin() -> None:
    found = Diagnosis({}, [])
    link = {
        "address": "a",
        "generation_now": 3,
        "generation_max": 4,
        "width_now": 2,
        "width_max": 4,
        "numa_node": None,
    }
    facts = {
        "/a": disk_facts("nvme0n1", link),
        "/b": disk_facts("nvme0n1", None),
        "/c": disk_facts("sda", None, is_rotational=True),
    }
    _doctor_disks._look_at_disks(found, facts)
    said = [problem.what for problem in found.problems]
    assert "/a: its SSD (nvme0n1) is at a, PCIe 3.0 x2 (of 4.0 x4)" in said[0]
    assert "/c is on a spinning disk" in said[1]
    assert "/a and /b are on the same drive (nvme0n1)" in said[2]
    assert len(said) == 3 and found.is_well


def test_drives_that_are_slower_together_than_alone_share_a_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {
        name: {"write_bytes_per_s": 2_000, "read_bytes_per_s": 4_000, **disk_facts(name, None)}
        for name in ("/a", "/b")
    }
    for share, problems in ((0.5, 1), (1.0, 0)):
        found = Diagnosis({}, [])
        rates = (2_000, int(4_000 * share))
        monkeypatch.setattr(_core, "store_measure", lambda raiser, d, n, rates=rates: rates)
        _doctor_disks._measure_together(found, ["/a", "/b"], facts)
        assert found.facts["together"]["read_share_of_alone"] == share
        assert len(found.problems) == problems
        if problems:
            assert "share a link" in found.problems[0].what
            assert "50%" in found.problems[0].what and "write" not in found.problems[0].what


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("proc/1/environ", "A=b\0container=lxc\0", "lxc"),
        ("proc/1/cgroup", "0::/kubepods/besteffort/pod1", "kubernetes"),
        ("proc/version", "Linux version 6.6 (Microsoft@Microsoft.com)", "wsl2"),
        ("proc/version", "Linux version 6.6", ""),
    ],
)
def test_a_container_is_known_by_its_marks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, kind: str
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert _hardware.container(tmp_path) == kind


@pytest.mark.parametrize(
    ("code", "sysctl", "seccomp", "blocker"),
    [
        (0, "0", 0, ""),
        (errno.EPERM, "2", 0, "sysctl"),
        (errno.EPERM, "1", 2, "group"),
        (errno.EPERM, "0", 2, "seccomp"),
        (errno.ENOSYS, "0", 2, "seccomp"),
        (errno.ENOSYS, "0", 0, "kernel"),
        (errno.ENOMEM, "0", 0, "memlock"),
        (errno.ENOTSUP, "0", 0, "build"),
        (errno.EIO, "0", 0, "unknown"),
    ],
)
def test_who_blocks_io_uring_is_named_and_each_has_a_command(
    tmp_path: pathlib.Path, code: int, sysctl: str, seccomp: int, blocker: str
) -> None:
    for name, text in (
        ("proc/sys/kernel/io_uring_disabled", sysctl),
        ("proc/self/status", f"Name:\tx\nSeccomp:\t{seccomp}\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _hardware.io_uring_blocker(-code, tmp_path) == blocker
    assert not blocker or blocker in _doctor_disks._IO_URING_FIXES


DRIVER = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return REFUSED + (int)flags; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetName(char *name, int bytes, int i) { strncpy(name, i ? "B" : "A", bytes); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int i) { *bytes = 1000u + (unsigned)i; return 0; }
"""


@pytest.mark.parametrize("refused", [0, 999])
def test_the_driver_is_asked_by_its_own_library(tmp_path: pathlib.Path, refused: int) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libfake.so"
    source.write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", f"-DREFUSED={refused}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    module = tmp_path / "proc/driver/nvidia/version"
    module.parent.mkdir(parents=True)
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    found = _hardware.driver(str(library), tmp_path)
    assert found["version"] == "580.65.06"
    if refused:
        assert found["devices"] == [] and "999" in found["error"] and found["cuda"] is None
    else:
        assert found["cuda"] == "13.2" and found["error"] == ""
        assert found["devices"] == [
            {"name": "A", "memory_bytes": 1000},
            {"name": "B", "memory_bytes": 1001},
        ]


def test_a_machine_of_several_nodes_is_told_of_libnuma(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("node0", "node1", "has_cpu"):
        (tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
    assert _hardware.numa_nodes(tmp_path) == 2
    assert _hardware.numa_nodes(tmp_path / "empty") == 1
    info = {**_core.build_info(), "numa_nodes": 1}
    monkeypatch.setattr(_core, "build_info", lambda: info)
    for nodes, said in ((2, ["apt-get install libnuma1"]), (1, [])):
        monkeypatch.setattr(_hardware, "numa_nodes", lambda nodes=nodes: nodes)
        found = Diagnosis({}, [])
        _doctor._look_at_build(found)
        fixes = [problem.fix for problem in found.problems if "NUMA" in problem.what]
        assert fixes == said


WSL = "Linux version 6.6 (root@x) microsoft-standard-WSL2"


def mounted(root: pathlib.Path, version: str, kind: str) -> None:
    """Write the texts of a machine that has the folder "Windows drive" of root mounted."""
    (root / "proc").mkdir()
    (root / "proc/version").write_text(version)
    lines = ("/dev/sdc / ext4 rw 0 0", f"C:\\134 {root}/Windows\\040drive {kind} rw 0 0")
    (root / "proc/mounts").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("version", "kind", "is_windows"),
    [(WSL, "9p", True), (WSL, "drvfs", True), (WSL, "ext4", False), ("Linux 6.6", "9p", False)],
)
def test_a_windows_drive_is_known_by_wsl_and_its_file_system(
    tmp_path: pathlib.Path, version: str, kind: str, is_windows: bool
) -> None:
    mounted(tmp_path, version, kind)
    inside = f"{tmp_path}/Windows drive/run/store"
    assert _mounts.mount_of(inside, tmp_path)[:2] == (f"{tmp_path}/Windows drive", kind)
    assert _mounts.is_windows_drive(inside, tmp_path) == is_windows
    assert not _mounts.is_windows_drive(f"{tmp_path}/Windows", tmp_path)


def test_a_store_on_a_windows_drive_is_refused_before_anything_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(tmp_path, WSL, "9p")
    read = _mounts.read
    monkeypatch.setattr(_mounts, "read", lambda path: read(tmp_path / path.relative_to("/")))
    drive = tmp_path / "Windows drive"
    drive.mkdir()
    with pytest.raises(StoreError, match=r"is on a Windows drive \(9p, mounted at .*wsl --mount"):
        lohan.wrap(torch.nn.Linear(4, 4), store=drive / "run")
    assert list(drive.iterdir()) == []
    found = Diagnosis({}, [])
    _doctor._look_at_build(found)
    _doctor_disks.look(found, [str(drive)], False, print)
    assert not found.is_well
    assert any("Windows drive" in problem.what for problem in found.problems)
    store = tmp_path / "run"
    lohan.wrap(torch.nn.Linear(4, 4), store=store).lohan.close()
    assert store.exists()


@pytest.mark.parametrize("refused_bytes", [0, 1 << 20])
def test_doctor_says_how_much_memory_the_driver_page_locks(
    monkeypatch: pytest.MonkeyPatch, refused_bytes: int
) -> None:
    asked = []

    def probe(index: int, nbytes: int) -> int:
        asked.append((index, nbytes))
        return nbytes - refused_bytes

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(_core, "probe_pins", probe)
    found = Diagnosis({}, [])
    _doctor._look_at_gpu(found)
    ((index, nbytes),) = asked
    assert index == 1 and 0 < nbytes <= 2 << 30
    assert found.facts["gpu"]["page_locked_bytes"] == nbytes - refused_bytes
    told = [problem for problem in found.problems if "page-locks" in problem.what]
    assert len(told) == (refused_bytes > 0)
    if told:
        assert f"only {(nbytes - refused_bytes) >> 20} of {nbytes >> 20} MiB" in told[0].what
        assert told[0].fix == _hardware.pin_remedy()


def test_a_machine_without_the_driver_is_no_error(tmp_path: pathlib.Path) -> None:
    found = _hardware.driver("libnothing-of-the-kind.so.1", tmp_path)
    assert found["devices"] == [] and found["version"] is None and "libnothing" in found["error"]
