"""Whether verifiers listen."""

from __future__ import annotations

from typing import ClassVar

from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.scenario_base.text.analysers.base import Role, RolloutAnalyser, Subject
from nip_astra.scenario_base.text.analysers.registry import register_rollout_analyser


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
