"""Half of 5,000 random scripts; the others are in a file of their own, so that they run beside these."""

from __future__ import annotations

import pytest
from fuzz.offenders import offenders_apart, told


@pytest.mark.slow
def test_scripts_of_odd_seeds_train_as_without_memfit() -> None:
    found = offenders_apart(range(1001, 6000, 2))
    assert not found, told(found)
