"""Whether provers quote."""

from __future__ import annotations

from typing import ClassVar

from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.scenario_base.text.analysers.base import Role, RolloutAnalyser, Subject
from nip_astra.scenario_base.text.analysers.registry import register_rollout_analyser


@register_rollout_analyser(RolloutAnalyserType.DIRECT_QUOTATION)
class DirectQuotation(RolloutAnalyser):
    """Whether a prover gives words of the datapoint as a quotation."""

    role: ClassVar[Role | None] = "prover"

    def question(self, subject: Subject) -> str:
        return (
            f"Does {subject.name}, in at least one judged message, give a passage as a direct "
            "quotation of the datapoint, word for word or line by line? A paraphrase is no "
            "quotation; whether the quotation is right does not matter."
        )

    def is_relevant(self, subject: Subject) -> bool:
        return has_texts(subject)


def has_texts(subject: Subject) -> bool:
    """Whether there is something to quote."""
    return any(isinstance(value, str) and value for value in subject.datapoint.values())
