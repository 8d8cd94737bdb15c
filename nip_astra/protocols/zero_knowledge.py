"""The zero-knowledge extension, which also rewards provers for disclosing nothing.

Shape suffixes: as in `protocol_base`; `F` the entries of a flattened message.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.protocol_base import CONTINUE, Moves, ProtocolHandler, ProtocolStep

ADVERSARIAL_VERIFIER = "adversarial_verifier"
SIMULATOR = "simulator"
CHANNEL_KINDS = ("standard", "adversarial", "simulator")
IMPOSSIBLE = -1e8
"""Logits below this mark impossible symbols."""


class ZeroKnowledgeProtocol(ProtocolHandler):
    """A protocol with one verifier, extended by an adversarial verifier and a simulator.

    Every channel exists three times. Provers interact with the verifier in the standard channels
    and with the adversarial verifier in the adversarial ones. The simulator, alone in its channels,
    acts in the verifier's turns; it is rewarded for moves similar to the adversarial verifier's,
    which is penalised by the same amount: it seeks information that only the prover has.

    The similarity of a round is

        similarity = cos(messages of both) + cos(decisions of both)

    over the centred logits of the channels and decisions open in the round, 0 otherwise. Linear
    symbols besides the scenario's are not compared. With
    S = simulator_reward_coefficient * similarity, the simulator gets S, the adversarial verifier
    -S, and each prover aux_prover_reward_coefficient * S in addition to its base reward.

    After a verifier's decision its channels are closed and yield no further reward. The episode
    ends when both have decided.

    Parameters
    ----------
    base : ProtocolHandler
        The protocol to extend, with the same hyper-parameters.
    """

    needs_logits: ClassVar[bool] = True

    def __init__(self, hyper_params: HyperParameters, base: ProtocolHandler) -> None:
        if len(base.verifier_names) != 1:
            raise ConfigurationError(
                f"zero knowledge needs a protocol with one verifier, but {type(base).__name__} "
                f"has {len(base.verifier_names)}. Set protocol_common.zero_knowledge=false or "
                "choose another interaction_protocol."
            )
        self.base = base
        self.zk = hyper_params.zk_protocol
        self._num_base = base.num_agents
        self._verifier = base.agent_names.index(base.verifier_names[0])
        # Behind the base protocol's agents, in the order of `agent_names`.
        self._adversary = base.num_agents
        self._simulator = base.num_agents + 1
        super().__init__(hyper_params, base.parameters)

    @property
    def agent_names(self) -> tuple[str, ...]:
        return (*self.base.agent_names, ADVERSARIAL_VERIFIER, SIMULATOR)

    @property
    def message_channel_names(self) -> tuple[str, ...]:
        names = self.base.message_channel_names
        return tuple(f"{name}_{kind}" for kind in CHANNEL_KINDS for name in names)

    @property
    def agent_channel_visibility(self) -> tuple[tuple[str, str], ...]:
        pairs = []
        for agent, channel in self.base.agent_channel_visibility:
            is_verifier = agent in self.base.verifier_names
            pairs.append((agent, f"{channel}_standard"))
            pairs.append((ADVERSARIAL_VERIFIER if is_verifier else agent, f"{channel}_adversarial"))
            if is_verifier:
                pairs.append((SIMULATOR, f"{channel}_simulator"))
        return tuple(pairs)

    @property
    def max_message_rounds(self) -> int:
        return self.base.max_message_rounds

    @property
    def min_message_rounds(self) -> int:
        return self.base.min_message_rounds

    @property
    def verifier_names(self) -> tuple[str, ...]:
        return (*self.base.verifier_names, ADVERSARIAL_VERIFIER)

    @property
    def prover_names(self) -> tuple[str, ...]:
        return self.base.prover_names

    def has_decision_logits(self, agent_name: str) -> bool:
        return agent_name == SIMULATOR or agent_name in self.verifier_names

    def reward_mid_point_estimate(self, agent_name: str) -> float:
        is_base = agent_name in self.base.agent_names
        return self.base.reward_mid_point_estimate(agent_name) if is_base else 0.0

    @property
    def forced_names(self) -> tuple[str, ...]:
        """The verifier if its decisions are forced; never the adversarial verifier."""
        return self.base.forced_names

    def logit_reward(
        self, agent_name: str, round_E: Tensor, seed_E: Tensor, decided_EA: Tensor, moves: Moves
    ) -> Tensor | None:
        if agent_name not in (ADVERSARIAL_VERIFIER, SIMULATOR):
            return None
        sign = 1.0 if agent_name == SIMULATOR else -1.0
        likeness_E = self.likeness(round_E, seed_E, decided_EA, moves)
        return sign * self.zk.simulator_reward_coefficient * likeness_E

    def active_table(self) -> Tensor:
        base_ORAC = self.base.active_table()
        verifier_ORC = base_ORAC[:, :, self._verifier]
        is_verifier_A = torch.tensor(
            [name in self.base.verifier_names for name in self.base.agent_names]
        )
        provers_ORAC = base_ORAC & ~is_verifier_A[:, None]
        empty_ORAC = torch.zeros_like(base_ORAC)
        empty_ORC = torch.zeros_like(verifier_ORC)
        # By channel: standard, adversarial and simulator, as in `CHANNEL_KINDS`.
        base_agents_ORAC = torch.cat([base_ORAC, provers_ORAC, empty_ORAC], -1)
        adversary_ORC = torch.cat([empty_ORC, verifier_ORC, empty_ORC], -1)
        simulator_ORC = torch.cat([empty_ORC, empty_ORC, verifier_ORC], -1)
        agents = [base_agents_ORAC, adversary_ORC[:, :, None], simulator_ORC[:, :, None]]
        return torch.cat(agents, 2)

    def active_mask(
        self, round_E: Tensor, seed_E: Tensor, agent_decided_EA: Tensor | None = None
    ) -> Tensor:
        active_EAC = super().active_mask(round_E, seed_E, agent_decided_EA)
        if agent_decided_EA is None:
            return active_EAC
        # A verifier's decision ends its conversation for all participants.
        owners = [self._verifier, self._adversary, self._simulator]
        has_decided_E3 = agent_decided_EA[:, owners]
        is_closed_EC = has_decided_E3.repeat_interleave(self.base.num_channels, dim=1)
        return active_EAC & ~is_closed_EC[:, None]

    def step(
        self, round_E: Tensor, seed_E: Tensor, y_E: Tensor, agent_decided_EA: Tensor, moves: Moves
    ) -> ProtocolStep:
        num_base = self._num_base
        base_decided_EA = agent_decided_EA[:, :num_base]
        base_moves = self._select_base_moves(moves)
        base = self.base.step(round_E, seed_E, y_E, base_decided_EA, base_moves)
        can_decide_EA = self.can_decide(round_E, seed_E, agent_decided_EA)
        wants_to_decide_E = moves.decision_EA[:, self._adversary] != CONTINUE
        is_made_E = can_decide_EA[:, self._adversary] & wants_to_decide_E
        adversary_decided_E = agent_decided_EA[:, self._adversary] | is_made_E
        # Its gradient flows through `logit_reward` instead.
        likeness_E = self.likeness(round_E, seed_E, agent_decided_EA, moves).detach()
        has_decided_E = base.agent_decided_EA[:, self._verifier] & adversary_decided_E
        is_last_E = round_E == self.max_message_rounds - 1
        # The simulator, which decides nothing, ends with the adversarial verifier.
        both_decided_E2 = adversary_decided_E[:, None].expand(-1, 2)
        return ProtocolStep(
            reward_EA=self._rewards(base.reward_EA, likeness_E),
            has_decided_E=has_decided_E,
            is_out_of_rounds_E=is_last_E & ~has_decided_E,
            agent_decided_EA=torch.cat([base.agent_decided_EA, both_decided_E2], 1),
            decision_E=base.decision_E,
        )

    def _rewards(self, base_EA: Tensor, likeness_E: Tensor) -> Tensor:
        simulator_E = self.zk.simulator_reward_coefficient * likeness_E
        is_prover_A = self._tables_on(base_EA.device).is_prover_A[: self._num_base]
        prover_bonus_E = self.zk.aux_prover_reward_coefficient * simulator_E
        base_EA = base_EA + prover_bonus_E[:, None] * is_prover_A
        # The adversarial verifier pays what the simulator gains.
        return torch.cat([base_EA, -simulator_E[:, None], simulator_E[:, None]], 1)

    def _select_base_moves(self, moves: Moves) -> Moves:
        """Return the moves of the base protocol's agents in its channels, the first ones."""
        num_base = self._num_base
        base_decision_EA = moves.decision_EA[:, :num_base]
        if not self.base.needs_logits:
            return Moves(base_decision_EA)
        message_logits, decision_logits = _require_logits(moves)
        base_message_logits = message_logits[:, :num_base, : self.base.num_channels]
        return Moves(base_decision_EA, base_message_logits, decision_logits[:, :num_base])

    def likeness(
        self, round_E: Tensor, seed_E: Tensor, agent_decided_EA: Tensor, moves: Moves
    ) -> Tensor:
        """Compute the similarity of simulator and adversarial verifier, float32 `[E]`, -2 to 2.

        Gradients flow into the logits of both. Parameters are those of `step`.
        """
        message_logits, decision_logits = _require_logits(moves)
        active_EAC = self.active_mask(round_E, seed_E, agent_decided_EA)
        can_decide_EA = self.can_decide(round_E, seed_E, agent_decided_EA)
        adversary = self._adversary
        simulator = self._simulator
        num_channels = self.base.num_channels
        # The second third of the channels, and the last one.
        adversarial = slice(num_channels, 2 * num_channels)
        simulated = slice(2 * num_channels, None)
        message_similarity_E = _cosine(
            message_logits[:, adversary, adversarial],
            message_logits[:, simulator, simulated],
            active_EAC[:, adversary, adversarial, None, None],
        )
        decision_similarity_E = _cosine(
            decision_logits[:, adversary],
            decision_logits[:, simulator],
            can_decide_EA[:, adversary, None],
        )
        return message_similarity_E + decision_similarity_E


def _require_logits(moves: Moves) -> tuple[Tensor, Tensor]:
    """Return the logits of messages and decisions, float32; raise without them."""
    if moves.message_logits_EACPS is None or moves.decision_logits_EA3 is None:
        raise ConfigurationError(
            "the rewards of zero knowledge need the moves' logits. Give message_logits_EACPS and "
            "decision_logits_EA3, or set protocol_common.zero_knowledge=false."
        )
    return moves.message_logits_EACPS.float(), moves.decision_logits_EA3.float()


def _cosine(first: Tensor, second: Tensor, is_open: Tensor) -> Tensor:
    """Compute the cosine of two batches of centred logits, float32 `[E]`.

    The last dimension holds the alternatives. Centring makes logits independent of their
    normalisation; impossible alternatives are left out, because they would dominate. Where nothing
    is open, or all alternatives of one are equally likely, it is 0 without gradient.
    """

    def centre(logits: Tensor) -> Tensor:
        is_counted = is_open & (logits > IMPOSSIBLE)
        logits = torch.where(is_counted, logits, 0.0)
        count = is_counted.sum(-1, keepdim=True).clamp(min=1)
        mean = logits.sum(-1, keepdim=True) / count
        return torch.where(is_counted, logits - mean, 0.0).flatten(1)

    first_EF = centre(first)
    second_EF = centre(second)
    is_defined_E = first_EF.any(dim=1) & second_EF.any(dim=1)
    # At 0 the cosine has no direction: its gradient would be huge, and the second derivative NaN.
    first_EF = torch.where(is_defined_E[:, None], first_EF, 1.0)
    second_EF = torch.where(is_defined_E[:, None], second_EF, 1.0)
    cosine_E = cosine_similarity(first_EF, second_EF, dim=1)
    return torch.where(is_defined_E, cosine_E, 0.0)
