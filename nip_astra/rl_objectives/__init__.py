"""Losses, advantages and rewards as pure functions, and loss modules of agents with networks."""

from nip_astra.lazy import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "IppoObjective": "nip_astra.rl_objectives.ippo",
        "Objective": "nip_astra.rl_objectives.objective",
        "ReinforceObjective": "nip_astra.rl_objectives.ippo",
        "SpgObjective": "nip_astra.rl_objectives.spg",
    },
)
