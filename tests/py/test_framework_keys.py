"""The keys that axolotl's YAML has for lohan; frameworks are in test_frameworks.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import lohan
import pytest
from lohan.errors import ModelError, UnsupportedError
from lohan.hf import _prefixed, _zo_trainer
from patience import HUNG_S

OF_ARGS = {"lr": "learning_rate"}


def rejected(error: type[Exception], text: str, **given: Any) -> None:
    with pytest.raises(error, match=text):
        _prefixed.check_keys(given, OF_ARGS)


def test_a_configuration_without_a_store_is_rejected() -> None:
    rejected(ModelError, "lohan_store is missing: name a directory", lohan_host_bytes="1GB")


@pytest.mark.parametrize("key", ["lohan_host_byte", "lohan_hostbytes", "Lohan_host_bytes"])
def test_an_unknown_key_is_rejected_by_name(key: str) -> None:
    text = f"{key} is not a setting .* did you mean lohan_host_bytes"
    rejected(ModelError, text, lohan_store="a", **{key: 1})


def test_a_key_of_the_optimizer_names_the_framework_s_own() -> None:
    rejected(ModelError, "set learning_rate instead", lohan_store="a", lohan_lr=1e-3)


@pytest.mark.parametrize("key", ["deepspeed", "fsdp", "fsdp_config"])
def test_a_rival_of_lohan_is_rejected(key: str) -> None:
    text = f"{key} places parameters .* remove either {key} or"
    rejected(UnsupportedError, text, lohan_store="a", **{key: "x"})


def test_every_key_is_a_setting_of_the_callback() -> None:
    found = {"lohan_store": "a", "lohan_method": "mezo", "lohan_eps": 1e-3, "lohan_io": "threads"}
    lohan.TrainerCallback(**_prefixed.settings_of(found))
    of_mezo = {f"lohan_{name}" for name in _zo_trainer.KEYWORDS}
    assert {"lohan_store", "lohan_host_bytes", "lohan_weights"} <= set(_prefixed.keys())
    for key in set(_prefixed.keys()) - of_mezo:
        lohan.TrainerCallback(**{key.removeprefix("lohan_"): None})


def test_keys_without_a_value_are_left_out() -> None:
    assert _prefixed.settings_of({"lohan_store": "a", "lohan_io": None, "x": 1}) == {"store": "a"}


def test_lohan_does_not_import_what_only_frameworks_need() -> None:
    program = (
        "import sys, lohan; lohan.TrainerCallback\n"
        "print(*sorted({'axolotl', 'swift', 'lohan.hf.axolotl', 'lohan.hf.swift',"
        " 'lohan.hf._prefixed'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=True,
    )
    assert done.stdout.split() == []
