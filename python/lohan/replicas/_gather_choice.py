"""Whether the processes of a machine gather blocks (gather="auto"), from measured times.

A block of U bytes is on all G accelerators after U / B_link if each process copies it over its link
to main memory, and after U / (G B_link) + T_gather if each copies a part and they gather the rest.
B_link is measured while all processes copy at once, because they may share the link.

Source: Elixir V compares both ways by their bandwidths.
"""

from __future__ import annotations

import datetime
import json
import time
from typing import TYPE_CHECKING, Literal

import torch

from lohan.common import _log
from lohan.replicas import _gather
from lohan.torch_glue import _device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan.config import Config
    from lohan.replicas._team import Team
    from lohan.world._world import World

_BYTES = 32 << 20
_ROUNDS = 3
_COPIES = 4  # per round, so that it matters little when each process begins
# Gathers must take less than this share of the time of whole copies: they also use cores or
# multiprocessors that computation needs.
_SHARE = 0.9
_NEVER_S = 1e9
_WHAT = 'measuring gather="auto"'


def choose(world: World, team: Team | None, config: Config) -> Literal["host", "shards"]:
    """Return "shards" if gathers take clearly less time than whole copies, otherwise "host".

    All processes of the run must call this. Those of a machine get the same answer.

    Args:
        world: the processes.
        team: those of this machine; None if they do not share parameters.
        config: the settings of this process.

    Raises:
        PeerLostError, PeerStepError: a process is gone.
    """
    name, index = _device.parse(config.device)
    ranks = (world.rank,) if team is None or name == "cpu" else tuple(team.ranks)
    is_possible = len(ranks) > 1 and (name != "cuda" or torch.distributed.is_nccl_available())
    told = world.exchange(json.dumps([is_possible]).encode(), _WHAT)
    can_gather = len(ranks) > 1 and all(json.loads(told[rank])[0] for rank in ranks)
    mine = [_NEVER_S, _NEVER_S]
    if can_gather and team is not None:
        place = torch.device(name, index) if name == "cuda" else torch.device("cpu")
        link_rate = 0.0 if config.emu_bytes_per_s is None else config.emu_bytes_per_s[0]
        mine = [_copy_s(place, link_rate), _gather_s(world, team, place, config.peer_timeout_s)]
    told = world.exchange(json.dumps(mine).encode(), _WHAT)
    copy_s, gather_s = (max(json.loads(told[rank])[way] for rank in ranks) for way in (0, 1))
    parts_s = copy_s / len(ranks) + gather_s
    chosen: Literal["host", "shards"] = "host"
    if can_gather and parts_s < _SHARE * copy_s:
        chosen = "shards"
    if can_gather and team is not None and not team.is_mate:
        _log.inform(
            f'Parallel(gather="auto") chose "{chosen}": {_BYTES >> 20} MiB take'
            f" {copy_s * 1e3:.3g} ms"
            f" over each link, or {parts_s * 1e3:.3g} ms in {len(ranks)} parts that are gathered"
        )
    return chosen


def _copy_s(place: torch.device, link_rate: float) -> float:
    """Return the seconds that _BYTES take from main memory to the accelerator."""
    if link_rate > 0:  # an emulated link
        return _BYTES / link_rate
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=place.type == "cuda").fill_(1)
    target = torch.empty_like(host, device=place)
    times = []
    for _ in range(_ROUNDS):
        _settle(place)
        began = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(host, non_blocking=True)
        _settle(place)
        times.append((time.perf_counter() - began) / _COPIES)
    return min(times)


def _gather_s(world: World, team: Team, place: torch.device, timeout_s: float) -> float:
    """Return the seconds that gathering _BYTES takes; _NEVER_S if it fails.

    If it fails because a process is gone, the next exchange of messages says so.
    """
    group = _gather.connect(world, team.ranks, place, "gather-test")
    target = torch.empty(_BYTES, dtype=torch.uint8, device=place).fill_(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        _gather.broadcast(group, target, _edges(len(team.ranks)), timeout)  # connects
        times = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            for _ in range(_COPIES):
                _gather.broadcast(group, target, _edges(len(team.ranks)), timeout)
            times.append((time.perf_counter() - began) / _COPIES)
    except RuntimeError:
        # gloo would wait for a process that does not answer when the group is destroyed.
        _gather.cut(group, len(team.ranks), is_cuda=place.type == "cuda")
        return _NEVER_S
    finally:
        _gather.disconnect(group)
    return min(times)


def _edges(count: int) -> Sequence[int]:
    return [_BYTES * part // count for part in range(count + 1)]


def _settle(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
