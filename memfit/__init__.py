"""Fits a PyTorch training into the available memory, with the same gradients, for the effective batch size you ask for.

    model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=1024)
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from memfit._errors import (
        DoesNotFit as DoesNotFit,
        MemfitError as MemfitError,
        PlanFileError as PlanFileError,
        RankFailed as RankFailed,
        Refused as Refused,
        UsageError as UsageError,
    )
    from memfit._verbs import apply as apply, plan as plan, profile as profile, verify as verify
    from memfit._wrap import wrap as wrap
    from memfit.hardware.budget import Budget as Budget, probe as probe
    from memfit.hardware.device import Device as Device
    from memfit.planning.plan import Plan as Plan
    from memfit.profiling.profile import Profile as Profile
    from memfit.reporting.report import Report as Report
    from memfit.reporting.verification import Verification as Verification
    from memfit.runtime.events import Event as Event
    from memfit.training.run import Run as Run

__version__ = "0.1.0"

# Names are imported lazily, so that importing memfit, and `memfit --help`, cost nothing.
_HOME = {
    **dict.fromkeys(("DoesNotFit", "MemfitError", "PlanFileError", "RankFailed", "Refused", "UsageError"), "memfit._errors"),
    **dict.fromkeys(("apply", "plan", "profile", "verify"), "memfit._verbs"),
    "wrap": "memfit._wrap",
    **dict.fromkeys(("Budget", "probe"), "memfit.hardware.budget"),
    "Device": "memfit.hardware.device",
    "Plan": "memfit.planning.plan",
    "Profile": "memfit.profiling.profile",
    "Report": "memfit.reporting.report",
    "Verification": "memfit.reporting.verification",
    "Event": "memfit.runtime.events",
    "Run": "memfit.training.run",
}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    value = getattr(_importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
