"""A trivial game of two agents, and a loop for it that is written by hand for it alone.

The prover sees the label, the verifier sees what was said and decides. `HandLoop` plays and learns
it in plain torch: the same perceptrons, frames, epochs, minibatches, masks and losses as `OurWay`
with `game_trainer`, and nothing else: no other protocol, agent or message, no statistics but two.

Shapes: E environments, T rounds played, B frames, R rounds of a conversation, S symbols, D inputs;
the second agent is the verifier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import Stopwatch
from our_proofs import BACKWARD, BUFFER, CLIP, COLLECT, FORWARD, GAE, STEP, UPDATE, WHOLE, Seconds
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import one_hot, smooth_l1_loss

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.agents import AgentParameters
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.scenario_base.protocol.message_space import AgentShape
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentBody,
    AgentPolicyHead,
    AgentValueHead,
    Observation,
    PolicyOutput,
    Representation,
    SoloAgentHead,
    mlp,
    round_one_hot,
)
from nip_astra.scenarios.tensordict_base import Datasets, TensorDictScenario
from nip_astra.trainers.protocol.optimizers import ADAM_EPS
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer
from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer

NUM_ROUNDS, MIN_ROUNDS, NUM_SYMBOLS, WIDTH = 8, 2, 4, 64
CONTINUE = 2
PROVER, VERIFIER = 0, 1


# ---- the game as a scenario of ours


class LabelBody(AgentBody):
    """Reads the history and the round, and the label unless the agent is a verifier."""

    def __init__(self, shape: AgentShape) -> None:
        super().__init__(shape)
        d_in = self.history_mean.numel() + shape.num_rounds + (not shape.is_verifier)
        self.network = mlp(d_in, WIDTH, 2, shape.d_representation, "tanh")

    def forward(self, observation: Observation) -> dict[str, Tensor]:
        parts = [self.history(observation).flatten(1), round_one_hot(observation, self.shape)]
        if not self.shape.is_verifier:
            parts.append(observation["y"].float())
        return {"read": torch.tanh(self.network(torch.cat(parts, dim=1)))}


class LinearPolicyHead(AgentPolicyHead):
    """Linear in what was read."""

    def __init__(self, shape: AgentShape) -> None:
        super().__init__(shape)
        self.message = nn.Linear(shape.d_representation, NUM_SYMBOLS)
        self.decision = nn.Linear(shape.d_representation, 3) if shape.has_decision else None

    def logits(self, representation: Representation, observation: Observation) -> PolicyOutput:
        read = representation["read"]
        decision = None if self.decision is None else self.decision(read)
        return PolicyOutput(self.message(read)[:, None, None], decision)


class LinearValueHead(AgentValueHead):
    """Linear in what was read."""

    def __init__(self, shape: AgentShape) -> None:
        super().__init__()
        self.value = nn.Linear(shape.d_representation, 1)

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        values_B: Tensor = self.value(representation["read"]).squeeze(-1)
        return values_B


class LabelGame(TensorDictScenario):
    """A datapoint is its label and nothing more."""

    kind = "label_game"

    @classmethod
    def build_datasets(cls, parameters: Any, *, seed: int, scenario_dir: Path | None) -> Datasets:
        dataset = TensorDict({"y": torch.arange(256)[:, None] % 2}, batch_size=[256])
        return Datasets(dataset, dataset.clone())

    @classmethod
    def num_symbols(cls, parameters: Any, dataset: TensorDict) -> int:
        return NUM_SYMBOLS

    @classmethod
    def build_body(
        cls, parameters: Any, agent: Any, shape: AgentShape, dataset: TensorDict
    ) -> AgentBody:
        return LabelBody(shape)

    @classmethod
    def build_policy_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentPolicyHead:
        return LinearPolicyHead(shape)

    @classmethod
    def build_value_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentValueHead:
        return LinearValueHead(shape)

    @classmethod
    def build_solo_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> SoloAgentHead:
        raise NotImplementedError("nobody plays this game alone")


def game_trainer(num_frames: int, minibatch_size: int, num_epochs: int) -> TensorDictRlTrainer:
    """Build our trainer on the game."""
    sections = {
        LabelGame.kind: LabelGame.Parameters,
        "nip": PROTOCOL_HANDLERS.get("nip").Parameters,
    }
    values = {
        "trainer": "vanilla_ppo",
        "scenario": LabelGame.kind,
        "interaction_protocol": "nip",
        "nip": {"max_message_rounds": NUM_ROUNDS, "min_message_rounds": MIN_ROUNDS},
        LabelGame.kind: {"agents": {"default": {}}, "d_representation": WIDTH},
        "rl": {
            "frames_per_batch": num_frames,
            "minibatch_size": minibatch_size,
            "num_epochs": num_epochs,
            "num_iterations": 1_000_000,
        },
    }
    hyper_params = HyperParameters.with_sections(sections).from_dict(values)
    settings = ExperimentSettings(progress=False, num_threads=1)
    instance = LabelGame.build(
        hyper_params,
        getattr(hyper_params, LabelGame.kind),
        settings,
        scenario_dir=None,
        trainer_type="rl",
    )
    assert AgentParameters in {
        type(agent.parameters_of_agent) for agent in instance.agents.values()
    }
    return VanillaPpoTrainer(hyper_params, instance, settings)


# ---- the loop by hand


class Frames(NamedTuple):
    """What is learned from; entries of two agents have a last dimension of 2."""

    inputs_BD: Tensor
    round_B: Tensor
    symbol_B: Tensor
    decision_B: Tensor
    logprob_B: Tensor
    advantage_B2: Tensor
    target_B2: Tensor


class HandLoop:
    """The game and PPO in plain torch, from the weights of a trainer of ours."""

    def __init__(self, trainer: TensorDictRlTrainer) -> None:
        self.rl, self.ppo = trainer.rl, trainer.hyper_params.ppo
        agents = [trainer.agents[name] for name in ("prover", "verifier")]
        self.policies = [_joined(a.policy_body, a.policy_head) for a in agents]
        self.values = [_joined(a.value_body, a.value_head) for a in agents]
        pairs = zip(self.policies, self.values, strict=True)
        self.weights = [[*policy.parameters(), *value.parameters()] for policy, value in pairs]
        self.optimizer = torch.optim.Adam(
            [weight for group in self.weights for weight in group],
            lr=self.rl.lr,
            eps=ADAM_EPS,
            fused=True,
        )
        num_environments = self.rl.frames_per_batch // NUM_ROUNDS
        self.label_E = torch.randint(2, (num_environments,))
        self.round_E = torch.zeros(num_environments, dtype=torch.long)
        self.history_ERS = torch.zeros(num_environments, NUM_ROUNDS, NUM_SYMBOLS)

    def iterate(self) -> Seconds:
        """Play and learn once, and give the seconds of each part."""
        watch = Stopwatch()
        with watch.phase(WHOLE):
            with watch.phase(COLLECT), torch.no_grad():
                played, reward_TE2, is_end_TE, last_E2 = self.play()
            with watch.phase(GAE), torch.no_grad():
                frames = self.with_advantages(played, reward_TE2, is_end_TE, last_E2)
            with watch.phase(UPDATE):
                self.learn(frames, watch)
        return watch.seconds

    def inputs(self) -> Tensor:
        """What the agents see, [E, D]; the last column is the prover's alone."""
        parts = [self.history_ERS.flatten(1), one_hot(self.round_E, NUM_ROUNDS), self.label_E]
        return torch.cat([parts[0], parts[1], parts[2][:, None]], dim=1)

    def play(self) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Play a batch: what `Frames` holds up to the log-probabilities, rewards, ends, values."""
        steps = []
        every_E = torch.arange(len(self.label_E))
        for _ in range(NUM_ROUNDS):
            inputs_ED, round_E = self.inputs(), self.round_E
            is_verifier_E = round_E % 2 == 0
            words = self.policies[PROVER](inputs_ED).log_softmax(-1)
            asked, decided = self.policies[VERIFIER](inputs_ED[:, :-1]).split([NUM_SYMBOLS, 3], -1)
            asked, decided = asked.log_softmax(-1), decided.log_softmax(-1)
            symbol_logs_ES = torch.where(is_verifier_E[:, None], asked, words)
            symbol_E, choice_E = _draw(symbol_logs_ES), _draw(decided)
            decides_E = is_verifier_E & (round_E >= MIN_ROUNDS - 1)
            decision_E = torch.where(decides_E, choice_E, CONTINUE)
            logprob_E = symbol_logs_ES[every_E, symbol_E]
            logprob_E = logprob_E + decided[every_E, choice_E] * decides_E
            has_decided_E = decision_E != CONTINUE
            is_out_E = (round_E == NUM_ROUNDS - 1) & ~has_decided_E
            is_right_E = decision_E == self.label_E
            reward_E = torch.where(has_decided_E, 2.0 * is_right_E - 1, -1.0 * is_out_E)
            prover_reward_E = (has_decided_E & (decision_E == 1)).float()
            is_end_E = has_decided_E | is_out_E
            reward_E2 = torch.stack([prover_reward_E, reward_E], dim=1)
            frame = (inputs_ED, round_E, symbol_E, decision_E, logprob_E, reward_E2, is_end_E)
            steps.append(frame)
            self.history_ERS[every_E, round_E, symbol_E] = 1.0
            self.history_ERS *= ~is_end_E[:, None, None]
            self.round_E = (round_E + 1) * ~is_end_E
            fresh_E = torch.randint(2, self.label_E.shape)
            self.label_E = torch.where(is_end_E, fresh_E, self.label_E)
        *played, reward_TE2, is_end_TE = (
            torch.stack(column) for column in zip(*steps, strict=True)
        )
        self.mean_reward = reward_TE2.mean((0, 1))
        self.mean_length = is_end_TE.numel() / is_end_TE.sum()
        return played, reward_TE2, is_end_TE, self.value(self.inputs())

    def value(self, inputs: Tensor) -> Tensor:
        """The values of both agents, [..., 2]."""
        return torch.cat([self.values[PROVER](inputs), self.values[VERIFIER](inputs[..., :-1])], -1)

    def with_advantages(
        self, played: list[Tensor], reward_TE2: Tensor, is_end_TE: Tensor, next_E2: Tensor
    ) -> Frames:
        """Estimate advantages, backwards over the rounds."""
        value_TE2 = self.value(played[0])
        goes_on_TE1 = (~is_end_TE)[..., None].float()
        advantage_TE2 = torch.empty_like(value_TE2)
        advantage_E2 = torch.zeros_like(next_E2)
        for t in reversed(range(NUM_ROUNDS)):
            delta_E2 = reward_TE2[t] + self.rl.gamma * next_E2 * goes_on_TE1[t] - value_TE2[t]
            decay = self.rl.gamma * self.rl.lmbda * goes_on_TE1[t]
            advantage_E2 = delta_E2 + decay * advantage_E2
            advantage_TE2[t], next_E2 = advantage_E2, value_TE2[t]
        estimates = (advantage_TE2, advantage_TE2 + value_TE2)
        return Frames(*(column.flatten(0, 1) for column in (*played, *estimates)))

    def losses(self, frames: Frames) -> list[Tensor]:
        """The losses of the prover and of the verifier, scalars."""
        is_verifier_B, found = frames.round_B % 2 == 0, []
        decides_B = is_verifier_B & (frames.round_B >= MIN_ROUNDS - 1)
        for agent, acting in (
            (PROVER, (~is_verifier_B).float()),
            (VERIFIER, is_verifier_B.float()),
        ):
            num_acting = acting.sum().clamp(min=1)
            inputs_BD = frames.inputs_BD if agent == PROVER else frames.inputs_BD[:, :-1]
            logits = self.policies[agent](inputs_BD)
            logs_BS = logits[:, :NUM_SYMBOLS].log_softmax(-1)
            logprob_B = logs_BS.gather(1, frames.symbol_B[:, None]).squeeze(1)
            entropy_B = -(logs_BS.exp() * logs_BS).sum(-1)
            if agent == VERIFIER:
                logs_B3 = logits[:, NUM_SYMBOLS:].log_softmax(-1)
                chosen_B = logs_B3.gather(1, frames.decision_B[:, None]).squeeze(1)
                logprob_B = logprob_B + chosen_B * decides_B
                entropy_B = entropy_B - (logs_B3.exp() * logs_B3).sum(-1) * decides_B
            advantage_B = frames.advantage_B2[:, agent]
            advantage_B = advantage_B - (advantage_B * acting).sum() / num_acting
            variance = (advantage_B.square() * acting).sum() / (num_acting - 1).clamp(min=1)
            advantage_B = advantage_B / variance.sqrt().clamp(min=1e-6)
            ratio_B = ((logprob_B - frames.logprob_B) * acting).exp()
            low, high = 1 - self.ppo.clip_epsilon, 1 + self.ppo.clip_epsilon
            gain_B = torch.minimum(ratio_B * advantage_B, ratio_B.clamp(low, high) * advantage_B)
            gain_B = gain_B + self.ppo.entropy_coef * entropy_B
            value_B = self.values[agent](inputs_BD).squeeze(1)
            loss_value = smooth_l1_loss(value_B, frames.target_B2[:, agent])
            loss_policy = -(gain_B * acting).sum() / num_acting
            found.append(loss_policy + self.ppo.critic_coef * loss_value)
        return found

    def learn(self, frames: Frames, watch: Stopwatch) -> None:
        """Take the steps of all epochs."""
        for _ in range(self.rl.num_epochs):
            with watch.phase(BUFFER):
                order_B = torch.randperm(len(frames.round_B))
                columns = [column[order_B].split(self.rl.minibatch_size) for column in frames]
            for minibatch in zip(*columns, strict=True):
                with watch.phase(FORWARD):
                    loss = torch.stack(self.losses(Frames(*minibatch))).sum()
                with watch.phase(BACKWARD):
                    self.optimizer.zero_grad()
                    loss.backward()
                with watch.phase(CLIP):
                    for weights in self.weights:
                        nn.utils.clip_grad_norm_(weights, self.rl.max_grad_norm or float("inf"))
                with watch.phase(STEP):
                    self.optimizer.step()


def _draw(logs: Tensor) -> Tensor:
    """Draw one alternative of each row: the first to come of as many exponential clocks."""
    return (logs - torch.empty_like(logs).exponential_().log()).argmax(-1)


def _joined(body: Any, head: Any) -> nn.Sequential:
    """A perceptron with the weights of a body and a head, whose layers are put together."""
    layers = [layer for layer in body.network if isinstance(layer, nn.Linear)]
    outputs = [layer for layer in head.children() if isinstance(layer, nn.Linear)]
    last = nn.Linear(WIDTH, sum(layer.out_features for layer in outputs))
    with torch.no_grad():
        last.weight.copy_(torch.cat([layer.weight for layer in outputs]))
        last.bias.copy_(torch.cat([layer.bias for layer in outputs]))
    first, second = (_copy(layer) for layer in layers)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def _copy(layer: nn.Linear) -> nn.Linear:
    copied = nn.Linear(layer.in_features, layer.out_features)
    copied.load_state_dict(layer.state_dict())
    return copied


def compare(trainer: TensorDictRlTrainer, hand: HandLoop) -> dict[str, float]:
    """The largest differences of losses and of gradients, as shares of the largest value."""
    batch = trainer.collect().flatten()
    agents, is_verifier_B = batch["agents"], batch["round"] % 2 == 0
    noise_B = 0.2 * torch.randn(is_verifier_B.shape, generator=torch.Generator().manual_seed(0))
    acting_B2 = torch.stack([~is_verifier_B, is_verifier_B], dim=1)
    agents["logprob"] = agents["logprob"] + noise_B[:, None] * acting_B2
    history_BD = batch["message_history"].flatten(1)
    inputs = [history_BD, one_hot(batch["round"], NUM_ROUNDS), batch["y"]]
    frames = Frames(
        inputs_BD=torch.cat(inputs, dim=1),
        round_B=batch["round"],
        symbol_B=(agents["message"].flatten(2).squeeze(-1) * acting_B2).sum(1),
        decision_B=agents["decision"][:, VERIFIER],
        logprob_B=agents["logprob"].sum(1),
        advantage_B2=agents["advantage"].squeeze(-1),
        target_B2=agents["value_target"].squeeze(-1),
    )
    entries = IppoObjective(trainer.agents, trainer.hyper_params.ppo, trainer.rl)(batch)
    kinds = ("policy", "value", "entropy")
    ours = [
        torch.stack([entries[f"loss_{kind}_{name}"] for kind in kinds]).sum()
        for name in ("prover", "verifier")
    ]
    theirs = hand.losses(frames)
    pairs = [
        pair
        for number, name in enumerate(("prover", "verifier"))
        for pair in (
            (trainer.agents[name].policy_body.network[0].weight, hand.policies[number][0].weight),
            (trainer.agents[name].value_body.network[0].weight, hand.values[number][0].weight),
        )
    ]
    our_gradients = torch.autograd.grad(torch.stack(ours).sum(), [a for a, _ in pairs])
    gradients = torch.autograd.grad(torch.stack(theirs).sum(), [b for _, b in pairs])
    return {
        "losses": max(
            _difference(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True)
        ),
        "gradients": max(map(_difference, our_gradients, gradients)),
    }


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))
