"""The page of `lohan watch --html`: what it contains, its size, and what a browser makes of it."""

from __future__ import annotations

import errno
import itertools
import math
import os
import pathlib
import shutil
import subprocess
import time

import pytest
from click.testing import CliRunner, Result
from lohan.cli import main
from lohan.commands import _watch, _watch_page
from lohan.store._steps import Reader, Writer
from patience import HUNG_S, slowness
from watch_helper import UUID, record, write


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["watch", *map(str, words)])


def test_a_page_of_ten_thousand_steps_is_small_and_quickly_made(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [(1, range(1, 10_001))])
    with Reader([str(tmp_path)]) as reader:
        began = time.monotonic()
        shown = _watch.Run(reader)
        shown.refresh()
        text = _watch_page.page(shown)
        taken = time.monotonic() - began
    assert len(text) < 500_000
    assert taken < 2 * slowness(), taken
    assert "10,000 steps, up to 10,000" in text and '"35 to 68"' in text
    assert "&lt;b&gt;cpu&lt;/b&gt;" in text and "<b>cpu</b>" not in text
    for forbidden in ("http://", "https://", "src=", "@import", "url("):
        assert forbidden not in text
    assert text.count("<figure>") == 6 and text.count("<tr>") < 60


def test_a_bucket_has_the_mean_and_the_range_of_its_steps() -> None:
    values = [float(each) for each in range(10)]
    values[3] = math.nan
    found = _watch_page.buckets_of(values, 4)
    assert found == [(1.0, 0.0, 2.0), (4.5, 4.0, 5.0), (7.0, 6.0, 8.0), (9.0, 9.0, 9.0)]
    assert math.isnan(_watch_page.buckets_of([math.nan, math.inf], 1)[0].mean)
    assert _watch_page.buckets_of([], 4) == []


@pytest.mark.parametrize(
    ("low", "high"),
    [
        *((0, 1), (2.1, 5.3), (0, 0), (-3, 1e-9), (1e9, 1e9), (0, 7.3e12), (-1, -1)),
        *((0, 5e-324), (1e99, math.nextafter(1e99, math.inf)), (-1e99, 1e99)),
    ],
)
def test_ticks_are_round_and_cover_what_is_shown(low: float, high: float) -> None:
    found = _watch_page.ticks_of(low, high)
    assert 2 <= len(found) <= 8 and found[0] <= low and found[-1] >= high
    assert all(a < b for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324, 1e99])
def test_a_page_is_made_of_extreme_numbers(value: float, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "s", [(1, range(1, 601))])  # each bucket has two steps
    writer = Writer([str(tmp_path / "s")], UUID, is_resumed=True)
    for step in range(1, 601):
        names = ("seconds", "loss", "tokens", "written_bytes", "ssd")
        writer.put(record(step, **dict.fromkeys(names, value)))
    writer.close()
    page = tmp_path / "page.html"
    answer = run(tmp_path / "s", "--once", "--html", page)
    assert answer.exit_code == 0, answer.exception
    assert "<h1>/nvme0/run</h1>" in page.read_text()
    assert run(tmp_path / "s", "--once").exit_code == 0


def test_the_page_is_replaced_as_a_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, page = tmp_path / "s", tmp_path / "page.html"
    write(store, [(1, range(1, 4))])
    assert run(store, "--html", page).exit_code == 0
    before, old = page.read_text(), page.open()
    write(store, [(1, range(1, 6))])
    assert run(store, "--html", page).exit_code == 0
    assert old.read() == before != page.read_text()
    old.close()
    before = page.read_text()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        answer = run(store, "--html", page)
    assert answer.exit_code == 1 and "No space left" in answer.output
    assert page.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "s"]


def _dump(page: pathlib.Path, folder: pathlib.Path) -> str:
    """Return the page as a browser has built it, after taking a screenshot."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1240,1300"]
    shot = f"--screenshot={folder / 'page.png'}"
    for more in (shot, "--dump-dom"):
        done = subprocess.run(
            [*command, more, page.as_uri()], capture_output=True, text=True, timeout=HUNG_S
        )
        assert done.returncode == 0, done.stderr
    assert (folder / "page.png").stat().st_size > 10_000
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 10_000])
def test_a_browser_shows_the_page(count: int, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "s", [(1, range(1, count + 1))])
    page = tmp_path / "page.html"
    assert run(tmp_path / "s", "--html", page).exit_code == 0
    dom = _dump(page, tmp_path)
    assert "data-error" not in dom, dom[:500]
    assert f'data-charts="{6 if count else 0}"' in dom
    assert dom.count("<polyline") == (9 if count else 0)
    assert f"closed after step {count:,}" in dom
