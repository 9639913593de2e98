"""peft's models: base weights are read in place, never written; adapters are trained."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import lohan
import lora_helper as helper
import pytest
import torch
from kit import host_bytes_min
from lohan.common._inside import inside
from lohan.errors import UnsupportedError
from lora_helper import BATCH, CONFIG, adapters, load, logits, lora, train
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig, OPTModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "04_lora.py"
SETTINGS = {
    "alone": {},
    "least memory": {"host_bytes": "least"},
    "deferred": {"schedule": "deferred"},
    "emulated": {"device": "emu"},
    "recompute": {"activations": "recompute"},
    "no checks": {"verify": False},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a base model, which no test changes."""
    return helper.save_base(tmp_path_factory.mktemp("lora") / "base")


def empty() -> Any:
    with lohan.empty():
        return AutoModelForCausalLM.from_config(OPTConfig(**CONFIG)).to(torch.bfloat16)


def frozen_units(model: Any) -> list[Any]:
    return [unit for unit in inside(model).layout.units if unit.runs]


@pytest.fixture(scope="module")
def expected(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the losses and adapters of training in memory."""
    model = lohan.wrap(lora(load(base)), store=tmp_path_factory.mktemp("memory"), lr=1e-2)
    assert not frozen_units(model)
    losses = train(model)
    found = adapters(model)
    model.lohan.close()
    return losses, found


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_weights_in_place_give_the_bits_of_weights_in_memory(
    settings: dict[str, Any], base: Path, expected: Any, store_dir: Path
) -> None:
    plain = lora(load(base))
    before = logits(plain)
    if settings.get("host_bytes") == "least":
        settings = {"host_bytes": host_bytes_min(plain, store_dir, weights=base)}
    model = lohan.wrap(plain, store=store_dir / "s", weights=base, lr=1e-2, **settings)
    assert frozen_units(model)
    assert all(unit.runs for unit in inside(model).layout.units if not unit.trainable)
    assert torch.equal(logits(model), before)
    losses, values = expected
    assert train(model) == losses
    found = adapters(model)
    assert all(torch.equal(found[name], values[name]) for name in values)
    model.lohan.flush()
    stats = model.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    model.lohan.close()


@pytest.mark.parametrize("nbytes", [2, 8, 40])
def test_tensors_at_any_offset_are_read_in_place(
    nbytes: int, tmp_path: Path, expected: Any, store_dir: Path
) -> None:
    folder = helper.save_base(tmp_path / "base")
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        helper.shift(path, nbytes + 2 * number)
    model = lohan.wrap(lora(load(folder)), store=store_dir, weights=folder, lr=1e-2)
    assert all(unit.runs for unit in inside(model).layout.units if not unit.trainable)
    assert train(model) == expected[0]
    model.lohan.close()


def test_nothing_of_the_base_is_written_or_kept_in_the_store(base: Path, store_dir: Path) -> None:
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(base.iterdir())}
    least = host_bytes_min(lora(empty()), store_dir, weights=base)
    model = lohan.wrap(
        lora(empty()), store=store_dir / "s", weights=base, lr=1e-2, host_bytes=least
    )
    session = inside(model)
    trainable = [unit for unit in session.layout.units if unit.trainable]
    table = session.extents.table
    assert sum(nbytes for nbytes, _ in table) == 4096 + sum(12 * u.elements for u in trainable)
    fds = [fd for fd in os.listdir("/proc/self/fd") if str(base) in _link(fd)]
    assert len(fds) == len(list(base.glob("*.safetensors")))
    for fd in fds:
        flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
        assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY
    train(model, 1)
    session.flush()
    steps, begin = 4, _written()
    train(model, steps)
    session.flush()
    moved = _written() - begin
    stats = session.stats()
    assert stats.bytes == stats.planned_bytes
    states = sum(12 * unit.elements for unit in trainable)
    assert stats.bytes["param_write"] + stats.bytes["state_write"] == states
    frozen = sum(unit.nbytes for unit in session.layout.units if unit.runs)
    assert stats.bytes["param_read"] > frozen // 2, "memory has no room for all"
    assert moved <= steps * (states + stats.bytes["commit_write"]) + (64 << 10)
    session.close()
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(base.iterdir())} == before
    assert not [fd for fd in os.listdir("/proc/self/fd") if str(base) in _link(fd)], "left open"


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _written() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def test_adapters_saved_by_peft_give_the_same_outputs_on_the_plain_base(
    base: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=base, lr=1e-2)
    train(model)
    wanted = logits(model)
    read: list[int] = []
    values = type(inside(model).parameters)
    lend = values.lend
    monkeypatch.setattr(values, "lend", lambda self, index: read.append(index) or lend(self, index))
    model.save_pretrained(store_dir / "adapters")
    monkeypatch.undo()
    units = inside(model).layout.units
    params = inside(model).layout.params
    assert read and all(units[params[index].unit].trainable for index in read)
    saved = load_file(store_dir / "adapters" / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    assert torch.equal(
        logits(PeftModel.from_pretrained(load(base), store_dir / "adapters")), wanted
    )
    model.save_pretrained(store_dir / "more", save_embedding_layers=True)
    assert any("embed_tokens" in k for k in load_file(store_dir / "more/adapter_model.safetensors"))
    model.lohan.close()


def test_adapters_of_an_empty_model_begin_as_peft_s_do(base: Path, store_dir: Path) -> None:
    plain = logits(load(base))
    for init, is_same in ((True, True), ("gaussian", True), (False, False)):
        model = lora(empty(), init_lora_weights=init)
        assert any(p.is_meta for p in model.parameters())
        model = lohan.wrap(model, store=store_dir / f"{init}", weights=base)
        assert torch.equal(logits(model), plain) == is_same
        values = adapters(model)
        for name, value in values.items():
            zero = "lora_B" in name and init is not False
            assert bool(value.any()) != zero and value.isfinite().all(), name
        bound = 64**-0.5  # the bound of kaiming_uniform with a = sqrt(5)
        if init is True:
            assert all(v.abs().max() <= bound for k, v in values.items() if "lora_A" in k)
            assert max(v.abs().max() for k, v in values.items() if "lora_A" in k) > 0.8 * bound
        model.lohan.close()


def test_dora_begins_with_the_norms_of_the_base_in_the_files(base: Path, store_dir: Path) -> None:
    plain = lora(load(base), use_dora=True)
    model = lohan.wrap(lora(empty(), use_dora=True), store=store_dir / "s", weights=base)
    state, count = model.state_dict(), 0
    for name, value in plain.state_dict().items():
        if "lora_" in name:
            assert torch.equal(state[name], value), name
            count += "magnitude" in name
    assert count == 2 * CONFIG["num_hidden_layers"]
    model.lohan.close()


def test_trained_copies_of_modules_get_the_base_s_values(base: Path, store_dir: Path) -> None:
    settings = {"modules_to_save": ["fc2"], "target_modules": ["q_proj", "fc1"]}
    plain = lora(load(base), **settings)
    wanted = logits(plain)
    model = lohan.wrap(lora(empty(), **settings), store=store_dir, weights=base, lr=1e-2)
    names = [p.name for p in inside(model).layout.params if "modules_to_save" in p.name]
    assert len(names) == 2 * CONFIG["num_hidden_layers"]
    assert torch.equal(logits(model), wanted)
    train(model, 1)
    model.lohan.close()


def test_a_bare_model_s_files_are_found_with_the_prefix_and_without(
    base: Path, tmp_path: Path, store_dir: Path
) -> None:
    bare = OPTModel.from_pretrained(base, dtype=torch.bfloat16)
    bare.save_pretrained(tmp_path / "bare")
    assert not any(k.startswith("model.") for k in load_file(tmp_path / "bare/model.safetensors"))
    wanted = logits(load(base))
    model = lohan.wrap(lora(empty()), store=store_dir / "a", weights=tmp_path / "bare")
    assert torch.equal(logits(model), wanted)
    assert all(unit.runs for unit in inside(model).layout.units if not unit.trainable)
    model.lohan.close()
    with lohan.empty():
        again = OPTModel(OPTConfig(**CONFIG)).to(torch.bfloat16)
    again.requires_grad_(False)
    again = lohan.wrap(again, store=store_dir / "b", weights=base)
    with torch.no_grad():
        states = again.eval()(input_ids=BATCH).last_hidden_state
        assert torch.equal(states, bare.eval()(input_ids=BATCH).last_hidden_state)
    again.lohan.close()


def test_a_reference_model_is_the_one_without_adapters(base: Path, store_dir: Path) -> None:
    model = lohan.wrap(lora(empty()), store=store_dir, weights=base, lr=1e-2)
    train(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(load(base)))
    assert not torch.equal(logits(model), logits(load(base)))
    model.eval()
    out = model.generate(input_ids=BATCH[:, :4], max_new_tokens=3, do_sample=False)
    assert out.shape == (2, 7)
    model.train()
    train(model, 1)
    model.lohan.close()


def test_a_run_continues_and_can_be_merged(base: Path, expected: Any, store_dir: Path) -> None:
    model = lohan.wrap(lora(load(base)), store=store_dir, weights=base, lr=1e-2)
    losses = train(model, 1)
    model.lohan.close()
    model = lohan.wrap(lora(empty()), store=store_dir, resume=True)
    assert frozen_units(model)
    losses += train(model, 2)
    assert losses == expected[0]
    wanted = logits(model)
    model.lohan.close()
    plain = lohan.unwrap(model)
    assert torch.equal(logits(plain), wanted)
    merged = plain.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert (logits(merged) - wanted).abs().max() < 0.1 * wanted.abs().max()


class Params4bit(nn.Parameter):
    """A parameter that looks like bitsandbytes'."""


def test_bases_that_bitsandbytes_quantized_are_refused_by_name(store_dir: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    packed = Params4bit(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    model[0].weight = packed
    with pytest.raises(
        UnsupportedError, match=r"'0\.weight' is quantized by bitsandbytes.*bfloat16"
    ):
        lohan.wrap(model, store=store_dir / "a")
    model[0].weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    model[0].weight.SCB = torch.ones(8)
    with pytest.raises(UnsupportedError, match="bitsandbytes"):
        lohan.wrap(model, store=store_dir / "b")


def _steps(source: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    capsys.readouterr()
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "04_lora.py", "exec"), space)
    space["main"]()
    said = capsys.readouterr().out
    assert "the same outputs" in said
    return [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step")]


def test_the_example_differs_from_a_script_of_peft_s_in_two_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    plain = re.sub(r"^import lohan\n", "", source, count=1, flags=re.M)
    made = r"lohan\.wrap\(model, weights=[^)]*, lr=(\S+)\)\.optimizer$"
    adamw = r"torch.optim.AdamW(model.parameters(), lr=\1)"
    plain = re.sub(made, adamw, plain, count=1, flags=re.M)
    assert "lohan." not in plain.split("def make_base")[1]
    diff = difflib.ndiff(plain.splitlines(), source.splitlines())
    assert sum(line.startswith("+ ") for line in diff) == 2
    ours, theirs = _steps(source, capsys), _steps(plain, capsys)
    assert len(ours) == 8 and ours[0] == theirs[0]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.01
    assert ours[-1] < ours[0] - 0.2
