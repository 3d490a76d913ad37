"""Makes a fresh rendezvous after torchrun restarts the ranks, so that they do not read what earlier ranks left behind.

Since torch 2.5 the rendezvous store persists over restarts, with the addresses of ranks that are gone. `init_process_group`
connects to these and blocks for half an hour. So rank 0 invents a name for every new rendezvous, a prefix with no old keys,
and tells it to the live ranks. Not covered: scripts that call `init_process_group` themselves (there
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
"""How long a rank waits for the others; the default of `init_process_group`."""
PAUSE = 0.02
"""Seconds between two polls of the store."""


def meeting_place(here: World, environ: Mapping[str, str]) -> Store | None:
    """Return the store in which the ranks of this attempt meet, or None if torch's own store is fresh."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = TCPStore(address, port, here.size, is_master=False, timeout=PATIENCE)
    return PrefixStore(agreed_name(store, here.rank, here.size), store)


def agreed_name(store: Store, rank: int, size: int) -> str:
    """Agree with the live ranks on a name that nobody has used before. Keys of earlier ranks in `store` are ignored: a rank
    accepts only an answer to the word that it has just invented."""
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
