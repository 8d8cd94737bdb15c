"""The behaviour of each protocol, computed by hand.

Turns are one text a round: "agent:channel agent:channel". Decisions are one letter a round:
`r`eject, `a`ccept, `c`ontinue. Rewards are those of `playing.REWARDS`: a right decision 3, a wrong
decision -5, no decision in time -7, a turn without a decision 0.5, a favoured prover 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

V_BOTH = "verifier:prover0_channel verifier:prover1_channel"
P0, P1 = "prover0:prover0_channel", "prover1:prover1_channel"
SEQUENTIAL = {"sequential": True, "max_message_rounds": 6}


@dataclass(frozen=True)
class Play:
    """An episode.

    Attributes
    ----------
    decisions : str
        Of the verifier, by round.
    rewards : dict[str, list[float]]
        By agent and round, up to the end.
    is_out : bool
        Whether it ends without a decision.
    """

    decisions: str
    y: int
    rewards: dict[str, list[float]]
    is_out: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """A protocol with parameters, and their expected consequences."""

    protocol: str
    turns: list[list[str]]
    deciding_rounds: list[int]
    plays: list[Play]
    section: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = {**self.section, **self.common}
        return "-".join([self.protocol, *(f"{name}={value}" for name, value in given.items())])


def one(prover: list[float], verifier: list[float]) -> dict[str, list[float]]:
    return {"prover": prover, "verifier": verifier}


def two(first: list[float], second: list[float], verifier: list[float]) -> dict[str, list[float]]:
    return {"prover0": first, "prover1": second, "verifier": verifier}


NIP = [
    Case(
        "nip",
        [["verifier:main", "prover:main", "verifier:main", "prover:main"]],
        [0, 2],
        [
            Play("a", 1, one([2], [3])),
            Play("a", 0, one([2], [-5])),
            Play("r", 0, one([0], [3])),
            Play("r", 1, one([0], [-5])),
            Play("cca", 1, one([0, 0, 2], [0.5, 0, 3])),
            Play("ccr", 1, one([0, 0, 0], [0.5, 0, -5])),
            # A decision out of turn does not count.
            Play("cacr", 1, one([0, 0, 0, 0], [0.5, 0, 0.5, -7]), is_out=True),
            Play("cccc", 0, one([0, 0, 0, 0], [0.5, 0, 0.5, -7]), is_out=True),
        ],
        {"max_message_rounds": 4},
    ),
    Case(
        "nip",
        [["prover:main", "verifier:main", "prover:main", "verifier:main"]],
        [1, 3],
        [
            Play("aa", 1, one([0, 2], [0, 3])),
            Play("cccr", 0, one([0, 0, 0, 0], [0, 0.5, 0, 3])),
            Play("ccca", 0, one([0, 0, 0, 2], [0, 0.5, 0, -5])),
            # Its last turn is passed, and the rounds are over: this is penalised, not rewarded.
            Play("cccc", 0, one([0, 0, 0, 0], [0, 0.5, 0, -7]), is_out=True),
        ],
        {"max_message_rounds": 4},
        {"verifier_first": False},
    ),
    Case(
        "nip",
        [["verifier:main", "prover:main", "verifier:main", "prover:main", "verifier:main"]],
        [2, 4],
        [
            # A decision before the third round does not count.
            Play("acr", 0, one([0, 0, 0], [0.5, 0, 3])),
            Play("rccca", 1, one([0, 0, 0, 0, 2], [0.5, 0, 0.5, 0, 3])),
            Play("acccc", 1, one([0, 0, 0, 0, 0], [0.5, 0, 0.5, 0, -7]), is_out=True),
        ],
        {"max_message_rounds": 5, "min_message_rounds": 3},
    ),
    Case(
        "nip",
        [["verifier:main", "prover:main", "verifier:main"]],
        [0, 2],
        [
            Play("cca", 1, one([0.5, 0, 3], [0.5, 0, 3])),
            Play("ccr", 1, one([0.5, 0, -5], [0.5, 0, -5])),
            Play("ccc", 1, one([0.5, 0, -7], [0.5, 0, -7]), is_out=True),
        ],
        {"max_message_rounds": 3},
        {"shared_reward": True},
    ),
    Case(
        "nip",
        [["verifier:main", "prover:main", "verifier:main"]],
        [0, 2],
        [
            Play("c", 0, one([0], [3])),
            Play("c", 1, one([2], [3])),
            Play("a", 0, one([0], [3])),
            Play("r", 1, one([2], [3])),
        ],
        {"max_message_rounds": 3},
        {"force_guess": "y"},
    ),
    Case(
        "nip",
        [["prover:main", "verifier:main", "prover:main", "verifier:main"]],
        [3],
        [
            Play("aaaa", 0, one([0, 0, 0, 0], [0, 0.5, 0, 3])),
            Play("cccc", 1, one([0, 0, 0, 0], [0, 0.5, 0, -5])),
        ],
        {"max_message_rounds": 4, "min_message_rounds": 3},
        {"force_guess": "zero", "verifier_first": False},
    ),
]
ADP = [
    Case(
        "adp",
        [["prover:main", "verifier:main"]],
        [1],
        [
            Play("ca", 1, one([0, 2], [0, 3])),
            Play("ca", 0, one([0, 2], [0, -5])),
            Play("cr", 0, one([0, 0], [0, 3])),
            Play("ac", 1, one([0, 0], [0, -7]), is_out=True),
        ],
        {},
        {"verifier_first": verifier_first},
    )
    for verifier_first in (True, False)
]
DEBATE = [
    Case(
        "debate",
        [[V_BOTH, f"{P0} {P1}", V_BOTH, f"{P0} {P1}"]],
        [0, 2],
        [
            Play("r", 0, two([2], [0], [3])),
            Play("a", 0, two([0], [2], [-5])),
            Play("cca", 1, two([0, 0, 0], [0, 0, 2], [0.5, 0, 3])),
            Play("crr", 1, two([0, 0, 2], [0, 0, 0], [0.5, 0, -5])),
            Play("cccc", 1, two([0] * 4, [0] * 4, [0.5, 0, 0.5, -7]), is_out=True),
        ],
        {"max_message_rounds": 4},
    ),
    Case(
        "debate",
        [[f"{P0} {P1}", V_BOTH, f"{P0} {P1}", V_BOTH]],
        [1, 3],
        [
            Play("ra", 1, two([0, 0], [0, 2], [0, 3])),
            Play("cccr", 0, two([0, 0, 0, 2], [0] * 4, [0, 0.5, 0, 3])),
            Play("cccc", 0, two([0] * 4, [0] * 4, [0, 0.5, 0, -7]), is_out=True),
        ],
        {"max_message_rounds": 4},
        {"verifier_first": False},
    ),
    Case(
        "debate",
        [[V_BOTH, P0, P1, V_BOTH, P0, P1]],
        [0, 3],
        [
            Play("ccca", 1, two([0] * 4, [0, 0, 0, 2], [0.5, 0, 0, 3])),
            Play("craccc", 1, two([0] * 6, [0] * 6, [0.5, 0, 0, 0.5, 0, -7]), is_out=True),
        ],
        SEQUENTIAL,
    ),
    Case(
        "debate",
        [[V_BOTH, P1, P0, V_BOTH, P1, P0]],
        [0, 3],
        [Play("cccr", 0, two([0, 0, 0, 2], [0] * 4, [0.5, 0, 0, 3]))],
        {**SEQUENTIAL, "prover0_first": False},
    ),
    Case(
        "debate",
        [[P0, P1, V_BOTH, P0, P1, V_BOTH]],
        [2, 5],
        [
            Play("aaa", 0, two([0, 0, 0], [0, 0, 2], [0, 0, -5])),
            Play("cccccr", 0, two([0] * 5 + [2], [0] * 6, [0, 0, 0.5, 0, 0, 3])),
        ],
        SEQUENTIAL,
        {"verifier_first": False},
    ),
    Case(
        "debate",
        [[P1, P0, V_BOTH, P1, P0, V_BOTH]],
        [5],
        [Play("ccrccr", 0, two([0] * 5 + [3], [0] * 5 + [3], [0] * 5 + [3]))],
        {**SEQUENTIAL, "prover0_first": False, "min_message_rounds": 4},
        {"verifier_first": False, "shared_reward": True, "verifier_no_guess_reward": 0.0},
    ),
    Case(
        "debate",
        [[V_BOTH, f"{P0} {P1}"]],
        [0],
        [Play("c", 0, two([0], [2], [-5])), Play("r", 1, two([0], [2], [3]))],
        {"max_message_rounds": 2},
        {"force_guess": "one"},
    ),
]
MNIP = [
    Case(
        "mnip",
        [[V_BOTH, f"{P0} {P1}", V_BOTH, f"{P0} {P1}"]],
        [2],
        [
            Play("aca", 1, two([0, 0, 2], [0, 0, 2], [0.5, 0, 3])),
            Play("cca", 0, two([0, 0, 2], [0, 0, 2], [0.5, 0, -5])),
            Play("ccr", 0, two([0, 0, 0], [0, 0, 0], [0.5, 0, 3])),
            Play("cccc", 0, two([0] * 4, [0] * 4, [0.5, 0, 0.5, -7]), is_out=True),
        ],
        {"max_message_rounds": 4, "min_message_rounds": 2},
    ),
    Case(
        "mnip",
        [[f"{P0} {P1}", V_BOTH]],
        [1],
        [Play("ca", 1, two([0, 2], [0, 2], [0, 3]))],
        {"max_message_rounds": 2},
        {"verifier_first": False},
    ),
    Case(
        "mnip",
        [[V_BOTH, P1, P0, V_BOTH, P1, P0]],
        [0, 3],
        [Play("ccca", 0, two([0, 0, 0, 2], [0, 0, 0, 2], [0.5, 0, 0, -5]))],
        {**SEQUENTIAL, "prover0_first": False},
    ),
    Case(
        "mnip",
        [[P0, P1, V_BOTH, P0, P1, V_BOTH]],
        [2, 5],
        [Play("ccr", 1, two([0] * 3, [0] * 3, [0, 0, -5]))],
        SEQUENTIAL,
        {"verifier_first": False},
    ),
]
MERLIN_ARTHUR = [
    Case(
        "merlin_arthur",
        [["prover0:main", "verifier:main"], ["prover1:main", "verifier:main"]],
        [1],
        [
            Play("cr", 0, two([0, 2], [0, 0], [0, 3]), seed=0),
            # Rewards follow from the decision, whichever agent spoke.
            Play("cr", 1, two([0, 2], [0, 0], [0, -5]), seed=7),
            Play("aa", 1, two([0, 0], [0, 2], [0, 3]), seed=65534),
            Play("ac", 1, two([0, 0], [0, 0], [0, -7]), is_out=True, seed=3),
        ],
    )
]
SOLO_VERIFIER = [
    Case(
        "solo_verifier",
        [["verifier:main"]],
        [0],
        [
            Play("a", 1, {"verifier": [3]}),
            Play("r", 1, {"verifier": [-5]}),
            Play("c", 1, {"verifier": [-7]}, is_out=True),
        ],
    )
]
MULTI_CHANNEL_TEST = [
    Case(
        "multi_channel_test",
        [
            [
                "verifier:main verifier:prover0_verifier",
                "prover0:prover0_verifier prover1:prover_chat",
                "prover1:main prover2:prover_chat",
                "verifier:main verifier:prover0_verifier",
                "prover0:prover0_verifier prover1:prover_chat",
            ]
        ],
        [3],
        [
            Play(
                "acca",
                1,
                {
                    "prover0": [0, 0, 0, 2],
                    "prover1": [0, 0, 0, 2],
                    "prover2": [0, 0, 0, 2],
                    "verifier": [0.5, 0, 0, 3],
                },
            )
        ],
        {"max_message_rounds": 5},
    )
]
CASES = [*NIP, *ADP, *DEBATE, *MNIP, *MERLIN_ARTHUR, *SOLO_VERIFIER, *MULTI_CHANNEL_TEST]

SEES = {
    "nip": {"prover": ["main"], "verifier": ["main"]},
    "adp": {"prover": ["main"], "verifier": ["main"]},
    "debate": {
        "prover0": ["prover0_channel", "prover1_channel"],
        "prover1": ["prover0_channel", "prover1_channel"],
        "verifier": ["prover0_channel", "prover1_channel"],
    },
    "merlin_arthur": {"prover0": ["main"], "prover1": ["main"], "verifier": ["main"]},
    "mnip": {
        "prover0": ["prover0_channel"],
        "prover1": ["prover1_channel"],
        "verifier": ["prover0_channel", "prover1_channel"],
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
