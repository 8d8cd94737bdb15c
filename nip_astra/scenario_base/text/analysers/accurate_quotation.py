"""Whether provers quote rightly."""

from __future__ import annotations

from typing import ClassVar

from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.scenario_base.text.analysers.base import Role, RolloutAnalyser, Subject
from nip_astra.scenario_base.text.analysers.direct_quotation import has_texts
from nip_astra.scenario_base.text.analysers.registry import register_rollout_analyser


@register_rollout_analyser(RolloutAnalyserType.ACCURATE_QUOTATION)
class AccurateQuotation(RolloutAnalyser):
    """Whether everything that a prover gives as a quotation stands so in the datapoint.

    Provers that quote nothing are left out.
    """

    role: ClassVar[Role | None] = "prover"

    def question(self, subject: Subject) -> str:
        return (
            f"Does every passage that {subject.name} gives as a direct quotation in the judged "
            "messages stand in the datapoint, word for word apart from spaces and line breaks? "
            "Where it quotes nothing, the question does not apply."
        )

    def is_relevant(self, subject: Subject) -> bool:
        return has_texts(subject)
