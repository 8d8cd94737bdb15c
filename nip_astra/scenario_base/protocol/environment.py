"""The environment of a protocol: agents exchange messages about datapoints.

Shapes: E environments, A agents, C channels, R rounds, P positions, S symbols, L linear symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Binary, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from nip_astra.protocols.protocol_base import CONTINUE, Moves, ProtocolHandler, ProtocolStep
from nip_astra.scenario_base.protocol.combined import JointMoves
from nip_astra.scenario_base.protocol.tensordict_agents import MessageSpace
from nip_astra.utils.seeding import SeedPart, derive_seed

NUM_EPISODE_SEEDS = 2**16
"""Upper bound of an episode's seed, available to protocols."""


@dataclass(frozen=True)
class Transition:
    """Result of a round."""

    observation: dict[str, Tensor]
    """The next frame; for an ended episode, the unused frame after its end."""
    step: ProtocolStep
    """Rewards and termination."""
    is_done_E: Tensor
    """bool; whether the episode ended."""


class DataCycler:
    """Iterator over a dataset that is reshuffled for every pass.

    The order depends on the key alone, so `position` is the complete state.
    """

    def __init__(self, num_datapoints: int, key: tuple[SeedPart, ...]) -> None:
        self.num_datapoints = num_datapoints
        self.position = 0
        self._key = key
        self._order: tuple[int, Tensor] | None = None

    def take(self, count: int) -> Tensor:
        """Return rows of the next datapoints, long [count]."""
        parts: list[Tensor] = []
        while count > 0:
            pass_number, offset = divmod(self.position, self.num_datapoints)
            order = self._shuffle(pass_number)
            part = order[offset : offset + count]
            parts.append(part)
            self.position += len(part)
            count -= len(part)
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)

    def _shuffle(self, pass_number: int) -> Tensor:
        """Return the order of a pass; that of the last one is kept."""
        if self._order is not None and self._order[0] == pass_number:
            return self._order[1]
        seed = derive_seed(*self._key, "pass", pass_number)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.num_datapoints, generator=generator)
        self._order = pass_number, order
        return order


class ProtocolEnvironment(EnvBase):
    """A batch of synchronous environments as one TorchRL environment of batch size [E].

    `fresh` and `advance` implement the protocol on plain tensors; TorchRL's `reset` and `step` wrap
    them for collectors. Episodes are always `terminated`, never truncated. `key` is the seed path
    of the data order and the episodes' seeds.
    """

    batch_locked = True

    def __init__(
        self,
        protocol: ProtocolHandler,
        dataset: TensorDict,
        space: MessageSpace,
        *,
        num_environments: int,
        key: tuple[SeedPart, ...],
    ) -> None:
        device = dataset["y"].device
        super().__init__(device=device, batch_size=torch.Size([num_environments]))
        self.protocol = protocol
        self.dataset = dataset
        self.space = space
        self.key = key
        self.num_environments = num_environments
        # Columns of texts are for reports only.
        self._columns: dict[str, Tensor] = {}
        for name, column in dataset.items():
            if isinstance(column, Tensor):
                self._columns[name] = column
        self.restart()
        self._make_specs()

    def restart(self) -> None:
        """Reset the data order and the generator."""
        self.cycler = DataCycler(len(self.dataset), (*self.key, "data"))
        self.generator = torch.Generator().manual_seed(derive_seed(*self.key, "episodes"))

    def with_key(self, *key: SeedPart) -> ProtocolEnvironment:
        """Return an environment on the same data with another seed path."""
        return ProtocolEnvironment(
            self.protocol,
            self.dataset,
            self.space,
            num_environments=self.num_environments,
            key=key,
        )

    # ---- protocol

    def fresh(self, count: int) -> dict[str, Tensor]:
        """Return first frames of `count` episodes with the next datapoints."""
        rows = self.cycler.take(count).to(self.device)
        seeds = torch.randint(NUM_EPISODE_SEEDS, (count,), generator=self.generator)
        return self.first_frames(rows, seeds.to(self.device))

    def first_frames(self, rows_E: Tensor, seeds_E: Tensor | None = None) -> dict[str, Tensor]:
        """Return frames of round 0, without messages, for rows of the dataset."""
        space, protocol, device = self.space, self.protocol, self.device
        if seeds_E is None:
            seeds_E = torch.zeros_like(rows_E)
        num_episodes = len(rows_E)
        message_size = (protocol.num_channels, space.message_size)
        shape_ECP = (num_episodes, *message_size)
        shape_ERCP = (num_episodes, protocol.max_message_rounds, *message_size)
        shape_EA = (num_episodes, protocol.num_agents)
        frame = {name: column[rows_E] for name, column in self._columns.items()}
        frame |= {
            "round": torch.zeros_like(rows_E),
            "seed": seeds_E,
            "datapoint_id": rows_E,
            "message_history": torch.zeros(*shape_ERCP, space.num_symbols, device=device),
            "message": torch.zeros(*shape_ECP, space.num_symbols, device=device),
            "has_decided": torch.zeros(shape_EA, dtype=torch.bool, device=device),
            "decided": torch.full((num_episodes,), CONTINUE, device=device),
        }
        if space.num_linear_symbols:
            num_symbols = space.num_linear_symbols
            frame["linear_message_history"] = torch.zeros(*shape_ERCP, num_symbols, device=device)
            frame["linear_message"] = torch.zeros(*shape_ECP, num_symbols, device=device)
        return frame | self.turn_masks(frame)

    def advance(self, frame: Mapping[str, Tensor], moves: JointMoves) -> Transition:
        """Apply the moves of a round."""
        active_EAC = frame["active_mask"]
        step = self.protocol.step(
            frame["round"],
            frame["seed"],
            frame["y"].squeeze(-1),
            frame["has_decided"],
            Moves(
                decision_EA=moves.decision_BA,
                message_logits_EACPS=moves.message_logits_BACPS,
                decision_logits_EA3=moves.decision_logits_BA3,
            ),
        )
        next_frame = dict(frame)
        next_frame |= self.record_messages("", frame, moves.message_BACP, active_EAC)
        if moves.linear_BACP is not None:
            next_frame |= self.record_messages("linear_", frame, moves.linear_BACP, active_EAC)
        next_frame["round"] = frame["round"] + 1
        next_frame["has_decided"] = step.agent_decided_EA
        # The first decision counts.
        is_undecided_E = frame["decided"] == CONTINUE
        next_frame["decided"] = torch.where(is_undecided_E, step.decision_E, frame["decided"])
        next_frame |= self.turn_masks(next_frame)
        return Transition(next_frame, step, step.is_done)

    def renew(self, frame: dict[str, Tensor], is_done_E: Tensor) -> dict[str, Tensor]:
        """Return the frame with ended episodes replaced by new ones."""
        rows = is_done_E.nonzero().flatten()
        if len(rows) == 0:
            return frame
        new_frame = self.fresh(len(rows))
        if len(rows) == self.num_environments:
            return new_frame
        return {name: column.index_copy(0, rows, new_frame[name]) for name, column in frame.items()}

    def turn_masks(self, frame: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks of sending and deciding, and the rounds of the messages to answer.

        All masks are False after the last round and after an agent's decision.
        """
        round_E, seed_E, has_decided_EA = frame["round"], frame["seed"], frame["has_decided"]
        return {
            "active_mask": self.protocol.active_mask(round_E, seed_E, has_decided_EA),
            "can_decide": self.protocol.chooses(round_E, seed_E, has_decided_EA),
            "question_round": self.protocol.question_round(round_E, seed_E),
        }

    def record_messages(
        self, prefix: str, frame: Mapping[str, Tensor], symbols_EACP: Tensor, active_EAC: Tensor
    ) -> dict[str, Tensor]:
        """Return messages of the round, and the updated history."""
        history_ERCPS = frame[f"{prefix}message_history"]
        num_rounds, num_symbols = history_ERCPS.shape[1], history_ERCPS.shape[-1]
        sent_EACPS = one_hot(symbols_EACP, num_symbols).to(history_ERCPS.dtype)
        message_ECPS = (sent_EACPS * active_EAC[..., None, None]).sum(dim=1)
        # The round may differ between environments.
        is_round_ER = one_hot(frame["round"], num_rounds).to(history_ERCPS.dtype)
        new_messages_ERCPS = is_round_ER[:, :, None, None, None] * message_ECPS[:, None]
        return {
            f"{prefix}message": message_ECPS,
            f"{prefix}message_history": history_ERCPS + new_messages_ERCPS,
        }

    # ---- state

    def state(self) -> dict[str, Any]:
        """Return the state of the data order and the generator."""
        return {"position": self.cycler.position, "generator": self.generator.get_state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.cycler.position = state["position"]
        self.generator.set_state(state["generator"])

    # ---- TorchRL

    def _make_specs(self) -> None:
        # An example has the shapes; drawing it must not change the next episodes.
        state = self.state()
        example = self.fresh(self.num_environments)
        self.load_state(state)
        observations: dict[str, TensorSpec] = {}
        for name, column in example.items():
            if column.dtype == torch.bool:
                observations[name] = Binary(column.shape[-1], shape=column.shape, dtype=torch.bool)
            else:
                observations[name] = Unbounded(column.shape, dtype=column.dtype)
        self.observation_spec = self._spec(observations)
        shape_EA = (self.num_environments, self.protocol.num_agents)
        shape_EACP = (*shape_EA, self.protocol.num_channels, self.space.message_size)
        actions: dict[str, TensorSpec] = {
            "decision": Categorical(3, shape=shape_EA),
            "message": Categorical(self.space.num_symbols, shape=shape_EACP),
        }
        if self.space.num_linear_symbols:
            num_symbols = self.space.num_linear_symbols
            actions["linear_message"] = Categorical(num_symbols, shape=shape_EACP)
        if self.protocol.needs_logits:
            actions["message_logits"] = Unbounded((*shape_EACP, self.space.num_symbols))
            actions["decision_logits"] = Unbounded((*shape_EA, 3))
        self.action_spec = self._spec({"agents": self._spec(actions)})
        rewards = self._spec({"reward": Unbounded((*shape_EA, 1))})
        self.reward_spec = self._spec({"agents": rewards})
        flag = Binary(1, shape=(self.num_environments, 1), dtype=torch.bool)
        self.done_spec = self._spec({"done": flag, "terminated": flag.clone()})

    def _spec(self, specs: Mapping[str, TensorSpec]) -> Composite:
        on_device = {name: spec.to(self.device) for name, spec in specs.items()}
        return Composite(on_device, shape=self.batch_size, device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        is_done_E = None if tensordict is None else tensordict.get("_reset", None)
        if is_done_E is None or bool(is_done_E.all()):
            frame = self.fresh(self.num_environments)
        else:
            # TorchRL keeps the other rows; here they are filled with the first datapoint.
            first_rows_E = torch.zeros(self.num_environments, dtype=torch.long, device=self.device)
            frame = self.renew(self.first_frames(first_rows_E), is_done_E.flatten())
        flag = torch.zeros(self.num_environments, 1, dtype=torch.bool, device=self.device)
        content = {**frame, "done": flag, "terminated": flag.clone()}
        return TensorDict(content, batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        frame = {name: tensordict[name] for name in self.observation_spec.keys()}  # noqa: SIM118
        agents = tensordict["agents"]
        needs_logits = self.protocol.needs_logits
        moves = JointMoves(
            decision_BA=agents["decision"],
            message_BACP=agents["message"],
            logprobs_BA=torch.zeros_like(agents["decision"], dtype=torch.float32),
            message_logits_BACPS=agents["message_logits"] if needs_logits else torch.empty(0),
            decision_logits_BA3=agents["decision_logits"] if needs_logits else torch.empty(0),
            linear_BACP=agents["linear_message"] if self.space.num_linear_symbols else None,
        )
        transition = self.advance(frame, moves)
        flag = transition.is_done_E[:, None]
        content = {**transition.observation, "done": flag, "terminated": flag.clone()}
        next_frame = TensorDict(content, batch_size=self.batch_size, device=self.device)
        next_frame["agents", "reward"] = transition.step.reward_EA[..., None]
        return next_frame

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.key = (*self.key, seed)
            self.restart()
