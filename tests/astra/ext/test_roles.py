"""Speakers are never guessed: conversations keep their roles as texts are added."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from nip_astra.astra import (
    DPO,
    ASTSampler,
    Conversation,
    Graph,
    HFASTProblem,
    Node,
    Sampler,
    Spoken,
)
from nip_astra.errors import ConfigurationError
from tests.astra.conftest import Models
from tests.astra.toys import PROMPTS, hf_problem, texts_of, train

WAYS = {
    "as it is": lambda s, a, r: s + a + r,
    "spaces": lambda s, a, r: s + " " + a + " " + r,
    "lines": lambda s, a, r: s + "\n" + a + "\n" + r,
    "together": lambda s, a, r: s + (a + " " + r),
    "formatted": lambda s, a, r: f"{s} {a} {r}",
    "glued": lambda s, a, r: f"{s}{a}{r}",
    "joined": lambda s, a, r: "\n".join([s, a, r]),
}


def problem_that_advances(models: Models, way: Any) -> HFASTProblem:
    class Advances(HFASTProblem):
        def advance(self, state: str, action: str, response: str) -> str:
            given: str = way(state, action, response)
            return given

    return hf_problem(models, kind=Advances)


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_an_advance_that_adds_the_same_turns_otherwise_plays_the_same_conversation(
    models: Models, way: Any
) -> None:
    plain = problem_that_advances(models, WAYS["as it is"])
    other = problem_that_advances(models, way)
    graphs = [ASTSampler(problem, PROMPTS, 2, 3).rollout(0) for problem in (plain, other)]
    assert texts_of(graphs[0]) == texts_of(graphs[1])
    (*_, last) = graphs[1].chain()
    ids = other._reader.context_ids("attacker", last.context)
    shown = other.tokenizer.decode(ids)
    # The opening and two responses are the other side's, two probes are the attacker's.
    assert (shown.count("<user>"), shown.count("<assistant>")) == (3, 3)
    turns = other._reader._turns("attacker", last.context.turns)
    assert [turn.role == "assistant" for turn in turns] == [*(False, True, False, True, False)]


@pytest.mark.parametrize(
    "way",
    [
        lambda s, a, r: f"{s}\nUser: {a}\nBot: {r}",
        lambda s, a, r: s + "User:" + a + "Bot:" + r,
        lambda s, a, r: (s + a + r)[-20:],
        lambda s, a, r: s + a,
        lambda s, a, r: s + r + a,
        lambda s, a, r: None,
    ],
    ids=["labels", "labels as turns", "cut", "no response", "swapped", "nothing"],
)
def test_an_advance_that_loses_the_speakers_is_refused(models: Models, way: Any) -> None:
    problem = problem_that_advances(models, way)
    with pytest.raises(ConfigurationError):
        ASTSampler(problem, PROMPTS, 2, 3).rollout(0)


def test_an_advance_may_drop_the_oldest_turns(models: Models) -> None:
    problem = problem_that_advances(
        models, lambda s, a, r: Conversation([*getattr(s, "turns", [s]), a, r][-3:])
    )
    (_, _, third) = ASTSampler(problem, PROMPTS, 1, 3).rollout(0).chain()
    assert len(third.context.turns) == 3
    train(DPO(problem), training_steps=1)


class OwnLoop(Sampler[str, str]):
    """A custom sampler that adds texts in its own way."""

    def __init__(self, system: Any, way: Any) -> None:
        super().__init__(system)
        self.way = way

    def rollout(self, seed: int | None = None) -> Graph[str, str]:
        state: str = "hello"
        result: list[Node[str, str]] = []
        for _ in range(3):
            (probe,) = self.system.rollout_prompt_with_attacker([state])
            (response,) = self.system.rollout_prompt_with_target([state + " " + probe])
            result.append(Node(state, probe, response, 0.0, []))
            state = self.way(state, probe, response)
        return Graph("hello", result)


def test_a_custom_sampler_may_put_spaces_between_turns_and_no_labels(models: Models) -> None:
    played = OwnLoop(hf_problem(models), WAYS["spaces"]).rollout()
    assert [len(node.context.split("\n")) for node in played.children] == [1, 3, 5]
    with pytest.raises(ConfigurationError):
        OwnLoop(hf_problem(models), lambda s, a, r: s + " " + a + "\nBot: " + r).rollout()


def test_turns_know_their_tokens_and_speaker_through_copies_and_trees(models: Models) -> None:
    turn = Spoken("good day", [4, 5, 3], "attacker")
    for again in (copy.deepcopy(turn), pickle.loads(pickle.dumps(turn))):
        assert (again, again.ids, again.speaker) == ("good day", (4, 5, 3), "attacker")
    grown = "hello" + turn
    for conversation in (copy.deepcopy(grown), pickle.loads(pickle.dumps(grown))):
        assert conversation == grown == "hello\ngood day"
        assert conversation.turns[1].ids == (4, 5, 3)
    assert type(turn + "!") is str
    assert " " + turn is turn
    assert "hello" + turn + "" + turn == Conversation(["hello", turn, turn])
    first = ASTSampler(hf_problem(models), PROMPTS).rollout(0).children[0]
    assert (first.probe.speaker, first.response.speaker) == ("attacker", "target")


def test_a_single_text_is_the_prompt_for_either_model(models: Models) -> None:
    problem = hf_problem(models)
    for role in ("attacker", "target"):
        shown = problem.agents[role].language_model.tokenizer.decode(
            problem._reader.context_ids(role, "hello")
        )
        assert shown.count("<user>") == 1
        assert "<user> hello" in shown
    with pytest.raises(ConfigurationError, match="attacker"):
        problem.rollout_prompt_with_attacker([Conversation(["hello", "you"])])
    with pytest.raises(ConfigurationError, match="target"):
        problem.rollout_prompt_with_target([Conversation(["hello", "you", "fine"])])
