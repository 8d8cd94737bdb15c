"""Turns of speakers that give texts: what they are asked, and where a conversation ends.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nip_astra.language_models.base import Generation, pad_right
from nip_astra.samplers.tree_columns import OpenConversation
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.chat_agent import ChatAgent, ChatReply
from nip_astra.scenario_base.conversation.tokens import Turn
from nip_astra.scenario_base.text_attackers import TextAttacker, TextConversation
from nip_astra.utils.seeding import SeedPart, derive_seed


def ask_attacker(
    attacker: TextAttacker, children: Sequence[OpenConversation], key: tuple[SeedPart, ...]
) -> list[str]:
    """Ask for all probes of a level at once; where one fails its conversation has ended."""
    asked = [child for child in children if child.failure is None]
    seeds = [derive_seed(*key, attacker.role, child.path) for child in asked]
    seen = [TextConversation(int(child.path.partition(".")[0]), child.texts) for child in asked]
    replies = dict(zip(map(id, asked), attacker.probe(seen, seeds), strict=True))
    for child in asked:
        failure = replies[id(child)].failure
        child.failure = None if failure is None else f"attacker {failure}"
    return [replies[id(child)].text if id(child) in replies else "" for child in children]


def ask_target(
    target: ChatAgent,
    reader: ConversationAgent,
    children: Sequence[OpenConversation],
    key: tuple[SeedPart, ...],
) -> None:
    """Ask a chat model for all responses of a level at once, and add them to the conversations.

    Where a response failed the conversation has ended: what is said after it has no response and
    no score, so that nothing is learnt from it.

    Parameters
    ----------
    reader : ConversationAgent
        In whose tokens the attacker's side reads.
    """
    asked = [child for child in children if child.failure is None]
    seeds = [derive_seed(*key, target.role, child.path) for child in asked]
    replies = target.reply([child.texts for child in asked], seeds)
    said = dict(zip(map(id, asked), replies, strict=True))
    for child in children:
        reply = said.get(id(child), ChatReply("", child.failure))
        child.failure, child.is_refused = reply.failure, reply.is_refused
        ids = reader.conversation_format.encode(reply.text)
        child.attacker_turns = [*child.attacker_turns, Turn(False, ids)]
        child.texts = [*child.texts, reply.text]


def in_tokens_of(reader: ConversationAgent, texts: Sequence[str]) -> Generation:
    """Turns as a model would have had to say them; the probabilities of who did are NaN.

    A turn is cut where it would fill half of the model's window.
    """
    longest = reader.language_model.context_window // 2
    rows = [reader.say(text)[:longest] for text in texts]
    ids_BT, mask_BT = pad_right(rows, torch.device("cpu"))
    return Generation(ids_BT, mask_BT, torch.zeros(ids_BT.shape).masked_fill(mask_BT, math.nan))
