"""Meeting again: processes that torchrun restarts find each other, and not what those before them left.

Since torch 2.5 the store that processes meet in stays the same over restarts, with the addresses of processes that are gone:
`init_process_group` connects to these, and waits for half an hour. So rank 0 makes up a name for every new meeting, under which
nothing lies, and tells it to those that are alive. Not covered: scripts that call `init_process_group` themselves (there
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment helps).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from memfit.hardware.world import World

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others, as `init_process_group` does."""
PAUSE = 0.02
"""Seconds between two looks for others."""


def meeting_place(here: World, environ: Mapping[str, str]) -> Store | None:
    """Where the processes of this attempt meet; None where torch's own place is new."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = TCPStore(address, port, here.size, is_master=False, timeout=PATIENCE)
    return PrefixStore(agreed_name(store, here.rank, here.size), store)


def agreed_name(store: Store, rank: int, size: int) -> str:
    """A name that the processes alive agree on, and no other has used. Whatever processes before left in `store` is ignored:
    a process only believes what answers the word that it has just made up."""
    if rank:
        word = uuid.uuid4().hex
        store.set(f"memfit/here/{rank}", word)
        name = store.get(f"memfit/answer/{word}").decode()
        store.set(f"{name}/heard/{rank}", "")
        return name
    name = f"memfit/{uuid.uuid4().hex}"
    missing, until = set(range(1, size)), time.monotonic() + PATIENCE.total_seconds()
    while missing and time.monotonic() < until:
        for other in sorted(missing):
            if store.check([f"{name}/heard/{other}"]):
                missing.discard(other)
            elif store.check([f"memfit/here/{other}"]):
                store.set(f"memfit/answer/{store.get(f'memfit/here/{other}').decode()}", name)
        time.sleep(PAUSE)
    return name
