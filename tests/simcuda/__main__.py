"""Runs a script, or a module, with a simulated GPU: `python -m tests.simcuda --capacity 2GiB train.py --its --arguments`.

`python -m tests.simcuda --devices 2 -m torch.distributed.run --nproc_per_node=2 train.py` gives every process the devices.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from .build import built
from .launch import environment
from .sizes import size


def main() -> None:
    """Build it if need be, and become the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simcuda", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capacity", default="8GiB", help="memory of each device, such as 2GiB; several with commas")
    parser.add_argument("--devices", type=int, default=None, help="how many there are (one, or as many as capacities)")
    parser.add_argument("--others", default="0", help="memory that other processes hold of each device")
    parser.add_argument("--context", default="0", help="memory that each process holds of a device beside the allocator")
    parser.add_argument("--name", default=None, help="what torch.cuda.get_device_name says")
    parser.add_argument("-m", dest="module", action="store_true", help="the command is a module's name")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script", help="the script and its arguments")
    asked = parser.parse_args()
    if not asked.command:
        parser.error("a script, or -m and a module")
    capacities = [size(one) for one in asked.capacity.split(",")]
    devices = asked.devices or len(capacities)
    if len(capacities) not in (1, devices):
        parser.error(f"{len(capacities)} capacities for {devices} devices")
    settings: dict[str, Any] = {"devices": devices, "capacity": capacities * (devices // len(capacities))}
    settings |= {"others": size(asked.others), "context": size(asked.context)}
    if asked.name:
        settings["name"] = asked.name
    built()
    command = [sys.executable, *(["-m"] if asked.module else []), *asked.command]
    os.execve(sys.executable, command, environment(**settings))


if __name__ == "__main__":
    main()
