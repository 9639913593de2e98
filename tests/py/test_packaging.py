"""What is published: metadata, tags, and the tools that build it."""

from __future__ import annotations

import http.client
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request

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
import wheel_environments  # noqa: E402

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


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), http.client.IncompleteRead(b"half", 4)]
)
def test_a_library_whose_download_breaks_off_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cross, "WORK", tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(toolbox.WheelError, match=r"liburing-dev\S* cannot be downloaded"):
        cross.sysroot()


def test_the_last_upload_is_kept_if_the_cross_compiler_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(toolbox, "without", dict)
    monkeypatch.setattr(make_wheel, "DIST", tmp_path)
    monkeypatch.setattr(make_wheel, "build_sdist", lambda: pytest.fail("something was built"))
    monkeypatch.setattr(make_wheel.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cross, "COMPILER", "nonexistent-gcc")
    (tmp_path / "lohan.whl").touch()
    with pytest.raises(toolbox.WheelError, match=r"nonexistent-gcc not found.*setup_cross\.sh"):
        make_wheel.build_dist()
    monkeypatch.setattr(make_wheel.platform, "machine", lambda: "aarch64")
    with pytest.raises(toolbox.WheelError, match="a wheel for x86_64 is built on a machine with"):
        make_wheel.build_dist()
    assert (tmp_path / "lohan.whl").exists()


# --- Environments ---------------------------------------------------------------------------------


def test_a_python_that_cannot_be_executed_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "python3.97").symlink_to(tmp_path / "nothing")
    (tmp_path / "python3.98").write_text("not executable", encoding="utf-8")
    (tmp_path / "python3.99").symlink_to(shutil.which("true") or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "nothing"))
    found = wheel_environments.pythons([])
    assert found["3.99"] == tmp_path / "python3.99"
    assert not {"3.97", "3.98"} & found.keys()


def test_the_report_of_pip_is_read_between_warnings() -> None:
    report = '{"install": [{"download_info": {"url": "https://host/torch.whl"}}]}'
    said = f"WARNING: slow\n{report}\nWARNING: a new pip {{}}\n"
    assert wheel_environments.url_of(said) == "https://host/torch.whl"
    with pytest.raises(toolbox.WheelError, match="no report"):
        wheel_environments.url_of("ERROR: no network\n")


def test_a_torch_that_pip_does_not_find_is_not_tried_and_the_reason_is_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(wheel_environments, "WORK", tmp_path)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first\necho ERROR: no such torch\nexit 1\n", "utf-8")
    python.chmod(0o755)
    shelf = wheel_environments.Shelf(may_download=True, find_links=[])
    said = shelf.torch(python, "9.0", "cp399")
    assert said == "pip finds no torch 9.0 for this Python (ERROR: no such torch)"


@pytest.mark.parametrize(
    ("statuses", "status"),
    [(["passed"], 0), (["passed", "not tried"], 0), (["passed", "failed"], 1), (["not tried"], 1)],
)
def test_a_wheel_passes_if_a_test_passed_and_none_failed(
    monkeypatch: pytest.MonkeyPatch, statuses: list[str], status: int
) -> None:
    outcomes = [wheel_environments.Outcome("3.11", "2.13.0", each, "") for each in statuses]
    monkeypatch.setattr(wheel_environments, "try_all", lambda *_: outcomes)
    nothing = wheel_environments.argparse.Namespace()
    assert wheel_environments.report(pathlib.Path("lohan.whl"), nothing) == status


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
