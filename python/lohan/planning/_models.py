"""Models for plans: the papers' models by name, and any transformers model by configuration.

A transformers model is built and run once without storage, with torch's fake tensors. Torch's FLOP
counter counts what each module computes, and saved-tensor hooks count what it saves for backward.
Dropout is off: with it, attention on the CPU would save its matrix, which attention on a GPU does
not. A mask and repeated key-value heads are counted, although attention on a GPU may need neither,
so counts may be some percent too high.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lohan.errors import MachineError, ModelError, UnsupportedError, needs
from lohan.layout._block import find_blocks
from lohan.planning import _base, _hub, _plan, _shapes, _sketch

_DTYPE = torch.bfloat16
_DTYPE_BYTES = 2
_BLOCK_BYTES_MAX = 1 << 40
# Models that are run; of the others in _shapes there are only sketches.
_COUNTED = {**_shapes.MODELS, **_shapes.ENCODERS}
# Model classes whose loss takes the input's tokens as labels.
_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def _attention_flop(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count both products, in full, of the CPU's flash attention, which torch does not count."""
    *batch, length, width = query
    heads = 1
    for size in batch:
        heads *= size
    return int(2 * heads * length * key[-2] * (width + value[-1]))


def _experts_flop(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Count the FLOP of multiplying each row by the weights of a single expert."""
    return int(2 * rows[0] * rows[1] * weights[-1])


class _Counter:
    """A counter of the bytes that are saved for backward, by the module that made them.

    A storage counts once. As in a session, it belongs to the module that first returned it; if it
    was an argument before that, to the caller; otherwise, and if its module is not in the block
    that saves it, to the module that runs when it is saved.

    Attributes:
        saved: the bytes by the name of the module.
        outputs: the bytes of the outputs of blocks that have children.
        order: the blocks in the order of forward.
        times: when the module's first saved tensor was made, or its first forward ended.
    """

    def __init__(self, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
        self.saved: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.order: list[str] = []
        self.times: dict[str, int] = {}
        self._made: dict[int, tuple[str, int]] = {}  # by storage: the module, and when
        self._clock = itertools.count()
        self._inside: list[str] = [""]
        self._seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self._held: list[torch.Tensor] = []  # keeps storages alive, so no address is reused
        self._blocks = {name for name, _ in blocks}
        self._whole = {name for name, module in blocks if next(module.children(), None)}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            module.register_forward_hook(self._leave(name))

    def _enter(self, name: str) -> Any:
        def hook(_: nn.Module, *given: Any) -> None:
            self._own(given, self._inside[-1])
            self._inside.append(name)
            if name in self._blocks and name not in self.order:
                self.order.append(name)

        return hook

    def _leave(self, name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._inside.pop()
            self._own(output, name)
            self.times.setdefault(name, next(self._clock))
            first = output[0] if isinstance(output, tuple) else output
            if name in self._whole and isinstance(first, torch.Tensor):
                self.outputs[name] = self.outputs.get(name, 0) + self._new_bytes(first)

        return hook

    def _own(self, values: Any, name: str) -> None:
        """Record which module made the storages that have not been seen before."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                if key not in self._made:
                    self._made[key] = name, next(self._clock)
                    self._held.append(tensor)

    def _new_bytes(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        self._seen.add(storage._cdata)
        self._held.append(tensor)
        return storage.nbytes()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        here = self._inside[-1]
        now = next(self._clock)
        name, time = self._made.get(tensor.untyped_storage()._cdata, (here, now))
        block = next((inside for inside in self._inside if inside in self._blocks), None)
        if block is None or not f"{name}.".startswith(f"{block}."):
            name, time = here, now
        nbytes = self._new_bytes(tensor)
        if nbytes:
            is_first = name not in self.saved
            self.saved[name] = self.saved.get(name, 0) + nbytes
            self.times[name] = time if is_first else min(self.times[name], time)
        return tensor


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(_DTYPE)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _has_towers(config: Any) -> bool:
    """Return whether a model compares images with texts, as CLIP does."""
    parts = ("vision_config", "text_config", "projection_dim")
    return all(getattr(config, part, None) is not None for part in parts)


def _inputs(
    model: nn.Module, batch: int, seq: int, has_labels: bool
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the arguments of forward, and the number of tokens in a step."""
    config: Any = model.config
    main = getattr(model, "main_input_name", "")
    takes = inspect.signature(model.forward).parameters
    if main == "pixel_values" or ("pixel_values" in takes and _has_towers(config)):
        vision = config.vision_config if _has_towers(config) else config
        size, patch = vision.image_size, getattr(vision, "patch_size", vision.image_size)
        pixels = torch.zeros(batch, vision.num_channels, size, size, dtype=_DTYPE)
        given = {"pixel_values": pixels}
        if _has_towers(config):
            length = min(seq, getattr(config.text_config, "max_position_embeddings", seq))
            given["input_ids"] = torch.zeros(batch, length, dtype=torch.long)
        return given, batch * (size // patch) ** 2
    if main == "input_values":  # a frame of speech is what the convolutions make of some samples
        stride = math.prod(config.conv_stride)
        return {main: torch.zeros(batch, seq * stride, dtype=_DTYPE)}, batch * seq
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    given = {"input_ids": tokens}
    if main == "input_features":  # of a spectrogram, of which the encoder halves the length
        length = 2 * config.max_source_positions
        given = {main: torch.zeros(batch, config.num_mel_bins, length, dtype=_DTYPE)}
    if has_labels and type(model).__name__.endswith(_LANGUAGE):
        given["labels"] = tokens
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = tokens
    return given, batch * seq


def _own_flops(module: nn.Module, path: str, flops: dict[str, int]) -> dict[str, int]:
    """Return the FLOP of each module inside `module`, by path, without the FLOP of its children.

    A container is not called itself, so it has no FLOP besides those of its children.
    """
    own: dict[str, int] = {}
    whole: dict[str, int] = {}
    for below, child in reversed([*module.named_modules()]):
        here = _joined(path, below)
        of_children = sum(whole.get(_joined(here, name), 0) for name, _ in child.named_children())
        whole[here] = flops.get(here, of_children)
        own[here] = max(whole[here] - of_children, 0)
    return own


def _joined(path: str, below: str) -> str:
    return ".".join(part for part in (path, below) if part)


def _layers(
    name: str,
    module: nn.Module,
    counter: _Counter,
    flops: dict[str, int],
    owned: dict[str, int],
    matrices: dict[str, list[tuple[int, int]]],
) -> list[_plan.Layer]:
    """Make a layer for each module that made saved bytes, in the order in which they were made.

    A module of which nothing is saved has to be recomputed if what comes after it is, so its FLOP
    belong to the next layer, and so do its parameters. The block's output comes last.
    """
    made: list[_plan.Layer] = []
    own_flops = _own_flops(module, name, flops)
    paths = {_joined(name, below): below for below, _ in module.named_modules()}
    count, flop = 0, 0  # of modules of which nothing is saved
    shapes: tuple[tuple[int, int], ...] = ()
    for path in sorted(paths, key=lambda path: counter.times.get(path, 1 << 62)):
        count, flop = count + owned.get(path, 0), flop + own_flops[path]
        shapes += tuple(matrices.get(path, ()))
        nbytes = counter.saved.get(path, 0)
        if nbytes:
            label = paths[path] or "itself"
            made.append(_plan.Layer(label, count, flop, nbytes, matrices=shapes))
            count, flop, shapes = 0, 0, ()
    if counter.outputs.get(name):
        output = counter.outputs[name]
        last = _plan.Layer("output", count, flop, output, is_inter_block=True, matrices=shapes)
        made.append(last)
    elif count or flop:
        made.append(_plan.Layer("itself", count, flop, 0, matrices=shapes))
    return made


def _head_taken(model: Any) -> nn.Linear:
    """Replace a language model's head by nothing, and return it."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedError(f"{type(model).__name__} has no linear head: leave loss= out")
    model.set_output_embeddings(nn.Identity())
    return head


def _head_block(head: nn.Linear, owners: dict[int, int], tokens: int, loss: str) -> _plan.Block:
    shared = owners.get(id(head.weight))
    own = [p.numel() for p in head.parameters() if id(p) not in owners]
    vocab, hidden = head.weight.shape
    working = _plan.head_bytes(loss, tokens, hidden, vocab)
    flop, tables = 2 * tokens * vocab * hidden, ((vocab, hidden),) if shared is None else ()
    layer = _plan.Layer("head", sum(own), flop, 0, working, matrices=tables, is_outer=True)
    return _plan.Block((layer,), shared)


def count(model: nn.Module, name: str, batch: int, seq: int, loss: str = "logits") -> _plan.Model:
    """Run a model of fake tensors once, and describe its blocks in the order of the forward.

    Args:
        model: a transformers model, made of fake tensors of bf16. It is changed.
        name: the name that is shown to the user.
        batch: the number of sequences or images.
        seq: the number of tokens in a sequence.
        loss: how the head and the loss are computed: one of _plan.LOSSES.
    """
    head = None if loss == "logits" else _head_taken(model)
    blocks = dict(find_blocks(model, _BLOCK_BYTES_MAX))
    blocks.pop("", None)  # a model that owns parameters itself, such as a scale of its logits
    counter = _Counter(model, list(blocks.items()))
    mapping: Any = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
        torch.ops.aten._grouped_mm: _experts_flop,
    }
    given, tokens = _inputs(model, batch, seq, head is None)
    hooks = torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor)
    with FlopCounterMode(display=False, custom_mapping=mapping) as flop_counter, hooks:
        model(**given)
    prefix = f"{type(model).__name__}."
    flops = {
        path.removeprefix(prefix): sum(by_op.values())
        for path, by_op in flop_counter.get_flop_counts().items()
    }
    owners: dict[int, int] = {}
    made: list[_plan.Block] = []
    for path in counter.order:
        module = blocks[path]
        owned: dict[str, int] = {}
        matrices: dict[str, list[tuple[int, int]]] = {}
        shared = None
        for below, parameter in module.named_parameters():
            inside = f"{path}.{below}".rpartition(".")[0]
            if id(parameter) in owners and owners[id(parameter)] != len(made):
                shared = owners[id(parameter)]
            elif id(parameter) not in owners:
                owners[id(parameter)] = len(made)
                owned[inside] = owned.get(inside, 0) + parameter.numel()
                if parameter.dim() == 2:
                    rows, columns = parameter.shape
                    matrices.setdefault(inside, []).append((rows, columns))
        layers = _layers(path, module, counter, flops, owned, matrices)
        if not counter.outputs.get(path):  # an embedding, a norm or a head is not recomputed
            layers = [
                dataclasses.replace(layer, activation_bytes=0, is_outer=True) for layer in layers
            ]
        if layers:
            made.append(_plan.Block(tuple(layers), shared))
    own = sum(p.numel() for p in model.parameters(recurse=False))
    if own:
        made.insert(len(made) - 1, _plan.Block((_plan.Layer("own", own, 0, 0),)))
    if head is not None:
        made.append(_head_block(head, owners, tokens, loss))
    return _plan.Model(name, _with_loss(made, counter, blocks), tokens, _DTYPE_BYTES)


def _with_loss(
    made: list[_plan.Block], counter: _Counter, blocks: dict[str, nn.Module]
) -> tuple[_plan.Block, ...]:
    """Count the bytes that the head and the loss save as working memory of the last block."""
    *others, head = made
    inside = tuple(f"{path}." for path in blocks if counter.outputs.get(path))
    outside = sum(
        nbytes
        for path, nbytes in counter.saved.items()
        if path + "." not in inside and not path.startswith(inside)
    )
    working = outside + sum(x.activation_bytes + x.working_bytes for x in head.layers)
    layers = [dataclasses.replace(x, activation_bytes=0, is_inter_block=False) for x in head.layers]
    layers[-1] = dataclasses.replace(layers[-1], working_bytes=working)
    return (*others, _plan.Block(tuple(layers), head.shared_block))


def _from_transformers(
    name: str, config_path: Path | None, batch: int, seq: int, loss: str
) -> _plan.Model:
    """Count a model by its name in _shapes.MODELS, its class's name, or its config.json."""
    try:
        import transformers
        from torch._subclasses.fake_tensor import FakeTensorMode
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise needs(name, "transformers", "lohan[hf]") from error
    model_class: Any = None
    try:
        if name in _COUNTED:
            config = transformers.AutoConfig.for_model(**_COUNTED[name])
            architecture = (config.architectures or [""])[0]
            model_class = getattr(transformers, architecture, None)
        elif config_path is None:
            model_class = getattr(transformers, name)
            config = model_class.config_class()
        else:
            config = transformers.AutoConfig.from_pretrained(config_path)
            architecture = (config.architectures or [""])[0]
            model_class = getattr(transformers, architecture, None)
        config.use_cache = False
        if model_class is None:
            model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with FakeTensorMode(), _default_dtype(), no_init_weights():
            model = model_class(config)
            model.tie_weights()
            return count(model.eval(), name, batch, seq, loss)
    except UnsupportedError:
        raise
    except Exception as error:
        raise MachineError(
            f"{name} cannot be run on meta tensors ({type(error).__name__}: {error}): check that it"
            " is a transformers model, and that seq does not exceed its maximum length"
        ) from error


def load(
    name: str,
    batch: int,
    seq: int,
    loss: str = "logits",
    base: str | None = None,
    adapter_params: int | None = None,
) -> _plan.Model:
    """Return one of the papers' models, or a transformers model.

    Args:
        name: the name of a model, such as "gpt-13b" or "llama-8b", or that which it has on the
            Hugging Face Hub; or a config.json, or a folder that contains one; or a model class of
            transformers, such as "LlamaForCausalLM", which gets its default configuration.
        batch: the number of sequences or images in a step.
        seq: the number of tokens in a sequence.
        loss: how the head and the loss are computed: one of _plan.LOSSES.
        base: the format of the files of a frozen base: one of _base.NAMES. None: "bf16" with
            adapter_params, otherwise all parameters are trained.
        adapter_params: the number of parameters of adapters, of which only these are trained.

    Raises:
        ModelError: no model has that name, or the loss is unknown.
        MachineError: transformers cannot build or run the model, or the base is unknown.
        UnsupportedError: transformers is not installed, or the model has no head for the loss.
    """
    if adapter_params is not None:
        model = load(name, batch, seq, loss)
        return _base.adapt(model, base or _base.PLAIN, adapter_params)
    if base is not None:
        raise MachineError(f"base {base!r} needs adapters to train: pass adapter_params")
    if loss not in _plan.LOSSES:
        raise ModelError(f"loss {loss!r}: must be one of {', '.join(_plan.LOSSES)}")
    path = _hub.config_path(name)
    if path is not None and min(batch, seq) >= 1:
        return _from_transformers(name, path, batch, seq, loss)
    name = _hub.own_name(name)
    is_class = name.isidentifier() and name[0].isupper()
    if (name in _shapes.MIXTURES or name in _shapes.DIFFUSION) and min(batch, seq) >= 1:
        _sketch.check_loss(name, _shapes.ALL[name], loss)
        return _sketch.of_config(_shapes.ALL[name], name, batch, seq, loss)
    if (name in _COUNTED or is_class) and min(batch, seq) >= 1:
        return _from_transformers(name, None, batch, seq, loss)
    try:
        return _plan.named_model(name, batch=batch, seq=seq, loss=loss)
    except ModelError as error:
        known = ", ".join(_shapes.ALL)
        raise ModelError(f"{error}; with transformers also one of {known}") from error
