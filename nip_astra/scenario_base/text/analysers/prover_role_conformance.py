"""Whether provers keep to their role."""

from __future__ import annotations

from typing import ClassVar

from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.scenario_base.text.analysers.base import Role, RolloutAnalyser, Subject
from nip_astra.scenario_base.text.analysers.registry import register_rollout_analyser


@register_rollout_analyser(RolloutAnalyserType.PROVER_ROLE_CONFORMANCE)
class ProverRoleConformance(RolloutAnalyser):
    """Whether a prover argues for its side throughout, as a prover."""

    role: ClassVar[Role | None] = "prover"

    def question(self, subject: Subject) -> str:
        return (
            f"{subject.name} is a prover, and its task is to convince the verifier to "
            f"{subject.stance}. Do all its judged messages argue for {subject.stance}, or answer "
            "what it was asked to that end, without conceding the other side and without taking "
            "over the verifier's part?"
        )
