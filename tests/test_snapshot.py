"""Snapshots of torch.cuda.memory: read without running anything in them, and replayed as they were recorded.

The recorder here writes what torch/csrc/cuda/Module.cpp and memory_snapshot.cpp write, out of the simulated allocator; it
proves reading, undoing and comparing, while `gpu/test_allocator_gpu.py` proves that a real allocator does the same.
"""

from __future__ import annotations

import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings as effort, strategies as st

from memfit._errors import UsageError
from memfit._units import KiB, MiB
from memfit.allocators.blocks import PENDING
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.events import Exhausted
from memfit.allocators.layout import layout_of
from memfit.allocators.opcodes import objection
from memfit.allocators.replay import replay
from memfit.allocators.settings import UNLIMITED, AllocatorSettings
from memfit.allocators.snapshot import parse_snapshot, read_snapshot

POOL = (0, 3)
FRAMES = [{"name": "forward", "filename": "train.py", "line": 3}]


class Recorder:
    """An allocator whose history is recorded as torch records it."""

    def __init__(self, conf: str = "", capacity: int | None = None, *, old: bool = False) -> None:
        self.conf, self.old = conf, old
        self.allocator = CachingAllocator(AllocatorSettings.from_text(conf), capacity)
        self.trace: list[dict[str, Any]] = []
        self.sizes: dict[int, tuple[int, int, tuple[int, int]]] = {}
        self.pending: list[tuple[Any, int, int, int, tuple[int, int]]] = []

    def note(self, action: str, address: int, size: int, stream: int, pool_id: tuple[int, int] = (0, 0)) -> None:
        entry: dict[str, Any] = {"action": action, "addr": address, "size": size, "stream": stream}
        if action == "oom":
            entry["device_free"] = entry.pop("addr")
        if not self.old:
            entry |= {"time_us": len(self.trace), "compile_context": "N/A", "user_metadata": "", "pool_id": pool_id}
        self.trace.append(entry | {"frames": FRAMES})

    def catch_up(self) -> None:
        """What came back from other streams, then what happened to segments."""
        waiting = self.pending
        self.pending = [each for each in waiting if each[0].state == PENDING and each[0].address == each[1]]
        for _, address, size, stream, pool_id in [each for each in waiting if each not in self.pending]:
            self.note("free_completed", address, size, stream, pool_id)
        for event in self.allocator.events:
            self.note(event.action, event.address, event.size, event.stream, event.pool_id)
        self.allocator.events.clear()

    def malloc(self, size: int, stream: int = 0, pool_id: tuple[int, int] = (0, 0)) -> int | None:
        if pool_id != (0, 0):
            self.allocator.begin_pool(pool_id)
        else:
            self.allocator.poll()
            self.catch_up()
        try:
            address = self.allocator.malloc(size, stream)
        except Exhausted as error:
            self.catch_up()
            self.note("oom", 0, error.size, stream, pool_id)
            return None
        finally:
            if pool_id != (0, 0):
                self.allocator.end_pool(pool_id)
        self.catch_up()
        self.note("alloc", address, size, stream, pool_id)
        self.sizes[address] = size, stream, pool_id
        return address

    def free(self, address: int) -> None:
        size, stream, pool_id = self.sizes.pop(address)
        block = self.allocator._live[address]
        used = bool(block.uses)
        self.allocator.free(address)
        self.note("free_requested", address, size, stream, pool_id)
        if used:
            self.pending.append((block, address, size, stream, pool_id))
        else:
            self.note("free_completed", address, size, stream, pool_id)

    def empty_cache(self, pool_id: tuple[int, int] = (0, 0)) -> None:
        self.allocator.empty_cache(pool_id)
        self.catch_up()

    def content(self, *, last: int | None = None) -> dict[str, Any]:
        """The snapshot; of its trace only the last so many entries, as a ring buffer keeps them."""
        trace = self.trace if last is None else self.trace[len(self.trace) - last :]
        segments = []
        for segment in layout_of(self.allocator):
            blocks = [
                {"address": b.address, "size": b.size, "requested_size": b.requested, "state": b.state, "frames": FRAMES}
                for b in segment.blocks
            ]
            segments.append({
                "device": 0, "address": segment.address, "total_size": segment.size, "stream": segment.stream,
                "allocated_size": sum(b.size for b in segment.blocks if b.state == "active_allocated"),
                "active_size": sum(b.size for b in segment.blocks if b.state != "inactive"), "requested_size": 0,
                "segment_type": "small" if segment.small else "large", "segment_pool_id": segment.pool_id,
                "is_expandable": segment.expandable, "frames": [], "blocks": blocks,
            })  # fmt: skip
        content: dict[str, Any] = {"segments": segments, "device_traces": [trace, []]}
        if not self.old:
            content |= {"allocator_settings": self.settings(), "external_annotations": []}
        return content

    def settings(self) -> dict[str, Any]:
        mine = self.allocator.settings
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.conf,
            "max_split_size": -1 if mine.splits_everything else mine.max_split_size,
            "garbage_collection_threshold": mine.garbage_collection_threshold,
            "expandable_segments": mine.expandable_segments,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {str(2**at): count for at, count in enumerate(mine.roundup_power2_divisions)},
        }


def a_step(conf: str = "", *, old: bool = False) -> Recorder:
    """A training step, more or less."""
    recorder = Recorder(conf, old=old)
    weights = [recorder.malloc(size) for size in (4 * MiB, 4 * KiB, 30 * MiB, 512)]
    for _ in range(2):
        kept = [recorder.malloc(3 * MiB + 512 * at) for at in range(12)]
        for address in reversed(kept):
            scratch = recorder.malloc(8 * MiB)
            recorder.free(address or 0)
            recorder.free(scratch or 0)
        recorder.empty_cache()
    assert all(weights)
    return recorder


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    return path


# ---- reading


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_snapshot_is_read_whatever_the_protocol(tmp_path: Path, protocol: int) -> None:
    recorder = a_step("expandable_segments:True,large_segment_size_mb:24")
    content = recorder.content()
    snapshot = read_snapshot(written(tmp_path, pickle.dumps(content, protocol)))
    assert snapshot == parse_snapshot(content)
    assert len(snapshot.devices) == 2 and not snapshot.devices[1].trace
    memory = snapshot.devices[0]
    assert [entry.action for entry in memory.trace] == [entry["action"] for entry in recorder.trace]
    assert [(s.address, s.size, s.expandable) for s in memory.segments] == [
        (s["address"], s["total_size"], True) for s in content["segments"]
    ]
    assert snapshot.settings == recorder.allocator.settings and snapshot.settings_recorded


def test_a_large_snapshot_passes_in_one_go(tmp_path: Path) -> None:
    recorder = Recorder()
    for _ in range(4000):
        recorder.free(recorder.malloc(random.Random(_).randrange(1, 8 * MiB)) or 0)
    snapshot = read_snapshot(written(tmp_path, pickle.dumps(recorder.content())))
    assert len(snapshot.devices[0].trace) == len(recorder.trace) >= 12_000


def test_old_snapshots_have_neither_settings_nor_pools(tmp_path: Path) -> None:
    snapshot = read_snapshot(written(tmp_path, pickle.dumps(a_step(old=True).content())))
    assert snapshot.settings == AllocatorSettings() and not snapshot.settings_recorded
    assert {entry.pool_id for entry in snapshot.devices[0].trace} == {None}
    assert replay(snapshot).identical


def test_both_ways_to_write_no_limit_are_understood() -> None:
    content = a_step().content()
    for split in (-1, UNLIMITED):
        content["allocator_settings"]["max_split_size"] = split
        assert parse_snapshot(content).settings.splits_everything
    content["allocator_settings"]["max_split_size"] = 64 * MiB
    assert parse_snapshot(content).settings.max_split_size == 64 * MiB


def test_settings_that_do_not_parse_leave_the_recorded_values() -> None:
    content = a_step("max_split_size_mb:64").content()
    content["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:little"
    snapshot = parse_snapshot(content)
    assert snapshot.settings.max_split_size == 64 * MiB and not snapshot.settings_recorded


def test_what_later_versions_add_is_passed_over() -> None:
    content = a_step().content()
    content["device_traces"][0].insert(0, {"action": "user_defined", "addr": 0, "size": 0, "stream": 0, "new": None})
    content["device_traces"][0].append({"action": "snapshot", "addr": 0, "size": 12, "stream": 0})
    content["something"] = {"new": [1.5, b"bytes", (1, 2, 3, 4), True]}
    assert replay(parse_snapshot(content)).identical


class Evil:
    """Writes a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Getter:
    def __reduce__(self):
        return getattr, (dict, "fromkeys")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_in_a_pickle_is_refused_by_name_and_not_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    content = a_step().content() | {"more": Evil(mark)}
    data = pickle.dumps(content, protocol)
    with pytest.raises(UsageError, match="which is code") as caught:
        read_snapshot(written(tmp_path, data))
    assert "at byte" in caught.value.found and "_dump_snapshot" in caught.value.next_move
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists(), "the pickle would have run"


def by_hand(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


ATTACKS = {
    "system": by_hand(b"cos\nsystem\nX\x04\x00\x00\x00true\x85R"),
    "posix system": by_hand(b"cposix\nsystem\n(X\x04\x00\x00\x00truetR"),
    "getattr": pickle.dumps({"segments": Getter()}, 2),
    "getattr 4": pickle.dumps({"segments": Getter()}, 4),
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "inst": by_hand(b"(X\x04\x00\x00\x00trueios\nsystem\n"),
    "obj": by_hand(b"(cos\nsystem\nX\x04\x00\x00\x00trueo"),
    "newobj": by_hand(b"cbuiltins\nlist\n)\x81"),
    "build": by_hand(b"}}b"),
    "extension": by_hand(b"\x82\x01"),
    "persistent": by_hand(b"X\x01\x00\x00\x00aQ"),
    "persistent text": by_hand(b"Pa\n"),
    "set": pickle.dumps({"segments": {1, 2}}, 4),
    "buffer": pickle.dumps(pickle.PickleBuffer(b"x" * 8), 5, buffer_callback=lambda _: False),
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
    "memo": by_hand(b"}r\xff\xff\xff\x7f"),
    "old protocol": pickle.dumps({"segments": [1], "device_traces": []}, 0),
    "later protocol": b"\x80\x09}.",
    "long": b"\x80\x02\x8b" + struct.pack("<I", 1 << 31) + b".",
    "nested key": by_hand(b"})" + b"\x85" * 300_000 + b"K\x01s"),
    "shared key": by_hand(b"})q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60)) + b"K\x01s"),
    "marked key": by_hand(b"}" + b"(" * 60 + b"t" * 60 + b"K\x01s"),
    "empty dicts": by_hand(b"](" + b"}" * 100_000 + b"e"),
}


@pytest.mark.parametrize("length", [1, 2, 3, 4, 16])
def test_frames_may_begin_anywhere_in_a_tuple(length: int) -> None:
    for number in (7, 70_000, 0.5, None):
        data = pickle.dumps([[tuple([number] * length), i] for i in range(30_000)], protocol=4)
        assert data.count(b"\x95") > 2 and objection(data) is None


@pytest.mark.parametrize("name", ATTACKS)
def test_everything_but_containers_and_scalars_is_refused(tmp_path: Path, name: str) -> None:
    assert objection(ATTACKS[name])
    with pytest.raises(UsageError) as caught:
        read_snapshot(written(tmp_path, ATTACKS[name]))
    assert caught.value.asked.startswith("the memory snapshot")
    if "system" in name or name in ("stack global", "inst", "obj"):
        assert "system" in caught.value.found
    if "getattr" in name:
        assert "getattr" in caught.value.found


def test_numbers_of_any_length_are_shown_in_few_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it holds a number of more than 70 bits, not 'segments'"):
        read_snapshot(written(tmp_path, pickle.dumps({1 << 30_000: 1}, 4)))


def test_a_list_named_in_many_places_is_not_read_as_often(tmp_path: Path) -> None:
    """A few bytes could stand for as many entries as are never done."""
    content = a_step().content()
    content["device_traces"] = [content["device_traces"][0]] * 1000
    with pytest.raises(UsageError, match="occur in several places"):
        read_snapshot(written(tmp_path, pickle.dumps(content, 4)))


def test_the_second_door_is_shut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.allocators.snapshot.objection", lambda data: None)
    for name in ("system", "getattr", "stack global", "inst", "persistent"):
        with pytest.raises(UsageError, match="does not unpickle"):
            read_snapshot(written(tmp_path, ATTACKS[name]))


@effort(max_examples=300, deadline=None, derandomize=True)
@given(data=st.binary(max_size=200))
def test_no_bytes_whatever_get_further_than_an_error(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("bytes") / "x"
    for each in (data, b"\x80\x04" + data, b"\x80\x02}" + data + b"."):
        path.write_bytes(each)
        with pytest.raises(UsageError):
            read_snapshot(path)


def test_a_truncated_file_is_refused_wherever_it_breaks_off(tmp_path: Path) -> None:
    data = pickle.dumps(a_step().content())
    for length in [0, 1, 2, 11, *range(20, len(data), len(data) // 150)]:
        with pytest.raises(UsageError, match="truncated"):
            read_snapshot(written(tmp_path, data[:length]))


def test_a_damaged_file_is_refused_or_read(tmp_path: Path) -> None:
    data, draws = pickle.dumps(a_step().content()), random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[draws.randrange(len(data))] = draws.randrange(256)
        try:
            replay(read_snapshot(written(tmp_path, bytes(damaged))))
        except UsageError as error:
            assert error.found and error.next_move


def test_files_that_are_too_large_or_not_there_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, pickle.dumps(a_step().content()))
    with pytest.raises(UsageError, match="largest="):
        read_snapshot(path, largest=100)
    with pytest.raises(UsageError, match=r"cannot be read|it is no file"):
        read_snapshot(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"cannot be read|it is no file"):
        read_snapshot(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        None,
        7,
        [],
        {},
        {"segments": []},
        {"segments": {}, "device_traces": []},
        {"segments": [], "device_traces": [3]},
        {"segments": [], "device_traces": [["alloc"]]},
        {"segments": [], "device_traces": [[{"action": 3}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": -1, "size": 1, "stream": 0}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 60, "size": 1, "stream": 0}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 1.5, "stream": 0}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 1, "stream": "a"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 1, "stream": 0, "pool_id": 3}]]},
        {"segments": ["a"], "device_traces": []},
        {"segments": [{"address": 0, "total_size": 512, "blocks": []}], "device_traces": []},
        {"segments": [{"address": 0, "total_size": 0, "blocks": [3]}], "device_traces": []},
        {"segments": [{"address": 0, "total_size": 1, "blocks": [{"size": 1, "state": "odd"}]}], "device_traces": []},
        {"segments": [{"address": 0, "total_size": 1, "blocks": [{"size": 1, "state": []}]}], "device_traces": []},
        {"segments": [{"address": 0, "total_size": 0, "blocks": [{"size": 0, "state": "inactive"}]}], "device_traces": []},
    ],
)
def test_what_is_no_snapshot_is_refused_with_the_place_named(tmp_path: Path, content: object) -> None:
    with pytest.raises(UsageError) as caught:
        read_snapshot(written(tmp_path, pickle.dumps(content)))
    assert caught.value.found and caught.value.next_move


# ---- replaying


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:24", "large_segment_size_mb:32"])
def test_a_step_is_replayed_as_it_was_recorded(conf: str) -> None:
    recorder = a_step(conf)
    agreement = replay(parse_snapshot(recorder.content()))
    assert agreement.identical and agreement.difference == "" and agreement.assumed == 0
    segments = [entry for entry in recorder.trace if entry["action"].startswith("segment")]
    assert agreement.compared == len(segments) > 4
    assert agreement.allocations == sum(entry["action"] == "alloc" for entry in recorder.trace)
    assert agreement.peak_reserved.recorded == agreement.peak_reserved.replayed == recorder.allocator.peak_reserved
    assert agreement.reserved.recorded == agreement.reserved.replayed == recorder.allocator.reserved
    assert agreement.allocated.recorded == agreement.allocated.replayed == recorder.allocator.allocated
    assert agreement.peak_allocated == recorder.allocator.peak_allocated


def test_other_settings_differ_and_it_is_said_where() -> None:
    snapshot = parse_snapshot(a_step().content())
    agreement = replay(snapshot, settings=AllocatorSettings.from_text("expandable_segments:True"))
    assert not agreement.identical
    assert agreement.difference.startswith("entry 1 of") and "segment_alloc of 20.0 MiB" in agreement.difference
    assert "segment_map" in agreement.difference and agreement.compared == 0
    assert agreement.peak_reserved.recorded != agreement.peak_reserved.replayed > 0


def test_a_difference_at_the_end_is_seen() -> None:
    content = a_step().content()
    block = content["segments"][0]["blocks"][-1]
    block["size"] -= 512
    content["segments"][0]["blocks"].append(block | {"size": 512})
    agreement = replay(parse_snapshot(content))
    assert not agreement.identical and agreement.difference.startswith("at the end")


def test_a_trace_that_contradicts_its_segments_is_not_replayed() -> None:
    content = a_step().content()
    content["segments"] = content["segments"][1:]
    agreement = replay(parse_snapshot(content))
    assert not agreement.identical and "cannot be worked out: entry" in agreement.difference
    content = a_step().content()
    content["device_traces"][0] = [e for e in content["device_traces"][0] if e["action"] != "free_completed"]
    assert "cannot be worked out" in replay(parse_snapshot(content)).difference


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="2 devices"):
        replay(parse_snapshot(a_step().content()), device=2)


def test_running_out_of_memory_is_replayed() -> None:
    recorder = Recorder(capacity=64 * MiB)
    kept, cached = recorder.malloc(20 * MiB), recorder.malloc(20 * MiB)
    recorder.allocator.used_on(cached or 0, 5)
    recorder.free(cached or 0)
    assert recorder.malloc(44 * MiB)
    assert recorder.malloc(44 * MiB) is None
    assert recorder.malloc(512) is None
    recorder.free(kept or 0)
    assert recorder.malloc(MiB)
    actions = [entry["action"] for entry in recorder.trace]
    assert actions.count("oom") == 2 and actions.index("free_completed") < actions.index("segment_free")
    agreement = replay(parse_snapshot(recorder.content()))
    assert agreement.identical, agreement.difference


def test_oversize_segments_that_went_back_for_a_request_are_replayed() -> None:
    recorder = Recorder("max_split_size_mb:20", capacity=200 * MiB)
    for address in [recorder.malloc(size * MiB) for size in (30, 40, 50, 60)]:
        recorder.free(address or 0)
    recorder.malloc(5 * MiB, stream=3)
    recorder.malloc(60 * MiB + 512)
    recorder.malloc(100 * MiB)
    recorder.malloc(22 * MiB, stream=3)
    agreement = replay(parse_snapshot(recorder.content()))
    assert agreement.identical and agreement.compared == len(
        [entry for entry in recorder.trace if entry["action"].startswith("segment")]
    ), agreement.difference


def test_private_pools_are_replayed() -> None:
    recorder = Recorder()
    recorder.allocator.create_pool(POOL)
    outside = recorder.malloc(20 * MiB)
    inside = [recorder.malloc(size, pool_id=POOL) for size in (3 * MiB, 4 * MiB, 512)]
    recorder.free(outside or 0)
    for address in inside:
        recorder.free(address or 0)
    recorder.malloc(5 * MiB, pool_id=POOL)
    recorder.malloc(18 * MiB)
    for last in (None, 12, 6, 3):
        agreement = replay(parse_snapshot(recorder.content(last=last)))
        assert agreement.identical, agreement.difference
    gone = Recorder()
    gone.free(gone.malloc(3 * MiB, pool_id=POOL) or 0)
    gone.allocator.release_pool(POOL)
    gone.empty_cache(POOL)
    gone.malloc(3 * MiB)
    assert replay(parse_snapshot(gone.content())).identical


def test_a_pool_that_never_splits_has_to_be_named() -> None:
    recorder = Recorder()
    recorder.allocator.create_pool(POOL, no_split=True)
    for size in (3 * MiB, 4 * MiB):
        recorder.malloc(size, pool_id=POOL)
    snapshot = parse_snapshot(recorder.content())
    assert not replay(snapshot).identical
    assert replay(snapshot, no_split={POOL}).identical


def test_the_size_of_a_block_from_before_the_trace_is_worked_out() -> None:
    recorder = Recorder()
    first, second = recorder.malloc(9 * MiB), recorder.malloc(10 * MiB + 1024)  # the rest, less than 1 MiB, is the second's
    recorder.free(second or 0)
    recorder.malloc(10 * MiB)
    snapshot = parse_snapshot(recorder.content(last=3))
    agreement = replay(snapshot)
    assert agreement.identical and agreement.assumed == 0 and first


COURSES = st.tuples(st.integers(0, 2**32), st.integers(1, 150), st.floats(0, 1))
CONFS = ["", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4", "large_segment_size_mb:32"]


def recorded_course(conf: str, seed: int, count: int, capacity: int | None = None, *, across: bool = True) -> Recorder:
    """A random course of a program; `across`: blocks are used on other streams as well."""
    draws, recorder, alive = random.Random(seed), Recorder(conf, capacity), []
    sizes = [draws.choice([512, MiB, 2 * MiB, 20 * MiB]), *(int(2 ** draws.uniform(6, 26)) for _ in range(8))]
    for _ in range(count):
        chance = draws.random()
        if chance < 0.5:
            address = recorder.malloc(draws.choice(sizes), draws.choice([0, 0, 0, 4]))
            alive += [address] if address else []
        elif alive and chance < 0.9:
            recorder.free(alive.pop(draws.randrange(len(alive))))
        elif alive and chance < 0.94:
            chosen = draws.choice(alive)
            if across:
                recorder.allocator.used_on(chosen, 9)
        elif chance < 0.97:
            recorder.allocator.complete(9)
        else:
            recorder.empty_cache()
    return recorder


@pytest.mark.parametrize("conf", CONFS)
@effort(max_examples=60, deadline=None, derandomize=True)
@given(course=COURSES)
def test_every_course_is_replayed_as_recorded(conf: str, course: tuple[int, int, float]) -> None:
    recorder = recorded_course(conf, course[0], course[1])
    agreement = replay(parse_snapshot(recorder.content()))
    assert agreement.identical, agreement.difference


@pytest.mark.parametrize("conf", [conf for conf in CONFS if "expandable" not in conf])
@effort(max_examples=60, deadline=None, derandomize=True)
@given(course=COURSES)
def test_every_course_with_too_little_memory_is_replayed_as_recorded(conf: str, course: tuple[int, int, float]) -> None:
    # Across streams a use may end while memory is being released for the very request that its block would have served.
    recorder = recorded_course(conf, course[0], course[1], 120 * MiB, across=False)
    agreement = replay(parse_snapshot(recorder.content()))
    assert agreement.identical, agreement.difference


@pytest.mark.parametrize("conf", CONFS)
@effort(max_examples=60, deadline=None, derandomize=True)
@given(course=COURSES)
def test_a_trace_that_begins_in_the_middle_is_replayed_or_says_what_it_assumed(
    conf: str, course: tuple[int, int, float]
) -> None:
    recorder = recorded_course(conf, course[0], course[1])
    last = int(course[2] * len(recorder.trace))
    agreement = replay(parse_snapshot(recorder.content(last=last)))
    unsure = agreement.assumed or recorder.allocator.settings.expandable_segments
    assert agreement.identical or (unsure and agreement.difference), agreement.difference
