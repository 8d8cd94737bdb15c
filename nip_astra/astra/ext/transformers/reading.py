"""Conversion of texts, with or without stored tokens, to each model's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nip_astra.astra.core.texts import Conversation, Spoken, turns_of
from nip_astra.errors import ConfigurationError
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.agents import ConversationAgent


class Reader:
    """Returns the tokens of conversations as each agent reads them."""

    def __init__(self, agents: Mapping[str, ConversationAgent]) -> None:
        self.agents = agents
        self._shares_tokens = agents["attacker"].shares_tokens_with(agents["target"])

    def context_ids(self, role: str, text: str) -> list[int]:
        """Return the tokens before an agent's next turn."""
        is_attackers = role != "target"
        if is_attackers and isinstance(text, Conversation) and text.attacker_ids is not None:
            return list(text.attacker_ids)
        texts = turns_of(text)
        if len(texts) % 2 != is_attackers and len(texts) != 1:
            raise ConfigurationError(
                f"the conversation of {len(texts)} turns ends with the {role}'s own, so the {role} "
                f"cannot answer it: {_shown(texts)}. Add one turn per side: "
                "conversation + probe + response."
            )
        return self.agents[role].contexts([self._turns(role, texts)])[0]

    def split(self, role: str, context: str, probe: str) -> tuple[list[int], list[int]]:
        """Return an agent's input before a probe, and the tokens of the probe.

        For the attacker and the reference it is their own turn, including its end; the target reads
        it as the other side's turn, whose content is scored.
        """
        if role != "target":
            return self.context_ids(role, context), self._own_ids(role, probe)
        agent = self.agents[role]
        turns = self._turns(role, (*turns_of(context), probe))
        (ids,) = agent.contexts([turns])
        start, stop = agent.conversation_format.last_turn_span(turns, ids)
        return ids[:start], ids[start:stop]

    def _turns(self, role: str, texts: tuple[str, ...]) -> list[Turn]:
        # The target opens, then attacker and target alternate. A single text is always the turn to
        # answer.
        is_alone = len(texts) == 1
        turns = []
        for index, text in enumerate(texts):
            side = "attacker" if index % 2 else "target"
            is_own = not is_alone and (side == role or {side, role} == {"attacker", "reference"})
            speaker = getattr(text, "speaker", None) or side
            if index and speaker != side:
                raise ConfigurationError(
                    f"turn {index + 1} must be the {side}'s, got the {speaker}'s {text!r}: "
                    f"{_shown(texts)}. Attacker and target alternate after the opening; write "
                    "conversation + probe + response, without role markers such as 'User: '."
                )
            ids = self._content_ids(role, text, speaker)
            turn = Turn("assistant" if is_own else "user", str(text), ids=ids)
            if is_own and isinstance(text, Spoken) and text.num_reasoning_ids:
                text_ids = self.agents[role].conversation_format.encode(str(text))
                turn = replace(turn, num_reasoning_ids=text.num_reasoning_ids, text_ids=text_ids)
            turns.append(turn)
        return turns

    def _content_ids(self, role: str, text: str, speaker: str) -> tuple[int, ...]:
        """Return a turn's tokens, without its end, as an agent reads them."""
        is_author = (role == "target") == (speaker == "target")
        is_readable = self._shares_tokens or is_author
        if not isinstance(text, Spoken) or not text.ids or not is_readable:
            return self.agents[role].conversation_format.encode(str(text))
        if text.num_reasoning_ids and not is_author:
            # Others do not read the author's reasoning.
            return self.agents[role].conversation_format.encode(str(text))
        author = self.agents[speaker]
        ends = {*author.language_model.end_ids, *author.sampling.end_ids}
        return text.ids[:-1] if text.ids[-1] in ends else text.ids

    def _own_ids(self, role: str, text: str) -> list[int]:
        if isinstance(text, Spoken) and text.ids:
            return list(text.ids)
        return self.agents[role].encode_turn(str(text))


def _shown(texts: Sequence[str]) -> str:
    return ", ".join(repr(text if len(text) <= 40 else f"{text[:40]}...") for text in texts[-4:])
