"""Models by the names that they have on the Hugging Face Hub.

Of a name such as "Qwen/Qwen3-8B-Base" the sizes are known here, if the model is one of _shapes;
otherwise the Hub's config.json has them, a file of a few kilobytes. No weights are read.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from lohan.errors import MachineError, needs
from lohan.planning import _shapes

_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")  # not ./NAME, which is a folder
# What follows a model's name in those of its variants, which have the same sizes.
_VARIANT = re.compile(
    r"-(instruct|it|chat|base|hf|thinking|reasoning|diffusers|\d{4}|v\d+(\.\d+)?)$"
)
_NAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(?:meta-)?llama-3(?:\.[123])?-(1b|3b|8b|70b)", r"llama-\1"),
        (r"bert-(base|large)-uncased", r"bert-\1"),
        (r"vit-(base|large|huge)-patch1[46]-224(?:-in21k)?", r"vit-\1"),
        (r"flux\.1-dev", "flux-dev"),
        (r"stable-diffusion-xl-base-1\.0", "sdxl"),
        (r"stable-diffusion-3\.5-large", "sd3.5-large"),
        (r"stable-diffusion-3-medium", "sd3-medium"),
        (r"stable-diffusion-v1-[45]", "sd-1.5"),
    )
)


def own_name(name: str) -> str:
    """Return the name in _shapes of a model that has another name on the Hub, or the name."""
    if "/" in name and not _REPOSITORY.fullmatch(name):
        return name
    whole = name.rpartition("/")[2].lower()
    short = whole
    while (shorter := _VARIANT.sub("", short)) != short:
        short = shorter
    for candidate in (whole, short):
        if candidate in _shapes.ALL:
            return candidate
        for pattern, own in _NAMES:
            match = pattern.fullmatch(candidate)
            if match and match.expand(own) in _shapes.ALL:
                return match.expand(own)
    return name


def config_path(name: str) -> Path | None:
    """Return the config.json of a model: a file, that of a folder, or the Hub's; None: it has none.

    Args:
        name: what the user calls the model. A name of _shapes has no file.

    Raises:
        MachineError: the Hub cannot be asked, or does not give the file.
        UnsupportedError: the name is one of the Hub's, and huggingface_hub is not installed.
    """
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        return path
    if own_name(name) in _shapes.ALL or not _REPOSITORY.fullmatch(name) or path.suffix == ".json":
        return None
    return _of_hub(name)


@functools.cache
def _of_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        what = f"{name}, a model of the Hugging Face Hub,"
        raise needs(what, "huggingface_hub", "lohan[hf]") from error
    kept = huggingface_hub.try_to_load_from_cache(name, "config.json")
    if isinstance(kept, str):
        return Path(kept)
    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise MachineError(
            f"the config.json of {name} cannot be read from the Hugging Face Hub"
            f" ({type(error).__name__}: {reason}): pass the path of a config.json, or one of"
            f" {', '.join(_shapes.ALL)}"
        ) from error
