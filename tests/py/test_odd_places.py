"""Paths, working directories and locales that few people use have errors, or work."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys

import lohan
import pytest
from lohan.errors import ModelError, StoreError
from torch import nn


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(
        StoreError, match=r"directory of 6,\d+ bytes; the maximum is 4,084"
    ) as caught:
        lohan.wrap(nn.Linear(4, 4), store="/tmp/" + "a/" * 3010)
    assert caught.value.errno == errno.ENAMETOOLONG


def test_an_invalid_init_leaves_no_directory(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="init 'x' must be"):
        lohan.wrap(nn.Linear(4, 4), store=store_dir / "run", init="x")
    assert not (store_dir / "run").exists()


DELETED = """
import os, sys, torch, lohan
os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])
try:
    lohan.wrap(torch.nn.Linear(4, 4), store="relative")
except lohan.errors.StoreError as error:
    assert "working directory, which was deleted" in str(error), error
else:
    raise AssertionError("a relative store was accepted")
try:
    lohan.wrap(torch.nn.Linear(4, 4))
except lohan.errors.StoreError as error:
    assert "torch.optim cannot be used" in str(error), error
else:
    raise AssertionError("torch can be used there")
from click.testing import CliRunner
from lohan.cli import main
result = CliRunner().invoke(main, ["doctor"])
assert result.exit_code == 1 and "the working directory was deleted" in result.output, result
assert CliRunner().invoke(main, ["doctor", "--help"]).exit_code == 0
"""


def test_a_deleted_working_directory_has_errors_that_name_it(
    tmp_path: pathlib.Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DELETED, str(tmp_path / "gone")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


ASCII = """
import sys
from click import ClickException
from lohan.cli import main
place = sys.argv[1]
for words in (["doctor", place], ["inspect", place], ["inspect", place + "/x"]):
    try:
        main(words, standalone_mode=False)
    except (ClickException, SystemExit) as error:
        print("ended", ascii(error))
"""


def test_doctor_and_inspect_take_any_directory_with_the_locale_c(store_dir: pathlib.Path) -> None:
    place = store_dir / "dé"
    lohan.wrap(nn.Linear(4, 4), store=place).lohan.close()
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ASCII, str(place)],
        env={**os.environ, **plain},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
