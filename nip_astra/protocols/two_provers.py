"""The order of play of a verifier and two provers, each with a channel of its own."""

from __future__ import annotations

from nip_astra.protocols.protocol_base import MessageRounds

AGENT_NAMES = ("prover0", "prover1", "verifier")
CHANNEL_NAMES = ("prover0_channel", "prover1_channel")


class TwoProverParameters(MessageRounds):
    """How long conversations are, and in which order provers speak."""

    sequential: bool = False
    """Whether provers speak in turn, so that the second knows what the first said, instead of in
    the same round. A verifier gets fewer turns then."""
    prover0_first: bool = True
    """Whether prover0 speaks before prover1, where they speak in turn."""


def turns(parameters: TwoProverParameters, *, verifier_first: bool) -> list[tuple[str, ...]]:
    """Who speaks in each round of one turn of all agents."""
    provers: list[tuple[str, ...]] = [("prover0", "prover1")]
    if parameters.sequential:
        provers = [("prover0",), ("prover1",)]
        if not parameters.prover0_first:
            provers.reverse()
    return [("verifier",), *provers] if verifier_first else [*provers, ("verifier",)]


def is_active(
    agent_name: str, round_index: int, channel_name: str, turns: list[tuple[str, ...]]
) -> bool:
    """Say who sends where: the verifier in both channels, a prover in its own."""
    is_turn = agent_name in turns[round_index % len(turns)]
    return is_turn and agent_name in ("verifier", channel_name.removesuffix("_channel"))
