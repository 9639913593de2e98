"""tests/isa.py: which tests it selects, its configurations, its table."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import isa  # noqa: E402  (its folder has just been named)

COMPARES = "def check(a, b):\n    torch.testing.assert_close(a, b)\n"


def test_a_file_is_numeric_if_it_or_a_helper_uses_torch_and_compares(
    tmp_path: pathlib.Path,
) -> None:
    files = {
        "test_itself.py": "import torch\n" + COMPARES,
        "test_by_helpers.py": "def test_it():\n    from outer_helper import check\n",
        "outer_helper.py": "import inner_helper\n" + COMPARES,
        "inner_helper.py": "import outer_helper\nfrom torch import nn\n",
        "test_without_torch.py": COMPARES,
        "test_without_comparison.py": "import torch\nimport inner\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = [pathlib.Path(path).name for path in isa.numeric_files(tmp_path)]
    assert found == ["test_by_helpers.py", "test_itself.py"]


def test_files_that_compare_with_torch_are_selected_and_those_of_the_build_are_not() -> None:
    found = {pathlib.Path(path).stem for path in isa.numeric_files(isa.PY_FOLDER)}
    assert {"test_losses", "test_numerics", "test_bits", "test_quantize"} <= found
    assert not {"test_driver", "test_wheel", "test_matrix"} & found


def test_every_header_of_kernels_has_a_selected_c_test() -> None:
    texts = [(isa.C_FOLDER / f"{name}.c").read_text() for name in isa.c_names(isa.C_FOLDER)]
    headers = ("adam", "cast", "norm", "sum", "unpack", "zo")
    for header in [f"compute/{name}.h" for name in headers] + ["base/crc32c.h"]:
        assert any(f'"{header}"' in text for text in texts), header
    assert "test_ring" not in isa.c_names(isa.C_FOLDER)


def test_configurations_are_every_limit_in_c_and_every_limit_with_every_thread_count() -> None:
    every = isa.configurations(["c", "py"], list(isa.FLAGS), isa.THREAD_COUNTS)
    names = [configuration.name for configuration in every]
    c_tests = ["c sse2", "c sse42", "c avx2", "c avx512"]
    limits = ("sse42", "avx2", "avx512")
    assert names == c_tests + [f"py {name}, threads: {n}" for name in limits for n in (1, 2)]
    assert isa.Configuration("py", "sse42", 1).environment() == [
        "LOHAN_MAX_CPU_ISA=sse42",
        "ATEN_CPU_CAPABILITY=default",
        "ONEDNN_MAX_CPU_ISA=SSE41",
        "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
        "OMP_NUM_THREADS=1",
        "LOHAN_TEST_THREADS=1",
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_the_number_of_threads_is_that_of_the_environment(
    count: int, tmp_path: pathlib.Path
) -> None:
    test = "import torch\n\ndef test_it():\n"
    test += f"    assert torch.get_num_threads() == {count}\n"
    (tmp_path / "test_it.py").write_text(test)
    # The option names this folder's conftest.py, which the test's own folder lacks.
    words = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-p", "conftest"]
    variables = [f"LOHAN_TEST_THREADS={count}", f"PYTHONPATH={isa.PY_FOLDER}"]
    answer = subprocess.run(
        ["env", *variables, sys.executable, *words, "-c", "/dev/null", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_a_processor_lacks_what_its_flags_do_not_name() -> None:
    cpuinfo = "processor : 0\nflags\t\t: fpu sse2 sse4_2 pclmulqdq avx2 fma f16c\n"
    assert isa.lacking("avx2", cpuinfo) == set()
    assert isa.lacking("avx512", cpuinfo) == {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    assert "sse2" in isa.lacking("avx2", "Features : asimd\n")


def test_a_failure_fails_the_run_and_so_does_a_run_of_nothing() -> None:
    rows = [isa.Row("c sse2", isa.PASSED, 20, (), 4.2), isa.Row("c avx512", isa.SKIPPED)]
    failed = isa.Row("py avx2, threads: 2", isa.FAILED, 900, ("test_a.py::test_b",), 61.0)
    assert isa.status_of(rows) == 0
    assert isa.status_of([*rows, failed]) == 1
    assert isa.status_of(rows[1:]) == 1
    assert isa.table([*rows, failed]).splitlines()[1:] == [
        "c sse2                  passed       20       0        4",
        "c avx512                skipped       0       0        0",
        "py avx2, threads: 2     failed      900       1       61",
        "    test_a.py::test_b",
    ]
