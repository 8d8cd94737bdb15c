"""The built components of agents with networks under nip's names and layout, over ours.

A frame has nip's layout: messages are `x` and `message_history` [B, R, C, P, *symbols] and
`message` [B, C, P, *symbols], where `symbols` is (2, n) for pairs of graphs of up to n nodes, and
(h, w) for images with that grid of latent pixels. Labels `y` are [B].

Shape suffixes: `B` frame, `R` round, `A` agent, `C` channel, `V` channel that an agent sees,
`P` position, `S` symbol.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nip_astra.nip.views import ProtocolView, View
from nip_astra.protocols.protocol_base import CONTINUE
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import MASKED, Agent, PolicyOutput
from nip_astra.scenario_instance import ProtocolInstance
from nip_astra.scenarios.images.agents import ImageGrid
from nip_astra.trainers.protocol.optimizers import parts_of

REPRESENTATION = "representation"
"""Entry of a frame with the output of a body, for the agent's heads."""
REPRESENTATIONS = "representations"
"""Entry with the representations of all agents, by name."""


class MessageLayout(NamedTuple):
    """How nip lays out the symbols of a message, and how it names the symbol that is sent."""

    symbols: tuple[int, ...]
    action: str

    @property
    def num_symbols(self) -> int:
        """S, the number of symbols."""
        return math.prod(self.symbols)

    def folded(self, messages: Tensor) -> Tensor:
        """Return messages [..., S] as [..., *symbols]."""
        return messages.reshape(*messages.shape[:-1], *self.symbols)

    def flat(self, messages: Tensor, num_dims: int) -> Tensor:
        """Return messages with `num_dims` dimensions before the symbols as [..., S]."""
        return messages.flatten(num_dims)


def message_layout(environment: ProtocolEnvironment, parameters: Any) -> MessageLayout:
    """Return the layout of an environment's messages; `parameters` are the scenario's section."""
    columns = environment.dataset
    if "adjacency" in columns:
        return MessageLayout((2, environment.space.num_symbols // 2), "node_selected")
    if "image" in columns:
        grid = ImageGrid.of(columns["image"].shape[1:], parameters.num_block_groups)
        return MessageLayout((grid.latent_height, grid.latent_width), "latent_pixel_selected")
    return MessageLayout((environment.space.num_symbols,), "message")


class TensorDictEnvironment(ProtocolEnvironment):
    """Our environment with nip's names in addition.

    It plays our layout, and `_step` also nip's: a frame whose agents have `node_selected` or
    `latent_pixel_selected`.

    Attributes
    ----------
    train : bool
        Whether its datapoints are those of training.
    steps_per_env_per_iteration, frames_per_batch : int
        Rounds of an environment, and of all environments, in an iteration.
    """

    @classmethod
    def of(
        cls, environment: ProtocolEnvironment, layout: MessageLayout, *, num_steps: int, train: bool
    ) -> TensorDictEnvironment:
        """Return an environment that continues the data order and the seeds of another."""
        made = cls._on(environment, environment.dataset, layout, num_steps=num_steps, train=train)
        made.cycler, made.generator = environment.cycler, environment.generator
        return made

    @classmethod
    def _on(
        cls,
        environment: ProtocolEnvironment,
        dataset: TensorDict,
        layout: MessageLayout,
        *,
        num_steps: int,
        train: bool,
    ) -> TensorDictEnvironment:
        """Return an environment like another, on some datapoints."""
        made = cls(
            environment.protocol,
            dataset,
            environment.space,
            num_environments=environment.num_environments,
            key=environment.key,
        )
        made.layout, made.train = layout, train
        made.steps_per_env_per_iteration = num_steps
        made.protocol_handler = ProtocolView(environment.protocol)
        return made

    def with_datapoints(self, dataset: TensorDict) -> TensorDictEnvironment:
        """Return an environment on datapoints of this one, given as frames."""
        rows = self.dataset[dataset["datapoint_id"]]
        return self._on(
            self,
            rows,
            self.layout,
            num_steps=self.steps_per_env_per_iteration,
            train=self.train,
        )

    dataset: TensorDict
    layout: MessageLayout
    train: bool
    steps_per_env_per_iteration: int
    protocol_handler: ProtocolView

    @property
    def num_envs(self) -> int:
        """Number of environments that are played together."""
        return self.num_environments

    @property
    def frames_per_batch(self) -> int:
        """Number of frames of an iteration."""
        return self.num_envs * self.steps_per_env_per_iteration

    @property
    def main_message_space_shape(self) -> tuple[int, ...]:
        """Shape of the symbols of a message."""
        return self.layout.symbols

    @property
    def max_num_nodes(self) -> int:
        """Number of nodes of the largest graph."""
        return int(self.dataset["adjacency"].shape[-1])

    @property
    def dataset_num_channels(self) -> int:
        """Number of colours of an image."""
        return int(self.dataset["image"].shape[1])

    @property
    def image_height(self) -> int:
        """Height of an image, pixels."""
        return int(self.dataset["image"].shape[2])

    @property
    def image_width(self) -> int:
        """Width of an image, pixels."""
        return int(self.dataset["image"].shape[3])

    @property
    def latent_height(self) -> int:
        """Height of the grid of latent pixels."""
        return self.layout.symbols[0]

    @property
    def latent_width(self) -> int:
        """Width of the grid of latent pixels."""
        return self.layout.symbols[1]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.layout.action not in tensordict["agents"].keys():  # noqa: SIM118  # not a lookup
            return super()._step(tensordict)
        frame = our_frame(tensordict, self)
        symbols_BACP = tensordict["agents", self.layout.action]
        turns = frame["round"], frame["seed"]
        active_BAC = self.protocol.active_mask(*turns)
        following = dict(frame)
        following |= self.record_messages("", frame, symbols_BACP, active_BAC)
        following["round"] = frame["round"] + 1
        done_B, agent_done_BA, terminated_B, reward_BA = (
            self.protocol_handler.step_interaction_protocol(tensordict)
        )
        agents = {"reward": reward_BA, "done": agent_done_BA}
        return TensorDict(
            nip_frame(following, self)
            | {
                "done": done_B | terminated_B,
                "terminated": terminated_B,
                "agents": TensorDict(agents, batch_size=reward_BA.shape),
            },
            batch_size=tensordict.batch_size,
        )


def nip_frame(frame: Mapping[str, Tensor], environment: TensorDictEnvironment) -> dict[str, Tensor]:
    """Return one of our frames in nip's layout."""
    layout = environment.layout
    history = layout.folded(frame["message_history"])
    return {
        **frame,
        "y": frame["y"].flatten(),
        "message_history": history,
        "x": history.clone(),
        "message": layout.folded(frame["message"]),
    }


def our_frame(data: TensorDictBase, environment: TensorDictEnvironment) -> dict[str, Tensor]:
    """Return a frame in nip's layout in ours; what it lacks is that of an episode's start."""
    layout, space = environment.layout, environment.space
    keys = set(data.keys())
    history = data["x"] if "x" in keys else data["message_history"]
    count, device = len(history), history.device
    whole_numbers = torch.zeros(count, dtype=torch.long, device=device)
    frame: dict[str, Tensor] = {
        "y": whole_numbers[:, None],
        "seed": whole_numbers,
        "round": whole_numbers,
        "datapoint_id": whole_numbers,
        "has_decided": torch.zeros(
            count, environment.protocol.num_agents, dtype=torch.bool, device=device
        ),
        "decided": torch.full((count,), CONTINUE, device=device),
    }
    frame |= {name: value for name, value in data.items() if isinstance(value, Tensor)}
    frame["y"] = frame["y"].reshape(count, 1)
    frame["round"] = frame["round"].reshape(count)
    frame["message_history"] = layout.flat(history, 4)
    if "message" in keys:
        frame["message"] = layout.flat(data["message"], 3)
    else:
        frame["message"] = torch.zeros_like(frame["message_history"][:, 0])
    if space.num_linear_symbols and "linear_message_history" not in keys:
        shape = (*frame["message_history"].shape[:-1], space.num_linear_symbols)
        frame["linear_message_history"] = torch.zeros(shape, device=device)
    return frame | environment.turn_masks(frame)


def dataset_of(environment: TensorDictEnvironment) -> TensorDict:
    """Return the datapoints of an environment as frames before any message, in nip's layout."""
    rows = torch.arange(len(environment.dataset), device=environment.device)
    return TensorDict(nip_frame(environment.first_frames(rows), environment), [len(rows)])


def _collated(rows: Any) -> TensorDict:
    """Return one TensorDict of rows that may be collated already."""
    return rows if isinstance(rows, TensorDictBase) else torch.stack(list(rows))


class TensorDictDataLoader(DataLoader[Any]):
    """torch's loader of batches of a dataset, or of part of one, as TensorDicts."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **{"collate_fn": _collated, **options})


class TensorDictAgentPart(TensorDictModuleBase):
    """Base of nip's parts of an agent: modules that read a frame and write into it.

    Attributes
    ----------
    agent_name : str
        The agent.
    agent_level_in_keys, env_level_in_keys, agent_level_out_keys, env_level_out_keys : tuple
        Entries that the part reads and writes; none here.
    """

    in_keys: Any = ()
    out_keys: Any = ()
    agent_level_in_keys: Any = ()
    env_level_in_keys: Any = ()
    agent_level_out_keys: Any = ()
    env_level_out_keys: Any = ()

    def __init__(
        self, hyper_params: Any, settings: Any, agent_name: str, protocol_handler: Any
    ) -> None:
        super().__init__()
        self.hyper_params, self.settings = hyper_params, settings
        self.agent_name, self.protocol_handler = agent_name, protocol_handler

    @property
    def agent_id(self) -> int:
        """Index of the agent."""
        return list(self.protocol_handler.agent_names).index(self.agent_name)

    @property
    def is_prover(self) -> bool:
        """Whether the agent is a prover."""
        return self.agent_name in self.protocol_handler.prover_names

    @property
    def is_verifier(self) -> bool:
        """Whether the agent is a verifier."""
        return self.agent_name in self.protocol_handler.verifier_names

    @property
    def max_message_rounds(self) -> int:
        """Rounds of the longest episode."""
        rounds: int = self.protocol_handler.max_message_rounds
        return rounds

    @property
    def visible_message_channel_indices(self) -> list[int]:
        """Indices of the channels that the agent sees."""
        channels: list[int] = self.protocol_handler.visible_channels(self.agent_name)
        return channels

    @property
    def visible_message_channel_names(self) -> list[str]:
        """Names of the channels that the agent sees."""
        names = self.protocol_handler.message_channel_names
        return [names[index] for index in self.visible_message_channel_indices]

    @property
    def visible_message_channel_mask(self) -> Tensor:
        """Whether the agent sees a channel, bool [C]."""
        mask: Tensor = self.protocol_handler.visibility_AC[self.agent_id]
        return mask

    @property
    def num_visible_message_channels(self) -> int:
        """Number of channels that the agent sees."""
        return len(self.visible_message_channel_indices)


class _OurPart(TensorDictAgentPart):
    """One of our modules as a part of nip's."""

    def __init__(self, module: nn.Module, agent_name: str, context: Context) -> None:
        handler = context.environment.protocol_handler
        super().__init__(context.hyper_params, None, agent_name, handler)
        self.module = module
        # A plain attribute: an environment is a module too, and no part of an agent.
        self.__dict__["environment"] = context.environment

    def frame(self, data: TensorDictBase) -> dict[str, Tensor]:
        """Return a frame in our layout, with all channels."""
        environment: TensorDictEnvironment = self.__dict__["environment"]
        data = data.copy()
        channels_V = torch.tensor(self.visible_message_channel_indices)
        num_channels = environment.protocol.num_channels
        for name, dim in _CHANNEL_DIMS.items():
            # A combined part passes the channels that the agent sees, our modules select them.
            if name in data.keys() and data[name].shape[dim] < num_channels:  # noqa: SIM118
                shape = list(data[name].shape)
                shape[dim] = num_channels
                all_channels = data[name].new_zeros(shape)
                data[name] = all_channels.index_copy(dim, channels_V, data[name])
        return our_frame(data, environment)


_CHANNEL_DIMS = {
    "x": 2,
    "message_history": 2,
    "linear_message_history": 2,
    "message": 1,
    "linear_message": 1,
}
"""Dimension of the channels in entries of a frame."""


class AgentBody(_OurPart):
    """A body: writes `representation`."""

    out_keys = (REPRESENTATION,)

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Write the representation of every frame."""
        # Not a TensorDict: some of our bodies compute entries when a head asks for them.
        data.set_non_tensor(REPRESENTATION, self.module(self.frame(data)))
        return data


class _Head(_OurPart):
    in_keys = (REPRESENTATION,)

    def _output(self, data: TensorDictBase) -> Any:
        read = data[REPRESENTATION] if REPRESENTATION in data.keys() else {}  # noqa: SIM118
        return self.module(read, self.frame(data))


class AgentPolicyHead(_Head):
    """A policy head: writes the logits of messages and, for a verifier, of decisions."""

    out_keys = ("decision_logits",)

    @property
    def has_decider(self) -> bool:
        """Whether the agent decides."""
        return bool(self.protocol_handler.has_decision_logits(self.agent_name))

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Write `<symbol>_logits` [B, V, P, S], `decision_logits` [B, 3] and linear ones."""
        output: PolicyOutput = self._output(data)
        action = self.__dict__["environment"].layout.action
        decision = output.decision_logits_B3
        no_decision = torch.zeros(len(output.message_logits_BVPS), 3)
        data[f"{action}_logits"] = output.message_logits_BVPS
        data["decision_logits"] = no_decision if decision is None else decision
        if output.linear_logits_BVPL is not None:
            data["linear_message_selected_logits"] = output.linear_logits_BVPL
        return data


class AgentValueHead(_Head):
    """A value head: writes `value` [B]."""

    out_keys = ("value",)

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Write the expected rewards."""
        data["value"] = self._output(data)
        return data


class SoloAgentHead(_Head):
    """A head of supervised training: writes `decision_logits` [B, 2]."""

    out_keys = ("decision_logits",)

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Write the logits of the labels."""
        data["decision_logits"] = self._output(data)
        return data


class _Parts(nn.ModuleDict):
    """Parts by agent."""

    def copy(self) -> dict[str, nn.Module]:
        """Return the current parts."""
        return dict(self.items())


class _Combined(TensorDictModuleBase):
    """The parts of one kind of all agents."""

    in_keys: Any = ()
    out_keys: Any = ()

    def __init__(self, parts: Mapping[str, TensorDictModuleBase]) -> None:
        super().__init__()
        self.parts = _Parts(parts)

    def _of_agent(self, data: TensorDictBase, name: str) -> TensorDictBase:
        """Return what an agent sees: its channels, and its own representation."""
        part: Any = self.parts[name]
        channels_V = torch.tensor(part.visible_message_channel_indices)
        seen = data.copy()
        for entry, dim in _CHANNEL_DIMS.items():
            if entry in data.keys():  # noqa: SIM118
                seen[entry] = data[entry].index_select(dim, channels_V)
        if (REPRESENTATIONS, name) in data.keys(True):
            seen.set_non_tensor(REPRESENTATION, data[REPRESENTATIONS, name])
        return seen


class CombinedBody(_Combined):
    """The bodies of all agents: writes `representations` by agent."""

    out_keys = (REPRESENTATIONS,)

    @property
    def bodies(self) -> _Parts:
        """The bodies by agent; they may be replaced."""
        return self.parts

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Write the representations."""
        for name, part in self.parts.items():
            read = part(self._of_agent(data, name))[REPRESENTATION]
            data.set_non_tensor((REPRESENTATIONS, name), read)
        return data


class CombinedPolicyHead(_Combined):
    """The policy heads of all agents: writes logits under `agents`, `MASKED` where unseen."""

    in_keys = (REPRESENTATIONS,)
    out_keys = (("agents", "decision_logits"),)

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Write `<symbol>_logits` [B, A, C, P, S] and `decision_logits` [B, A, 3]."""
        written: dict[str, list[Tensor]] = {}
        for name in self.parts:
            part: Any = self.parts[name]
            output = part(self._of_agent(data, name))
            names = [key for key in output.keys() if key.endswith("_logits")]  # noqa: SIM118
            channels_V = torch.tensor(part.visible_message_channel_indices)
            num_channels = len(part.protocol_handler.message_channel_names)
            for key in names:
                logits = output[key]
                if key != "decision_logits":
                    shape = (len(logits), num_channels, *logits.shape[2:])
                    unseen = logits.new_full(shape, MASKED)
                    logits = unseen.index_copy(1, channels_V, logits)
                written.setdefault(key, []).append(logits)
        for key, logits_of_agents in written.items():
            data["agents", key] = torch.stack(logits_of_agents, dim=1)
        return data


class CombinedValueHead(_Combined):
    """The value heads of all agents: writes `("agents", "value")` [B, A]."""

    in_keys = (REPRESENTATIONS,)
    out_keys = (("agents", "value"),)

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Write the expected rewards."""
        values = [part(self._of_agent(data, name))["value"] for name, part in self.parts.items()]
        data["agents", "value"] = torch.stack(values, dim=1)
        return data


class Context(NamedTuple):
    """What parts of agents need beside their networks."""

    hyper_params: Any
    environment: TensorDictEnvironment


class AgentView(View):
    """One of our agents with nip's parts: `body`, or `policy_body` and `value_body`, and heads.

    Parts that the trainer does not need are None.
    """

    _viewed: Agent
    agent_name: str
    body: AgentBody | None
    policy_body: AgentBody | None
    value_body: AgentBody | None
    policy_head: AgentPolicyHead | None
    value_head: AgentValueHead | None
    solo_head: SoloAgentHead | None
    whole: None

    def __init__(self, agent: Agent, context: Context) -> None:
        def part(kind: type[_OurPart], module: nn.Module | None) -> _OurPart | None:
            return None if module is None else kind(module, agent.name, context)

        policy_body = part(AgentBody, agent.policy_body)
        is_single = agent.value_body is None or agent.shares_body
        super().__init__(
            agent,
            agent_name=agent.name,
            body=policy_body if is_single else None,
            policy_body=None if is_single else policy_body,
            value_body=None if is_single else part(AgentBody, agent.value_body),
            policy_head=part(AgentPolicyHead, agent.policy_head),
            value_head=part(AgentValueHead, agent.value_head),
            solo_head=part(SoloAgentHead, agent.solo_head),
            whole=None,
        )

    def train(self) -> None:
        """Set the agent's networks to training."""
        self._viewed.train()

    def eval(self) -> None:
        """Set the agent's networks to evaluation."""
        self._viewed.eval()

    def get_model_parameter_dicts(
        self,
        base_lr: float,
        named_parameters: Any = None,
        body_lr_factor_override: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the agent's weights by learning rate, for an optimizer.

        Parameters
        ----------
        base_lr : float
            Learning rate, multiplied by the factors of agent and part.
        named_parameters : iterable of pairs, optional
            Weights that are returned; all by default.
        body_lr_factor_override : bool
            Whether bodies ignore their own factor.
        """
        agent = self._viewed
        allowed = None if named_parameters is None else {id(p) for _, p in named_parameters}
        groups = [
            (part.parameters, part.lr_factor)
            for part in parts_of(agent, has_body_factor=not body_lr_factor_override)
        ]
        if agent.solo_head is not None:
            factor = agent.parameters_of_agent.agent_lr_factor.actor
            groups.append((list(agent.solo_head.parameters()), factor))
        kept = [
            ([weight for weight in weights if allowed is None or id(weight) in allowed], factor)
            for weights, factor in groups
        ]
        return [{"params": weights, "lr": base_lr * factor} for weights, factor in kept if weights]


class ScenarioInstanceView(View):
    """Our components with nip's names in addition.

    Attributes
    ----------
    agents : dict of AgentView
        By name.
    train_dataset, test_dataset : TensorDict
        Frames before any message.
    train_environment, test_environment : TensorDictEnvironment
        Data and protocol.
    combined_body, combined_policy_body, combined_value_body : CombinedBody or None
        The bodies of all agents: the first if policy and value share one, else the others.
    combined_policy_head, combined_value_head : _Combined or None
        The heads of all agents.
    """

    agents: dict[str, AgentView]
    protocol_handler: ProtocolView
    message_regressor: Any
    train_environment: TensorDictEnvironment
    test_environment: TensorDictEnvironment
    combined_whole: None
    combined_body: _Combined | None
    combined_policy_body: _Combined | None
    combined_value_body: _Combined | None
    combined_policy_head: _Combined | None
    combined_value_head: _Combined | None
    shared_model_groups: None

    def __init__(self, instance: ProtocolInstance, hyper_params: Any) -> None:
        parameters, rl = getattr(hyper_params, instance.kind), hyper_params.rl
        num_steps = getattr(rl, "steps_per_env_per_iteration", None)
        num_steps = num_steps or instance.protocol_handler.max_message_rounds
        layout = message_layout(instance.train_environment, parameters)
        environments = {
            f"{split}_environment": TensorDictEnvironment.of(
                environment, layout, num_steps=num_steps, train=split == "train"
            )
            for split, environment in (
                ("train", instance.train_environment),
                ("test", instance.test_environment),
            )
        }
        context = Context(hyper_params, environments["train_environment"])
        agents = {name: AgentView(agent, context) for name, agent in instance.agents.items()}
        super().__init__(
            instance,
            agents=agents,
            protocol_handler=ProtocolView(instance.protocol_handler),
            combined_body=_combined(CombinedBody, agents.values(), "body"),
            combined_policy_body=_combined(CombinedBody, agents.values(), "policy_body"),
            combined_value_body=_combined(CombinedBody, agents.values(), "value_body"),
            combined_policy_head=_combined(CombinedPolicyHead, agents.values(), "policy_head"),
            combined_value_head=_combined(CombinedValueHead, agents.values(), "value_head"),
            combined_whole=None,
            shared_model_groups=None,
            **environments,
        )

    @cached_property
    def train_dataset(self) -> TensorDict:
        """The training data."""
        return dataset_of(self.train_environment)

    @cached_property
    def test_dataset(self) -> TensorDict:
        """The test data."""
        return dataset_of(self.test_environment)


def _combined(kind: type[_Combined], agents: Any, name: str) -> _Combined | None:
    """Return the parts of one kind of all agents that have one; None if none has."""
    parts = {agent.agent_name: getattr(agent, name) for agent in agents}
    present = {agent: part for agent, part in parts.items() if part is not None}
    return kind(present) if present else None


def instance_view(instance: Any, hyper_params: Any) -> Any:
    """Return components with nip's names in addition; those of chat models as they are."""
    if isinstance(instance, ProtocolInstance):
        return ScenarioInstanceView(instance, hyper_params)
    return instance


def unviewed(viewed: Any) -> Any:
    """Return the object of a view; others unchanged."""
    return viewed._viewed if isinstance(viewed, View) else viewed
