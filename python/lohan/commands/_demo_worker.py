"""The workers of `lohan demo`, which run in separate processes to measure their peak memory.

    python -m lohan.commands._demo_worker KIND OPTIONS

OPTIONS is JSON; events are written to stdout as lines of JSON. KIND "lohan" trains with states on
SSD, "reference" trains with everything in memory and the same optimizer, and "baseline" imports the
same modules and runs one block.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

SEED = 1
TEXT_BYTES_MAX = 4 << 20
# The number of newest trace events to keep: about seven steps of the demo's model.
TRACE_EVENTS = 16_384
TRACED_STEPS = 4
STEPS_MIN = 4

Report = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that both trainings share.

    Attributes:
        steps: the maximum number of steps of this worker.
        seconds: the time after which no step begins, except for the first STEPS_MIN.
        batch: the number of sequences per step.
        sequence: the number of tokens per sequence.
        lr: the learning rate.
        host_bytes: lohan's budget.
        tiny: use a model of two small layers, for tests.
        store: the store's directory; None: a temporary one.
    """

    steps: int = 40
    seconds: float = 120.0
    batch: int = 4
    sequence: int = 128
    lr: float = 3e-4
    host_bytes: int = 300_000_000
    tiny: bool = False
    store: str | None = None


def model_config(options: Options) -> Any:
    """Return the config of GPT-2 small or a tiny GPT-2, without dropout: runs are comparable."""
    import transformers

    sizes: dict[str, Any] = {}
    if options.tiny:
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    return transformers.GPT2Config(
        **sizes,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def initialise(names: dict[int, str], layer_count: int, module: nn.Module) -> None:
    """Initialise one module like GPT-2. Its name is the seed, so modules may come in any order."""
    generator = torch.Generator().manual_seed(SEED + zlib.crc32(names[id(module)].encode()))
    deviation = 0.02 / (2 * layer_count) ** 0.5 if "c_proj" in names[id(module)] else 0.02
    with torch.no_grad():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if name == "bias":
                param.data.zero_()
            elif param.ndim == 1:
                param.data.fill_(1.0)
            else:
                param.data.normal_(0.0, deviation, generator=generator)


def text() -> torch.Tensor:
    """Return the sources of Python's standard library, a text that every machine has, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = bytearray()
    for path in sorted(folder.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= TEXT_BYTES_MAX:
            break
    return torch.frombuffer(found, dtype=torch.uint8)[:TEXT_BYTES_MAX].clone()


def batches(options: Options) -> Iterator[torch.Tensor]:
    """Yield token ids (batch, sequence), the same in every process, up to the limits of options."""
    tokens = text()
    generator = torch.Generator().manual_seed(SEED)
    deadline = time.monotonic() + options.seconds
    for step in range(options.steps):
        if step >= STEPS_MIN and time.monotonic() > deadline:
            return
        high = len(tokens) - options.sequence
        starts = torch.randint(0, high, (options.batch,), generator=generator).tolist()
        yield torch.stack([tokens[i : i + options.sequence] for i in starts]).long()


def peak_bytes() -> int:
    """Return the peak memory of this process, including its pages on hugetlbfs."""
    fields = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * 1024
    return fields["VmHWM"] + fields.get("HugetlbPages", 0)


# --- With lohan ---------------------------------------------------------------------------------


def run_lohan(options: Options, report: Report) -> None:
    """Train with lohan: parameters and optimizer states are on SSD."""
    import functools

    from transformers import GPT2LMHeadModel

    import lohan
    from lohan.common._inside import inside

    config = model_config(options)
    with lohan.empty():
        model: Any = GPT2LMHeadModel(config)
    model = model.to(torch.bfloat16).train()
    names = {id(module): name for name, module in model.named_modules()}
    count = sum(p.numel() for p in model.parameters())
    model = lohan.wrap(
        model,
        store=options.store,
        init=functools.partial(initialise, names, config.n_layer),
        lr=options.lr,
        host_bytes=options.host_bytes,
        debug=lohan.Debug(trace_events=TRACE_EVENTS),
    )
    session: Any = inside(model)
    status = session.status()
    report("ready", params=count, io=status["io"], pages=status["pages"], budget=session.budget)
    marks: list[tuple[str, int, int, int]] = []
    seen: list[dict[str, Any]] = []
    begun = time.monotonic_ns()
    for step, tokens in enumerate(batches(options), 1):
        times = [time.monotonic_ns()]
        loss = model(input_ids=tokens, labels=tokens).loss
        times.append(time.monotonic_ns())
        loss.backward()
        times.append(time.monotonic_ns())
        model.optimizer.step()
        times.append(time.monotonic_ns())
        for i, name in enumerate(("forward", "backward", "step")):
            marks.append((name, step, times[i], times[i + 1]))
        _collect(session, seen)
        report(
            "step",
            step=step,
            loss=loss.item(),
            step_ns=time.monotonic_ns() - begun,
            stats=seen[-1] if seen else None,
        )
        begun = time.monotonic_ns()
    session.flush()
    _collect(session, seen)
    status = session.status()
    first = session.step - TRACED_STEPS
    report(
        "done",
        peak_bytes=peak_bytes(),
        arena_bytes=status["arena_bytes"],
        bookkeeping_bytes=status["bookkeeping_bytes"],
        stats=seen,
        units=[unit.name for unit in session.layout.units],
        events=[event for event in session.trace() if event[3] > first],
        marks=[mark for mark in marks if mark[1] > first],
    )
    session.close()


def _collect(session: Any, seen: list[dict[str, Any]]) -> None:
    """Append the statistics of the last finished step to `seen`, if they are new."""
    stats = session.stats()
    if stats.step == 0 or (seen and seen[-1]["step"] == stats.step):
        return
    seen.append(
        {
            "step": stats.step,
            "read": stats.read_bytes,
            "written": stats.written_bytes,
            "planned_read": stats.planned_read_bytes,
            "planned_written": stats.planned_written_bytes,
            "bytes": stats.bytes,
            "gradient_bytes_max": stats.gradient_bytes_max,
            "bound_by": stats.bound_by,
        }
    )


# --- Without lohan ------------------------------------------------------------------------------


def run_reference(options: Options, report: Report) -> None:
    """Train in plain torch, all in memory: bf16 parameters and compute, fp32 masters and moments.

    This is the fastest way in torch on a CPU: a fused AdamW, and gradient buffers that are reused.
    """
    from transformers import GPT2LMHeadModel

    config = model_config(options)
    model: Any = GPT2LMHeadModel(config)
    model = model.to(torch.bfloat16).train()
    names = {id(module): name for name, module in model.named_modules()}
    done: set[int] = set()
    for module in model.modules():
        own = {id(p) for p in module._parameters.values() if p is not None}
        if own - done:  # a tied parameter is initialised by its first owner
            initialise(names, config.n_layer, module)
            done |= own
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    grads = [torch.empty_like(master) for master in masters]
    optimizer = torch.optim.AdamW(masters, lr=options.lr, weight_decay=1e-2, fused=True)
    begun = time.monotonic_ns()
    for step, tokens in enumerate(batches(options), 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        with torch.no_grad():
            for param, master, grad in zip(params, masters, grads, strict=True):
                assert param.grad is not None
                grad.copy_(param.grad)
                master.grad, param.grad = grad, None
            optimizer.step()
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        report("step", step=step, loss=loss.item(), step_ns=time.monotonic_ns() - begun)
        begun = time.monotonic_ns()
    report("done", peak_bytes=peak_bytes())


def run_baseline(options: Options, report: Report) -> None:
    """Measure what any training needs: the imports, and one block's forward and backward."""
    from transformers import GPT2LMHeadModel  # noqa: F401  (as in the other workers)
    from transformers.models.gpt2 import modeling_gpt2

    import lohan  # noqa: F401

    config = model_config(options)
    config._attn_implementation = "sdpa"
    text()
    make_block: Any = modeling_gpt2.GPT2Block
    block = make_block(config, layer_idx=0).to(torch.bfloat16)
    shape = (options.batch, options.sequence, config.n_embd)
    hidden_BTD = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    output = block(hidden_BTD)
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    report("done", peak_bytes=peak_bytes())


KINDS = {"lohan": run_lohan, "reference": run_reference, "baseline": run_baseline}


def _channel() -> IO[str]:
    """Return a file for events on stdout, and redirect all other output from stdout to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def main(argv: list[str]) -> int:
    """Run one worker."""
    channel = _channel()

    def report(event: str, **fields: Any) -> None:
        channel.write(json.dumps({"event": event, **fields}) + "\n")
        channel.flush()

    KINDS[argv[1]](Options(**json.loads(argv[2])), report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
