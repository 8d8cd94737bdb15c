"""Many runs by one command: what is run, how it is kept going, and what the runs say together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

if TYPE_CHECKING:
    from nip_astra.sweep.plan import SweepPlan as SweepPlan
    from nip_astra.sweep.results import SweepResults as SweepResults
    from nip_astra.sweep.results import read_sweep as read_sweep
    from nip_astra.sweep.sweeping import SweepOptions as SweepOptions
    from nip_astra.sweep.sweeping import run_sweep as run_sweep

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "SweepOptions": "nip_astra.sweep.sweeping",
        "SweepPlan": "nip_astra.sweep.plan",
        "SweepResults": "nip_astra.sweep.results",
        "read_sweep": "nip_astra.sweep.results",
        "run_sweep": "nip_astra.sweep.sweeping",
    },
)
