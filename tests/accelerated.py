"""A script for `accelerate launch`, as test_guest_accelerate starts it: what it found goes into a JSON file on rank 0."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset

import memfit
from memfit.integrations.accelerate import Accelerator


class Kept(GeneralTracker):
    """Keeps what is logged."""

    name, requires_logging_directory, main_process_only = "kept", False, True

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append(values)


def parts() -> tuple[nn.Module, DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(52, 6, generator=generator), torch.randint(0, 3, (52,), generator=generator))
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), DataLoader(data, batch_size=4, shuffle=True)


def trained(accelerator: accelerate.Accelerator, epochs: int = 2) -> dict[str, Any]:
    model, loader = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps, synced = 0, True
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                synced = synced and accelerator.sync_gradients
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # as scripts do to save in between
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += 1
            accelerator.log({"loss": 1.0}, step=steps)
    with tempfile.TemporaryDirectory() as folder:
        state = [None] if accelerator.num_processes == 1 else [folder]
        if accelerator.num_processes == 1:
            accelerator.save_state(folder)
            before = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
            accelerator.load_state(folder)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())), state
    bare, run = accelerator.unwrap_model(model), getattr(accelerator, "run", None)
    found = {
        "parameters": [p.detach().flatten().tolist() for p in bare.parameters()],
        "steps": steps,
        "synced": synced,
        "rate": scheduler.get_last_lr()[0],
        "processes": accelerator.num_processes,
        "micro_batch": run.plan.micro_batch if run is not None and run.plan else None,
        "type": type(bare).__name__,
        "script_batch": None if run is None else run.script_batch,
        "another_batch": run is not None and run.report().change is not None,
    }
    accelerator.free_memory()
    found["given_back"] = "forward" not in vars(bare) or not hasattr(bare.forward, "plain")
    return found


def main(how: str, path: str) -> None:
    if how == "checks":
        found: dict[str, Any] = {name: checked(check) for name, check in CHECKS.items()}
        if int(os.environ.get("RANK", "0")) == 0:
            Path(path).write_text(json.dumps(found))
        return
    tracker = Kept()
    settings: dict[str, Any] = {"micro_batch": 3, "log_with": tracker}
    if how == "plain":
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, log_with=tracker)
    elif how == "accumulating":  # 4 samples x 2 x the processes
        accelerator = Accelerator(gradient_accumulation_steps=2, **settings)
    else:
        accelerator = Accelerator(target_batch=16, **settings)
    accelerator.init_trackers("test")
    try:
        found = trained(accelerator)
    except memfit.MemfitError as error:
        found = {"error": str(error)}
    if accelerator.is_main_process:
        found["logged"] = sorted(tracker.logged[-1]) if tracker.logged else []
        with open(path, "w") as file:
            json.dump(found, file)


# ---- what a script may ask of an Accelerator, each in a few lines; what does not hold raises

SEEN = 13
"""Samples of the small data sets; no multiple of anything."""


def checked(check: Callable[[], None]) -> str:
    """Nothing, or what went wrong."""
    torch.manual_seed(0)
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


def numbered(n: int = SEEN) -> TensorDataset:
    """Samples that can be told apart, and their numbers."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.arange(n))


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def prepared(loader: DataLoader[Any], target: int | None = 4, **settings: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(target_batch=target, micro_batch=1, **settings)
    return accelerator, *accelerator.prepare(*small(), loader)


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The logits."""
    out = model(x)
    accelerator.backward(F.cross_entropy(out, numbers % 3))
    optimizer.step()
    optimizer.zero_grad()
    return out


def seen(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> list[list[int]]:
    """The numbers of the samples in every effective batch of an epoch, over all processes."""
    found = []
    for x, numbers in loader:
        step(accelerator, model, optimizer, x, numbers)
        found.append(accelerator.gather_for_metrics(numbers).tolist())
    return found


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def wanted(batches: list[list[int]], start: nn.Module) -> list[torch.Tensor]:
    """The parameters after plain steps over these samples."""
    model, optimizer, data = start, torch.optim.SGD(start.parameters(), lr=0.1), numbered()
    for batch in batches:
        x, numbers = data[batch]
        optimizer.zero_grad()
        F.cross_entropy(model(x), numbers % 3).backward()
        optimizer.step()
    return list(model.parameters())


def assert_trained(model: nn.Module, batches: list[list[int]]) -> None:
    for found, want in zip(model.parameters(), wanted(batches, small()[0]), strict=True):
        torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-5)


def raises(kind: type[Exception], text: str, what: Callable[[], Any]) -> None:
    try:
        what()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing raised {kind.__name__}")


def every_sample_of_an_epoch_once() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=2, shuffle=True))
    batches = seen(accelerator, model, optimizer, loader)
    assert [len(batch) for batch in batches] == [4, 4, 4, 1] == [4] * (len(loader) - 1) + [1]
    assert sorted(joined(batches)) == list(range(SEEN))
    assert_trained(model, batches)


def evaluation_is_divided_and_gathered_once() -> None:
    accelerator = Accelerator(target_batch=4, micro_batch=1)
    training, evaluation = DataLoader(numbered(), batch_size=2), DataLoader(numbered(), batch_size=4)
    model, optimizer, training, evaluation = accelerator.prepare(*small(), training, evaluation)
    for x, numbers in training:
        step(accelerator, model, optimizer, x, numbers)
        model.eval()
        found, mine = [], 0
        for other, its in evaluation:  # within an epoch of training, as scripts do
            with torch.no_grad():
                out, its = accelerator.gather_for_metrics((model(other), its))
            assert len(out) == len(its)
            found += its.tolist()
            mine += len(other)
        assert found == list(range(SEEN)) and mine < SEEN + 4 * (accelerator.num_processes == 1)
        assert accelerator.num_processes == 1 or mine <= 8
        model.train()
    apart = accelerator.prepare_data_loader(DataLoader(numbered(), batch_size=5))
    assert joined(accelerator.gather_for_metrics(numbers).tolist() for _, numbers in apart) == list(range(SEEN))
    assert joined(accelerator.gather_for_metrics(numbers.tolist()) for _, numbers in apart) == list(range(SEEN))


def metrics_of_training_batches() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=3), target=6)
    right = 0
    for x, numbers in loader:
        out = step(accelerator, model, optimizer, x, numbers)
        gathered = accelerator.gather_for_metrics({"out": out.argmax(1), "numbers": numbers})
        assert gathered["out"].shape == gathered["numbers"].shape
        right += len(gathered["numbers"])
        assert len(accelerator.gather_for_metrics([str(n) for n in numbers.tolist()])) == len(gathered["numbers"])
    assert right == SEEN


def losses_are_gathered_and_reduced() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=4), target=8)
    for x, numbers in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), numbers % 3)
        alone = accelerator.gather(loss)
        assert alone.shape == (accelerator.num_processes,) or accelerator.num_processes == 1
        torch.testing.assert_close(accelerator.reduce(loss.detach(), "mean"), alone.mean())
        torch.testing.assert_close(accelerator.gather(loss.repeat(3)).mean(), alone.mean())
        accelerator.backward(loss)
        optimizer.step()


def accumulation_is_in_the_batch() -> None:
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"  # as `accelerate launch --gradient_accumulation_steps 2` does
    try:
        accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=2), target=None)
    finally:
        del os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]
    size = 4 * accelerator.num_processes
    assert len(loader) == -(-SEEN // size) and accelerator.gradient_accumulation_steps == 1
    raises(memfit.UsageError, "gradient_accumulation_steps = 4", lambda: setattr(accelerator, "gradient_accumulation_steps", 4))
    batches = []
    for x, numbers in loader:
        with accelerator.accumulate(model):
            assert accelerator.sync_gradients
            step(accelerator, model, optimizer, x, numbers)
        batches.append(accelerator.gather_for_metrics(numbers).tolist())
    assert_trained(model, batches)
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=3)
    again, *_, loader = prepared(DataLoader(numbered(), batch_size=2), target=None, gradient_accumulation_plugin=plugin)
    assert again.sync_gradients and len(loader) == -(-SEEN // (6 * accelerator.num_processes))


def prepared_one_after_the_other() -> None:
    accelerator = Accelerator(target_batch=4, micro_batch=1)
    model, optimizer = small()
    raises(memfit.UsageError, "prepare", lambda: accelerator.backward(torch.zeros((), requires_grad=True)))
    assert accelerator.prepare(model) is model
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(numbered(), batch_size=2))
    assert_trained(model, seen(accelerator, model, optimizer, loader))
    raises(memfit.Refused, "beside those prepared before", lambda: accelerator.prepare(*small()))
    accelerator.free_memory()
    model, optimizer, loader = accelerator.prepare(*small(), DataLoader(numbered(), batch_size=2))
    assert_trained(model, seen(accelerator, model, optimizer, loader))


def gradients_are_clipped() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=2))
    x, numbers = next(iter(loader))
    for clip, most in ((accelerator.clip_grad_norm_, 0.01), (accelerator.clip_grad_value_, 0.001)):
        accelerator.backward(F.cross_entropy(model(x), numbers % 3))
        clip(model.parameters(), most)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert norm <= 0.0101
        every = accelerator.gather(norm.reshape(1))
        assert torch.equal(every, every[:1].expand_as(every))
        optimizer.zero_grad()


def without_sync_is_the_same() -> None:
    accelerator, model, _, loader = prepared(DataLoader(numbered(), batch_size=4), target=None)
    x, numbers = next(iter(loader))
    found = []
    for context in (contextlib.nullcontext, lambda: accelerator.no_sync(model)):
        model.zero_grad()
        with context():
            accelerator.backward(F.cross_entropy(model(x), numbers % 3))
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def joining_uneven_inputs() -> None:
    accelerator = Accelerator(target_batch=4, micro_batch=1)
    evaluation = DataLoader(numbered(), batch_size=4)
    model, optimizer, loader, evaluation = accelerator.prepare(*small(), DataLoader(numbered(), batch_size=2), evaluation)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        mine = sum(len(numbers) for _, numbers in evaluation)
        assert accelerator.reduce(torch.tensor(mine), "sum") == SEEN  # nothing twice
        assert sum(map(len, seen(accelerator, model, optimizer, loader))) == SEEN
    with accelerator.join_uneven_inputs([model]):
        mine = sum(len(numbers) for _, numbers in evaluation)
    assert accelerator.reduce(torch.tensor(mine), "sum") >= SEEN


def order_of_a_seedable_sampler() -> None:
    configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    loader = DataLoader(numbered(), batch_size=2, shuffle=True)
    accelerator, model, optimizer, loader = prepared(loader, dataloader_config=configuration)

    def drawn(epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(7 + epoch)
        return torch.randperm(SEEN, generator=generator).tolist()

    epochs = [joined(seen(accelerator, model, optimizer, loader)) for _ in range(2)]
    assert epochs == [drawn(0), drawn(1)]
    loader.set_epoch(5)
    assert joined(seen(accelerator, model, optimizer, loader)) == drawn(5)
    plain = accelerate.Accelerator(dataloader_config=configuration)
    theirs = plain.prepare_data_loader(DataLoader(numbered(), batch_size=2, shuffle=True))
    assert sorted(joined(plain.gather_for_metrics(n).tolist() for _, n in theirs)) == sorted(drawn(0))


def skipping_what_was_done_before() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=2))
    rest = accelerator.skip_first_batches(loader, 2)
    assert len(rest) == 2
    assert seen(accelerator, model, optimizer, rest) == [[8, 9, 10, 11], [12]]
    assert len(seen(accelerator, model, optimizer, loader)) == len(loader) == 4


class Turning(Sampler[int]):
    """Another order in each epoch, which it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % SEEN for i in range(SEEN)])

    def __len__(self) -> int:
        return SEEN


def samplers_are_told_the_epoch() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=2, sampler=Turning()))
    first = [seen(accelerator, model, optimizer, loader)[0][0] for _ in range(3)]
    assert first == [0, 1, 2]  # without a call of set_epoch, as accelerate's loaders do
    loader.set_epoch(7)
    assert seen(accelerator, model, optimizer, loader)[0][0] == 7


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(numbered(12))


def streams_are_divided() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(Stream(), batch_size=2), target=None)
    batches = seen(accelerator, model, optimizer, loader)
    assert sorted(joined(batches)) == list(range(12)) and len(batches[0]) == 2 * accelerator.num_processes
    accelerator, model, optimizer, loader = prepared(DataLoader(Stream(), batch_size=2), target=12)
    assert [sorted(batch) for batch in seen(accelerator, model, optimizer, loader)] == [list(range(12))]


class Pairs(BatchSampler):
    """A batch sampler of the script's own."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(12)), batch_size=3, drop_last=False)


def batches_of_a_batch_sampler_are_divided() -> None:
    loader = DataLoader(numbered(), batch_sampler=Pairs())
    accelerator, model, optimizer, loader = prepared(loader, target=None)
    batches = seen(accelerator, model, optimizer, loader)
    assert sorted(joined(batches)) == list(range(12)) and len(batches[0]) == 3 * accelerator.num_processes


def settings_of_loaders() -> None:
    config = DataLoaderConfiguration(split_batches=True)
    accelerator, *_, loader = prepared(DataLoader(numbered(), batch_size=4), target=None, dataloader_config=config)
    assert len(loader) == 4  # 4 samples over all processes
    config = DataLoaderConfiguration(dispatch_batches=True)
    if accelerator.num_processes == 1:
        assert sum(map(len, seen(*prepared(DataLoader(numbered(), batch_size=2), dataloader_config=config)))) == SEEN
    else:
        loader = DataLoader(numbered(), batch_size=2)
        raises(memfit.Refused, "dispatch_batches=True over 2", lambda: prepared(loader, dataloader_config=config))
    ready = accelerator.prepare_data_loader(DataLoader(numbered(), batch_size=2))
    raises(memfit.Refused, "prepared already", lambda: prepared(ready))
    config = DataLoaderConfiguration(even_batches=False)
    assert sum(map(len, seen(*prepared(DataLoader(numbered(), batch_size=2), dataloader_config=config)))) == SEEN


def models_are_saved_whole() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=2))
    seen(accelerator, model, optimizer, loader)
    state = accelerator.get_state_dict(model)
    assert list(state) == list(small()[0].state_dict())
    assert accelerator.unwrap_model(model) is model and type(model) is nn.Sequential
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_model(model, folder)
        other = small()[0]
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerate.load_checkpoint_in_model(other, folder)
            assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    accelerator.register_for_checkpointing(scheduler)
    raises(ValueError, "state_dict", lambda: accelerator.register_for_checkpointing(object()))


def processes_talk() -> None:
    accelerator = Accelerator(target_batch=4)
    index, size = accelerator.process_index, accelerator.num_processes
    assert accelerator.reduce(torch.tensor(float(index + 1)), "sum") == sum(range(size + 1))
    padded = accelerator.pad_across_processes(torch.ones(index + 1))
    assert len(padded) == size and padded.sum() == index + 1
    with accelerator.split_between_processes(list(range(5))) as mine:
        assert sum(accelerator.gather(torch.tensor([len(mine)])).tolist()) == 5
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pass
    assert not accelerator.check_trigger()
    if index == size - 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")


def tensorboard() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shared = [tempfile.mkdtemp()]
    accelerate.utils.broadcast_object_list(shared)
    loader = DataLoader(numbered(64), batch_size=4)
    accelerator = Accelerator(target_batch=4, micro_batch=1, budget="2GiB", log_with="tensorboard", project_dir=shared[0])
    model, optimizer, loader = accelerator.prepare(*small(), loader)
    accelerator.init_trackers("run", config={"rate": 0.1})
    for number, (x, numbers) in enumerate(itertools.chain(loader, loader)):
        step(accelerator, model, optimizer, x, numbers)
        accelerator.log({"loss": 1.0}, step=number * 100)
        if number == 20:
            accelerator.run._core.note("note", "something to be read")
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    found = EventAccumulator(f"{shared[0]}/run").Reload()
    logged = [*range(1, 11), 20, 30, 32]
    assert [event.step for event in found.Scalars("loss")] == [100 * i for i in range(32)]
    for name in ("seconds", "samples_per_second", "micro_batch", "accumulation", "peak_predicted", "budget", "out_of_memory"):
        assert [event.step for event in found.Scalars(f"memfit/{name}")] == logged, name
    assert {event.value for event in found.Scalars("memfit/micro_batch")} == {1.0}
    assert found.Scalars("memfit/budget")[0].value == 2 * 2**30
    assert found.Scalars("memfit/peak_measured")[-1].value > 0
    assert not any("utilisation" in name for name in found.Tags()["scalars"])
    plans, events = (
        [event.tensor_proto.string_val[0].decode() for event in found.Tensors(f"memfit/{name}/text_summary")]
        for name in ("plan", "events")
    )
    assert plans == [accelerator.run.plan.summary()]
    assert "plan" in events[0] and "something to be read" in events[-1]
    assert len(list(Path(shared[0], "run").glob("events*"))) == 1
    shutil.rmtree(shared[0])


def nothing_is_logged_without_trackers() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(numbered(), batch_size=2))
    assert accelerator.trackers == []
    seen(accelerator, model, optimizer, loader)
    accelerator.log({"loss": 1.0})


CHECKS = {check.__name__: check for check in (
    every_sample_of_an_epoch_once,
    evaluation_is_divided_and_gathered_once,
    metrics_of_training_batches,
    losses_are_gathered_and_reduced,
    accumulation_is_in_the_batch,
    prepared_one_after_the_other,
    gradients_are_clipped,
    without_sync_is_the_same,
    joining_uneven_inputs,
    order_of_a_seedable_sampler,
    skipping_what_was_done_before,
    samplers_are_told_the_epoch,
    streams_are_divided,
    batches_of_a_batch_sampler_are_divided,
    settings_of_loaders,
    models_are_saved_whole,
    processes_talk,
    nothing_is_logged_without_trackers,
    tensorboard,  # the last one: it ends the process group
)}  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
