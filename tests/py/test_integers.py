"""Frozen bases in GPTQ's, AWQ's and compressed-tensors' forms: integers with zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from integers_helper import FORMS, Integers
from kit import host_bytes_min
from lohan.common._inside import inside
from lohan.errors import ModelError
from lora_helper import adapters, logits, lora, train
from quantize_helper import CONFIG, save
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

slow = pytest.mark.slow
PROJ = "model.layers.1.mlp.up_proj"
SLOW = ("gptq", "gptq, 8 bits", "words, 8 bits, act-order")
BASES = ("gptq, act-order", "awq", "words", *(pytest.param(name, marks=slow) for name in SLOW))


def empty(dtype: torch.dtype = torch.bfloat16) -> Any:
    with lohan.empty():
        return AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=dtype)


@pytest.fixture(scope="module", params=BASES)
def base(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a quantized base, and the training on one decoded in memory."""
    packed, plain = save(tmp_path_factory.mktemp("base"), FORMS[request.param])
    model = lohan.wrap(
        lora(empty()), store=tmp_path_factory.mktemp("s"), weights=plain, lr=1e-2, frozen="copy"
    )
    expected = logits(model), train(model, 4), adapters(model)
    model.lohan.close()
    return packed, plain, expected


@pytest.mark.parametrize("settings", [{}, {"host_bytes": "least"}, {"device": "emu"}], ids=str)
def test_a_base_of_integers_gives_the_bits_of_the_decoded_one(
    settings: dict[str, Any], base: Any, store_dir: Path, request: Any
) -> None:
    folder, _, (before, losses, values) = base
    if "host_bytes" in settings:
        settings = {"host_bytes": host_bytes_min(lora(empty()), store_dir, weights=folder)}
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder, lr=1e-2, **settings)
    units = [unit for unit in inside(model).layout.units if unit.packs]
    assert len(units) == 3
    # Reads are whole pages: beside its own bytes, a tensor of the files costs one at most. Of four
    # bits that is less than bfloat16's bytes even in layers as small as these.
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    stored = {name: tensor.nbytes for file in files for name, tensor in file.items()}
    for index, unit in enumerate(units):
        sizes = [size for name, size in stored.items() if f".layers.{index}." in name]
        assert len(sizes) > 20
        assert unit.read_bytes <= sum(sizes) + 4096 * len(sizes)
        if "8 bits" not in request.node.name:
            assert unit.read_bytes < 0.8 * sum(2 * param.count for param in unit.params)
    assert torch.equal(logits(model), before)
    assert train(model, 4) == losses
    found = adapters(model)
    assert all(torch.equal(found[name], values[name]) for name in values)
    stats = model.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    model.lohan.close()


def test_the_loss_is_that_of_torch_with_the_decoded_weights(base: Any, store_dir: Path) -> None:
    folder, plain, _ = base
    torch.manual_seed(0)
    theirs = lora(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16))
    model = lohan.wrap(lora(empty()), store=store_dir, weights=folder, lr=1e-2)
    assert torch.equal(logits(model), logits(theirs))
    model.lohan.close()


def test_a_run_is_resumed_and_its_adapter_is_saved(
    base: Any, tmp_path: Path, store_dir: Path
) -> None:
    folder, _, (_, losses, _) = base
    model = lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder, lr=1e-2)
    assert train(model, 2) == losses[:2]
    model.save_pretrained(tmp_path / "adapter")
    assert any(
        "lora_A" in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors")
    )
    state = model.state_dict()
    model.lohan.close()
    again = lohan.wrap(lora(empty()), store=store_dir / "s", resume=True, lr=1e-2)
    assert train(again, 2) == losses[2:]
    again.lohan.close()
    assert lohan.verify(store_dir / "s").is_whole
    lohan.export(store_dir / "s", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    frozen = [name for name in found if "lora" not in name]
    assert len(frozen) > 20 and all(torch.equal(found[name], state[name]) for name in frozen)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(d, marks=slow) for d in (torch.float32, torch.float16))],
    ids=str,
)
def test_each_form_is_decoded_to_the_values_of_its_definition(
    form: Integers, dtype: torch.dtype, tmp_path: Path, store_dir: Path
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(200, 288, dtype=dtype)
    made, decoded = form("0.weight", weight)
    save_file(made, tmp_path / "model.safetensors")
    said = json.dumps({"quantization_config": form.quantization})
    (tmp_path / "config.json").write_text(said)
    model = nn.Sequential(nn.Linear(288, 200, bias=False, dtype=dtype).requires_grad_(False))
    model = lohan.wrap(model, store=store_dir / "s", weights=tmp_path)
    assert any(unit.packs for unit in inside(model).layout.units)
    assert torch.equal(model.state_dict()["0.weight"], decoded)
    layout = inside(model).layout
    pieces = [*layout.in_place.pieces(layout, layout.params[0], 1022)]
    assert torch.equal(torch.cat(pieces), decoded.view(-1))
    model.lohan.close()


def test_older_folders_have_their_settings_in_a_file_of_their_own(
    tmp_path: Path, store_dir: Path
) -> None:
    for method, name in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        form = FORMS[method]
        folder, plain = save(tmp_path / method, form)
        said = dict(form.quantization)
        del said["quant_method"]
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / name).write_text(json.dumps(said))
        model = lohan.wrap(lora(empty()), store=store_dir / method, weights=folder)
        theirs = lora(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16))
        assert torch.equal(logits(model), logits(theirs))
        model.lohan.close()


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "3 bits": ("gptq", {}, {f"{PROJ}.qweight": torch.zeros(9, 224).int()}, "have 3 bits, and 4"),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}, {}, "'marlin'.*repacked for a kernel"),
    "older marlin": ("gptq", {"is_marlin_format": True}, {}, "'marlin'"),
    "gemv": ("awq", {"version": "GEMV"}, {}, "version is 'gemv', and only 'gemm'"),
    "no method": ("gptq", {"quant_method": "exl2"}, {}, "quant_method is 'exl2'"),
    "no zeros": ("gptq", {}, {f"{PROJ}.qzeros": None}, "do not have .*up_proj.qzeros"),
    "no scales": ("awq", {}, {f"{PROJ}.scales": None}, "do not have .*up_proj.scales"),
    "zeros of another shape": (
        "gptq",
        {},
        {f"{PROJ}.qzeros": torch.zeros(3, 24).int()},
        r"qzeros is \[3, 24\], not \[3, 28\]",
    ),
    "scales of another shape": (
        "awq",
        {},
        {f"{PROJ}.scales": torch.ones(3, 96).half()},
        "scales is",
    ),
    "values of another shape": (
        "awq",
        {},
        {f"{PROJ}.qweight": torch.zeros(96, 20).int()},
        "qweight is",
    ),
    "values of another dtype": ("gptq", {}, {f"{PROJ}.qweight": torch.zeros(12, 224)}, "dtype F32"),
    "columns of unknown groups": (
        "gptq",
        {},
        {f"{PROJ}.g_idx": torch.arange(96).int()},
        "values from 0 to 95, but there are 3",
    ),
    "too few columns": ("gptq", {}, {f"{PROJ}.g_idx": torch.zeros(8).int()}, "8 elements, not 96"),
    "words of 3 bits": (
        "words",
        {},
        {f"{PROJ}.weight_packed": torch.zeros(224, 9).int()},
        r"packed as \[224, 9\].*4 or 8",
    ),
    "words of another shape": (
        "words",
        {},
        {f"{PROJ}.weight_shape": torch.tensor([224, 90])},
        r"weight_shape is \[224, 90\], not \[224, 96\]",
    ),
    "scales of other rows": (
        "words",
        {},
        {f"{PROJ}.weight_scale": torch.ones(1).bfloat16()},
        r"scales are \[1\], not one row",
    ),
    "zeros that are not packed": (
        "words",
        {},
        {f"{PROJ}.weight_zero_point": torch.zeros(224, 3).to(torch.int8)},
        "dtype I8, not I32",
    ),
    "zeros of other rows": (
        "words",
        {},
        {f"{PROJ}.weight_zero_point": torch.zeros(224, 3).int()},
        r"zero points are \[224, 3\]",
    ),
    "words of unknown groups": (
        "words, 8 bits, act-order",
        {},
        {f"{PROJ}.weight_g_idx": torch.arange(96).int()},
        "values from 0 to 95, but there are 3",
    ),
    "no shape": ("words", {}, {f"{PROJ}.weight_shape": None}, "do not have .*weight_shape"),
    "AWQ with groups": ("awq", {}, {f"{PROJ}.g_idx": torch.zeros(96).int()}, "actorder"),
}


@pytest.mark.parametrize(
    ("form", "said", "changed", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_what_cannot_be_decoded_is_refused_by_name(
    form: str,
    said: dict[str, Any],
    changed: dict[str, Any],
    message: str,
    tmp_path: Path,
    store_dir: Path,
) -> None:
    folder, _ = save(tmp_path, FORMS[form], **changed)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(said)
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        lohan.wrap(lora(empty()), store=store_dir / "s", weights=folder)
    assert "proj" in str(caught.value)
    assert not (store_dir / "s").exists()


def test_weights_that_a_module_keeps_turned_are_refused(tmp_path: Path, store_dir: Path) -> None:
    made, _ = FORMS["gptq"]("0.weight", torch.randn(64, 64))
    save_file({**made, "0.bias": torch.zeros(64)}, tmp_path / "model.safetensors")
    said = json.dumps({"quantization_config": FORMS["gptq"].quantization})
    (tmp_path / "config.json").write_text(said)
    model = nn.Sequential(Conv1D(64, 64)).requires_grad_(False)
    with pytest.raises(ModelError, match=r"0\.weight.*keeps the weight as \[in, out\]"):
        lohan.wrap(model, store=store_dir / "s", weights=tmp_path)
