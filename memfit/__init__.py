"""Say the batch you want; memfit fits the training into the memory you have, with the same gradients.

    model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=1024)
"""

from memfit._errors import (
    DoesNotFit as DoesNotFit,
    MemfitError as MemfitError,
    PlanFileError as PlanFileError,
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
from memfit.training.events import Event as Event
from memfit.training.run import Run as Run

__version__ = "0.1.0"
