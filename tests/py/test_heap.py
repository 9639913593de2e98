"""The heap keeps what torch frees from wrap on, where it is asked to."""

from __future__ import annotations

import os
import platform

import program_server
import pytest

PROGRAM = """
import resource, sys, tempfile
import lohan, torch

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with tempfile.TemporaryDirectory() as folder:
    model = lohan.wrap(torch.nn.Linear(4, 4), store=folder + "/s", heap=sys.argv[1])
    faults()
    print(min(faults() for _ in range(5)))
    model.lohan.close()
"""


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer keeps freed memory"
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap can")
@pytest.mark.parametrize("heap", ["keep", "system"])
def test_a_tensor_made_again_finds_its_pages_where_the_heap_keeps_them(heap: str) -> None:
    run = program_server.run(["-c", PROGRAM, heap])
    assert run.returncode == 0, run.stderr
    huge_pages = 40_000_000 // (2 << 20)
    if heap == "keep":
        assert int(run.stdout) < huge_pages // 2
    else:
        assert int(run.stdout) >= huge_pages
