"""Shards parameters and gradients with FSDP2 over the model's blocks, and keeps the user's model and optimizer objects.

Every block is all-gathered from all ranks while it computes, and its gradients are reduced to the rank that owns each shard
(ZeRO stages 2 and 3: Rajbhandari et al. 2020, arXiv:1910.02054; torch.distributed.fsdp.fully_shard). `fully_shard` creates new
parameters, which replace the old ones in the optimizer's groups. State dicts stay full: they are gathered on request, on the
requesting ranks. Not covered: parameters that a forward reads from outside the block that owns them; recurrent layers, which
keep lists of their weights.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memfit._errors import RankFailed, Refused
from memfit.batches.tree import map_leaves, tensors
from memfit.engine.aside import aside
from memfit.engine.call_context import restore_tensors
from memfit.engine.modules import modules_of
from memfit.engine.staged import AS_GIVEN, RESHARD, bytes_here
from memfit.levers.checkpoint import candidate_blocks
from memfit.ranks.passes import APART, BACKWARD, COUNTED, FORWARD, GLANCE, Passes, begins
from memfit.ranks.ranks import Ranks

COLLECTING = "gathering sharded state"
PASSING = "a pass over sharded parameters"
LARGE = 8 << 20
"""Size in bytes from which a module outside the blocks (an embedding, a head) is gathered by itself."""


@dataclass(frozen=True)
class ShardLayout:
    """How a model is sharded."""

    share: float
    """This rank's fraction of all parameters."""
    units: tuple[int, ...]
    """Bytes of the parameters that are gathered together, per unit. Units are the blocks; the last one is everything else."""
    whole_while_training: bool
    """Whether all parameters stay gathered from the first forward to the end of backward (ZeRO stage 2)."""

    @property
    def gathered(self) -> int:
        """Bytes gathered or in flight at once: all parameters, or the block that computes and everything outside blocks; the
        next block; a block's gradients and the copy of them that is sent."""
        largest = max(self.units)
        parameters = sum(self.units) + largest if self.whole_while_training else self.units[-1] + 2 * largest
        return parameters + 2 * largest


class FullySharded:
    """A model whose parameters are sharded over `ranks`. With `whole_while_training`, parameters stay gathered from the first
    forward to the end of backward, and only gradients and optimizer state stay sharded.

    Attributes: `parameters` (in the model's order), `counting` (whether passes belong to the training). Raises Refused for
    models that cannot be sharded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, *, whole_while_training: bool) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        _check(model, optimizer)
        self.counting = False
        self.live = False
        self.gathered: list[torch.Tensor | None] | None = None
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._classes = {module: type(module) for module in modules_of(model)}
        before = list(model.parameters())
        group: Any = ranks.group or dist.group.WORLD
        self._mesh = DeviceMesh.from_group(group, ranks.device.type)
        units = _shard(model, self._mesh, reshard=not whole_while_training)
        self._units = list(units)
        self.parameters: list[Any] = list(model.parameters())
        share = sum(map(bytes_here, self.parameters)) / max(1, sum(p.numel() * p.element_size() for p in self.parameters))
        self.division = ShardLayout(share, tuple(units.values()), whole_while_training)
        places = {id(p): i for i, p in enumerate(self.parameters)}
        self._names = {name: places[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._put_into_optimizer(dict(zip(map(id, before), self.parameters)))
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
        hooks = [unit.register_forward_hook(self._let_go) for unit in reshard_model]
        hooks.append(optimizer.register_step_pre_hook(lambda *_: self.reshard()))
        self._undo = [*self._answer_states(), *(hook.remove for hook in hooks)]

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
        out = self._state._post_forward(self._model, args, out)
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
            with aside(), torch.set_grad_enabled(kind != GLANCE), _buffers_kept(self._model), _draws_kept(self._ranks.device):
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
                for key in [key for key, hook in hooks.items() if _is_torchs(hook)]:
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
                    self._optimizer.state[q] = {name: _part_like(value, q) for name, value in state.items()}

    def _answer_states(self) -> list[Callable[[], None]]:
        undo = []
        for module in modules_of(self._model):
            undo.append(module._register_state_dict_hook(self._whole_state).remove)
            undo.append(module.register_load_state_dict_pre_hook(_in_parts).remove)
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
            self._optimizer.state[p] = {name: _part_like(value, p) for name, value in state.items()}

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
            whole = _sent(part, asking, self._ranks) if _is_part(part) else None
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
        _unshard(self._units, self._classes)
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


def _shard(model: nn.Module, mesh: Any, *, reshard: bool) -> dict[Any, int]:
    """Shard every block by itself, other large modules that share no parameters, and the rest together. Returns the bytes of
    parameters that are gathered together, per module."""
    from torch.distributed.fsdp import fully_shard

    blocks, others = _units(model)
    units = [*blocks, *others, model]
    sizes = unit_bytes(model)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=None if unit is model else reshard)
        unit.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]  # weights already refer to the whole batch
        unit.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
    # By default torch prefetches in the order of the forwards it has seen. It does not see those inside a backward, so ranks
    # in different backwards would gather in different orders.
    for unit, ahead in zip(units, [*blocks[:1], *blocks]):
        unit.set_modules_to_backward_prefetch([ahead if unit in blocks else unit])  # type: ignore[attr-defined]
    return sizes


def _units(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The blocks, and the other large modules that share no parameters."""
    modules = dict(model.named_modules())
    users = Counter(id(p) for m in modules_of(model) for p in m._parameters.values() if p is not None)
    blocks = [modules[name] for name in candidate_blocks(model)]
    inside = {id(m) for block in blocks for m in block.modules()}
    return blocks, [m for m in modules_of(model) if m is not model and id(m) not in inside and _large(m, users)]


def unit_bytes(model: nn.Module) -> dict[nn.Module, int]:
    """Return the bytes of the parameters that are gathered together, per unit of FSDP2; the model itself is the last unit. A
    parameter counts in the first unit that holds it."""
    blocks, others = _units(model)
    seen: set[int] = set()
    sizes: dict[nn.Module, int] = {}
    for unit in (*blocks, *others, model):
        own = {id(p): p for p in unit.parameters() if id(p) not in seen}
        seen |= own.keys()
        sizes[unit] = sum(p.numel() * p.element_size() for p in own.values())
    return sizes


def _large(module: nn.Module, users: Counter[int]) -> bool:
    own = [p for p in module._parameters.values() if p is not None]
    return sum(p.numel() * p.element_size() for p in own) >= LARGE and all(users[id(p)] == 1 for p in own)


def _unshard(units: Sequence[Any], classes: dict[nn.Module, type]) -> None:
    """Remove FSDP's hooks and classes. torch has no public way back (torch 2.13)."""
    from torch.distributed import _composable_state
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    for unit in units:
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_torchs(hook)]:
                del hooks[key]
        unit.__class__ = classes[unit]
        for key in (STATE_KEY, REGISTRY_KEY):
            unit.__dict__.pop(key, None)
        _composable_state._module_state_mapping.pop(unit, None)
    for module in classes:
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(mark, None)


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    found = next(_obstacles(model, optimizer), None)
    if found is not None:
        raise Refused("sharding parameters or gradients", found=found, next_move="pass shard='optimizer' or 'off'")


def _obstacles(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    import torch.distributed.fsdp as fsdp

    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms"):
        yield f"torch {torch.__version__} cannot yet sum gradient shards"
    held = {id(p) for p in model.parameters()}
    if any(id(p) not in held for group in optimizer.param_groups for p in group["params"]):
        yield "the optimizer trains parameters that are not the model's"
    if others := _trained_elsewhere(model, optimizer):
        yield f"another optimizer trains {', '.join(others[:3])}, and would not see what takes their place"
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            yield f"{name} keeps a list of its weights"
        if module.__dict__.get("sparse") is True:
            yield f"{name} has sparse gradients"


def _trained_elsewhere(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the parameters that another optimizer of the script trains, and `optimizer` does not."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = {id(p): name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own}
    if not left:
        return []
    alive = [each for each in gc.get_objects() if isinstance(each, Optimizer) and each is not optimizer]
    return [left[id(p)] for each in alive for group in each.param_groups for p in group["params"] if id(p) in left]


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one.add_(other)


def _is_torchs(hook: Any) -> bool:
    """Whether a hook belongs to fully_shard."""
    return type(getattr(hook, "__self__", None)).__name__ == "FSDPState"


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


def _is_part(value: Any) -> bool:
    return hasattr(value, "to_local")


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


def _part_like(value: Any, parameter: Any) -> Any:
    """Return this rank's shard of a full tensor that belongs to `parameter`. Anything else is returned unchanged."""
    if not isinstance(value, torch.Tensor) or _is_part(value) or value.shape != parameter.shape or not _is_part(parameter):
        return value
    from torch.distributed.tensor import DTensor

    local = parameter.to_local()
    start, stop = _rows(parameter)
    part = value.detach()[start:stop].to(device=local.device, dtype=value.dtype, copy=True)
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=value.shape, stride=parameter.stride()
    )


def _rows(part: Any, rank: int | None = None) -> tuple[int, int]:
    """Return the rows that a rank holds, as torch.chunk splits them."""
    mesh = part.device_mesh
    each = -(-part.shape[0] // mesh.size()) if part.shape[0] else 0
    start = min(part.shape[0], each * (mesh.get_local_rank() if rank is None else rank))
    return start, min(part.shape[0], start + each)


def _in_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module loads its own parameters, replace full tensors by shards for the sharded parameters."""
    for name, p in module._parameters.items():
        if prefix + name in state and p is not None:
            state[prefix + name] = _part_like(state[prefix + name], p)


def _sent(part: Any, asking: Sequence[int], ranks: Ranks) -> torch.Tensor | None:
    """Gather the full tensor on the host of the requesting ranks."""
    local = part.to_local().detach().cpu().contiguous()
    mine = ranks.rank in asking
    whole = torch.empty(part.shape, dtype=part.dtype) if mine else None
    for owner in range(ranks.size):
        start, stop = _rows(part, owner)
        if start == stop:
            continue
        if owner == ranks.rank:
            for rank in asking:
                if rank != owner:
                    dist.send(local, ranks.everywhere(rank), group=ranks.talk)
            if whole is not None:
                whole[start:stop] = local
        elif whole is not None:
            dist.recv(whole[start:stop], ranks.everywhere(owner), group=ranks.talk)
    return whole


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        restore_tensors(before)  # without a version bump for what the graph saved


@contextmanager
def _draws_kept(device: torch.device) -> Iterator[None]:
    here = device.type == "cpu"
    with torch.random.fork_rng([] if here else [device], device_type="cuda" if here else device.type):
        yield
