"""Optimizer steps of several processes: none begins before all are about to, none returns before all are done, and who fails
in its own catches up.

A process whose step ran out of memory takes what a process has whose step did not. The step itself is never tried again: it may
have changed some parameters and not others. Where every process holds whole parameters and optimizer state, they are the same
everywhere after a step, so that a copy of another's is what the step would have made. Not covered: steps that fail on all
processes, and optimizers that keep anything outside their state dicts.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memfit._errors import RankFailed
from memfit.hardware.exhausted import drop_frames, free_unused, is_out_of_memory, patiently
from memfit.ranks.ranks import Ranks

STEPPING = "taking an optimizer step"
STEPPED = "an optimizer step"
CATCHING_UP = "taking over an optimizer step from another process"


class CatchUp:
    """Takes the steps of `optimizer` on all of `ranks`. Every process makes one, or none."""

    def __init__(self, ranks: Ranks, model: nn.Module, optimizer: Optimizer) -> None:
        self._ranks, self._model, self._optimizer = ranks, model, optimizer
        self._service = ranks.serve(self._serve)
        self._source: int | None = None

    def step(self, *, whole: bool) -> int | None:
        """Step once all processes are about to. `whole`: every process holds all of the state. Returns the rank from which the
        result was taken because memory ran out here, or None where this process did it itself. Raises RankFailed where one
        failed since gradients were reduced; the optimizer's own error where it cannot be made good."""
        self._ranks.agree([], STEPPING)
        failure, source = self._failing(), None
        if failure is not None:
            source = self._taken(failure) if whole and is_out_of_memory(failure) else None
            if source is None:
                self._ranks.failed(failure)
                _say_torn(failure)
                raise failure
        self._ranks.agree([], STEPPED)
        return source

    def _failing(self) -> BaseException | None:
        try:
            self._optimizer.step()
        except RankFailed:
            raise
        except BaseException as error:
            return error
        return None

    def _taken(self, failure: BaseException) -> int | None:
        """Have parameters and optimizer state as a process has them whose step worked. Returns its rank, or None where there is
        none."""
        drop_frames(failure)
        free_unused(self._ranks.device)
        self._source = None
        try:
            self._ranks.ask(self._service, CATCHING_UP)
        except RankFailed:
            return None
        return self._source

    def _serve(self, asking: Sequence[int]) -> None:
        """Every process does this: the first that has stepped sends, those that ask receive."""
        having = [rank for rank in range(self._ranks.size) if rank not in asking]
        if not having:
            return
        self._source = having[0]
        if self._ranks.rank == self._source:
            self._send(asking)
        elif self._ranks.rank in asking:
            self._receive(self._source)

    def _send(self, asking: Sequence[int]) -> None:
        packed = io.BytesIO()
        torch.save({"state": self._optimizer.state_dict(), "groups": _settings(self._optimizer)}, packed)
        state = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
        for rank in asking:
            for tensor in (*self._tensors(), torch.tensor([len(state)]), state):
                self._over_talk(dist.send, tensor.detach().cpu().contiguous(), rank)

    def _receive(self, source: int) -> None:
        with torch.no_grad():
            for tensor in self._tensors():
                room = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._over_talk(dist.recv, room, source)
                tensor.copy_(room)
        length = torch.zeros(1, dtype=torch.int64)
        self._over_talk(dist.recv, length, source)
        state = torch.empty(int(length), dtype=torch.uint8)
        self._over_talk(dist.recv, state, source)
        told = torch.load(io.BytesIO(state.numpy().tobytes()), map_location="cpu", weights_only=False)
        self._load(told)

    def _load(self, told: dict[str, Any]) -> None:
        self._optimizer.state.clear()  # what the failed step may have made of it would stand beside the new one
        groups = self._optimizer.param_groups
        patiently(lambda: self._optimizer.load_state_dict(told["state"]), self._ranks.device)
        self._optimizer.param_groups = groups  # the dicts that schedulers know
        for group, values in zip(groups, told["groups"]):
            group.update(values)

    def _tensors(self) -> list[torch.Tensor]:
        """The parameters, those included that live in no module of the model."""
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        return list({id(p): p for p in (*self._model.parameters(), *trained)}.values())

    def _over_talk(self, move: Any, tensor: torch.Tensor, rank: int) -> None:
        try:
            move(tensor, self._ranks.everywhere(rank), group=self._ranks.talk)
        except RuntimeError as error:
            raise self._ranks.lost(CATCHING_UP) from error


def _say_torn(error: BaseException) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note("memfit: parameters on this process may be updated in part; go on from the last saved state")  # type: ignore[attr-defined]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
