"""The late device itself: it is late, keeps the order of streams, and has memory of its own."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import late
import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent
COUNT = 1000
TOUCH = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import late
late.load()
import torch
x = torch.ones(4, device="cuda")
print(float(x.sum()), flush=True)
ctypes.string_at(x.data_ptr(), 4)
print("not reached")
"""


def test_the_host_runs_ahead_of_what_is_executed(device: late.Late) -> None:
    x = torch.ones(COUNT, device="cuda")
    device.drain()
    device.allow(0)
    before = device.counts
    for _ in range(50):
        x = x + 1
    assert device.counts.enqueued - before.enqueued == 50
    assert device.counts.executed == before.executed
    assert device.counts.waits == before.waits
    device.allow(-1)
    assert float(x.sum()) == 51 * COUNT
    assert device.counts.executed == device.counts.enqueued


def test_a_cpu_that_touches_the_devices_memory_is_killed(device: late.Late) -> None:
    words = [sys.executable, "-c", TOUCH, str(HERE)]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert answer.stdout == "4.0\n"
    assert answer.returncode == -signal.SIGSEGV, answer.stderr


def test_streams_come_from_a_pool_as_torchs_do(device: late.Late) -> None:
    streams = [torch.cuda.Stream() for _ in range(100)]
    assert len({stream.cuda_stream for stream in streams}) == 16
    assert 0 not in {stream.cuda_stream for stream in streams}


def test_freed_memory_is_reused_at_once_and_has_no_values(device: late.Late) -> None:
    count = 123_457  # no other free block has this size
    device.allow(0)
    x = torch.ones(count, device="cuda")
    address = x.data_ptr()
    kept = x + 1
    del x
    y = torch.empty(count, device="cuda")
    is_reused = y.data_ptr() == address
    device.allow(-1)
    assert is_reused
    assert bool(y.isnan().all())
    assert float(kept.sum()) == 2 * count


def test_memory_that_another_stream_uses_is_reused_only_after_that(device: late.Late) -> None:
    count = 234_567  # no other free block has this size
    side = torch.cuda.Stream()
    x = torch.ones(count, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with device.held(side.number):
        with torch.cuda.stream(side):
            y = x + 1
        x.record_stream(torch.Stream(stream_id=side.number, device_index=0, device_type=1))
        address = x.data_ptr()
        del x
        x = torch.zeros(count, device="cuda")
        is_reused = x.data_ptr() == address
    assert is_reused
    side.synchronize()
    assert bool((y.cpu() == 2).all())


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_stream_that_is_not_joined_is_seen(is_joined: bool, device: late.Late) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(COUNT, device="cuda")
    device.drain()
    with device.held(side.number):
        with torch.cuda.stream(side):
            y = x + 1
        if is_joined:
            torch.cuda.current_stream().wait_stream(side)
        z = y * 2
        if not is_joined:
            torch.cuda.current_stream().synchronize()
    assert bool((z == 4).all()) is is_joined


def test_waits_are_counted_by_their_places(device: late.Late) -> None:
    x = torch.ones(3, device="cuda")
    with device.counted() as waits:
        float(x.sum())
        x.cpu()
        x.to("cuda")
        torch.cuda.synchronize()
        torch.equal(x, x)
    here = f"in {pathlib.Path(__file__).name}:test_waits_are_counted_by_their_places"
    assert waits.pop(f"device {here}") >= 1
    assert waits == {
        f"a value {here}": 1,
        f"a copy to main memory {here}": 1,
        f"aten::equal {here}": 1,
    }


def test_random_numbers_repeat_and_do_not_depend_on_when_they_are_made(device: late.Late) -> None:
    def made() -> list[torch.Tensor]:
        torch.manual_seed(3)
        first = torch.nn.functional.dropout(torch.ones(COUNT, device="cuda"), 0.5)
        return [first, torch.randn(COUNT, device="cuda"), torch.randint(0, 9, (9,), device="cuda")]

    once = made()
    device.tune("copies last", delay_us=50, seed=1)
    state = torch.cuda.get_rng_state()
    again = made()
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert 0.4 < float((once[0] == 0).float().mean()) < 0.6
    assert not torch.equal(torch.randn(COUNT, device="cuda"), once[1])


def test_autocast_casts_on_the_device(device: late.Late) -> None:
    linear = torch.nn.Linear(8, 8).cuda()
    x = torch.randn(4, 8).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    expected = torch.nn.functional.linear(x.bfloat16(), linear.weight.bfloat16())
    assert torch.allclose(y, expected + linear.bias.bfloat16(), atol=0.1)


def test_tensors_of_main_memory_are_refused(device: late.Late) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="cuda") @ torch.ones(3)
