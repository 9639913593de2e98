"""The files that a folder of weights consists of, and the index that says which tensor is where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lohan.errors import StoreError, UnsupportedError

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def paths_of(place: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files to read and, if there is an index, the file of each tensor.

    These are the files that from_pretrained would use: a folder may also have other variants or
    formats of the same tensors. A broken link counts as a missing file and is not skipped.
    """
    if place.name.endswith(".index.json") and place.is_file():
        return of_index(place)
    if place.is_file():
        if place.suffix in _PICKLES:
            raise _pickle_error(place, place.name)
        return [place], {}
    if os.path.lexists(place / _WHOLE):
        return [place / _WHOLE], {}
    indices = sorted(place.glob("*.safetensors.index.json"))
    if os.path.lexists(place / _INDEX) or len(indices) == 1:
        return of_index(place / _INDEX if os.path.lexists(place / _INDEX) else indices[0])
    found = sorted(place.glob("*.safetensors"))
    if (place / "adapter_config.json").is_file() and len(found) <= 1:
        raise StoreError(
            f"weights={place}: the folder has an adapter of peft, without its base: pass the base"
            " model's folder, and load the adapter into the model before lohan.wrap"
            f" (PeftModel.from_pretrained(model, {str(place)!r}))"
        )
    if found:
        return found, {}
    pickles = sorted(path.name for path in place.glob("*") if path.suffix in _PICKLES)
    if pickles:
        raise _pickle_error(place, pickles[0])
    if not place.exists():
        raise StoreError(
            f"weights={place}: there is no such folder or file. It must be a path on this machine:"
            " for a model on the Hub, huggingface_hub.snapshot_download(NAME) downloads the folder"
            " and returns its path"
        )
    ggufs = sorted(path.name for path in place.glob("*.gguf"))
    more = f"; a GGUF file is passed by its name: weights={place / ggufs[0]}" if ggufs else ""
    raise StoreError(f"weights={place}: the folder contains no .safetensors file{more}")


def of_index(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files that an index names, and the file of each tensor.

    Raises:
        StoreError: the index cannot be read, is damaged, or names a file outside its folder.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_of = {name: _beside(path, name, file) for name, file in said.items()}
    except FileNotFoundError as error:
        raise StoreError(error.errno, missing(path)) from error
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(error.errno, f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{path} is not a valid index of safetensors ({error!r}): download it again"
        ) from error
    return sorted(set(file_of.values())), file_of


def _beside(index: Path, name: str, file: Any) -> Path:
    """Return the file of a tensor, which must be in the index's folder or below.

    Raises:
        StoreError: the file is outside that folder, or its name is not valid.
    """
    if not isinstance(file, str):
        raise TypeError(f"{name!r} is in {file!r}")
    if file and "\0" not in file and file.isprintable():
        inner = Path(file)
        if not inner.is_absolute() and ".." not in inner.parts and inner.parts:
            return index.parent / inner
    raise StoreError(
        f"{index} says that {name!r} is in {file!r}, but files of an index must be in its own"
        " folder: check where the folder comes from, and download it again"
    )


def _pickle_error(place: Path, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"weights={place}: {name} is a pickle, which can run any code when it is read, and whose"
        " tensors cannot be read in place: load it once with from_pretrained, and write it"
        ' with save_pretrained("converted", safe_serialization=True)'
    )


def missing(path: Path) -> str:
    """Return the message for a file that is not there."""
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}, which does not exist: download it again"
    return f"{path} does not exist: the folder is incomplete; add the file, or download it again"
