"""Examples of fine-tuning jobs, from rollouts in words.

What an agent was asked in a turn is the conversation, and its answer, as it gave it, is what is to
be imitated or preferred: a job trains on the very texts that were sampled.
"""

from __future__ import annotations

from collections.abc import Iterator

from nip_astra.language_models.services.chat import ChatMessage
from nip_astra.language_models.services.fine_tuning import SupervisedExample
from nip_astra.samplers.text_arrays import active_turns, read_prompt
from nip_astra.scenario_base.text.parsing import decision_text
from nip_astra.utils.nested_array_dict import NestedArrayDict


def supervised_examples(
    rollouts: NestedArrayDict, agent: int, *, replace_guess: bool = False
) -> list[SupervisedExample]:
    """An example for each turn of an agent in which it gave an answer that could be used.

    Parameters
    ----------
    agent : int
        Its place in the protocol.
    replace_guess : bool
        Whether its last answer of each rollout is replaced by the right decision.
    """
    return list(_examples(rollouts, agent, replace_guess=replace_guess))


def _examples(
    rollouts: NestedArrayDict, agent: int, *, replace_guess: bool
) -> Iterator[SupervisedExample]:
    turns = list(active_turns(rollouts, agent))
    # In order of rollout and round, so that the last one of a rollout stays.
    last_round = {turn.rollout: turn.round for turn in turns}
    for turn in turns:
        is_replaced = replace_guess and last_round[turn.rollout] == turn.round
        if rollouts["agents", "is_filled"][turn] and not is_replaced:
            continue
        answer = rollouts["agents", "raw_message"][turn]
        if is_replaced:
            answer = decision_text(int(rollouts["y"][turn.rollout]))
        prompt = read_prompt(rollouts["agents", "prompt"][turn])
        yield SupervisedExample((*prompt, ChatMessage(role="assistant", content=answer)))
