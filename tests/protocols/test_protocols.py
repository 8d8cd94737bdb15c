"""Every protocol has the turns below, and pays in every possible play as the rules say.

Turns are one text a round: "agent:channel agent:channel". Decisions are one letter a round:
`r`eject, `a`ccept, `c`ontinue. Rewards are those of `playing.REWARDS`: a right decision 3, a wrong
decision -5, no decision in time -7, a turn without a decision 0.5, a favoured prover 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import CONTINUE, Moves, ProtocolHandler, ProtocolStep
from tests.kit.messages import says
from tests.protocols.playing import LETTERS, PLAY_ALONE, REWARDS, build, play, random_moves

V, P = "verifier:main", "prover:main"
V_BOTH = "verifier:prover0_channel verifier:prover1_channel"
P0, P1 = "prover0:prover0_channel", "prover1:prover1_channel"
P_BOTH = f"{P0} {P1}"
VERIFIER_LATER = {"verifier_first": False}


@dataclass(frozen=True)
class Case:
    """A protocol with parameters: its turns by order and round, and the rounds of decisions."""

    protocol: str
    turns: list[list[str]]
    deciding_rounds: list[int]
    section: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = {**self.section, **self.common}
        return "-".join([self.protocol, *(f"{name}={value}" for name, value in given.items())])

    def build(self) -> ProtocolHandler:
        return build(self.protocol, self.section, **self.common)


def rounds(count: int, **section: Any) -> dict[str, Any]:
    return {"max_message_rounds": count, **section}


LATE = rounds(4, min_message_rounds=3)
IN_TURN = rounds(6, sequential=True)
PROVER1_FIRST = IN_TURN | {"prover0_first": False}
OF_CHANNELS = (
    "verifier:main verifier:prover0_verifier",
    "prover0:prover0_verifier prover1:prover_chat",
    "prover1:main prover2:prover_chat",
)
CASES = [
    Case("nip", [[V, P, V, P]], [0, 2], rounds(4)),
    Case("nip", [[P, V, P, V]], [1, 3], rounds(4), VERIFIER_LATER),
    Case("nip", [[V, P, V, P, V]], [2, 4], rounds(5, min_message_rounds=3)),
    Case("nip", [[V, P, V]], [0, 2], rounds(3), {"shared_reward": True}),
    Case("nip", [[V, P, V]], [0, 2], rounds(3), {"force_guess": "y"}),
    Case("nip", [[P, V, P, V]], [3], LATE, {"force_guess": "zero", **VERIFIER_LATER}),
    Case("adp", [[P, V]], [1]),
    Case("adp", [[P, V]], [1], {}, VERIFIER_LATER),
    Case("debate", [[V_BOTH, P_BOTH, V_BOTH, P_BOTH]], [0, 2], rounds(4)),
    Case("debate", [[P_BOTH, V_BOTH, P_BOTH, V_BOTH]], [1, 3], rounds(4), VERIFIER_LATER),
    Case("debate", [[V_BOTH, P0, P1, V_BOTH, P0, P1]], [0, 3], IN_TURN),
    Case("debate", [[V_BOTH, P1, P0, V_BOTH, P1, P0]], [0, 3], PROVER1_FIRST),
    Case("debate", [[P0, P1, V_BOTH, P0, P1, V_BOTH]], [2, 5], IN_TURN, VERIFIER_LATER),
    Case(
        *("debate", [[P1, P0, V_BOTH, P1, P0, V_BOTH]], [5]),
        PROVER1_FIRST | {"min_message_rounds": 4},
        {**VERIFIER_LATER, "shared_reward": True, "verifier_no_guess_reward": 0.0},
    ),
    Case("debate", [[V_BOTH, P_BOTH]], [0], rounds(2), {"force_guess": "one"}),
    Case("mnip", [[V_BOTH, P_BOTH, V_BOTH, P_BOTH]], [2], rounds(4, min_message_rounds=2)),
    Case("mnip", [[P_BOTH, V_BOTH]], [1], rounds(2), VERIFIER_LATER),
    Case("mnip", [[V_BOTH, P1, P0, V_BOTH, P1, P0]], [0, 3], PROVER1_FIRST),
    Case("mnip", [[P0, P1, V_BOTH, P0, P1, V_BOTH]], [2, 5], IN_TURN, VERIFIER_LATER),
    Case("merlin_arthur", [["prover0:main", V], ["prover1:main", V]], [1]),
    Case("solo_verifier", [[V]], [0]),
    Case("multi_channel_test", [[*OF_CHANNELS, *OF_CHANNELS[:2]]], [3], rounds(5)),
]
BOTH_CHANNELS = ["prover0_channel", "prover1_channel"]
SEES = {
    "nip": {"prover": ["main"], "verifier": ["main"]},
    "adp": {"prover": ["main"], "verifier": ["main"]},
    "debate": dict.fromkeys(("prover0", "prover1", "verifier"), BOTH_CHANNELS),
    "merlin_arthur": {"prover0": ["main"], "prover1": ["main"], "verifier": ["main"]},
    "mnip": {
        "prover0": ["prover0_channel"],
        "prover1": ["prover1_channel"],
        "verifier": BOTH_CHANNELS,
    },
    "solo_verifier": {"verifier": ["main"]},
    "multi_channel_test": {
        "prover0": ["main", "prover0_verifier", "prover_chat"],
        "prover1": ["main", "prover_chat"],
        "prover2": ["main", "prover_chat"],
        "verifier": ["main", "prover0_verifier"],
    },
}
"""Agents, in order, and the channels that they see."""
FAVOURS_REJECT = {("debate", "prover0"), ("merlin_arthur", "prover0")}


def test_every_protocol_has_a_case() -> None:
    names = {str(member) for member in InteractionProtocolType}
    assert {case.protocol for case in CASES} == names == set(SEES)


@pytest.mark.parametrize("name", SEES)
def test_agents_see_their_channels_and_the_verifier_decides(name: str) -> None:
    handler = build(name)
    assert handler.agent_names == tuple(SEES[name])
    channels = handler.message_channel_names
    for a, (agent, seen) in enumerate(SEES[name].items()):
        assert [channels[c] for c in handler.visible_channels(agent)] == seen
        assert handler.visibility_AC[a].tolist() == [channel in seen for channel in channels]
        assert handler.has_decision_logits(agent) == (agent == "verifier")
    provers = tuple(SEES[name])[:-1]
    assert (handler.prover_names, handler.verifier_names) == (provers, ("verifier",))
    assert handler.stackelberg_sequence == (("verifier",), *[provers] * bool(provers))
    assert not handler.needs_logits


def question_rounds(turns: list[str], r: int, channels: tuple[str, ...]) -> list[int]:
    """By channel, the verifier's last turn before round `r`, else the last of anyone, else 0."""

    result = []
    for channel in channels:
        senders = {n: turn for n, turn in enumerate(turns[:r]) if f":{channel} " in f"{turn} "}
        questions = [n for n, turn in senders.items() if f"verifier:{channel}" in turn]
        result.append(max(questions or senders, default=0))
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_turns_decisions_and_questions_come_in_their_rounds(case: Case) -> None:
    handler = case.build()
    channels = handler.message_channel_names
    assert handler.max_message_rounds == len(case.turns[0])
    assert handler.max_verifier_questions == sum("verifier:" in turn for turn in case.turns[0])
    for seed, r in product(range(4), range(len(case.turns[0]) + 2)):
        turns = case.turns[seed % len(case.turns)]
        place = torch.tensor([r]), torch.tensor([seed])
        sends = {
            f"{handler.agent_names[a]}:{channels[c]}"
            for a, c in handler.active_mask(*place)[0].nonzero().tolist()
        }
        assert sends == (set(turns[r].split()) if r < len(turns) else set())
        deciding = handler.can_decide(*place)[0].nonzero().flatten().tolist()
        assert deciding == ([handler.num_agents - 1] if r in case.deciding_rounds else [])
        requested = handler.question_round(*place)[0].tolist()
        assert requested == question_rounds(turns, r, channels)


def payments(case: Case, decisions: str, y: int, seed: int = 0) -> tuple[list[list[float]], str]:
    """The rewards of the agents, the verifier last, in each round, and the decision that counts."""
    turns, right = case.turns[seed % len(case.turns)], "ra"[y]
    paid = REWARDS | case.common
    forced = {"zero": "r", "one": "a", "y": right}.get(str(case.common.get("force_guess")))
    favoured = ["r" if (case.protocol, a) in FAVOURS_REJECT else "a" for a in SEES[case.protocol]]
    rows: list[list[float]] = []
    for r, turn in enumerate(turns):
        decision = (forced or decisions[r]) if r in case.deciding_rounds else "c"
        if decision == right:
            verifier = paid["verifier_reward"]
        elif decision != "c":
            verifier = paid["verifier_incorrect_penalty"]
        elif r == len(turns) - 1:
            verifier = paid["verifier_terminated_penalty"]
        else:
            verifier = paid["verifier_no_guess_reward"] * ("verifier:" in turn)
        provers = [paid["prover_reward"] * (decision == letter) for letter in favoured[:-1]]
        if case.common.get("shared_reward"):
            provers = [verifier] * len(provers)
        rows.append([*provers, verifier])
        if decision != "c":
            return rows, decision
    return rows, "c"


@pytest.mark.parametrize(
    ("case", "decisions", "y", "rewards"),
    [
        (CASES[0], "cca", 1, [[0, 0.5], [0, 0], [2, 3]]),
        (CASES[0], "ccr", 1, [[0, 0.5], [0, 0], [0, -5]]),
        # A decision out of turn does not count.
        (CASES[0], "cacr", 1, [[0, 0.5], [0, 0], [0, 0.5], [0, -7]]),
        # Its last turn is passed, and the rounds are over: this is penalised, not rewarded.
        (CASES[1], "cccc", 0, [[0, 0], [0, 0.5], [0, 0], [0, -7]]),
        (CASES[3], "cca", 1, [[0.5, 0.5], [0, 0], [3, 3]]),
        (CASES[4], "c", 0, [[0, 3]]),
        (CASES[8], "r", 0, [[2, 0, 3]]),
        (CASES[8], "a", 0, [[0, 2, -5]]),
    ],
    ids=str,
)
def test_payments_by_hand(case: Case, decisions: str, y: int, rewards: list[list[float]]) -> None:
    assert payments(case, decisions.ljust(4, "c"), y)[0] == rewards


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_play_ends_and_pays_by_the_rules(case: Case) -> None:
    handler, num_rounds = case.build(), len(case.turns[0])
    texts = map("".join, product("rac", repeat=num_rounds))
    plays = list(product(texts, (0, 1), range(len(case.turns))))

    def moves_of(r: int) -> Moves:
        decision_EA = torch.zeros(len(plays), handler.num_agents, dtype=torch.long)
        decision_EA[:, -1] = torch.tensor([LETTERS[text[r]] for text, *_ in plays])
        return Moves(decision_EA)

    y_E, seed_E = (torch.tensor([item[place] for item in plays]) for place in (1, 2))
    steps = play(handler, moves_of, y_E, seed_E)
    expected = [payments(case, *item) for item in plays]
    end_E = torch.tensor([len(rows) - 1 for rows, _ in expected])
    decision_E = torch.tensor([LETTERS[decision] for _, decision in expected])
    nothing = [[0.0] * handler.num_agents]
    paid_ERA = torch.tensor([rows + nothing * (num_rounds - len(rows)) for rows, _ in expected])
    for r, step in enumerate(steps):
        assert torch.equal(step.reward_EA, paid_ERA[:, r])
        assert torch.equal(step.is_done, r >= end_E)
        assert torch.equal(step.has_decided_E, (r >= end_E) & (decision_E != LETTERS["c"]))
        assert torch.equal(step.decision_E, torch.where(r == end_E, decision_E, LETTERS["c"]))
        assert not step.agent_decided_EA[:, :-1].any()
        assert torch.equal(step.agent_decided_EA[:, -1], step.has_decided_E)


def test_the_mid_point_lies_between_the_rewards_for_well_and_badly_done() -> None:
    handler = build("nip")
    assert handler.reward_mid_point_estimate("verifier") == (3 - 5) / 2
    assert handler.reward_mid_point_estimate("prover") == 1.0
    assert build("nip", shared_reward=True).reward_mid_point_estimate("prover") == -1.0


def test_a_description_shows_who_sees_sends_and_decides() -> None:
    text = build("nip", {"max_message_rounds": 3}).describe()
    assert text.splitlines()[-4:] == [
        "round  prover  verifier",
        "0      -       main, decides",
        "1      main    -",
        "2      -       main, decides",
    ]
    assert says(text, "prover sees main", "verifier sees main")
    text = build("merlin_arthur").describe()
    assert says(text, "seed % 2 = 0:\nround  prover0  prover1  verifier\n0      main ")
    assert says(text, "seed % 2 = 1:\nround  prover0  prover1  verifier\n0      -  ")


# ---- random play, with and without zero knowledge

COUNT = 64
ZK = {"simulator_reward_coefficient": 0.5, "aux_prover_reward_coefficient": 0.25}


def variants(*extensions: dict[str, float] | None) -> Iterator[Any]:
    for member in InteractionProtocolType:
        name = str(member)
        for zk in extensions:
            for common in ({}, {"verifier_first": False}, {"shared_reward": True}):
                section = {}
                if name not in PLAY_ALONE:
                    section = {"max_message_rounds": 7, "min_message_rounds": 2}
                if name in ("debate", "mnip"):
                    section["sequential"] = "shared_reward" in common
                words = [name, *common, *(["zk"] if zk else [])]
                yield pytest.param((name, section, zk, common), id="-".join(words))


@pytest.fixture(params=variants(None, ZK))
def handler(request: pytest.FixtureRequest) -> ProtocolHandler:
    name, section, zk, common = request.param
    return build(name, section, zk=zk, **common)


class Rollout:
    """A random play of COUNT episodes: moves, their results, and the initial state."""

    def __init__(self, handler: ProtocolHandler) -> None:
        generator = torch.Generator().manual_seed(1)
        self.handler = handler
        self.y_E = torch.randint(2, (COUNT,), generator=generator)
        self.seed_E = torch.randint(2**16, (COUNT,), generator=generator)
        self.moves = [
            random_moves(handler, COUNT, generator) for _ in range(handler.max_message_rounds + 2)
        ]
        self.steps = self.play(self.moves)

    def play(self, moves: list[Moves]) -> list[ProtocolStep]:
        return play(self.handler, lambda r: moves[r], self.y_E, self.seed_E, num_rounds=len(moves))


@pytest.fixture
def rollout(handler: ProtocolHandler) -> Rollout:
    return Rollout(handler)


def test_every_episode_ends_once_and_earns_nothing_after_it(rollout: Rollout) -> None:
    last = rollout.handler.max_message_rounds - 1
    is_over_E = torch.zeros(COUNT, dtype=torch.bool)
    decided_EA = torch.zeros(COUNT, rollout.handler.num_agents, dtype=torch.bool)
    num_rewarded = num_out_of_rounds = 0
    for r, step in enumerate(rollout.steps):
        assert (step.reward_EA[is_over_E] == 0).all()
        assert (step.reward_EA[decided_EA] == 0).all()
        assert (step.decision_E[is_over_E] == CONTINUE).all()
        assert not (step.has_decided_E & step.is_out_of_rounds_E).any()
        assert r == last or not step.is_out_of_rounds_E.any()
        assert (step.agent_decided_EA | ~decided_EA).all(), "who has decided stays decided"
        is_over_E, decided_EA = is_over_E | step.is_done, step.agent_decided_EA
        assert r < last or is_over_E.all()
        num_rewarded += int((step.reward_EA != 0).sum())
        num_out_of_rounds += int(step.is_out_of_rounds_E.sum())
    assert num_rewarded > 0
    assert 0 < num_out_of_rounds < COUNT


def test_moves_of_agents_that_may_not_make_them_change_nothing(rollout: Rollout) -> None:
    generator, handler = torch.Generator().manual_seed(2), rollout.handler
    changed = []
    decided_EA = torch.zeros(COUNT, handler.num_agents, dtype=torch.bool)
    for r, (move, step) in enumerate(zip(rollout.moves, rollout.steps, strict=True)):
        place = torch.full((COUNT,), r), rollout.seed_E, decided_EA
        is_open = handler.active_mask(*place)[..., None, None]
        can_decide_EA = handler.can_decide(*place)
        # The simulator decides nothing, but its hypothetical decision is compared.
        is_read_EA = can_decide_EA.clone()
        is_read_EA[:, -1] |= can_decide_EA[:, -2:].any(1) & handler.needs_logits
        other = random_moves(handler, COUNT, generator)
        logits, others = move.decision_logits_EA3, other.decision_logits_EA3
        changed.append(
            Moves(
                torch.where(can_decide_EA, move.decision_EA, other.decision_EA),
                torch.where(is_open, move.message_logits_EACPS, other.message_logits_EACPS),
                torch.where(is_read_EA[..., None], logits, others),
            )
        )
        decided_EA = step.agent_decided_EA
    for step, again in zip(rollout.steps, rollout.play(changed), strict=True):
        for item in fields(step):
            assert torch.equal(getattr(step, item.name), getattr(again, item.name)), item.name


@pytest.mark.parametrize("handler", variants(ZK), indirect=True)
def test_zero_knowledge_adds_opposite_rewards_and_a_share_for_provers_alone(
    rollout: Rollout,
) -> None:
    base = rollout.handler.base
    n = base.num_agents
    moves = [Moves(move.decision_EA[:, :n]) for move in rollout.moves]
    steps = play(base, lambda r: moves[r], rollout.y_E, rollout.seed_E, num_rounds=len(moves))
    highest = 0.0
    share_A = torch.tensor([0.25 * (name in base.prover_names) for name in base.agent_names])
    for step, of_base in zip(rollout.steps, steps, strict=True):
        adversary_E, simulator_E = step.reward_EA[:, n:].unbind(1)
        assert torch.equal(adversary_E, -simulator_E)
        highest = max(highest, float(simulator_E.abs().max()))
        added_EA = step.reward_EA[:, :n] - of_base.reward_EA
        torch.testing.assert_close(added_EA, share_A * simulator_E[:, None], atol=1e-6, rtol=0)
        assert torch.equal(step.decision_E, of_base.decision_E)
    assert 0.1 < highest <= 2 * 0.5


def test_each_environment_is_on_its_own(rollout: Rollout) -> None:
    rows = torch.randperm(COUNT, generator=torch.Generator().manual_seed(3))[:7]
    moves = [
        replace(move, **{item.name: getattr(move, item.name)[rows] for item in fields(move)})
        for move in rollout.moves
    ]
    y_E, seed_E = rollout.y_E[rows], rollout.seed_E[rows]
    steps = play(rollout.handler, lambda r: moves[r], y_E, seed_E, num_rounds=len(moves))
    for step, of_all in zip(steps, rollout.steps, strict=True):
        for item in fields(step):
            torch.testing.assert_close(getattr(step, item.name), getattr(of_all, item.name)[rows])


def test_inputs_are_left_alone_and_results_are_of_the_stated_types(
    handler: ProtocolHandler,
) -> None:
    moves = random_moves(handler, COUNT, torch.Generator().manual_seed(4))
    moves.message_logits_EACPS.requires_grad_()
    numbers = torch.arange(COUNT)
    undecided_EA = torch.zeros(COUNT, handler.num_agents, dtype=torch.bool)
    last_E = torch.full((COUNT,), handler.max_message_rounds - 1)
    inputs = [last_E, numbers, numbers % 2, undecided_EA]
    inputs += [getattr(moves, item.name) for item in fields(moves)]
    before = [(tensor._version, tensor.detach().clone()) for tensor in inputs]
    # Fake tensors have no values, so a step that looks at none can run on any device: `.item()`,
    # `if tensor:` and `nonzero()` fail on them.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = list(map(mode.from_tensor, inputs))
        steps = [handler.step(*fake[:4], Moves(*fake[4:]))]
        assert handler.active_mask(*fake[:2], fake[3]).dtype == torch.bool
    steps.append(handler.step(*inputs[:4], moves))
    for tensor, (version, value) in zip(inputs, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, value)
    for step in steps:
        assert not step.reward_EA.requires_grad
        assert step.reward_EA.shape == step.agent_decided_EA.shape == undecided_EA.shape
        assert (step.reward_EA.dtype, step.decision_E.dtype) == (torch.float32, torch.long)
        flags = (step.has_decided_E, step.is_out_of_rounds_E, step.agent_decided_EA, step.is_done)
        assert {flag.dtype for flag in flags} == {torch.bool}
