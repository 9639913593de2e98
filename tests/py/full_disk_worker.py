"""Train a step whose N-th write or sync fails with ENOSPC, for each N; print a line of JSON.

Run as `python full_disk_worker.py FOLDER`, FOLDER on a disk. Each item is [class, errno, message]
of the error of one step, or null if the step succeeded although a call failed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "campaign"))

import campaign_build
import lives
from lives import crash_worker, lohan, torch
from lohan.errors import LohanError

CALLS_MAX = 100


def main() -> None:
    """Until a step has fewer calls than N."""
    calls = lives.preloaded(campaign_build.recorder())
    torch.set_num_threads(1)
    store = pathlib.Path(sys.argv[1]).resolve() / "s"
    found = []
    calls.set(store)
    for at in range(1, CALLS_MAX):
        model = lohan.wrap(
            crash_worker.build(torch.float32),
            store=store,
            resume=store.exists(),
            lr=1e-2,
            io="threads",  # this backend makes the C library's calls
        )
        calls.arm(at, lives.FAIL, 0, errno.ENOSPC)
        error_found = None
        try:
            crash_worker.train_step(model, model.lohan.step)
            model.lohan.commit()
        except LohanError as error:
            error_found = [type(error).__name__, getattr(error, "errno", None), str(error)]
        made = calls.count()
        calls.arm(0, 0, 0, kinds=0)
        with contextlib.suppress(LohanError):
            model.lohan.close()
        if made < at:
            break
        found.append(error_found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
