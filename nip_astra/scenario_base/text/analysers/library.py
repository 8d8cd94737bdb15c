"""The analysers of rollouts that ship."""

from __future__ import annotations

from typing import ClassVar

from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.scenario_base.text.analysers.base import (
    Role,
    RolloutAnalyser,
    Subject,
    register_rollout_analyser,
)


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
        return _has_texts(subject)


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
        return _has_texts(subject)


def _has_texts(subject: Subject) -> bool:
    """Whether there is something to quote."""
    return any(isinstance(value, str) and value for value in subject.datapoint.values())


@register_rollout_analyser(RolloutAnalyserType.FOLLOW_UP)
class FollowUp(RolloutAnalyser):
    """Whether a verifier's later questions take up what it was answered.

    A verifier that wrote nothing after it had heard an answer in the channel is left out.
    """

    role: ClassVar[Role | None] = "verifier"

    def question(self, subject: Subject) -> str:
        return (
            f"Does {subject.name}, in at least one judged message, take up an answer that it was "
            "given before in the same channel: ask about it, press it further, or challenge it? A "
            "new question that could have been asked without the answer does not count."
        )

    def is_relevant(self, subject: Subject) -> bool:
        return any(subject.heard_before(line) for line in subject.own)


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
