"""Processes of one machine that share parameters (share="on")."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest
import world_adamw
import world_commits
from lohan.errors import NetworkError
from lohan.replicas._team import Team
from lohan.world._watch import Peer
from world_adamw import ON
from world_helper import Group, run


def test_a_machine_moves_the_bytes_of_one_process(tmp_path: pathlib.Path) -> None:
    settings = {"host_bytes": 14_000_000, "schedule": "serial"}
    one = run(tmp_path, 1, world_adamw.traffic, str(tmp_path / "one"), settings)[0]
    shared = run(tmp_path, 3, world_adamw.traffic, str(tmp_path / "run"), settings, env=ON)
    assert shared[0] == one and one[1]["state_write"] > 0
    for _, nbytes in shared[1:]:
        assert set(nbytes.values()) == {0}


def test_frozen_blocks_stay_on_every_accelerator(tmp_path: pathlib.Path) -> None:
    settings = {"device": "emu", "device_param_bytes": 1 << 20, "change": "frozen"}
    found = run(tmp_path, 3, world_adamw.traffic, str(tmp_path / "run"), settings, env=ON)
    assert found[0][1]["copy_in"] > 0  # of blocks that the owner has updated
    for _, nbytes in found[1:]:
        assert nbytes["copy_in"] == found[0][1]["copy_in"]


def test_what_processes_that_share_parameters_cannot_do_is_refused_by_name(
    tmp_path: pathlib.Path,
) -> None:
    owner, mate = run(tmp_path, 2, world_adamw.refused, str(tmp_path / "run"), env=ON)
    for each in (owner, mate):
        assert each.pop("step").startswith("StepError: parameters were changed while processes")
    assert [*owner] == ["loop", "load"] and [*mate] == ["snapshot", "loop", "load"]
    said = mate.pop("snapshot")
    assert said.startswith("UnsupportedError: a snapshot ") and "do it on rank 0" in said, said
    for said in (*owner.values(), *mate.values()):
        assert said.startswith("UnsupportedError: parameters cannot be changed"), said
        assert "before lohan.wrap()" in said and "rank 0" not in said


def test_a_change_of_a_shared_frozen_parameter_ends_the_training(tmp_path: pathlib.Path) -> None:
    for said in run(tmp_path, 2, world_adamw.frozen_changed, str(tmp_path / "run"), env=ON):
        assert len(said) == 2, said
        assert said[0].startswith("UnsupportedError: ") and "Parallel(share=True)" in said[0], said
        assert said[1].startswith("StepError: parameters were changed while processes"), said


def test_what_shared_parameters_do_not_support_is_refused_at_wrap(tmp_path: pathlib.Path) -> None:
    for said in run(tmp_path, 2, world_adamw.refused_at_wrap, str(tmp_path / "run"), env=ON):
        assert said[0].startswith("StoreError: Parallel(share=True) needs store="), said
        assert said[1].startswith(
            "UnsupportedError: Parallel(share=True) is not supported with method"
        ), said


def test_all_processes_may_unwrap_their_models(tmp_path: pathlib.Path) -> None:
    one = run(tmp_path, 1, world_adamw.unwrapped, str(tmp_path / "one"))
    assert run(tmp_path, 2, world_adamw.unwrapped, str(tmp_path / "run"), env=ON) == one * 2


class _World:
    """What a Team asks of a World, for two processes of which this one is rank 1."""

    rank = 1
    peers = (Peer(0, "vm", 1, "node"), Peer(1, "vm", 2, "node"))

    def __init__(self, name: str) -> None:
        self._name = name

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        return [self._name.encode(), payload]

    def name(self, rank: int) -> str:
        return str(self.peers[rank])

    def known_end(self, rank: int | None, what: str) -> None:
        return None


def test_a_handshake_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NetworkError, match=r"rank 1 .* cannot share memory with rank 0 .*refused"):
        Team(_World("lohan-nobody")).follow()
    name = f"lohan-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"\0{name}")
        door.listen(1)
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(NetworkError, match=r"belongs to user .* whose user is 4711"):
            Team(_World(name)).follow()


def test_an_update_that_waits_for_a_killed_process_ends_by_name(tmp_path: pathlib.Path) -> None:
    owner, mate = Group(
        tmp_path, 2, world_adamw.die_with_pins, str(tmp_path / "run"), env=ON
    ).wait()
    assert mate.code == 9
    assert owner.error == "PeerLostError" and "rank 1 (host" in owner.text
    resumed = run(tmp_path, 2, world_adamw.resume_for, str(tmp_path / "run"), 2, env=ON)
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), resumed[0][0])[0]
    assert resumed == [whole] * 2


def test_an_owner_that_fails_while_a_mate_is_late_ends_both(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    found = run(tmp_path, 2, world_commits.lose_states_in_a_close, store, env=ON)
    assert found == ["ChecksumError", "PeerStepError"]


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_wait_for_a_block_of_a_killed_owner_ends(
    tmp_path: pathlib.Path, interrupts: bool
) -> None:
    store = str(tmp_path / "run")
    owner, mate = Group(
        tmp_path, 2, world_commits.wait_for_an_owner, store, interrupts, env=ON
    ).wait()
    assert (owner.code, mate.code) == (9, 0)
    expected = "KeyboardInterrupt: " if interrupts else "PeerLostError: rank 0 (host"
    assert mate.value.startswith(expected), mate.value


def test_a_wait_for_memory_that_a_killed_process_has_pinned_ends(tmp_path: pathlib.Path) -> None:
    owner, mate = Group(
        tmp_path, 2, world_commits.wait_for_room, str(tmp_path / "run"), env=ON
    ).wait()
    assert (owner.code, mate.code) == (0, 9)
    assert owner.value.startswith("PeerLostError: rank 1 (host"), owner.value


def test_an_unwrap_gives_every_process_the_moments_that_only_the_owner_has(
    tmp_path: pathlib.Path,
) -> None:
    found = {}
    for share in ("off", "on"):
        env, store = {world_adamw.SHARE: share}, str(tmp_path / share)
        found[share] = run(tmp_path, 3, world_commits.unwrap_with_states, store, env=env)
    assert found["on"] == found["off"] and {each[1] for each in found["on"]} == {2}
    assert len({each[0] for each in found["on"]}) == 1


def test_every_process_has_the_buffers_and_the_origins_of_the_files(tmp_path: pathlib.Path) -> None:
    store, files = str(tmp_path / "run"), str(tmp_path / "files")
    found = run(tmp_path, 2, world_commits.values_of_files, store, files, env=ON)
    assert found[0] == found[1]
    assert found[0][0] == [0.0, 1.0, 2.0, 3.0] and {*found[0][1].values()} == {"file"}
