"""What is published: metadata, tags, the tools that build it, and the trees that try it."""

from __future__ import annotations

import argparse
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from typing import Any

import lohan
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import cross  # noqa: E402  (their folder has just been named)
import elf  # noqa: E402
import kernels  # noqa: E402
import make_wheel  # noqa: E402
import toolbox  # noqa: E402
import try_install  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA_NAMES = {"torch": "pytorch"}
PTX = b"//\n// comment\n//\n\n.version 8.0\n.target sm_75\n\t.reg .b32 \t%r<2>; // why\n}\n"


def requirement(text: str) -> tuple[str, str]:
    """Split a requirement into its name and the rest."""
    match = re.fullmatch(r"([\w-]+)\s*(.*)", text)
    assert match, text
    return match[1], match[2]


# --- Metadata -------------------------------------------------------------------------------------


def test_the_metadata_of_the_package_is_complete() -> None:
    assert PROJECT["readme"] == "README.md" and PROJECT["license"] == "Apache-2.0"
    assert PROJECT["authors"] and PROJECT["keywords"] and len(PROJECT["description"]) < 150
    minors = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert minors <= set(PROJECT["classifiers"])
    # A license is told by its expression; PyPI refuses a classifier in addition.
    assert not [name for name in PROJECT["classifiers"] if name.startswith("License")]


def test_the_conda_recipe_has_the_version_and_the_requirements_of_the_package() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == lohan.__version__
    wanted = {CONDA_NAMES.get(n, n): rest for n, rest in map(requirement, PROJECT["dependencies"])}
    needs = recipe["requirements"]
    found = dict(map(requirement, needs["run"]))
    assert found == wanted | {"python": PROJECT["requires-python"]}
    host = dict(map(requirement, needs["host"]))
    system = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    assert {**dict(map(requirement, system["requires"])), "python": found["python"]}.items() <= {
        *host.items()
    }
    assert recipe["about"]["license"] == PROJECT["license"]


def test_the_tools_of_wheels_are_pinned_to_the_versions_of_the_development_environment() -> None:
    def pins(path: pathlib.Path) -> dict[str, str]:
        lines = path.read_text(encoding="utf-8").splitlines()
        return dict(line.split("==") for line in lines if not line.startswith("#"))

    tools, ours = pins(toolbox.REQUIREMENTS), pins(ROOT / "requirements-dev.txt")
    assert {"auditwheel", "pyelftools", "setuptools", "twine"} <= tools.keys()
    assert {n: v for n, v in tools.items() if n in ours} == {
        n: ours[n] for n in tools if n != "twine"
    }


# --- Tags and kernels -----------------------------------------------------------------------------


def test_an_extension_that_needs_more_than_its_tag_promises_is_refused() -> None:
    good = elf.Needs("aarch64", ["libc.so.6"], ["PyList_New"], ["GLIBC_2.17", "GLIBC_2.34"])
    make_wheel.check_extension("_core", good, "aarch64", (2, 34))
    with pytest.raises(make_wheel.WheelError, match=r"glibc 2\.34, but the tag promises 2\.33"):
        make_wheel.check_extension("_core", good, "aarch64", (2, 33))
    with pytest.raises(make_wheel.WheelError, match="is for aarch64, but the wheel is for x86_64"):
        make_wheel.check_extension("_core", good, "x86_64", (2, 34))


def test_a_fatbin_that_was_packed_has_its_images() -> None:
    cubin = b"\x7fELF\x02\x01\x01\x33\x07".ljust(64, b"\0")
    fatbin = kernels.pack([("cubin", 80, cubin), ("ptx", 75, PTX)])
    found = [(image.kind, image.arch, image.version) for image in kernels.images(fatbin)]
    assert found == [("cubin", 80, (0x33, 7)), ("ptx", 75, (8, 0))]
    with pytest.raises(kernels.KernelsError, match=r"no line \.version"):
        kernels.pack([("ptx", 75, b".target sm_75\n")])


def test_a_fatbin_is_packed_byte_for_byte_as_fatbinary_does(tmp_path: pathlib.Path) -> None:
    fatbinary = shutil.which("fatbinary")
    if fatbinary is None:
        pytest.skip("fatbinary of the CUDA Toolkit is not installed")
    for length in range(8):  # every remainder of the padding
        text = PTX + b"." * length + b"\n"
        (tmp_path / "ptx").write_bytes(text)
        words = [fatbinary, f"--create={tmp_path / 'fatbin'}", "--64", "--compress=false"]
        words += [f"--image3=kind=ptx,sm=75,file={tmp_path / 'ptx'}"]
        subprocess.run(words, check=True)
        assert (tmp_path / "fatbin").read_bytes() == kernels.pack([("ptx", 75, text)])


# --- Tools ----------------------------------------------------------------------------------------


def test_what_a_machine_lacks_is_listed_with_the_package_that_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    assert toolbox.missing() == {}
    monkeypatch.setenv("CC", "/nonexistent/cc")
    monkeypatch.setattr(toolbox.sysconfig, "get_path", lambda _: str(tmp_path))
    assert list(toolbox.missing().values()) == ["python3-dev", "gcc libc6-dev"]
    monkeypatch.setattr(toolbox, "run", lambda *_: pytest.fail("the tools were installed"))
    with pytest.raises(toolbox.WheelError, match="apt-get install python3-dev gcc libc6-dev"):
        toolbox.enter()


def test_wheels_are_built_by_python_3_11_or_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "PYTHON_MIN", (4, 0))
    monkeypatch.setattr(toolbox, "run", lambda *_: pytest.fail("the tools were installed"))
    with pytest.raises(toolbox.WheelError, match=r"make wheel PYTHON=python3\.12"):
        toolbox.enter()


def test_a_library_for_another_machine_that_was_changed_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(cross, "WORK", tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b"changed"))
    with pytest.raises(toolbox.WheelError, match="does not have the SHA-256"):
        cross.sysroot()
    assert not (tmp_path / "sysroot-aarch64" / "complete").exists()


# --- Root trees -----------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    return try_install.parse(["--suite", "bookworm"])


def test_the_times_of_a_tree_are_those_between_its_marks() -> None:
    said = ["@ begin 10.0 0m0.5s 0m0.25s", "{}", "@ venv 12.5 1m1.0s 0m0.75s"]
    assert try_install.differences(said) == ({"venv": 2.5}, {"venv": 61.0})


def test_a_tree_is_deleted_after_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def fail(suite: str, root: pathlib.Path, _: Any) -> None:
        (root / "etc").mkdir(parents=True)
        raise toolbox.WheelError("no network")

    monkeypatch.setattr(try_install.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(try_install, "make_tree", fail)
    with (
        pytest.raises(toolbox.WheelError, match="no network"),
        try_install.tree("bookworm", options()),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_tree_in_which_something_is_mounted_is_not_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "tree" / "dev").mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"25 31 0:5 / {tmp_path}/tree/dev rw - devtmpfs udev rw\n", encoding="utf-8")
    monkeypatch.setattr(try_install, "MOUNTS", mounts)
    with pytest.raises(toolbox.WheelError, match="which is therefore kept"):
        try_install.remove(tmp_path / "tree")
    assert (tmp_path / "tree" / "dev").exists()
    mounts.write_text("", encoding="utf-8")
    try_install.remove(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


# --- The whole build ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_source_distribution_builds_a_wheel_from_itself_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_wheel, "DIST", tmp_path / "dist")
    monkeypatch.setattr(make_wheel, "WORK", tmp_path)
    try:
        make_wheel.build_sdist()
    except make_wheel.WheelError as error:
        if "Could not find a version that satisfies the requirement setuptools" in str(error):
            pytest.skip("setuptools cannot be downloaded")
        raise
    assert "builds lohan-" in capsys.readouterr().out


@pytest.mark.long
def test_the_wheel_for_aarch64_is_built_and_has_its_tag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    if shutil.which(cross.COMPILER) is None:
        pytest.skip("needs tools/setup_cross.sh")
    monkeypatch.setattr(make_wheel, "DIST", tmp_path)
    wheel = make_wheel.build("aarch64")
    assert re.fullmatch(r"lohan-.*-cp311-abi3-manylinux_2_\d+_aarch64\.whl", wheel.name)
