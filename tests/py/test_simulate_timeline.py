"""The timeline of a simulated step: what keeps each resource busy, and when."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from lohan.planning import _machines, _plan, _simulate_timeline
from lohan.simulate import Options, simulate, simulate_traced

MACHINE = _machines.change(_machines.load("gaming-pc"), ["ssd_count=2", "host_bytes=24 GB"])


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (8, Options("lohan")),
        (32, Options("g10", schedule="deferred")),
        (32, Options("zero", schedule="serial")),
        (8, Options("auto")),
    ],
    ids=str,
)
def test_a_resource_is_as_busy_in_its_parts_as_in_the_step(batch: int, options: Options) -> None:
    model = _plan.named_model("opt-1.3b", batch=batch)
    step, timeline = simulate_traced(model, MACHINE, options)
    assert step == simulate(model, MACHINE, options)
    # The share of the step without its commit.
    length = timeline.edges_s[-1] * 1e9 / step.step_ns
    for name, parts in timeline.busy.items():
        busy = sum(parts.values())
        assert busy.mean() * length == pytest.approx(step.resources[name].busy_share, abs=0.02), (
            name
        )
        assert busy.max() < 1.02, name


def test_forward_comes_first_and_each_kind_of_work_is_where_it_belongs() -> None:
    model = _plan.named_model("opt-1.3b", batch=32)
    step, timeline = simulate_traced(model, MACHINE, Options("g10", schedule="serial"))
    middles = (timeline.edges_s[1:] + timeline.edges_s[:-1]) / 2
    width = timeline.edges_s[1]
    early = middles < timeline.forward_s - width
    late = middles > timeline.forward_s + width
    close_s = (step.forward_ns + step.backward_ns) / 1e9
    open_, closed = middles < close_s - width, middles > close_s + width
    busy = timeline.busy
    assert busy["gpu"]["forward"][late].max() == 0 < busy["gpu"]["forward"][early].mean()
    assert busy["gpu"]["backward"][early].max() == 0 < busy["gpu"]["backward"][late].mean()
    assert busy["link_out"]["gradients"][early].max() == 0
    out = busy["link_out"]["activations"]
    assert out[closed].max() == 0 and out[early].mean() > 2 * out[late].mean()
    assert busy["link_in"]["activations"][early].max() == 0
    assert busy["cpu"]["updates"][open_].max() == 0 < busy["cpu"]["updates"][closed].mean()


def test_work_is_spread_evenly_over_its_time() -> None:
    begins, ends = np.array([0.0, 5.0, 10.0]), np.array([10.0, 10.0, 10.0])
    shares = _simulate_timeline._share(begins, ends, np.array([5.0, 2.0, 9.0]), np.arange(0, 25, 5))
    assert shares == pytest.approx([0.5, 0.9, 0.0, 0.0])
