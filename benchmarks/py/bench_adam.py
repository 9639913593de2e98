"""Compare lohan's AdamW kernels with torch's fused AdamW, DeepSpeed's CPU Adam and memory speed.

Every repetition runs each contestant once, in turn, with the same number of threads, so that a
drift of the machine affects all of them. Ratios and fractions are medians over repetitions of the
quotient of two times of the same repetition. Arrays are on huge pages, and torch uses the same
arrays as lohan, because in a virtual machine one gigabyte may be half as fast as another. DeepSpeed
runs in a separate process with separate arrays.

For fp32 gradients, a peer only takes its step. For bf16 gradients, it does what its user has to do:
cast the gradient to fp32, step, and cast the parameter to bf16. lohan's pass does all of this, with
the master in two halves (P16 and residual) instead of a separate copy.

Moments in bf16 and in 8 bits are compared with lohan's own pass over moments in fp32, and with the
8-bit AdamW of torchao and of bitsandbytes on the CPU, if these are installed
(benchmarks/requirements-peers.txt). torchao compiles its step first, which takes a minute.

    python benchmarks/py/bench_adam.py [--deepspeed-python VENV/bin/python]

Prints one JSON line per result; value, min, median and max are in elements per second.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import statistics
import sys
import time
from collections.abc import Callable

import torch
from report import Report
from served import Served, answer_all, answers, deepspeed_environment

HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# The same numbers as the core takes them: lr, beta1, beta2, eps and weight_decay.
FIVE = (1e-4, 0.9, 0.999, 1e-8, 0.01)
HUGE_PAGE_BYTES = 2 << 20


def huge_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of shape (count,), on transparent huge pages if the system has them."""
    byte_count = count * dtype.itemsize
    memory = mmap.mmap(-1, byte_count + HUGE_PAGE_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + byte_count].view(dtype).zero_()


def huge_like(source: torch.Tensor) -> torch.Tensor:
    return huge_tensor(source.numel(), source.dtype).copy_(source)


class Values:
    """Values of the magnitudes that occur in training."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(min(count, 1 << 20), generator=generator)
        unit = huge_tensor(count, torch.float32)
        for start in range(0, count, block.numel()):
            part = unit[start : start + block.numel()]
            part.copy_(block[: part.numel()])
        self.param = huge_like(unit * 0.02)
        self.moment1 = huge_like(unit * 1e-3)
        self.moment2 = huge_like((unit * 1e-3).square_())
        self.gradient = huge_like(unit * 1e-3)
        self.gradient16 = huge_like(self.gradient.bfloat16())


class Ours:
    """lohan's update with and without checksums, and the bound, on one set of arrays.

    hyper has the numbers of another rule than AdamW in the form that the core takes.
    """

    def __init__(
        self,
        core,
        values: Values,
        bf16: bool,
        threads: int,
        kernel: str | None,
        states: str = "fp32",
        rule: str = "adamw",
        hyper: tuple[float, ...] = FIVE,
    ) -> None:
        count = values.param.numel()
        self.core, self.threads, self.kernel, self.hyper = core, threads, kernel, hyper
        self.states: dict[str, object] = {"rule": rule}
        self.format = states
        if states == "fp32":
            self.moment1, self.moment2 = huge_like(values.moment1), huge_like(values.moment2)
        else:
            self._encode(values, states)
        (has,) = (moments for name, *moments in core.rules() if name == rule)
        self.gradient = values.gradient16 if bf16 else values.gradient
        self.residual = huge_tensor(count, torch.int16) if bf16 else None
        if bf16:
            self.param = huge_tensor(count, torch.bfloat16)
            core.adam_split(
                values.param.data_ptr(), self.param.data_ptr(), self.residual.data_ptr(), count
            )
        else:
            self.param = huge_like(values.param)
        self.place = (
            self.param.data_ptr(),
            self.residual.data_ptr() if bf16 else 0,
            self.moment1.data_ptr() if has[0] else 0,
            self.moment2.data_ptr() if has[1] and states != "4bit" else 0,
            self.gradient.data_ptr(),
            count,
            "bfloat16" if bf16 else "float32",
            "bfloat16" if bf16 else "float32",
        )
        self.seal: bytes | None = None

    def _encode(self, values: Values, states: str) -> None:
        """Make moments of another format."""
        count = values.param.numel()
        dtype = torch.int16 if states == "bf16" else torch.int8
        self.moment1 = huge_tensor(count, dtype)
        self.moment2 = huge_tensor(0 if states == "4bit" else count, dtype)
        self.scales = torch.empty(0 if states == "bf16" else count // 16, dtype=torch.uint8)
        scales = 0 if states == "bf16" else self.scales.data_ptr()
        stored = (self.moment1.data_ptr(), self.moment2.data_ptr(), scales)
        decoded = (values.moment1.clone(), values.moment2.clone())
        self.core.adam_encode(states, *stored, *(m.data_ptr() for m in decoded), 0, count, 0, 0)
        self.states |= {"states": states, "scales_ptr": scales}

    def _update(self, **kwargs) -> bytes | None:
        return self.core.adam_update(
            self.kernel,
            *self.place,
            *self.hyper,
            10,
            1.0,
            threads=self.threads,
            **self.states,
            **kwargs,
        )

    def update(self) -> None:
        """One pass without checksums."""
        self._update()

    def make_checksums(self) -> None:
        """Make the checksums that the next update_checked() expects. Not timed."""
        self.seal = self._update(checksums=True)

    def update_checked(self) -> None:
        """Verify the checksums of what is read, and make those of what is written."""
        self._update(expected=self.seal)

    def stream(self) -> None:
        """Move the same bytes without computing."""
        self.core.stream_bound(*self.place, threads=self.threads, states=self.format)


class Peer:
    """An optimizer's step over one fp32 parameter, with casts around it for bf16 gradients.

    Arrays that `ours` has as well (the moments, the parameter) are shared with it.
    """

    def __init__(self, make: Callable, values: Values, bf16: bool, ours: Ours | None) -> None:
        shared = ours and not bf16
        self.param = torch.nn.Parameter(ours.param if shared else huge_like(values.param))
        self.param.grad = huge_like(values.gradient) if bf16 else values.gradient
        self.param16 = None
        if bf16:
            self.param16 = ours.param if ours else huge_like(values.gradient16)
        self.gradient16 = values.gradient16
        self.optimizer = make([self.param])
        self.optimizer.step()
        state = self.optimizer.state[self.param]
        for key, mine, theirs in (
            ("exp_avg", "moment1", values.moment1),
            ("exp_avg_sq", "moment2", values.moment2),
        ):
            if type(state.get(key)) is torch.Tensor:  # 8-bit states have a format of their own
                state[key] = getattr(ours, mine) if ours else huge_like(theirs)

    def step(self) -> None:
        """Take a step, with casts before and after it if gradients are bf16."""
        if self.param16 is None:
            self.optimizer.step()
            return
        self.param.grad.copy_(self.gradient16)
        self.optimizer.step()
        self.param16.copy_(self.param.detach())


def torch_fused(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **HYPER)


def deepspeed_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **HYPER)


def eight_bit_peers() -> dict[str, Callable]:
    """Return the makers of 8-bit AdamW that are installed; print a note for each other one."""
    makers: dict[str, Callable] = {}
    for name, module in (("torchao", "torchao.optim"), ("bitsandbytes", "bitsandbytes.optim")):
        try:
            kind = importlib.import_module(module).AdamW8bit
        except ImportError as error:
            print(f"note: {name} is not compared: {error}", file=sys.stderr)
            continue
        makers[name] = lambda params, kind=kind: kind(params, **HYPER)
    return makers


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def serve(elements: int, bf16: bool, threads: int) -> None:
    """Take a step for each line on stdin, and print its seconds; for DeepSpeed's interpreter."""
    pipe = answers()
    torch.set_num_threads(threads)
    peer = Peer(deepspeed_adam, Values(elements), bf16, None)
    answer_all(pipe, {"elements": elements}, lambda _: seconds_of(peer.step))


def add(
    report: Report, name: str, count: int, times: dict[str, list[float]], ours: str, peer: str
) -> None:
    speeds = {
        key: [round(count / seconds) for seconds in times[key]] for key in (ours, peer, "stream")
    }
    report.add(
        name,
        speeds[ours],
        "elements/s",
        peer=peer,
        peer_values=speeds[peer],
        bound="the same bytes moved",
        bound_values=speeds["stream"],
        less_is_better=False,
        median=statistics.median(speeds[ours]),
    )


def deepspeed_served(python: str, elements: int, bf16: bool, threads: int) -> Served | None:
    """Start DeepSpeed in its interpreter; if that fails, print a note and return None."""
    command = [python, __file__, "--serve", "--elements", str(elements), "--threads", str(threads)]
    try:
        return Served(command + ["--bf16"] * bf16, deepspeed_environment(python))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"note: no DeepSpeed: {error}", file=sys.stderr)
        return None


def bench(core, report: Report, args: argparse.Namespace, bf16: bool) -> None:
    values = Values(args.elements)
    ours = Ours(core, values, bf16, args.threads, args.kernel)
    torch_peer = Peer(torch_fused, values, bf16, ours)
    served = None
    if args.deepspeed_python:
        served = deepspeed_served(args.deepspeed_python, args.elements, bf16, args.threads)

    contestants: dict[str, Callable[[], float]] = {
        "stream": lambda: seconds_of(ours.stream),
        "update": lambda: seconds_of(ours.update),
        "torch_fused": lambda: seconds_of(torch_peer.step),
        "checksums": lambda: seconds_of(ours.update_checked),
    }
    if served:
        contestants["deepspeed"] = lambda: served.seconds("step")
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(args.repetitions + 1):
        for name, run in contestants.items():
            if name == "checksums":
                ours.make_checksums()
            # OpenMP's threads spin for a while after their work; no time may include that.
            time.sleep(0.02)
            seconds = run()
            if repetition > 0:  # the first repetition is the warm-up
                times[name].append(seconds)
    if served:
        served.close()

    mode = "bf16_residual" if bf16 else "fp32"
    for peer in [name for name in times if name in ("torch_fused", "deepspeed")]:
        add(report, f"adam_py/{mode}", args.elements, times, "update", peer)
        add(report, f"adam_py/{mode}/checksums", args.elements, times, "checksums", peer)


def bench_states(core, report: Report, args: argparse.Namespace, bf16: bool) -> None:
    """Compare moments in fewer bits with those in fp32, and with 8-bit optimizers."""
    count = args.elements // 64 * 64
    values = Values(count)
    ours = {
        states: Ours(core, values, bf16, args.threads, args.kernel, states)
        for states in ("fp32", "bf16", "8bit", "4bit")
    }
    contestants: dict[str, Callable[[], float]] = {}
    for states, one in ours.items():
        contestants[states] = lambda one=one: seconds_of(one.update)
        contestants[f"{states}/checksums"] = lambda one=one: seconds_of(one.update_checked)
    for name, make in eight_bit_peers().items():
        peer = Peer(make, values, bf16, None)
        contestants[name] = lambda peer=peer: seconds_of(peer.step)
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(args.repetitions + 1):
        for name, run in contestants.items():
            if name.endswith("/checksums"):
                ours[name.split("/")[0]].make_checksums()
            time.sleep(0.02)
            seconds = run()
            if repetition > 0:
                speeds[name].append(round(count / seconds))
    mode = "bf16_residual" if bf16 else "fp32"
    for states in ("bf16", "8bit", "4bit"):
        for checksums in ("", "/checksums"):
            peers = {"fp32 moments": speeds[f"fp32{checksums}"]}
            peers |= {name: speeds[name] for name in speeds if name in ("torchao", "bitsandbytes")}
            for peer_name, peer_values in peers.items():
                report.add(
                    f"adam_py/{mode}{checksums}/{states}_moments",
                    speeds[states + checksums],
                    "elements/s",
                    peer=peer_name,
                    peer_values=peer_values,
                    less_is_better=False,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--kernel", help="the name of a kernel, for example avx2; default: the best"
    )
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--core", default="lohan._core", help="module that has adam_update()")
    parser.add_argument("--history", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.elements, args.bf16, args.threads)
        return
    torch.set_num_threads(args.threads)
    core = importlib.import_module(args.core)
    report = Report(args.history)
    for bf16 in (False, True):
        bench(core, report, args, bf16)
        bench_states(core, report, args, bf16)
    if not args.deepspeed_python:
        print("note: DeepSpeed is not compared: --deepspeed-python was not given", file=sys.stderr)


if __name__ == "__main__":
    main()
