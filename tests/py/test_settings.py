"""The arguments of wrap: sizes with units, and keywords that are almost right."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
from typing import Any

import crash_worker
import lohan
import pytest
from lohan.common import _memory, _setting, _units
from lohan.common._inside import inside
from lohan.errors import BudgetError, DeviceMemoryError, ModelError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import doc_tables  # noqa: E402  (its folder has just been named)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16GB", 16_000_000_000),
        ("16GiB", 16 << 30),
        (" 1.5 GB ", 1_500_000_000),
        ("500MB", 500_000_000),
        ("2e9", 2_000_000_000),
        ("16_000", 16_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert lohan.Config(host_bytes=text).host_bytes == nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["16G", "sixteen", "", "-1GB", "16 GB/s", "1e30"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ModelError, match=r'host_bytes .*"16GB" .*"16GiB"'):
        lohan.Config(host_bytes=text)  # type: ignore[arg-type]


def test_every_size_of_config_and_the_emulated_links_take_strings() -> None:
    names = [name for name in vars(lohan.Config()) if name.endswith("_bytes")]
    assert len(names) >= 6
    for name in names:
        given: dict[str, Any] = {name: "1MiB"}
        assert getattr(lohan.Config(**given), name) == 1 << 20
    links: Any = ("1GB/s", 2)
    assert lohan.Config(emu_bytes_per_s=links).emu_bytes_per_s == (10**9, 2)
    rate: Any = "2GB/s"
    assert lohan.Config(emu_alloc_bytes_per_s=rate).emu_alloc_bytes_per_s == 2 * 10**9


def test_wrap_takes_a_string_and_holds_it(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(crash_worker.build(), store=store_dir / "s", host_bytes="64MiB")
    assert inside(model).config.host_bytes == 64 << 20
    assert inside(model).budget["host_bytes"] <= 64 << 20
    model.lohan.close()


def machine(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_limit_of_memory_is_the_machines_or_that_of_a_control_group(
    tmp_path: pathlib.Path,
) -> None:
    whole, whose = _memory.limit_bytes(tmp_path)
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert "this machine's memory" in whose
    two = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": "3000000\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
    }
    limit, whose = _memory.limit_bytes(machine(tmp_path / "v2", two))
    assert limit == 3_000_000 and "control group" in whose
    one = {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2000000\n",
    }
    assert _memory.limit_bytes(machine(tmp_path / "v1", one))[0] == 2_000_000


def test_a_budget_above_the_memory_that_there_is_is_refused_with_both_numbers(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapped(host_bytes: Any) -> Any:
        return lohan.wrap(crash_worker.build(), store=store_dir / "s", host_bytes=host_bytes)

    limit = _memory.limit_bytes()[0]
    with pytest.raises(BudgetError, match=rf"^host_bytes {1 << 50} \(1\.13e\+03 TB\).*{limit}"):
        wrapped(1 << 50)
    monkeypatch.setattr(_memory, "limit_bytes", lambda: (64_000_000, "the limit of a group"))
    with pytest.raises(BudgetError, match=r"64000001 .*64000000 bytes.*the limit of a group"):
        wrapped(64_000_001)
    assert not (store_dir / "s").exists()
    wrapped(64_000_000).lohan.close()


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("hostbytes", "host_bytes"),
        ("host_byte", "host_bytes"),
        ("wieght_decay", "weight_decay"),
        ("max_gradnorm", "max_grad_norm"),
        ("learning_rate", "lr"),
        ("gradient_accumulation", "gradient_accumulation_steps"),
        ("comit_every", "commit_every"),
    ],
)
def test_a_keyword_that_is_nearly_right_is_named_with_the_right_one(typo: str, meant: str) -> None:
    given: dict[str, Any] = {typo: 1}
    with pytest.raises(TypeError, match=rf"^{typo}= is not a keyword.*did you mean {meant}=\?$"):
        lohan.wrap(crash_worker.build(), **given)


def test_a_keyword_that_is_like_none_is_told_where_they_are() -> None:
    with pytest.raises(ModelError, match=r"help\(lohan.wrap\)"):
        lohan.wrap(crash_worker.build(), zzz=1)


def test_a_device_too_small_names_what_would_do(store_dir: pathlib.Path) -> None:
    def wrapped(**settings: Any) -> Any:
        store = store_dir / str(len(list(store_dir.iterdir())))
        return lohan.wrap(crash_worker.build(), store=store, device="emu", **settings)

    with pytest.raises(
        BudgetError, match=r"try device_bytes=\d+, debug=lohan\.Debug\(device_param_bytes=\d+\)"
    ) as caught:
        wrapped(device_bytes=1)
    said = str(caught.value).rsplit("try ", 1)[1]
    target = {name: int(text) for name, text in re.findall(r"(device_\w+)=(\d+)", said)}
    model = wrapped(**target)
    model.lohan.close()
    with pytest.raises(BudgetError, match="device_param_bytes"):
        wrapped(**{**target, "device_param_bytes": target["device_param_bytes"] - 1})


def test_a_device_that_fills_names_how_much_is_enough(store_dir: pathlib.Path) -> None:
    import torch

    def step(store: str, nbytes: int) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        wrapped = lohan.wrap(model, store=store_dir / store, device="emu", device_bytes=nbytes)
        with contextlib.closing(wrapped.lohan):
            wrapped(torch.ones(512, 64)).tanh().square().mean().backward()
            wrapped.optimizer.step()

    with pytest.raises(DeviceMemoryError, match=r"raise it to at least \d+") as caught:
        step("small", 300_000)
    assert "activation_offload_bytes=" in str(caught.value)
    step("large", 16 * int(str(caught.value).split("at least ")[1].split(",")[0].split()[0]))


def test_units_of_rates_are_not_those_of_sizes() -> None:
    with pytest.raises(ModelError, match="16GB/s"):
        _units.size("emu_bytes_per_s", "5GB", _units.RATES)


def test_the_tables_of_settings_are_made_from_what_is_declared() -> None:
    text = doc_tables.SETTINGS.read_text(encoding="utf-8")
    assert doc_tables.settings_page(text) == text, "run tools/doc_tables.py --write"
    fields = {field.name for field in dataclasses.fields(lohan.Config)}
    assert fields == set(_setting.declared(lohan.Config)), "a setting without a declaration"


CHECKED = [
    name
    for name, said in _setting.declared(lohan.Config).items()
    if said.least is not None or _setting.choices(lohan.Config, name)
]


@pytest.mark.parametrize("name", CHECKED)
def test_a_value_outside_of_what_is_declared_is_refused(name: str) -> None:
    said = _setting.declared(lohan.Config)[name]
    choices = _setting.choices(lohan.Config, name)
    wrong: list[Any] = [*([said.least - 1, True] if said.least is not None else []), "neither", []]
    wrong += [said.most + 1] if said.most is not None else []
    for value in wrong:
        if value == "neither" and name.endswith("_bytes"):
            continue  # Config itself reads sizes
        with pytest.raises(ModelError, match=rf"^{said.public or name} .* must be ") as caught:
            _setting.check(lohan.Config(**{name: value}))
        shown = (
            (False, True) if said.flag else [each for each in choices if each not in said.former]
        )
        assert all(repr(choice) in str(caught.value) for choice in shown)
    right: list[Any] = [*choices, *([said.least] if said.least is not None else [])]
    right += [said.least + 0.5] if name in ("ema", "peer_timeout_s") else []
    for value in right:
        _setting.check(lohan.Config(**{name: value}))
