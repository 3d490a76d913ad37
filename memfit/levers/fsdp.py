"""Shards parameters and gradients with FSDP2 over the model's blocks, and keeps the user's model and optimizer objects.

Every block is all-gathered from all ranks while it computes, and its gradients are reduced to the rank that owns each shard
(ZeRO stages 2 and 3: Rajbhandari et al. 2020, arXiv:1910.02054; torch.distributed.fsdp.fully_shard). `fully_shard` creates new
parameters, which replace the old ones in the optimizer's groups. State dicts stay full: they are gathered on request, on the
requesting ranks. Not covered: parameters that a forward reads from outside the block that owns them; recurrent layers, which
keep lists of their weights.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memfit._errors import RankFailed, Refused
from memfit.batches.tree import map_leaves, tensors
from memfit.engine.aside import aside
from memfit.engine.gradients import AS_GIVEN, RESHARD, bytes_here
from memfit.engine.modules import modules_of
from memfit.engine.state_snapshot import StateSnapshot
from memfit.engine.step_hooks import before_steps
from memfit.levers.fsdp_guards import forget_gradients, refuse_numbers_of_shards
from memfit.levers.fsdp_state import full_tensor, is_shard, load_as_shards, shard_like
from memfit.levers.fsdp_units import ShardLayout, check_shardable, is_torchs, shard_units, unshard
from memfit.ranks.passes import APART, BACKWARD, COUNTED, FORWARD, GLANCE, Passes, begins
from memfit.ranks.ranks import Ranks

COLLECTING = "gathering sharded state"
PASSING = "a pass over sharded parameters"


class FullySharded:
    """A model whose parameters are sharded over `ranks`. With `whole_while_training`, parameters stay gathered from the first
    forward to the end of backward, and only gradients and optimizer state stay sharded.

    Attributes: `parameters` (in the model's order), `counting` (whether passes belong to the training). Raises Refused for
    models that cannot be sharded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, *, whole_while_training: bool) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        check_shardable(model, optimizer)
        self.counting = False
        self.live = False
        self.gathered: list[torch.Tensor | None] | None = None
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._classes = {module: type(module) for module in modules_of(model)}
        before = list(model.parameters())
        group: Any = ranks.group or dist.group.WORLD
        self._mesh = DeviceMesh.from_group(group, ranks.device.type)
        units = shard_units(model, self._mesh, reshard=not whole_while_training)
        self._units = list(units)
        self.parameters: list[Any] = list(model.parameters())
        share = sum(map(bytes_here, self.parameters)) / max(1, sum(p.numel() * p.element_size() for p in self.parameters))
        self.division = ShardLayout(share, tuple(units.values()), whole_while_training)
        places = {id(p): i for i, p in enumerate(self.parameters)}
        self._names = {name: places[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._put_into_optimizer(dict(zip(map(id, before), self.parameters)))
        forget_gradients(before)
        self._hidden = self._running = False
        self._seen: tuple[Any, Any] | None = None
        self._graphs: list[torch.Tensor] = []
        self._nodes: list[Any] = []
        self._own: list[weakref.ref[torch.Tensor]] = []
        self._announced = False
        self._passes = Passes(ranks.rank, self._along)
        ranks.pass_along(self._passes)
        self._of_parameters, self._of_state = ranks.serve(self._send_parameters), ranks.serve(self._send_state)
        self._found: dict[Any, torch.Tensor] = {}
        self._root_forward()
        reshard_model = [] if whole_while_training else [unit for unit in units if unit is not model]
        hooks = [unit.register_forward_hook(self._let_go).remove for unit in reshard_model]
        hooks.append(before_steps(optimizer, lambda *_: self.reshard()))
        self._undo = [*self._answer_states(), *hooks, refuse_numbers_of_shards()]

    # ---- passes

    def _root_forward(self) -> None:
        """Run FSDP's root hooks around the root's forward, inside the interception, so that each micro-batch fires them."""
        from torch.distributed.fsdp import fully_shard

        state = fully_shard.state(self._model)  # type: ignore[attr-defined]
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        self._state = state
        self._had_own = self._model.__dict__.get("forward")
        self._plain = self._had_own or _class_forward(self._model)
        self._model.forward = self._forward  # type: ignore[method-assign]
        self._model.__dict__.update({AS_GIVEN: self.hidden, RESHARD: self.reshard})

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._hidden:
            if self._seen is None:
                self._seen = map_leaves(_like, (args, kwargs))
            return self._plain(*args, **kwargs)
        self._check_parameters()
        kind = GLANCE if not torch.is_grad_enabled() else COUNTED if self.counting else APART
        self._seen = map_leaves(_apart, (args, kwargs))
        want = self._passes.forward(kind, anew=not any(graph() is not None for graph in self._own))
        if begins(want):
            self._nodes = []
        self._ranks.ask(want, PASSING)
        self._announced = False
        self._ranks.passing = True
        with self._ranks.noticing(PASSING):
            out = self._run(args, kwargs, partial(self._announce, kind, len(self._nodes)))
        self._ranks.passing = False
        outputs = _with_graph(out)
        self._own = [weakref.ref(tensor) for tensor in outputs]
        self._nodes += [tensor.grad_fn for tensor in outputs]
        return out

    def _check_parameters(self) -> None:
        """Raise Refused if parameters were added, removed or replaced: FSDP2 would neither reduce nor remove them."""
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        own = set(map(id, self.parameters))
        if names == self._names.keys():
            self.reshard()  # (gathered parameters are other objects)
            if all(id(p) in own for p in self._model.parameters()):
                return
        raise Refused(
            "training over sharded parameters or gradients",
            found="parameters of the model were added, removed or replaced since they were sharded",
            next_move="change them before memfit.wrap, or call the run's undo(), change them and wrap again",
        )

    def _run(self, args: Any, kwargs: Any, before_backward: Callable[[int, torch.Tensor], None] | None) -> Any:
        self.reshard()  # on all ranks, so that all of them gather
        args, kwargs = self._state._pre_forward(self._model, args, kwargs)
        self._running = True
        try:
            out = self._plain(*args, **kwargs)
        finally:
            self._running = False
        for number, tensor in enumerate(_with_graph(out)):
            if before_backward is None:
                break
            _first_hook(tensor, partial(before_backward, number))  # before torch's own hook, which gathers
        self._state._post_forward(self._model, args, _with_graph(out))  # (torch finds none in a distribution)
        if not torch.is_grad_enabled():
            self.reshard()
        return out

    def _let_go(self, unit: Any, *_: Any) -> None:
        """Reshard after a block's forward inside a backward. torch takes it for a recomputation and keeps it gathered."""
        if self._running and torch._C._current_graph_task_id() != -1:
            unit.reshard()

    def _announce(self, kind: int, first: int, number: int, _: torch.Tensor) -> None:
        """Announce the backward when it reaches this output. The outputs of its forward start at index `first`."""
        if not self._announced:
            nodes, self._nodes = self._nodes, []
            self._announced, self._own = True, []
            through = [float(_takes_part(node)) for node in nodes]
            through[first + number] = 1.0  # torch does not count the node where the backward starts among those to come
            self._ranks.ask(self._passes.backward(kind), PASSING, through)
            self._ranks.passing = True
            torch.autograd.Variable._execution_engine.queue_callback(self._passed)  # type: ignore[attr-defined]

    def _passed(self) -> None:
        self._ranks.passing = False

    def _along(self, kind: int, stage: int, through: Sequence[float]) -> None:
        """Run an empty pass for other ranks. A backward goes `through` the outputs that have one on the requesting rank."""
        if stage == FORWARD:
            self._graphs = []
        if stage != BACKWARD:
            with aside(), torch.set_grad_enabled(kind != GLANCE), _state_kept(self._model), _draws_kept(self._ranks.device):
                out = self._run(*self._inputs(), None)
            self._graphs += _with_graph(out) if kind != GLANCE else []
            return
        graphs, self._graphs = [tensor for tensor, takes_part in zip(self._graphs, through) if takes_part], []
        with aside(), self._aside(apart=kind == APART):
            torch.autograd.backward(graphs, [torch.zeros_like(tensor) for tensor in graphs])

    def _inputs(self) -> tuple[Any, Any]:
        if self._seen is None:
            raise Refused(
                "a forward over sharded parameters",
                found="another process runs the model, but this one has seen no input to run it on",
                next_move="run the model once on every process before one runs it alone",
            )
        return map_leaves(lambda leaf: leaf.made() if isinstance(leaf, _Like) else leaf, self._seen)

    @contextmanager
    def _aside(self, *, apart: bool) -> Iterator[None]:
        """Add the gradients of a backward for others to the running batch or to `gathered`. `apart`: drop them."""
        if self.live and not apart:
            yield
            return
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        try:
            yield
            if not apart:  # it may come before this rank begins its own part
                so_far = self.gathered or [None] * len(before)
                self.gathered = [_sum(one, p.grad) for one, p in zip(so_far, self.parameters)]
        finally:
            for p, grad in zip(self.parameters, before):
                p.grad = grad

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Make the modules look unsharded inside the context, for traces on full tensors."""
        self.reshard()
        places = [(m, hooks, OrderedDict(hooks)) for m in self._units for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._hidden = True
        try:
            for _, hooks, _ in places:
                for key in [key for key, hook in hooks.items() if is_torchs(hook)]:
                    del hooks[key]
            yield
        finally:
            self._hidden = False
            for _, hooks, before in places:
                hooks.clear()
                hooks.update(before)

    # ---- states

    def _put_into_optimizer(self, new: dict[int, Any]) -> None:
        for group in self._optimizer.param_groups:
            old = list(group["params"])
            group["params"] = [new.get(id(p), p) for p in old]
            for p, q in zip(old, group["params"]):
                if q is not p and p in self._optimizer.state:
                    state = self._optimizer.state.pop(p)
                    self._optimizer.state[q] = {name: shard_like(value, q) for name, value in state.items()}

    def _answer_states(self) -> list[Callable[[], None]]:
        undo = []
        for module in modules_of(self._model):
            undo.append(module._register_state_dict_hook(self._whole_state).remove)
            undo.append(module.register_load_state_dict_pre_hook(load_as_shards).remove)
        answered = {"state_dict": self._optimizer_state, "load_state_dict": self._load_optimizer_state}
        self._optimizer.__dict__.update(answered)
        return [*undo, *(partial(self._optimizer.__dict__.pop, name, None) for name in answered)]

    def _whole_state(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace shards with full parameters in a module's own state dict. Submodules' entries are part of it."""
        if prefix or self._hidden:
            return
        if next(module.parameters(), None) is None:
            return
        at = next(name for name, m in self._model.named_modules() if m is module)
        held = {name: (i, "") for name in state if (i := self._names.get(f"{at}.{name}" if at else name)) is not None}
        whole = self._collected(self._of_parameters)
        state.update({name: whole[held[name]] for name in state if name in held})

    def _optimizer_state(self) -> dict[str, Any]:
        found = type(self._optimizer).state_dict(self._optimizer)
        places = {id(p): i for i, p in enumerate(self.parameters)}
        numbers = [places.get(id(p)) for group in self._optimizer.param_groups for p in group["params"]]
        whole = self._collected(self._of_state)
        found["state"] = {
            number: {name: whole.get((numbers[number], name), value) for name, value in state.items()}
            for number, state in found["state"].items()
        }
        return found

    def _load_optimizer_state(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        type(self._optimizer).load_state_dict(self._optimizer, {**state_dict, "state": {}})
        for number, state in state_dict["state"].items():
            p = parameters[number]
            self._optimizer.state[p] = {name: shard_like(value, p) for name, value in state.items()}

    def _collected(self, service: int) -> dict[Any, torch.Tensor]:
        self._ranks.ask(service, COLLECTING)
        found, self._found = self._found, {}
        return found

    def _send_parameters(self, asking: Sequence[int]) -> None:
        self._send((((i, ""), p.detach()) for i, p in enumerate(self.parameters)), asking)

    def _send_state(self, asking: Sequence[int]) -> None:
        states = [(i, self._optimizer.state.get(p, {})) for i, p in enumerate(self.parameters)]
        self._send((((i, name), state[name]) for i, state in states for name in sorted(state)), asking)

    def _send(self, parts: Iterable[tuple[Any, Any]], asking: Sequence[int]) -> None:
        """Send this rank's shards to the requesting ranks, one tensor at a time."""
        self.reshard()
        for place, part in parts:
            whole = full_tensor(part, asking, self._ranks) if is_shard(part) else None
            if whole is not None:
                self._found[place] = whole

    def undo(self) -> None:
        """Restore the model and the optimizer with full parameters and state. All ranks must do so, or none."""
        try:
            state = self._optimizer_state()
        except RankFailed:
            return  # the other ranks are gone, and their shards with them
        whole = {place: p for (place, _), p in self._collected(self._of_parameters).items()}
        for undo in reversed(self._undo):
            undo()
        new = {id(p): nn.Parameter(whole[i].to(p.to_local().device), p.requires_grad) for i, p in enumerate(self.parameters)}
        for module in modules_of(self._model):
            for name, p in module._parameters.items():
                module._parameters[name] = new.get(id(p), p)
        unshard(self._units, self._classes)
        self._model.__dict__.pop("forward", None)
        for name in (AS_GIVEN, RESHARD):
            self._model.__dict__.pop(name, None)
        if self._had_own is not None:
            self._model.__dict__["forward"] = self._had_own
        for group in self._optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        self._optimizer.state.clear()
        groups = self._optimizer.param_groups
        self._optimizer.load_state_dict(state)
        self._optimizer.param_groups = groups


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one.add_(other)


def _first_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a tensor hook that runs before the existing ones."""
    hooks: Any = tensor._backward_hooks
    others = [] if hooks is None else list(hooks.items())
    if hooks is not None:
        hooks.clear()
    tensor.register_hook(hook)
    tensor._backward_hooks.update(others)  # type: ignore[union-attr]


def _with_graph(out: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors(out) if tensor.requires_grad]


def _takes_part(node: Any) -> bool:
    """Whether the current backward executes this node."""
    return node is None or torch._C._will_engine_execute_node(node)


def _class_forward(model: nn.Module) -> Callable[..., Any]:
    return type(model).forward.__get__(model)


def _apart(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


class _Like:
    """The shape of a tensor that only a trace has seen. Not a dataclass, because its fields would be leaves."""

    def __init__(self, seen: torch.Tensor) -> None:
        self._shape = tuple(map(int, seen.shape))
        self._as = {"dtype": seen.dtype, "device": seen.device, "requires_grad": seen.requires_grad}

    def made(self) -> torch.Tensor:
        """Return ones: valid token ids in any vocabulary, masks that hide nothing, nonzero divisors."""
        return torch.ones(self._shape, **self._as)  # type: ignore[call-overload,no-any-return]


def _like(leaf: Any) -> Any:
    return _Like(leaf) if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Undo what a forward for other ranks changes: buffers, attributes, counters. Sharded parameters stay as they are."""
    before = StateSnapshot([model], lambda tensor: tensor.detach().clone())
    try:
        yield
    finally:
        for place, value in before.moved():
            if not isinstance(getattr(place, "tensor", None), nn.Parameter):
                place.put(value)


@contextmanager
def _draws_kept(device: torch.device) -> Iterator[None]:
    here = device.type == "cpu"
    with torch.random.fork_rng([] if here else [device], device_type="cuda" if here else device.type):
        yield
