"""A torch outside the tested range is told, the tested ones and unreadable ones are not."""

from __future__ import annotations

import pytest
import torch

from memfit._tested import untested


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.1+cu130", "nightly", ""])
def test_nothing_is_said_of_tested_and_unreadable_versions(version: str) -> None:
    assert untested(version) is None


@pytest.mark.parametrize("version", ["2.4.1", "2.12.0+cpu", "2.14.0a0+git1234", "3.0.0"])
def test_others_are_told_with_their_number(version: str) -> None:
    said = untested(version)
    assert said is not None and version in said and "2.13" in said


def test_the_torch_that_runs_this_is_a_tested_one() -> None:
    assert untested(torch.__version__) is None
