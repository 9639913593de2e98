"""Processes with AdamW that end while a message of another process is awaited."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

from patience import HUNG_S

# Rank 0 waits for rank 1's gradients until it gives up, and rank 1 is killed while rank 0's
# interpreter ends. The tests' own workers end without that, so these are programs.
_PROGRAM = """
import os, signal, sys, time
import lohan, torch
from lohan.common._inside import inside

rank, folder = int(os.environ["RANK"]), sys.argv[1]
torch.manual_seed(0)
model = lohan.wrap(torch.nn.Linear(8, 8), store=folder + "/run", lr=1e-3, peer_timeout_s=5)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)


class Last:
    other = inside(model).peers.world.peers[1].pid

    def __del__(self, kill=os.kill, sleep=time.sleep):  # the modules are gone by then
        kill(self.other, 9)
        sleep(1)  # in which a thread that the end of rank 1 wakes wants the GIL


try:
    model(torch.ones(1, 8)).sum().backward()
except lohan.errors.PeerLostError as error:
    print(error)
sys.last_of_all = Last()
model.lohan.close()
"""


def test_a_process_that_has_given_up_on_another_ends_without_an_abort(
    tmp_path: pathlib.Path,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(tmp_path)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, errors = processes[0].communicate(timeout=HUNG_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == 0, errors
    assert "rank 1 (host" in said and "has been silent since" in said, said
    assert "terminate called" not in errors
