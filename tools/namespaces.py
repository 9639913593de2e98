"""Network namespaces: machines of their own on one machine, joined by links with a limited rate.

Each namespace is a node with one network card, whose counters say what a run sent and received. All
of them and a bridge between them disappear with the context. Root and iproute2 are needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

NETWORK = "10.77.0"


def why_not(*more: str) -> str:
    """Return why namespaces cannot be made here, or "" if they can.

    Args:
        more: further programs that are needed.
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", *more) if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (packages iproute2, nftables)"
    probe = f"lh{os.getpid() % 100_000}t"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    _run("ip", "netns", "del", probe, check=False)
    return done.stderr.strip() if done.returncode else ""


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=check)
    return done.stdout


def address(node: int) -> str:
    """Return the address of a node."""
    return f"{NETWORK}.{node + 1}"


@contextlib.contextmanager
def nodes(count: int, rate: str | None) -> Iterator[list[str]]:
    """Make nodes that reach each other, and remove them at the end.

    Args:
        count: the number of nodes.
        rate: the rate at which each node sends, as tc writes it ("1gbit"); None: no limit.

    Yields:
        The namespaces' names.
    """
    prefix = f"lh{os.getpid() % 100_000}"
    bridge = f"{prefix}b"
    names = [f"{prefix}n{node}" for node in range(count)]
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for node, name in enumerate(names):
            _run("ip", "netns", "add", name)
            port = f"p{node}"
            peer = ("peer", "name", port, "netns", bridge)
            _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", *peer)
            _run("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", bridge, "link", "set", port, "master", "br0")
            _run("ip", "-n", bridge, "link", "set", port, "up")
            limit(name, rate)
        yield names
    finally:
        for name in (*names, bridge):
            _run("ip", "netns", "del", name, check=False)


def limit(name: str, rate: str | None) -> None:
    """Set the rate at which a node sends.

    Args:
        name: the node's namespace.
        rate: the rate, as tc writes it; None: no limit.
    """
    _run("tc", "-n", name, "qdisc", "del", "dev", "eth0", "root", check=False)
    if rate is not None:
        # A burst of less than 64 KiB would divide the kernel's large segments into many packets.
        shape = ("tbf", "rate", rate, "burst", "256kb" if _is_fast(rate) else "32kb")
        _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape, "latency", "200ms")


def _is_fast(rate: str) -> bool:
    return rate.endswith("gbit") or (rate.endswith("mbit") and float(rate[:-4]) >= 100)


def command(name: str, *words: str) -> list[str]:
    """Return a command that runs in a namespace."""
    return ["ip", "netns", "exec", name, *words]


def counters(name: str) -> tuple[int, int]:
    """Return the bytes that a node's card has sent and received, headers included."""
    paths = (f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("tx", "rx"))
    sent, received = _run(*command(name, "cat", *paths)).split()
    return int(sent), int(received)


def sent_bytes(name: str) -> int:
    """Return the bytes that a node's card has sent, headers included."""
    return counters(name)[0]


def set_link(name: str, *, is_up: bool) -> None:
    """Switch a node's card on or off."""
    _run("ip", "-n", name, "link", "set", "eth0", "up" if is_up else "down")


def lose(name: str, percent: int) -> None:
    """Drop a share of the packets that a node sends, at random."""
    rule = f"numgen random mod 100 < {percent} drop;"
    chain = f"chain out {{ type filter hook output priority 0; {rule} }};"
    _run(*command(name, "nft", f"table inet loss {{ {chain} }};"))
