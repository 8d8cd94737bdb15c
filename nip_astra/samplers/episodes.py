"""Sampling of protocol episodes in many environments in parallel.

Shapes: E environments, T rounds played, A agents, C channels, P positions, S symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.scenario_base.protocol.combined import CombinedAgents, JointMoves
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment, Transition
from nip_astra.utils.seeding import SeedPart, derive_seed


class EpisodeSampler:
    """Batches of consecutive frames; episodes continue from one batch to the next."""

    def __init__(
        self,
        environment: ProtocolEnvironment,
        agents: CombinedAgents,
        *,
        key: tuple[SeedPart, ...],
    ) -> None:
        self.environment = environment
        self.agents = agents
        self.generator = torch.Generator().manual_seed(derive_seed(*key, "moves"))
        self._frame: dict[str, Tensor] | None = None

    @torch.no_grad()
    def collect(self, num_steps: int, *, renews: bool = True) -> TensorDict:
        """Run `num_steps` rounds in every environment.

        Parameters
        ----------
        renews : bool
            Whether a new episode follows an ended one at once. If false, its agents are inactive
            until the batch ends, so that the batch's datapoints do not depend on their moves.

        Returns
        -------
        TensorDict
            Batch size [E, T]: the observations; `agents` with `decision`, `message`,
            `linear_message`, `logprob` (nats), and normalised log-probabilities of all alternatives
            (`message_logits`, `decision_logits`); `next` with `agents.reward` [E, T, A, 1], `done`
            and `terminated` [E, T, 1], `decision` so far [E, T] (2: none) and the next observation,
            which after an end is the first of the next episode.
        """
        environment = self.environment
        frame = self._frame
        if frame is None:
            frame = environment.fresh(environment.num_environments)
        frames, moves, transitions = [frame], [], []
        has_ended_E = torch.zeros_like(frame["round"], dtype=torch.bool)
        for _ in range(num_steps):
            moves.append(self.agents.act(frame, self.generator))
            transition = environment.advance(frame, moves[-1])
            frame = transition.observation
            if renews:
                frame = environment.renew(frame, transition.is_done_E)
            else:
                has_ended_E = has_ended_E | transition.is_done_E
                frame["active_mask"] = frame["active_mask"] & ~has_ended_E[:, None, None]
                frame["can_decide"] = frame["can_decide"] & ~has_ended_E[:, None]
                # A message history has no place for a round after the last.
                frame["round"] = frame["round"].clamp(max=frame["message_history"].shape[1] - 1)
            transitions.append(transition)
            frames.append(frame)
        # The next batch draws its own datapoints: drawn here, an abandoned block would be skipped.
        self._frame = frame if renews else None
        return _assemble(frames, moves, transitions)

    def look_ahead(self, num_steps: int, *, renews: bool = True) -> TensorDict:
        """Return the next episodes of `collect` without advancing the sampler."""
        state = self.state()
        batch = self.collect(num_steps, renews=renews)
        self.load_state(state)
        return batch

    def begin_anew(self) -> None:
        """Abandon the episodes in progress; the next batch starts new ones."""
        self._frame = None

    def state(self) -> dict[str, Any]:
        """Return everything that determines the next episodes."""
        return {
            "environment": self.environment.state(),
            "generator": self.generator.get_state(),
            "frame": None if self._frame is None else dict(self._frame),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.environment.load_state(state["environment"])
        self.generator.set_state(state["generator"])
        self._frame = None
        if state["frame"] is not None:
            device = self.environment.device
            self._frame = {name: column.to(device) for name, column in state["frame"].items()}


def _assemble(
    frames: list[dict[str, Tensor]], moves: list[JointMoves], transitions: list[Transition]
) -> TensorDict:
    """Stack frames; the next observation of a frame shares memory with the following frame."""

    def stack(columns: Iterable[Tensor]) -> Tensor:
        """Stack one tensor per round in the second dimension."""
        return torch.stack(list(columns), dim=1)

    # With one frame more than there are rounds: the observation after the last.
    observations = {name: stack(frame[name] for frame in frames) for name in frames[0]}
    done_ET1 = stack(transition.is_done_E for transition in transitions).unsqueeze(-1)
    batch_size = done_ET1.shape[:2]
    agents = {
        "decision": stack(move.decision_BA for move in moves),
        "message": stack(move.message_BACP for move in moves),
        "logprob": stack(move.logprobs_BA for move in moves),
        "message_logits": stack(move.message_logits_BACPS for move in moves),
        "decision_logits": stack(move.decision_logits_BA3 for move in moves),
    }
    if moves[0].linear_BACP is not None:
        linear = [move.linear_BACP for move in moves if move.linear_BACP is not None]
        agents["linear_message"] = stack(linear)
    reward_ETA1 = stack(transition.step.reward_EA for transition in transitions).unsqueeze(-1)
    content: dict[str, Any] = {}
    next_content: dict[str, Any] = {}
    for name, column in observations.items():
        content[name] = column[:, :-1]
        next_content[name] = column[:, 1:]
    next_content |= {
        "agents": TensorDict({"reward": reward_ETA1}, batch_size=batch_size),
        "done": done_ET1,
        "terminated": done_ET1.clone(),
        "decision": stack(transition.observation["decided"] for transition in transitions),
    }
    content["agents"] = TensorDict(agents, batch_size=batch_size)
    content["next"] = TensorDict(next_content, batch_size=batch_size)
    return TensorDict(content, batch_size=batch_size)
