"""Processes that die, stop, fail or leave: the others say which one and why, and none hangs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import signal
import threading
import time
import types
import weakref
from typing import Any

import pytest
import torch.distributed as dist
import world_adamw
import world_ends
import world_worker
from lohan.errors import PeerLostError, WorldMismatchError
from lohan.world import _wire, _world
from lohan.world._watch import End, Peer, Watch
from patience import ENDS_S, HUNG_S, slowness
from world_helper import Group, run

# What the processes run: zeroth-order training, and AdamW.
WORKERS = pytest.mark.parametrize("worker", [world_worker, world_adamw], ids=["mezo", "adamw"])
MACHINES = world_adamw.WAYS["machines"]
BOTH = MACHINES["env"]


def wait_for(paths: list[pathlib.Path]) -> None:
    until = time.monotonic() + HUNG_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, "the processes did not start"
        time.sleep(0.01)


def kill_one(folder: pathlib.Path, seed: int, worker: Any, **options: Any) -> list[str]:
    """Kill one process at a random moment; check what the others say, and resume the run.

    The options are those of Group. With divided states the run resumes with as many processes, or
    with one of each machine. Return what is wrong.
    """
    rng = random.Random(seed)
    nodes = options.get("nodes", 1)
    count = nodes * 2 if nodes > 1 else rng.choice((2, 3))
    victim = rng.randrange(count)
    store, marker = str(folder / f"run-{seed}"), folder / f"ready-{seed}"
    group = Group(folder, count, worker.slow_train, store, 10_000, str(marker), **options)
    wait_for([pathlib.Path(f"{marker}.{rank}") for rank in range(count)])
    moment = rng.random() * 0.3
    time.sleep(moment)
    group.kill(victim)
    killed_at = time.monotonic()
    limit_s = 1.0 if nodes == 1 else world_adamw.PEER_TIMEOUT_S + 2.0
    ended = group.wait(ENDS_S)
    assert ended[victim].code == -signal.SIGKILL
    wrong = []
    for rank, each in enumerate(ended):
        seconds = each.ended_at - killed_at
        is_named = each.error == "PeerLostError" and f"rank {victim} (" in each.text
        is_right = is_named and "resume=True" in each.text and seconds <= limit_s * slowness()
        if rank != victim and not is_right:
            wrong.append(
                f"seed {seed}: rank {victim} of {count} was killed {moment:.3f} s after the start;"
                f" rank {rank} ended {seconds:.2f} s later with {each.error or each.code}:"
                f" {each.text}\n{each.said}"
            )
    # The run continues with any number of processes, and loses no step that was reported.
    resumed = rng.choice((1, 2, 3, 4))
    env = {k: v for k, v in options.get("env", {}).items() if k == world_adamw.REPLICAS}
    if env:
        resumed = count if nodes == 1 else nodes
    steps = max(each.value[0] if each.value else 0 for each in ended)
    results = run(folder, resumed, worker.resume_for, store, 3, env=env)
    whole = run(folder, 1, worker.train, str(folder / f"whole-{seed}"), results[0][0])[0]
    if results != [results[0]] * resumed or results[0][0] < steps or whole[1] != results[0][1]:
        wrong.append(f"seed {seed}: resumed as {results} after step {steps}, should be {whole}")
    return wrong


def kill_each(folder: pathlib.Path, seeds: range, worker: Any, **options: Any) -> None:
    """Kill a process of one run for each seed, and report everything that is wrong at the end."""
    wrong = []
    for seed in seeds:
        try:
            wrong += kill_one(folder, seed, worker, **options)
        except AssertionError as error:  # what hung, or did not resume
            wrong.append(f"seed {seed}: {error}")
    assert not wrong, f"{len(wrong)} errors in {len(seeds)} kills:\n" + "\n".join(wrong)


# The first two kill rank 1 of three processes, and rank 0 of two.
KILLS = pytest.mark.parametrize("count", [2, pytest.param(6, marks=pytest.mark.slow)])


@KILLS
@WORKERS
def test_a_killed_process_is_named_and_the_run_resumes(
    tmp_path: pathlib.Path, worker: Any, count: int
) -> None:
    kill_each(tmp_path, range(count), worker)


@pytest.mark.timeout(3600)
@pytest.mark.long
@WORKERS
def test_a_hundred_killed_processes_are_named(tmp_path: pathlib.Path, worker: Any) -> None:
    kill_each(tmp_path, range(100, 200), worker)


# By what happens: processes, machines, settings, the rank that is killed, late and blind ranks.
@pytest.mark.parametrize(
    ("count", "nodes", "env", "victim", "late", "blind"),
    [
        # Rank 1 has no connection to rank 3, and sees first that rank 2 has cut its own.
        pytest.param(4, 2, BOTH, 3, {}, {0: 1.5, 1: 1.5}, id="a process without a connection"),
        # Rank 0, which serves the store, ends before rank 2 looks.
        pytest.param(4, 2, BOTH, 1, {2: 4.0}, {}, id="a process that looks late"),
        # Rank 0 serves the store. Without it rank 2 cannot say why it ends, which rank 3 sees.
        pytest.param(4, 2, BOTH, 0, {3: 4.0}, {3: 10.0}, id="a process without the store"),
        # No process of rank 2's machine is left. Rank 0 finds that rank 1 has left because of it.
        pytest.param(3, 3, {}, 2, {0: 3.5}, {}, id="a machine that is gone"),
    ],
)
def test_a_process_that_ends_because_of_a_killed_one_passes_its_name_on(
    tmp_path: pathlib.Path,
    count: int,
    nodes: int,
    env: dict[str, str],
    victim: int,
    late: dict[int, float],
    blind: dict[int, float],
) -> None:
    ended = Group(
        tmp_path,
        count,
        world_ends.die_in_third_step,
        str(tmp_path / "run"),
        victim,
        late,
        blind,
        nodes=nodes,
        env=env,
    ).wait()
    assert ended.pop(victim).code == -signal.SIGKILL
    for each in ended:
        assert each.error == "PeerLostError", each
        assert f"rank {victim} (" in each.text, each


def test_a_process_killed_while_all_connect_is_named(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    ended = Group(tmp_path, 3, world_ends.die_while_connecting, store, 1).wait()
    assert ended.pop(1).code == -signal.SIGKILL
    for each in ended:
        assert each.error == "PeerLostError" and "rank 1 (" in each.text, each


@pytest.mark.slow
def test_a_process_killed_before_any_message_of_wrap_is_named(tmp_path: pathlib.Path) -> None:
    for number in range(2, 13):  # the first one is that of the meeting
        victim, store = number % 4, str(tmp_path / str(number))
        died = world_ends.die_in_message
        ended = Group(tmp_path, 4, died, store, victim, number, **MACHINES).wait()
        assert ended.pop(victim).code == -signal.SIGKILL
        for each in ended:
            assert each.error == "PeerLostError" and f"rank {victim} (" in each.text, each


class _Gloo:
    """A build of gloo, and whether its connections fail."""

    _Options = types.SimpleNamespace

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def create_device(self, **names: str) -> None:
        return None

    def __call__(self, *args: Any) -> str:
        if self._fails:
            raise RuntimeError("Connection closed by peer")
        return "connected"


class _World:
    """What connecting asks of a World. Rank 1 is lost, or nothing is known."""

    rank, size = 0, 2

    def __init__(self, lost: str) -> None:
        self._lost = lost
        self.said: list[str] = []

    def exchange(self, payload: bytes, what: str) -> None:
        self.said.append(what)

    def substore(self, name: str) -> None:
        return None

    def check_peers(self, missing: dict[int, float], what: str) -> None:
        return None

    def known_end(self, rank: int | None, what: str) -> PeerLostError | None:
        return PeerLostError(self._lost) if self._lost else None

    def name(self, rank: int) -> str:
        return f"rank {rank}"


def test_a_connection_that_fails_because_of_a_loss_names_the_lost_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(PeerLostError, match=r"^rank 1 is lost$"):
        _wire._connected(_Gloo(fails=True), _World("rank 1 is lost"))
    with pytest.raises(PeerLostError, match=r"rank 0 cannot connect.*Connection closed by peer"):
        _wire._connected(_Gloo(fails=True), _World(""))


def test_no_process_may_close_its_connections_before_all_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(_wire, "_groups", [])
    world = _World("")
    assert _wire._connected(_Gloo(fails=False), world) == "connected"
    assert world.said == ["the connections of lohan.wrap()"]


@pytest.mark.parametrize("absent", [(1, 3), (0,)], ids=str)
def test_a_process_that_does_not_come_is_named_after_a_limited_time(
    tmp_path: pathlib.Path, absent: tuple[int, ...]
) -> None:
    ended = Group(tmp_path, 4, world_ends.come_without, str(tmp_path / "run"), absent).wait()
    for rank, each in enumerate(ended):
        if rank in absent:
            assert each.code == 0, each
        elif 0 in absent:  # it serves the store
            assert each.error == "PeerLostError", each
            assert f"cannot be reached by rank {rank}" in each.text, each
            assert "rank 0, which serves it, was not started or has ended" in each.text, each
        else:
            assert each.error == "PeerLostError", each
            assert each.text.startswith("rank 1, rank 3 did not call lohan.wrap() within 3 s"), each


@pytest.mark.parametrize("has_accepted", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_before_all_have_met_is_named(
    tmp_path: pathlib.Path, victim: int, has_accepted: bool
) -> None:
    agent, env = agent_store()
    store, died = str(tmp_path / "run"), world_ends.die_before_all_have_met
    ended = Group(tmp_path, 4, died, store, victim, has_accepted, env=env).wait()
    assert ended.pop(victim).code == -signal.SIGKILL
    if not has_accepted:
        assert ended.pop().code == 0
    for each in ended:
        assert each.error == "PeerLostError", each
        assert each.text.startswith(f"rank {victim} called lohan.wrap(), and has been silent"), each
    del agent


@WORKERS
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named_after_the_timeout(
    tmp_path: pathlib.Path, victim: int, worker: Any
) -> None:
    marker = tmp_path / "ready"
    group = Group(
        tmp_path, 2, worker.slow_train, str(tmp_path / "run"), 10_000, str(marker), nodes=2
    )
    wait_for([pathlib.Path(f"{marker}.{rank}") for rank in range(2)])
    group.kill(victim, signal.SIGSTOP)
    stopped_at = time.monotonic()
    other = 1 - victim
    group.processes[other].join(ENDS_S)
    group.kill(victim)
    ended = group.wait(ENDS_S)
    assert ended[other].error == "PeerLostError", ended[other]
    # Rank 0 serves the store here, and if it stops, the store does not answer.
    assert f"rank {victim} (host" in ended[other].text
    assert ("rendezvous store" in ended[other].text) == (victim == 0)
    assert ended[other].ended_at - stopped_at <= (5 + 2) * slowness()


def test_a_failed_step_is_forgotten_everywhere_and_training_continues(
    tmp_path: pathlib.Path,
) -> None:
    found = run(tmp_path, 2, world_worker.fail_once, str(tmp_path / "run"))
    (zero, first), (one, second) = found
    whole = run(tmp_path, 1, world_worker.train, str(tmp_path / "whole"), 4)[0]
    assert first == second == whole[1]
    assert one[0] == "ValueError: this batch is bad"
    assert "PeerStepError: rank 1 (" in zero[0]
    assert "left step 3 with ValueError: this batch is bad" in zero[0]
    assert "not finite" in one[1]
    assert "PeerStepError: rank 1 (" in zero[1]


def test_an_interrupt_of_a_process_that_waits_ends_the_wait_of_the_others(
    tmp_path: pathlib.Path,
) -> None:
    store, marker = str(tmp_path / "run"), tmp_path / "waits"
    group = Group(tmp_path, 3, world_worker.wait_for_rank_0, store, str(marker), 4.0)
    wait_for([pathlib.Path(f"{marker}.{rank}") for rank in range(3)])
    time.sleep(1.0)
    group.kill(1, signal.SIGINT)
    ended = group.wait(ENDS_S)
    assert ended[1].error == "KeyboardInterrupt"
    for rank in (0, 2):
        assert ended[rank].error == "PeerStepError", ended[rank]
        assert "rank 1 (" in ended[rank].text
        assert "KeyboardInterrupt" in ended[rank].text
    results = run(tmp_path, 2, world_worker.resume_for, store, 2)
    assert results[0] == results[1]
    assert results[0][0] >= 3


def test_a_process_that_closes_early_is_named(tmp_path: pathlib.Path) -> None:
    ended = Group(tmp_path, 2, world_worker.leave_early, str(tmp_path / "run")).wait()
    assert (ended[1].code, ended[1].value) == (0, 2)
    assert ended[0].error == "PeerStepError"
    assert "closed its session after step 2" in ended[0].text


def test_the_error_of_a_program_that_fails_is_passed_on(tmp_path: pathlib.Path) -> None:
    ended = Group(tmp_path, 2, world_worker.die_in_program, str(tmp_path / "run")).wait()
    assert ended[1].error == "OSError"
    assert ended[0].error == "PeerStepError"
    assert "OSError: the data set is gone" in ended[0].text


def test_an_interrupted_process_is_named_while_it_lives(tmp_path: pathlib.Path) -> None:
    store, marker = str(tmp_path / "run"), str(tmp_path / "marker")
    zero, one = run(tmp_path, 2, world_worker.interrupted_in_exchange, store, marker)
    assert one.startswith("KeyboardInterrupt")
    assert "PeerStepError: rank 1 (" in zero
    assert "failed in step 1 with KeyboardInterrupt" in zero


def agent_store() -> tuple[Any, dict[str, str]]:
    """Return a store as torchrun's agent has one, and the variables that it sets."""
    made: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return made, {
        "MASTER_PORT": str(made.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def test_ctrl_c_ends_the_wait_in_wrap(tmp_path: pathlib.Path) -> None:
    agent, env = agent_store()
    zero, one = Group(tmp_path, 2, world_worker.interrupted_alone, env=env).wait(ENDS_S)
    assert (zero.code, zero.error) == (1, "KeyboardInterrupt"), zero
    assert one.code == 0
    del agent


def test_restarted_processes_do_not_read_what_earlier_ones_have_left(
    tmp_path: pathlib.Path,
) -> None:
    agent, env = agent_store()
    store = str(tmp_path / "run")
    for _ in range(3):  # each time, rank 1 is killed in its third step
        ended = Group(tmp_path, 2, world_worker.die_in_third_step, store, env=env).wait()
        assert ended[1].code == -signal.SIGKILL, ended[1]
        assert ended[0].error == "PeerLostError", ended[0]
        assert "step" in ended[0].text
    ended = Group(tmp_path, 2, world_worker.resume_for, store, 0, env=env).wait()
    results = [each.value for each in ended]
    assert results[0] == results[1]
    assert results[0][0] >= 6
    del agent


def test_ctrl_c_ends_the_wait_for_the_rendezvous(tmp_path: pathlib.Path) -> None:
    zero, one = Group(tmp_path, 2, world_worker.interrupted_alone).wait(ENDS_S)
    assert (zero.code, zero.error) == (1, "KeyboardInterrupt"), zero
    assert one.code == 0


def test_a_failed_step_raises_its_own_error_when_another_process_is_gone(
    tmp_path: pathlib.Path,
) -> None:
    store = str(tmp_path / "run")
    zero, one = Group(tmp_path, 2, world_worker.fail_beside_a_dead_process, store).wait()
    assert (zero.error, zero.text) == ("ValueError", "this batch is bad")
    assert one.error == "OSError"


def test_a_process_leaves_without_starting_a_thread(tmp_path: pathlib.Path) -> None:
    ended = Group(tmp_path, 2, world_worker.close_without_threads, str(tmp_path / "run")).wait()
    assert (ended[1].code, ended[1].value) == (0, 1), ended[1]
    assert ended[0].error == "PeerStepError", ended[0]
    assert "closed its session after step 1" in ended[0].text


def test_a_watch_that_stops_still_ends_the_waits_of_all() -> None:
    store: Any = dist.HashStore()
    peers = [Peer(rank, "host", rank, f"node {rank}") for rank in range(2)]
    store.set("beat/0", "1 here")
    watch = Watch(store, peers, 1, 5.0, lambda: None)
    watch.release(["x/7/0"], "-", End(1, "failed", "was interrupted"))
    stopper = threading.Thread(target=lambda: watch.stop(End(1, "closed", "closed"), lingers=False))
    stopper.start()
    time.sleep(0.2)
    watch.start()
    stopper.join()
    assert store.get("x/7/0") == b"-"
    assert json.loads(store.get("end/1"))["text"] == "was interrupted"


class _LateStore:
    """A store in which rank 0 is lost, and rank 1 follows, while the first key is looked up."""

    def __init__(self) -> None:
        self._store: Any = dist.HashStore()
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store.check(keys)
        if self._is_first:
            self._is_first = False
            for rank, how in enumerate(("lost", "failed")):
                end = dataclasses.asdict(End(rank, how, "has ended"))
                self._store.set(f"end/{rank}", json.dumps(end))
        return found


def test_the_end_of_a_process_is_never_read_without_the_loss_that_it_follows() -> None:
    peers = [Peer(rank, "host", rank, f"node {rank}") for rank in range(3)]
    watch = Watch(_LateStore(), peers, 2, 5.0, lambda: None)
    before = watch.ends
    watch._read_ends()
    watch.close()
    assert {rank: end.how for rank, end in watch.ends.items()} == {0: "lost", 1: "failed"}
    assert not before  # another thread may iterate over it


class _Answered:
    """What stands for the thread of a World: every process has sent what this one sends."""

    def put(self, job: Any) -> None:
        job.values = [job.payload[_world._HEAD.size :]] * 2
        job.done.set()


def test_a_late_process_is_not_taken_for_one_that_leaves_out_the_next_backward() -> None:
    store: Any = dist.HashStore()
    peers = [Peer(rank, "host", rank, f"node {rank}") for rank in range(2)]
    watch = Watch(store, peers, 0, 5.0, lambda: None)
    world: Any = _world.World.__new__(_world.World)
    world.rank, world.size, world.peers, world._timeout_s = 0, 2, peers, 5.0
    world._watch, world._jobs, world._broken, world._number = watch, _Answered(), "", 7
    world.check_peers({1: 1.5}, "backward 1 of step 2")  # it looks for messages from now on
    store.set("x/7/1", _world._HEAD.pack(b"+", 1) + b"step 2\0")
    world.backwards = 1
    world.exchange(b"", "step 2")
    store.set("beat/1", "1 here")
    watch._round()  # of the thread, which is late, too
    world.check_peers({1: 0.5}, "backward 1 of step 3")
    world.check_peers({1: 1.5}, "backward 1 of step 3")
    store.set("x/8/1", _world._HEAD.pack(b"+", 1) + b"step 3\0")
    watch._round()
    with pytest.raises(WorldMismatchError, match=r"rank 1 .* is at 'step 3', but rank 0 .*"):
        world.check_peers({1: 2.0}, "backward 1 of step 3")
    watch.close()


def test_a_connection_to_another_store_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = dist.HashStore(), dist.HashStore()
    monkeypatch.setattr(_world, "_spare", [(weakref.ref(first), first.clone())])
    _world._connect(second).set("key", "value")
    assert second.check(["key"])
    assert not first.check(["key"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rendezvous_store_that_is_gone_is_blamed_on_the_process_that_serves_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    world = _world.World.__new__(_world.World)
    world.rank, world._watch = rank, None
    world.peers = [Peer(each, "host", 100 + each, "node") for each in range(2)]
    words = "[/pytorch/third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    said = str(world._lost_store(RuntimeError(words), "step 3"))
    assert f"does not answer rank {rank} (host host, process 10{rank}) in step 3: Conn" in said
    assert ("This process serves it" in said) == (rank == 0)
    assert ("rank 0 (host host, process 100), which serves it, has ended" in said) == (rank == 1)
