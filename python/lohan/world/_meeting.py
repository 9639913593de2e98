"""How the processes of a run find a part of the rendezvous store that is theirs alone.

[Note: Restarts] When torchrun restarts the processes of a run, their store still has the keys of
the processes before, and nothing in the environment tells them apart on all machines. So each
process writes a random number, and rank 0 answers with all numbers that it finds and with a random
prefix. A process accepts only an answer that has its own number, and says so below the prefix. The
prefix is in use once all processes have accepted it; if rank 0 has read a number of an earlier
process, it answers again as soon as that number changes.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.02


def common_prefix(store: Any, rank: int, size: int, is_needed: Callable[[], bool]) -> str | None:
    """Wait for all processes, and return a prefix that only they use. See [Note: Restarts].

    Args:
        store: the rendezvous store.
        rank: this process's rank.
        size: the number of processes.
        is_needed: whether to wait any longer; None is returned once it is not.
    """
    mine, numbers = secrets.token_hex(8), [f"here/{each}" for each in range(size)]
    answered: list[str] = []
    accepted = ""
    store.set(numbers[rank], mine)
    while is_needed():
        if rank == 0 and store.check(numbers):
            found = [value.decode() for value in store.multi_get(numbers)]
            if found != answered:
                answered = found
                store.set("answer", json.dumps([secrets.token_hex(8), found]))
        if store.check(["answer"]):
            prefix, found = json.loads(store.get("answer"))
            if found[rank : rank + 1] == [mine] and prefix != accepted:
                accepted = prefix
                store.set(f"{prefix}/accepted/{rank}", "")
        if accepted and store.check([f"{accepted}/accepted/{each}" for each in range(size)]):
            return accepted
        time.sleep(POLL_S)
    return None
