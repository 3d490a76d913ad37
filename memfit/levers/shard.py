"""Shards the optimizer state: every rank keeps the state of its part of the parameters, steps these, and broadcasts them.

Uses fairscale's OSS (ZeRO stage 1: Rajbhandari et al. 2020, arXiv:1910.02054), or torch's ZeroRedundancyOptimizer where OSS
does not work: OSS moves parameters into flat buffers of one dtype, without strides. The user's optimizer object stays. The
sharded optimizer replaces its `step`, and its state dicts stay full. Not covered: optimizers whose update of one parameter
depends on others. Stepping a small copy both ways detects them.
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from memfit._errors import RankFailed, Refused, first_line
from memfit.engine.shadow_optimizer import held_by, shadow_optimizer
from memfit.ranks.ranks import Ranks

STEPPING = "an optimizer step"
ANSWERED = ("step", "state_dict", "load_state_dict", "add_param_group")
"""Methods of the user's optimizer that are replaced."""
TRIED = 64
"""Elements of each parameter in the small copy that the optimizer steps."""


class ShardedOptimizer:
    """Shards the user's `optimizer` over `ranks`: each rank steps its own part of the parameters.

    Attributes: `engine` (the library that shards), `local` (the optimizer of this rank's part). Raises Refused for an
    optimizer that cannot be sharded.
    """

    def __init__(self, optimizer: Optimizer, ranks: Ranks) -> None:
        _check_separable(optimizer)
        self._optimizer, self._ranks = optimizer, ranks
        self._inner, self.engine = _sharded(optimizer, ranks, self._stepped_here)
        self._keep_own_state()
        self._service = ranks.serve(self._collect)
        self._collected: defaultdict[Any, Any] = defaultdict(dict)
        self._before = {name: optimizer.__dict__.get(name) for name in ANSWERED}
        self._answer()

    @property
    def local(self) -> Optimizer:
        """The optimizer of this rank's part."""
        return self._inner.optim

    def undo(self) -> None:
        """Restore the optimizer's own step and the full state. All ranks must do so, or none."""
        try:
            whole = self._state_dict()
        except (RankFailed, RuntimeError):
            whole = None  # the other ranks are gone, and their state with them
        for name, before in self._before.items():
            self._optimizer.__dict__.pop(name, None)
            if before is not None:
                self._optimizer.__dict__[name] = before
        if whole is not None:
            groups = self._optimizer.param_groups
            self._optimizer.load_state_dict(whole)
            self._optimizer.param_groups = groups  # schedulers refer to these dicts

    # ---- replaced methods of the user's optimizer

    def _answer(self) -> None:
        optimizer = self._optimizer

        def step(own: Optimizer, *arguments: Any, **named: Any) -> Any:  # a function, because schedulers unwrap methods
            return self._step(own, *arguments, **named)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # keeps schedulers from wrapping it
        optimizer.__dict__["step"] = MethodType(Optimizer.profile_hook_step(step), optimizer)
        optimizer.__dict__["state_dict"] = self._state_dict
        optimizer.__dict__["load_state_dict"] = self._load_state_dict
        optimizer.__dict__["add_param_group"] = self._add_param_group

    def _step(self, optimizer: Optimizer, *arguments: Any, **named: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # earlier schedulers check it
        local = self.local
        self._inner.param_groups = optimizer.param_groups
        local.state = optimizer.state
        for name in ("grad_scale", "found_inf"):  # a GradScaler sets these for fused steps
            if hasattr(optimizer, name):
                setattr(local, name, getattr(optimizer, name))
        _take_numbers(optimizer, local)
        try:
            done = self._inner.step(*arguments, **named)
            _take_numbers(local, optimizer)
            return done
        except RankFailed:
            raise
        except BaseException as error:
            self._ranks.failed(error)  # the others are about to agree that all have stepped
            raise

    def _stepped_here(self) -> None:
        """Agree with all ranks, before parameters are broadcast, that every rank has stepped its part or one has failed."""
        self._ranks.agree([], STEPPING)

    def _state_dict(self) -> dict[str, Any]:
        own = self._optimizer.state
        self._optimizer.state = self._whole_state()
        try:
            return type(self._optimizer).state_dict(self._optimizer)
        finally:
            self._optimizer.state = own

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mine = self._own_places()
        own = {place: state for place, state in state_dict["state"].items() if place in mine}
        type(self._optimizer).load_state_dict(self._optimizer, {**state_dict, "state": own})

    def _add_param_group(self, group: dict[str, Any]) -> None:
        type(self._optimizer).add_param_group(self._optimizer, group)
        self._inner, self.engine = _sharded(self._optimizer, self._ranks, self._stepped_here)

    # ---- state

    def _keep_own_state(self) -> None:
        own = {id(p) for group in self.local.param_groups for p in group["params"]}
        kept = {p: state for p, state in self._optimizer.state.items() if not isinstance(p, torch.Tensor) or id(p) in own}
        self._optimizer.state = defaultdict(dict, kept)
        self.local.state = self._optimizer.state

    def _own_places(self) -> set[int]:
        """Return the indices of this rank's parameters in state dicts."""
        own = {id(p) for group in self.local.param_groups for p in group["params"]}
        return {place for place, p in enumerate(_parameters(self._optimizer)) if id(p) in own}

    def _whole_state(self) -> defaultdict[Any, Any]:
        """Return the state of all parameters: this rank's own by reference, the others' copied to the host."""
        self._ranks.ask(self._service, "gathering the optimizer's state")
        found, self._collected = self._collected, defaultdict(dict)
        return found

    def _collect(self, asking: Sequence[int]) -> None:
        """Send this rank's state to the requesting ranks, one tensor at a time."""
        ranks, parameters = self._ranks, _parameters(self._optimizer)
        places = {id(p): place for place, p in enumerate(parameters)}
        own = {places[id(p)]: state for p, state in self._optimizer.state.items() if id(p) in places}
        told: list[dict[int, dict[str, Any]]] = [{} for _ in range(ranks.size)]
        dist.all_gather_object(told, {place: _described(state) for place, state in own.items()}, group=ranks.talk)
        if ranks.rank in asking:
            rest = {p: state for p, state in self._optimizer.state.items() if not isinstance(p, torch.Tensor)}
            self._collected = defaultdict(dict, rest)
            for place in sorted(place for states in told for place in states):
                self._collected[parameters[place]] = self._optimizer.state.get(parameters[place], {})
        for owner, states in enumerate(told):
            for place, (name, there) in ((place, item) for place, state in states.items() for item in state.items()):
                value = self._sent(own[place][name] if owner == ranks.rank else there, owner, asking)
                if ranks.rank in asking and owner != ranks.rank:
                    self._collected[parameters[place]][name] = value

    def _sent(self, value: Any, owner: int, asking: Sequence[int]) -> Any:
        """Return the value that `owner` holds, on the requesting ranks."""
        ranks = self._ranks
        if ranks.rank == owner:
            for rank in asking if isinstance(value, torch.Tensor) else ():
                if rank != owner:
                    dist.send(value.detach().cpu().contiguous(), ranks.everywhere(rank), group=ranks.talk)
        elif ranks.rank in asking and isinstance(value, _Described):
            room = torch.empty(value.shape, dtype=value.dtype)
            dist.recv(room, ranks.everywhere(owner), group=ranks.talk)
            return room
        return value


class _Described:
    """The shape and dtype of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _described(state: Any) -> dict[str, Any]:
    return {name: _Described(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _take_numbers(given: Any, to: Any) -> None:
    """Copy plain attributes, such as a count of steps, which a script may read or set."""
    vars(to).update({name: value for name, value in vars(given).items() if type(value) in (bool, int, float, str)})


def largest_part(optimizer: Optimizer, processes: int) -> float:
    """Return the largest rank's fraction of all parameter elements. OSS gives each parameter to the rank with the fewest."""
    sizes = [0] * processes
    for p in _parameters(optimizer):
        sizes[sizes.index(min(sizes))] += p.numel() if p.requires_grad else 1
    return max(sizes) / max(1, sum(sizes))


def _sharded(optimizer: Optimizer, ranks: Ranks, stepped: Callable[[], None]) -> tuple[Any, str]:
    """Return (the sharded optimizer, the library it is from)."""
    make = partial(_over, optimizer)
    if _may_be_flat(optimizer) and (oss := _oss()) is not None:
        kind = _agreeing(oss, "_broadcast_params", stepped)
        return kind(optimizer.param_groups, optim=make, group=ranks.group), "fairscale OSS"
    zero = _agreeing(_zero(), "_sync_params", stepped)
    inner = zero(optimizer.param_groups, optimizer_class=make, process_group=ranks.group)
    return inner, "torch ZeroRedundancyOptimizer"


def _over(optimizer: Optimizer, groups: list[dict[str, Any]], **_: Any) -> Optimizer:
    """Copy the optimizer's kind and settings over these groups. Constructors take other arguments than are kept."""
    own = {id(p): p for group in groups for p in group["params"]}
    return shadow_optimizer(optimizer, lambda p: own.get(id(p)), lambda t: t)


def _agreeing(kind: type[Any], sends: str, stepped: Callable[[], None]) -> type[Any]:
    """Return a subclass of the sharded optimizer whose ranks agree, before `sends`, that all have stepped."""

    def send(self: Any) -> None:
        stepped()
        getattr(super(found, self), sends)()

    found = type(kind.__name__, (kind,), {sends: send, "_verify_same_dense_param_type": lambda self: None})
    return found


def _may_be_flat(optimizer: Optimizer) -> bool:
    """Whether all parameters may become views of flat buffers, as OSS makes them: one dtype, contiguous, nothing else in their
    storage."""
    parameters = _parameters(optimizer)
    alone = all(p.numel() * p.element_size() == p.untyped_storage().nbytes() for p in parameters)
    return alone and len({p.dtype for p in parameters}) == 1 and all(p.is_contiguous() for p in parameters)


def _oss() -> type[Any] | None:
    try:
        from fairscale.optim import OSS
    except ImportError:
        return None
    return OSS


def _zero() -> type[Any]:
    with warnings.catch_warnings():  # importing torch's package warns about its own deprecations
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def _check_separable(optimizer: Optimizer) -> None:
    """Raise Refused if stepping parameters one by one differs from stepping them together."""
    if (name := held_by(optimizer)) is not None:
        raise _inseparable(optimizer, f"it has an optimizer or tensors of its own in `{name}`")
    if any(p.is_sparse for p in _parameters(optimizer)):
        raise _inseparable(optimizer, "it has sparse parameters")
    together, apart = _small(optimizer), _small(optimizer)
    try:
        together.step()
        for one in _parameters(apart):
            _over(apart, [{"params": [one]}]).step()
    except Exception as error:
        raise _inseparable(optimizer, f"a small copy of it cannot step: {first_line(error)}") from error
    if not all(torch.equal(p, q) for p, q in zip(_parameters(together), _parameters(apart))):
        raise _inseparable(optimizer, "a parameter's update depends on the others'")


def _small(optimizer: Optimizer) -> Optimizer:
    """Return the same optimizer over a few elements of some parameters, with gradients and without state."""
    trained = itertools.islice((p for p in _parameters(optimizer) if p.requires_grad), 8)
    twins = {id(p): _corner(p, number) for number, p in enumerate(trained)}
    found = shadow_optimizer(optimizer, lambda p: twins.get(id(p)), lambda t: t.detach().clone())
    found.state = defaultdict(dict)
    for group in found.param_groups:
        group.update({"fused": None} if group.get("fused") else {})
    return found


def _corner(parameter: torch.Tensor, number: int) -> torch.nn.Parameter:
    few = torch.linspace(-1.0, 1.0, min(TRIED, max(4, 2 * (parameter.numel() // 2))), dtype=torch.float64).reshape(2, -1)
    twin = torch.nn.Parameter(few.clone() if parameter.dim() > 1 else few.flatten())
    twin.grad = few.reshape(twin.shape) * (number + 1.0) + 0.5
    return twin


def _inseparable(optimizer: Optimizer, found: str) -> Refused:
    return Refused(
        f"shard= with {type(optimizer).__name__}",
        found=found,
        next_move="pass shard='off', or an optimizer that updates each parameter by itself (SGD, Adam, AdamW, ...)",
    )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
