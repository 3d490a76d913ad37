"""These tests need an accelerator, or the simulated one (tests/simcuda), which is slower and has no graphs."""

from __future__ import annotations

import os

import pytest

# Which of them wait for `make test-all` there. On a GPU all run at once.
SLOW = (
    "test_the_peak_stays_within_the_budget_and_near_the_prediction",
    "test_what_torch_rounds_differently_for_few_samples_does_not_look_like_mixing",
    "test_a_training_step_takes_the_segments_the_replay_takes",
    "test_running_out_of_memory_goes_the_same_way",
    "test_garbage_is_collected_alike",
    "test_a_history_that_begins_in_the_middle_is_replayed",
    "test_gradients_are_those_of_the_whole_batch",
)
QUICK = [f"test_gradients_are_those_of_the_whole_batch[{name}]" for name in ("mlp", "lora", "frozen")]
REFUSED = {"test_a_captured_graph_has_its_own_pool": "the simulated device has no CUDA graphs"}


def pytest_configure(config: pytest.Config) -> None:
    """Deep copies of recurrent networks, which stand for plain PyTorch here, lose cuDNN's layout of their weights."""
    config.addinivalue_line("filterwarnings", "ignore:RNN module weights are not part of single contiguous chunk")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the simulated device makes of them."""
    for item in items if "SIMCUDA" in os.environ else ():
        name = item.name.split("[")[0]
        if name in SLOW and item.name not in QUICK:
            item.add_marker(pytest.mark.slow)
        if name in REFUSED:
            item.add_marker(pytest.mark.skip(reason=REFUSED[name]))
