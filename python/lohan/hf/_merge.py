"""`lohan.merge`: write a base with an adapter of peft merged into it, layer by layer.

[Note: Merging] The model is built without values. peft loads the adapter into it, which is small,
and merges one adapted module at a time with its own code: the module's values are read from the
base's files (decoded, if they are quantized), merged, written, and dropped. So the files have the
bits that peft's merge_and_unload() on the CPU gives for a base in that dtype, and memory holds the
adapter and one module.

An adapter of an embedding that is tied to the head changes only one of the two layers. peft would
add it to the matrix that both share. Here, layers whose values differ are untied in the result.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.common import _bar, _log
from lohan.errors import LohanError, ModelError, StoreExistsError, UnsupportedError, needs
from lohan.layout import _conversion, _files, _names, _resized, _safetensors
from lohan.store import _export, _weights
from lohan.store._contents import PIECE_ELEMENTS
from lohan.store._converted import Reader, pieces
from lohan.torch_glue import _empty
from lohan.torch_glue._empty import Empty
from lohan.torch_glue._peft import CHANGES_BASE, PARTS, ROOT

if TYPE_CHECKING:
    from lohan.layout._names import Origin
    from lohan.layout._packed import Entry
    from lohan.layout._safetensors import Progress

PathLike = str | os.PathLike[str]

_CONFIG = "adapter_config.json"
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_NAME = "default"  # of the adapter in the model
# Classes for adapters whose task is not that of the base, by task_type.
_TASKS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Files of a folder that are not copied: weights, and configurations of what was quantized.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_REPLACED = ("config.json", "quantize_config.json", "quant_config.json")
# Files of a tokenizer, which training scripts save beside an adapter.
_TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|(sentencepiece.*|spiece)\.model|chat_template.*"
)


@dataclasses.dataclass(frozen=True)
class Merged:
    """What merge() has written.

    Attributes:
        files: the paths of the files with weights.
        nbytes: the size of the tensors, in bytes.
        merged: the names of the modules that the adapter has changed.
        untied: the names of parameters that are tied in the base, and not in the result.
    """

    files: list[Path]
    nbytes: int
    merged: list[str]
    untied: list[str]


def merge(
    base: PathLike,
    adapter: PathLike,
    out: PathLike,
    *,
    model: nn.Module | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = _safetensors.SHARD_BYTES,
    progress: Progress | None = None,
) -> Merged:
    """Write a model with an adapter of peft merged into it, for from_pretrained without peft.

    The base may be larger than memory and may be quantized (docs/lora.md); the result is not
    quantized. Memory holds the adapter and one module, or one layer if the library's loader
    converts the model's tensors.

    Args:
        base: a folder with config.json and safetensors files, or a GGUF file beside a config.json.
        adapter: the folder of an adapter, as peft's save_pretrained writes it.
        out: the new folder.
        model: the model without values, built inside `lohan.empty()`, whose class the folder's
            config.json does not name, or whose embeddings were resized. It is not changed.
        overwrite: allow replacing a model in the folder.
        max_shard_size: the size limit of a file, in bytes or as text like "5GB".
        progress: called with the bytes written so far and the total.

    Returns:
        What was written.

    Raises:
        UnsupportedError: the adapter does not consist of changes of weights (prompts, prefixes), or
            its method cannot be merged.
        ModelError: base and adapter do not match, or a form of the base is not supported.
        StoreError: a file cannot be read or written; see the subclasses.
    """
    source, target, folder = (Path(os.fspath(p)).expanduser() for p in (base, adapter, out))
    place = source.parent if source.is_file() else source
    _check_folders(place, target, folder, overwrite=overwrite)
    config = _adapter_config(target)
    plain = _build(place, source, target, config) if model is None else _copied(model)
    plain.requires_grad_(False)
    values = _Values(plain, _load(plain, target), source)
    values.untie()
    found = _names.sources(plain, values.index)
    made = _names.saved(plain, found)
    with _bar.Bar(f"merging into {folder}", progress) as bar:
        tensors = _export.live_tensors(made, values.pieces)
        paths = _safetensors.write(
            folder,
            tensors,
            max_shard_size=max_shard_size,
            stem=_names.stem(plain),
            count=sum(param.numel() for param in plain.parameters()),
            beside=functools.partial(_write_beside, plain, place, target),
            progress=bar,
        )
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Merged(paths, nbytes, sorted(values.wrappers), values.untied)


# --- What is given --------------------------------------------------------------------------------


def _check_folders(base: Path, adapter: Path, out: Path, *, overwrite: bool) -> None:
    for library in ("transformers", "peft"):
        if importlib.util.find_spec(library) is None:
            raise needs("a merge", library, library)
    if not (base / "config.json").is_file():
        raise ModelError(
            f"{base} has no config.json: lohan merge takes the folder of a model of transformers,"
            " or a GGUF file in a folder with the config.json of the model that was converted"
        )
    if not (adapter / _CONFIG).is_file():
        inside = sorted(path.parent.name for path in adapter.glob(f"*/{_CONFIG}"))
        which = f", such as {adapter / inside[0]}" if inside else ""
        raise ModelError(
            f"{adapter} has no {_CONFIG}: pass the folder that peft's save_pretrained has written"
            f"{which}"
        )
    if not any((adapter / name).is_file() for name in _ADAPTER):
        raise ModelError(f"{adapter} has no weights: neither {_ADAPTER[0]} nor {_ADAPTER[1]}")
    _export.check_not_read(out, None)
    for read in (base, adapter):
        if out.exists() and os.path.realpath(out) == os.path.realpath(read):
            raise StoreExistsError(f"{out} is a folder that is read: choose another one")
    stems = ("model", "diffusion_pytorch_model")
    ends = (".safetensors", ".safetensors.index.json")
    for name in (stem + end for stem in stems for end in ends):
        if (out / name).exists() and not overwrite:
            raise StoreExistsError(
                f"{out / name} exists: choose another folder, or pass overwrite=True (--overwrite)"
                " to replace that model"
            )


def _adapter_config(adapter: Path) -> Any:
    """Return the adapter's configuration.

    Raises:
        UnsupportedError: its method changes inputs, not weights.
        ModelError: peft cannot read it.
    """
    import peft

    with _refusing(f"peft cannot read {adapter / _CONFIG}"):
        config = peft.PeftConfig.from_pretrained(str(adapter))
    kind = getattr(config.peft_type, "value", config.peft_type)
    init = str(getattr(config, "init_lora_weights", "")).lower()
    if init.startswith(CHANGES_BASE):
        raise UnsupportedError(
            f"{adapter} was saved with init_lora_weights={init!r}, so it belongs to a base that"
            " peft computes from all of the base's values: convert it when you save it (peft's"
            " save_pretrained(path_initial_model_for_weight_conversion=...)), or merge it in"
            " memory, with merge_and_unload()"
        )
    if config.is_prompt_learning or kind == "ADAPTION_PROMPT":
        raise UnsupportedError(
            f"{adapter} is an adapter of type {kind}, which adds inputs or hidden states and has no"
            " weights to merge: load it with PeftModel.from_pretrained"
        )
    return config


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Return a context in which errors of another library become errors of lohan."""
    try:
        yield
    except (LohanError, MemoryError):
        raise
    except NotImplementedError as error:
        raise UnsupportedError(f"{what}: its method cannot be merged ({error!r})") from error
    except Exception as error:  # safetensors' are of a class of their own
        said = " ".join(str(error).split())
        raise ModelError(f"{what}: {type(error).__name__}: {said}") from error


def _copied(model: nn.Module) -> nn.Module:
    if any(not param.is_meta for param in model.parameters()):
        raise ModelError(
            "model= of lohan.merge() has values, which would not be used: build it inside"
            " lohan.empty(), or call merge_and_unload() on a model in memory"
        )
    return copy.deepcopy(model)


def _build(base: Path, weights: Path, adapter: Path, said: Any) -> nn.Module:
    """Return the model without values, in the dtype in which from_pretrained would load it."""
    import transformers

    with _refusing(f"transformers cannot build the model of {base / 'config.json'}; pass model="):
        config = transformers.AutoConfig.from_pretrained(str(base), trust_remote_code=False)
        name = _class_of(config, said)
        if name is None:
            raise ModelError(
                f"{base / 'config.json'} names no class of transformers"
                f" ({getattr(config, 'architectures', None)}): build the model inside"
                " lohan.empty(), and pass it as model= of lohan.merge()"
            )
        if name in _TASKS.values():
            config.num_labels = _label_count(adapter, said) or config.num_labels
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else _dtype_of(weights)
        kind: Any = getattr(transformers, name)
        build = kind.from_config if name.startswith("Auto") else kind._from_config
        with _weights.empty():
            model: Any = build(config, dtype=dtype)
            _resize(model, adapter)
        _keep_wide(model, dtype)
    return model  # type: ignore[no-any-return]


def _class_of(config: Any, adapter: Any) -> str | None:
    """Return the name of the class in transformers that the adapter was trained on, or None."""
    import transformers

    mapping = getattr(adapter, "auto_mapping", None) or {}
    named = [mapping.get("base_model_class"), *(getattr(config, "architectures", None) or ())]
    task = _TASKS.get(str(getattr(adapter.task_type, "value", adapter.task_type)))
    if task is not None and not any(str(n).endswith(task.removeprefix("AutoModel")) for n in named):
        return task
    return next((n for n in named if n and hasattr(transformers, n)), None)


def _label_count(adapter: Path, said: Any) -> int | None:
    """Return the number of rows of the head that the adapter's file has, or None."""
    import peft

    state = peft.load_peft_weights(str(adapter), device="cpu")
    names = {*(said.modules_to_save or ()), "score", "classifier", "qa_outputs"}
    for name, value in state.items():
        parts = name.split(".")
        if parts[-1] == "weight" and names & set(parts) and value.ndim == 2:
            return int(value.shape[0])
    return None


def _dtype_of(base: Path) -> torch.dtype:
    """Return the dtype of a model whose config.json has none: that of its first plain weight."""
    entries = _files.read_folder(base).entries
    plain = {n: _DTYPES[e.dtype] for n, e in entries.items() if e.dtype in _DTYPES}
    weights = (dtype for name, dtype in plain.items() if name.endswith(".weight"))
    return next(weights, next(iter(plain.values()), torch.float32))


def _resize(model: Any, adapter: Path) -> None:
    """Resize the embeddings if those that are saved with the adapter have another number of rows.

    Such an adapter was trained with new tokens.
    """
    import peft

    inputs = _resized.inputs(model)
    names = [name for name, param in model.named_parameters() if id(param) in inputs]
    for name, value in peft.load_peft_weights(str(adapter), device="cpu").items():
        plain = PARTS.sub("", name.removeprefix(ROOT))
        if plain in names and value.shape[0] != model.get_parameter(plain).shape[0]:
            model.resize_token_embeddings(value.shape[0])


def _keep_wide(model: Any, dtype: torch.dtype) -> None:
    """Give parameters that from_pretrained keeps in fp32 that dtype."""
    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    patterns = {re.compile(name.replace("*", ".*")): wide for name, wide in plan.items()}
    for name, param in model.named_parameters():
        wide = next((wide for p, wide in patterns.items() if p.search(name)), param.dtype)
        if wide != param.dtype:
            owner = model.get_submodule(name.rpartition(".")[0])
            made = Empty(torch.empty(param.shape, dtype=wide, device="meta"), False)
            owner._parameters[name.rpartition(".")[2]] = made


def _load(plain: nn.Module, adapter: Path) -> Any:
    """Return a copy of the model with the adapter.

    Raises:
        ModelError: the adapter does not fit the model.
        UnsupportedError: it cannot be merged.
    """
    import peft

    with warnings.catch_warnings(record=True) as said, _refusing(f"peft cannot load {adapter}"):
        warnings.simplefilter("always")
        with _weights.empty():
            model: Any = peft.PeftModel.from_pretrained(copy.deepcopy(plain), str(adapter))
        state = peft.load_peft_weights(str(adapter), device="cpu")
        result: Any = peft.set_peft_model_state_dict(model, state)
        left = result.unexpected_keys
    missing = [str(w.message) for w in said if "missing adapter keys" in str(w.message)]
    if missing or left:
        why = missing[0] if missing else f"it has values for {len(left)} others ({left[0]!r}, ...)"
        raise ModelError(
            f"{adapter} does not fit the base: {why[:300]}. Is it an adapter of this model?"
        )
    if not hasattr(model.base_model, "merge_and_unload"):
        kind = model.peft_config[_NAME].peft_type
        raise UnsupportedError(f"{adapter} is of type {kind}, which peft cannot merge")
    with _refusing(f"peft cannot merge {adapter}"):
        check = getattr(model.base_model, "_check_merge_allowed", None)
        if check is not None:
            check()
        if getattr(model.peft_config[_NAME], "layer_replication", None):
            raise UnsupportedError(f"{adapter} replicates layers of its base: it cannot be merged")
    return model


# --- Values ---------------------------------------------------------------------------------------


def _wrappers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that peft has put in the place of others, and their names."""
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        is_layer = "base_layer" in child._modules and hasattr(child, "adapter_layer_names")
        if is_layer or hasattr(type(child), "unload_and_optionally_merge_module"):
            yield full, child
        else:
            yield from _wrappers(child, full)


def _saved_module(wrapper: Any) -> nn.Module | None:
    """Return the copy of a module that is saved with the adapter as a whole, or None."""
    copies = wrapper._modules.get("modules_to_save")
    made = None if copies is None or _NAME not in copies else copies[_NAME]
    return None if made is None or "base_layer" in made._modules else made


def _in_pieces(values: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = values.reshape(-1)
    for first in range(0, flat.numel(), PIECE_ELEMENTS):
        yield flat[first : first + PIECE_ELEMENTS]


class _Values:
    """The values of the merged model, read from the files and computed when they are asked for.

    Attributes:
        plain: the model without the adapter.
        index: the number of each of its parameters, by its id.
        wrappers: the modules that the adapter has replaced, by their names in the plain model.
        untied: the names of parameters that untie() has separated.
    """

    def __init__(self, plain: nn.Module, model: Any, base: Path) -> None:
        self.plain, self._base = plain, base
        folder = _files.read_folder(base)
        _conversion.apply(plain, folder)
        self._reader = Reader(folder.files)
        self._entries = _files.match(plain, folder)
        buffers = _files.match_buffers(plain, folder)
        left = _files.unused(plain, folder)
        if left:
            _log.note(
                f"{len(left)} tensors of {base} are not used by {type(plain).__name__} and are not"
                f" written ({left[0]!r}, ...)"
            )
        adapted: nn.Module = model.base_model.model
        self.wrappers = dict(_wrappers(adapted))
        # Biases and embeddings that are saved with the adapter under the names of the base.
        self._given: dict[str, torch.Tensor] = {}
        for name, param in adapted.named_parameters():
            values = _empty.given(param)
            if values is not None and ".modules_to_save." not in name:
                self._given[PARTS.sub("", f".{name}")[1:]] = values
        self.untied: list[str] = []
        self._merged: tuple[str, Mapping[str, torch.Tensor]] = ("", {})
        self._number()
        self._fill(buffers)

    def _number(self) -> None:
        self._names = [name for name, _ in self.plain.named_parameters()]
        self.index = {id(param): i for i, (_, param) in enumerate(self.plain.named_parameters())}

    def _fill(self, buffers: list[tuple[torch.Tensor, Entry]]) -> None:
        """Fill the buffers from the files, or from modules that are saved with the adapter."""
        for buffer, entry in buffers:
            buffer.copy_(self._reader.values(entry))
        for path, wrapper in self.wrappers.items():
            module = _saved_module(wrapper)
            if module is not None:
                theirs = dict(self.plain.get_submodule(path).named_buffers())
                for name, buffer in module.named_buffers():
                    theirs[name].copy_(buffer)

    def untie(self) -> None:
        """Separate tied parameters whose values differ once the adapter is merged."""
        for key, (first, *others) in _files.all_names(self.plain).items():
            if not any(self._wrapper_of(name) for name in (first, *others)) or not others:
                continue
            value = self._whole(first)
            for name in others:
                if not torch.equal(value, self._whole(name)):
                    self._separate(name, self._entries.get(key))
        if not self.untied:
            return
        for module in self.plain.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
            tied: Any = getattr(module, "all_tied_weights_keys", None)
            if isinstance(tied, dict):
                tied.clear()
        _log.note(
            f"the adapter makes tied parameters differ: {self.untied[0]!r} is written with values"
            " of its own, and config.json has tie_word_embeddings=false"
        )
        self._number()

    def _separate(self, name: str, entry: Entry | None) -> None:
        """Give a parameter of its own to a tied name."""
        path, _, own = name.rpartition(".")
        owner = self.plain.get_submodule(path)
        made = copy.deepcopy(owner._parameters[own])
        assert made is not None
        owner._parameters[own] = made
        if entry is not None:
            self._entries[id(made)] = entry
        self.untied.append(name)

    def pieces(self, source: Origin) -> Iterator[torch.Tensor]:
        """Yield a parameter's merged values, flat, in pieces."""
        assert source.index is not None
        name = self._names[source.index]
        if self._wrapper_of(name) is None:
            yield from self._base_pieces(name)
        else:
            yield from _in_pieces(self._whole(name))

    def _wrapper_of(self, name: str) -> str | None:
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((path for path in paths if path in self.wrappers), None)

    def _base_pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a parameter's values without the adapters of its module."""
        param = self.plain.get_parameter(name)
        if name in self._given:
            yield from _in_pieces(self._given[name])
            return
        entry = self._entries.get(id(param))
        if entry is None:
            raise ModelError(
                f"neither {self._base} nor the adapter has a value for {name!r}: is it the base on"
                " which the adapter was trained?"
            )
        rows = _resized.rows_in_file(entry)
        if rows:
            raise ModelError(
                f"{self._base} has {rows} of {len(param)} rows of {name!r}, and the adapter has no"
                " values of the others: save them with it (save_embedding_layers=True)"
            )
        yield from pieces(self._reader, entry, param.dtype, PIECE_ELEMENTS)

    def _base_value(self, name: str) -> torch.Tensor:
        param = self.plain.get_parameter(name)
        flat, first = torch.empty(param.numel(), dtype=param.dtype), 0
        for piece in self._base_pieces(name):
            flat[first : first + piece.numel()] = piece
            first += piece.numel()
        return flat.view(param.shape)

    def _whole(self, name: str) -> torch.Tensor:
        """Return a parameter's merged values."""
        path = self._wrapper_of(name)
        if path is None:
            return self._base_value(name)
        if self._merged[0] != path:
            self._merged = ("", {})  # before the next module's values are read
            self._merged = (path, self._merge(path))
        return self._merged[1][name.removeprefix(f"{path}.")]

    def _merge(self, path: str) -> dict[str, torch.Tensor]:
        """Return the values of a module into which peft has merged its adapter."""
        saved = _saved_module(self.wrappers[path])
        if saved is not None:
            given = {name: (param, _empty.given(param)) for name, param in saved.named_parameters()}
            return {
                name: param.detach()
                if not param.is_meta
                else self._base_value(f"{path}.{name}")
                if values is None
                else values
                for name, (param, values) in given.items()
            }
        wrapper: Any = copy.deepcopy(self.wrappers[path])  # small: its base has no values
        for name, param in [*wrapper.named_parameters(remove_duplicate=False)]:
            if param.is_meta:
                values = _empty.given(param)
                if values is None:
                    values = self._base_value(PARTS.sub("", f"{path}.{name}"))
                owner = wrapper.get_submodule(name.rpartition(".")[0])
                owner._parameters[name.rpartition(".")[2]] = nn.Parameter(values, False)
        with _refusing(f"peft cannot merge {path!r}"):
            if hasattr(type(wrapper), "unload_and_optionally_merge_module"):
                module = wrapper.unload_and_optionally_merge_module(
                    merge=True, safe_merge=False, adapter_names=None
                )
            else:
                wrapper.merge(safe_merge=False, adapter_names=None)
                module = wrapper.get_base_layer()
        return {name: param.detach() for name, param in module.named_parameters()}


# --- The other files ------------------------------------------------------------------------------


def _write_beside(model: nn.Module, base: Path, adapter: Path, working: Path) -> None:
    """Write config.json, and copy the files that are not weights."""
    texts = _names.texts(model)
    for name, text in texts.items():
        (working / name).write_text(text, encoding="utf-8")
    for path in sorted(base.iterdir()):
        is_weight = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not (path.name in _REPLACED and texts):
            shutil.copyfile(path, working / path.name)
    for path in sorted(adapter.iterdir()):
        if path.is_file() and _TOKENIZER.fullmatch(path.name):
            shutil.copyfile(path, working / path.name)
