"""Optimizer steps in sync over ranks: none starts before all are about to, none returns before all are done, and a rank whose
step fails catches up.

A rank whose step ran out of memory copies the result of a rank whose step succeeded. The step itself is never retried: it may
have updated some parameters and not others. If every rank holds whole parameters and optimizer state, they are the same on all
ranks after a step, so the copy is what the step would have made. Not covered: steps that fail on all ranks, and optimizers that
keep anything outside their state dicts.
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
from memfit.hardware.exhausted import drop_frames, free_unused, is_out_of_memory, retry_on_oom
from memfit.ranks.ranks import Ranks

STEPPING = "taking an optimizer step"
STEPPED = "an optimizer step"
CATCHING_UP = "taking over an optimizer step from another process"


class CatchUp:
    """Takes the steps of `optimizer` in sync on all of `ranks`. Every rank creates one of these, or none does."""

    def __init__(self, ranks: Ranks, model: nn.Module, optimizer: Optimizer) -> None:
        self._ranks, self._model, self._optimizer = ranks, model, optimizer
        self._service = ranks.serve(self._serve)
        self._source: int | None = None

    def step(self, *, whole: bool) -> int | None:
        """Step once all ranks are about to. `whole`: every rank holds the whole state. Returns the rank that the result was
        copied from because memory ran out here, or None if this rank stepped itself. Raises RankFailed if a rank failed since
        the gradient reduction, and the optimizer's own error if it cannot be repaired."""
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
        """Copy parameters and optimizer state from a rank whose step succeeded. Return that rank, or None if there is none."""
        drop_frames(failure)
        free_unused(self._ranks.device)
        self._source = None
        try:
            self._ranks.ask(self._service, CATCHING_UP)
        except RankFailed:
            return None
        return self._source

    def _serve(self, asking: Sequence[int]) -> None:
        """Run on every rank: the first rank that has stepped sends, those that ask receive."""
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
        self._optimizer.state.clear()  # else entries of the failed step would stay beside the new ones
        groups = self._optimizer.param_groups
        retry_on_oom(lambda: self._optimizer.load_state_dict(told["state"]), self._ranks.device)
        self._optimizer.param_groups = groups  # schedulers refer to these dicts
        for group, values in zip(groups, told["groups"]):
            group.update(values)

    def _tensors(self) -> list[torch.Tensor]:
        """Return the parameters, including those that no module of the model holds."""
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        return list({id(p): p for p in (*self._model.parameters(), *trained)}.values())

    def _over_talk(self, move: Any, tensor: torch.Tensor, rank: int) -> None:
        try:
            move(tensor, self._ranks.everywhere(rank), group=self._ranks.talk)
        except RuntimeError as error:
            raise self._ranks.lost(CATCHING_UP) from error


def _say_torn(error: BaseException) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note("memfit: parameters on this process may be partly updated; resume from the last saved state")  # type: ignore[attr-defined]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
