"""Baseline training of protocol agents with TorchRL, on our environment.

TorchRL's collector, GAE, clipped loss and buffer with the agents of `plain_proof_agents.py`:
separate policies and values, one optimizer and one gradient norm. It takes the faster alternative
where there is a choice: weights stay in the modules, and values are computed without vmap.

Weights, log-probabilities, values and the loss of a frame equal ours, which `compare` checks. Two
things differ: TorchRL takes means over all frames of all agents, ours over the frames in which an
agent acts, summed over agents; and advantages are normalised over different frames.

Shapes: B frames, A agents.
"""

from __future__ import annotations

from typing import Any

import torch
from measuring import Stopwatch, seconds_of
from our_proofs import COLLECT, GAE, UPDATE, WHOLE
from plain_proof_agents import build_actor, build_critic
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, set_composite_lp_aggregate
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as GaeOfTorchRl  # noqa: N811 - GAE is a part's name here

from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.trainers.protocol.optimizers import ADAM_EPS
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer


class TorchRlBaseline:
    """Collects and learns with TorchRL, from the weights and parameters of our trainer.

    Only one epoch of an update runs; its time is multiplied by the number of epochs.
    """

    def __init__(self, trainer: TensorDictRlTrainer) -> None:
        self.rl, self.ppo = trainer.rl, trainer.hyper_params.ppo
        self.num_frames = self.rl.frames_per_batch
        # Keep one log-probability per head: the sum would mix agents.
        set_composite_lp_aggregate(False).set()
        combined = trainer.agents
        agents = [combined[name] for name in combined.names]
        self.actor = build_actor(agents)
        self.critic = build_critic(agents)
        self.loss_module = build_loss(self.actor, self.critic, self.ppo, self.rl)
        self.gae = GaeOfTorchRl(
            gamma=self.rl.gamma,
            lmbda=self.rl.lmbda,
            value_network=self.critic,
            deactivate_vmap=True,
        )
        self.gae.set_keys(
            value=("agents", "value"),
            advantage=("agents", "advantage"),
            value_target=("agents", "value_target"),
            reward=("agents", "reward"),
            done=("agents", "done"),
            terminated=("agents", "terminated"),
        )
        self.collector = Collector(
            trainer.train_environment.with_key("plain"),
            self.actor,
            frames_per_batch=self.num_frames,
            total_frames=-1,
            trust_policy=True,
            auto_register_policy_transforms=False,
        )
        self._batches = iter(self.collector)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(self.num_frames),
            sampler=SamplerWithoutReplacement(),
            batch_size=self.rl.minibatch_size,
        )
        self.optimizer = torch.optim.Adam(
            self.loss_module.parameters(), lr=self.rl.lr, eps=ADAM_EPS
        )

    def iterate(self) -> dict[str, float]:
        """Run one iteration, and return the seconds of each part."""
        watch = Stopwatch()
        with watch.phase(COLLECT):
            batch = next(self._batches)
        with watch.phase(GAE), torch.no_grad():
            self.estimate(batch)
        with watch.phase(UPDATE):
            self.buffer.empty()
            self.buffer.extend(batch.reshape(-1))
        watch.seconds[UPDATE] += self.rl.num_epochs * seconds_of(self.learn)
        return {WHOLE: sum(watch.seconds.values()), **watch.seconds}

    def estimate(self, batch: TensorDictBase) -> None:
        """Write values, advantages and targets, after broadcasting the end flags to agents."""
        shape = batch["next", "agents", "reward"].shape
        for key in ("done", "terminated"):
            batch["next", "agents", key] = batch["next", key].unsqueeze(-1).expand(shape)
        self.gae(batch)

    def learn(self) -> None:
        """Take the optimizer steps of one epoch."""
        for _ in range(self.num_frames // self.rl.minibatch_size):
            losses = self.loss_module(self.buffer.sample())
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            loss.sum().backward()
            nn.utils.clip_grad_norm_(
                self.loss_module.parameters(), self.rl.max_grad_norm or float("inf")
            )
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """Release the environment."""
        self.collector.shutdown()


def build_loss(
    actor: ProbabilisticActor,
    critic: TensorDictModule,
    ppo: CommonPpoParameters,
    rl: RlTrainerParameters,
) -> ClipPPOLoss:
    """TorchRL's clipped loss with our parameters."""
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=(ppo.clip_low, ppo.clip_high),
        entropy_coeff=ppo.entropy_weight,
        critic_coeff=ppo.critic_coef,
        loss_critic_type=rl.loss_critic_type,
        normalize_advantage=ppo.normalize_advantage,
        normalize_advantage_exclude_dims=(-2,),
        functional=False,
    )
    loss_module.set_keys(
        advantage=("agents", "advantage"),
        value_target=("agents", "value_target"),
        value=("agents", "value"),
        reward=("agents", "reward"),
        action=[("agents", "message"), ("agents", "decision")],
        sample_log_prob=[("agents", "message_log_prob"), ("agents", "decision_log_prob")],
    )
    return loss_module


# ---- comparison of losses


def compare(trainer: TensorDictRlTrainer, plain: TorchRlBaseline) -> dict[str, float]:
    """Maximum differences of losses and gradients, relative to the largest value.

    Both use the same weights and frames. To make the losses comparable, advantages are 0 for
    inactive agents and not normalised, and our means are weighted by the share of frames in which
    the agent acts. Noise on the sampled log-probabilities makes the ratios differ from 1.
    """
    frames, shares = _frames_to_compare(trainer)
    num_agents = len(trainer.agents.names)
    ppo = trainer.hyper_params.ppo.model_copy(update={"normalize_advantage": False})
    ours = IppoObjective(trainer.agents, ppo, trainer.rl)(frames)
    theirs = build_loss(plain.actor, plain.critic, ppo, trainer.rl)(frames)
    losses: list[tuple[Tensor, Tensor]] = []
    for kind, name in (("policy", "objective"), ("value", "critic"), ("entropy", "entropy")):
        weights = shares if kind != "value" else dict.fromkeys(shares, 1.0)
        total = sum(ours[f"loss_{kind}_{agent}"] * weight for agent, weight in weights.items())
        assert isinstance(total, Tensor)
        losses.append((total, theirs[f"loss_{name}"].sum() * num_agents))
    pairs = list(_same_weights(trainer, plain))
    our_gradients = torch.autograd.grad(_sum([a for a, _ in losses]), [a for a, _ in pairs])
    gradients = torch.autograd.grad(_sum([b for _, b in losses]), [b for _, b in pairs])
    return {
        "losses": max(_difference(a.detach(), b.detach()) for a, b in losses),
        "gradients": max(map(_difference, our_gradients, gradients)),
    }


def _frames_to_compare(trainer: TensorDictRlTrainer) -> tuple[TensorDict, dict[str, float]]:
    frames = trainer.collect().flatten().clone()
    names = trainer.agents.names
    acting_BA = torch.stack([trainer.agents.is_acting(name, frames) for name in names], dim=1)
    generator = torch.Generator().manual_seed(0)
    noise_BA = 0.2 * torch.randn(acting_BA.shape, generator=generator) * acting_BA
    agents = frames["agents"]
    agents["logprob"] = agents["logprob"] + noise_BA
    agents["advantage"] = agents["advantage"] * acting_BA.unsqueeze(-1)
    agents["message_log_prob"] = agents["logprob"]
    agents["decision_log_prob"] = torch.zeros_like(agents["logprob"])
    shares = acting_BA.float().mean(dim=0).tolist()
    return frames, dict(zip(names, shares, strict=True))


def _same_weights(
    trainer: TensorDictRlTrainer, plain: TorchRlBaseline
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Pairs of input-layer weights, ours and the baseline's."""
    pairs = []
    for number, name in enumerate(trainer.agents.names):
        agent = trainer.agents[name]
        ours: Any = agent
        bodies = (ours.policy_body, plain.actor), (ours.value_body, plain.critic)
        for body, module in bodies:
            parameters = dict(module.named_parameters())
            (weight,) = (
                value
                for key, value in parameters.items()
                if key.endswith(f"{number}.node_input.weight")
            )
            pairs.append((body.node_input.weight, weight))
    return pairs


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum()


def _difference(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
