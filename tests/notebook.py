"""What a notebook runs: a training function in accelerate's launchers for notebooks, in a process that has trained nothing.

    python tests/notebook.py notebook plain 2 29500 found.json
"""

from __future__ import annotations

import json
import sys

import accelerate
import accelerated
import launched


def plain(path: str) -> None:
    """memfit.wrap inside the launched function."""
    launched.main(path)


def guest(path: str) -> None:
    """memfit's Accelerator inside the launched function."""
    accelerated.main("target", path)


def guest_on_cpu(path: str) -> None:
    """The same, told to train on the CPU as accelerate wants to be told."""
    accelerator = accelerated.Accelerator(cpu=True, target_batch=16, micro_batch=3)
    found = accelerated.trained(accelerator)
    if accelerator.is_main_process:
        with open(path, "w") as file:
            json.dump(found, file)


FUNCTIONS = {"plain": plain, "guest": guest, "guest on CPU": guest_on_cpu}


def main(launcher: str, function: str, processes: str, port: str, path: str) -> None:
    if launcher == "debug":
        accelerate.debug_launcher(FUNCTIONS[function], (path,), num_processes=int(processes))
    else:
        accelerate.notebook_launcher(FUNCTIONS[function], (path,), num_processes=int(processes), use_port=port)
    print("the notebook goes on")


if __name__ == "__main__":
    main(*sys.argv[1:])
