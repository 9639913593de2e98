"""Compare each update rule's kernel with the same rule in torch, and with AdamW.

Every repetition runs each contestant once, in turn, with the same number of threads, so that a
drift of the machine affects all of them. Ratios are medians over repetitions of the quotient of two
speeds of the same repetition. lohan's pass verifies the checksums of what it reads and makes those
of what it writes; with bf16 gradients it also keeps the exact fp32 master. The peer is torch's
fused form of the rule, or its foreach form if it has no fused one; torch has no Lion, so its peer
is the rule of lion-pytorch in torch._foreach operations. For bf16 gradients a peer has an fp32
master as well: it casts the gradient to fp32, steps, and casts the master to the bf16 parameter.
The bound is what memory allows: a pass with as many threads that reads and writes the same bytes
and computes nothing. bench_adam.py has the arrays.

    python benchmarks/py/bench_rules.py [--rules lion sgd] [--elements 50000000] [--repetitions 9]

Prints one JSON line per result; value, min, median and max are in elements per second.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from bench_adam import Ours, Peer, Values, seconds_of
from lohan.common._rules import RULES, Rule
from report import Report

LR, MOMENTUM = 1e-4, 0.9
Params = list[torch.nn.Parameter]


class Lion:
    """Lion in torch._foreach operations, in the order of lion-pytorch."""

    def __init__(self, params: Params, lr: float) -> None:
        self.params, self.lr = params, lr
        self.state = {param: {"exp_avg": torch.zeros_like(param)} for param in params}

    def step(self) -> None:
        """Take a step without weight decay."""
        with torch.no_grad():
            beta1, beta2 = RULES["lion"].defaults["betas"]
            grads = [param.grad for param in self.params]
            moments = [self.state[param]["exp_avg"] for param in self.params]
            moved = torch._foreach_lerp(moments, grads, 1 - beta1)
            torch._foreach_sign_(moved)
            torch._foreach_add_(self.params, moved, alpha=-self.lr)
            torch._foreach_lerp_(moments, grads, 1 - beta2)


# The form that is compared, and what makes the optimizer, by the rule's name.
PEERS: dict[str, tuple[str, Callable[[Params], object]]] = {
    "adamw": ("torch fused", lambda params: torch.optim.AdamW(params, LR, fused=True)),
    "adam": ("torch fused", lambda params: torch.optim.Adam(params, LR, fused=True)),
    "lion": ("torch foreach", lambda params: Lion(params, LR)),
    "sgd": ("torch fused", lambda params: torch.optim.SGD(params, LR, fused=True)),
    "sgd_momentum": (
        "torch fused",
        lambda params: torch.optim.SGD(params, LR, momentum=MOMENTUM, fused=True),
    ),
    "adagrad": ("torch fused", lambda params: torch.optim.Adagrad(params, LR, fused=True)),
    "rmsprop": ("torch foreach", lambda params: torch.optim.RMSprop(params, LR, foreach=True)),
    "rmsprop_momentum": (
        "torch foreach",
        lambda params: torch.optim.RMSprop(params, LR, momentum=MOMENTUM, foreach=True),
    ),
}
# An engine makes the sums and the products that the other rules need first: they cannot be called
# alone.
CHOICES = [name for name, rule in RULES.items() if not rule.is_of_whole]


def hyper_of(rule: Rule) -> tuple[float, ...]:
    """Return a rule's defaults as the core takes them, with a momentum if the rule has one."""
    group = {**rule.defaults, "lr": LR}
    return rule.hyper_of(group | {"momentum": MOMENTUM} if "momentum" in group else group)


def bound_of(name: str, states: str) -> str:
    """Return the name of the contestant that moves the bytes of a rule's update."""
    return f"bound/{RULES[name].moment_bytes(64, states)}"


def contestants_of(core, values: Values, bf16: bool, options) -> dict[str, tuple]:
    """Return what runs in turn, by name: what comes before it without being timed, and itself."""
    made: dict[str, tuple] = {}
    for name in options.rules:
        for states in RULES[name].formats:
            kind = (states, name, hyper_of(RULES[name]))
            ours = Ours(core, values, bf16, options.threads, options.kernel, *kind)
            made[f"{name}/{states}"] = (ours.make_checksums, ours.update_checked)
            bound = bound_of(name, states)
            if bound not in made:  # on arrays of its own, because it makes them garbage
                apart = Ours(core, values, bf16, options.threads, options.kernel, *kind)
                made[bound] = (lambda: None, apart.stream)
        if name not in PEERS:
            print(f"note: {name} is not compared: it has no peer here", file=sys.stderr)
            continue
        peer = Peer(PEERS[name][1], values, bf16, None)
        made[f"{name}/peer"] = (lambda: None, peer.step)
    return made


def bench(core, report: Report, options: argparse.Namespace, bf16: bool) -> None:
    """Let all rules take turns with one dtype of parameters and gradients."""
    count = options.elements // 64 * 64
    contestants = contestants_of(core, Values(count), bf16, options)
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(options.repetitions + 1):
        for name, (before, run) in contestants.items():
            before()
            # OpenMP's threads spin for a while after their work; no time may include that.
            time.sleep(0.02)
            seconds = seconds_of(run)
            if repetition > 0:  # the first repetition is the warm-up
                speeds[name].append(round(count / seconds))
    mode = "bf16_residual" if bf16 else "fp32"
    for name in options.rules:
        for states in RULES[name].formats:
            ours = speeds[f"{name}/{states}"]
            format_of = "" if states == "fp32" else f"/{states}_moments"
            peers = {PEERS[name][0]: f"{name}/peer"} if name in PEERS else {}
            if "adamw" in options.rules and name != "adamw":
                peers["AdamW with the same moments"] = f"adamw/{states}"
            for peer, key in peers.items():
                report.add(
                    f"rules_py/{name}/{mode}/checksums{format_of}",
                    ours,
                    "elements/s",
                    peer=peer,
                    peer_values=speeds[key],
                    bound="the same bytes moved",
                    bound_values=speeds[bound_of(name, states)],
                    less_is_better=False,
                    median=statistics.median(ours),
                    moved_bytes=2 * RULES[name].moment_bytes(64, states) / 64,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", choices=CHOICES, default=CHOICES)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--kernel", help="the name of a kernel, for example avx2; default: the best"
    )
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    core = importlib.import_module("lohan._core")
    report = Report(options.history)
    for bf16 in (False, True):
        bench(core, report, options, bf16)


if __name__ == "__main__":
    main()
