"""PPO of a prover and a verifier in plain PyTorch: python doc/loops/interactive_proof.py

This is the loop of `vanilla_ppo` without checkpoints, tracking, tests and processes, on the graph
isomorphism game of its preset, without pretraining and with smaller steps. It prints the metrics
that the trainer logs. Rounding differs, so the last digit may too. Edit `advantages` or
`ppo_losses` to try an idea.

From nip_astra come
- `resolve_experiment` and `prepare_experiment`: parameters, agents, environments;
- `EpisodeSampler`: frames of many environments, with log-probabilities of the moves;
- `agents.evaluate` and `agents.values`: log-probabilities, entropies and values, with gradient.

Shape suffixes: E environment, T round, A agent, B frame.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

import nip_astra as na

SEED = 0
LR = 3e-4  # annealed linearly to 0
GAMMA, LMBDA = 0.95, 0.95
CLIP_EPSILON = 0.2
ENTROPY_COEF = 0.003
NUM_EPOCHS, MINIBATCH_SIZE = 2, 512
MAX_GRAD_NORM = 0.5  # per agent

Frames = dict[Any, Tensor]


def advantages(batch: TensorDict, value_ETA: Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), and targets of the values.

    Here every episode ends with the last round of the batch, so nothing is bootstrapped there.
    """
    reward_ETA = batch["next", "agents", "reward"].squeeze(-1)
    goes_on_ETA = (~(batch["next", "terminated"] | batch["next", "has_decided"])).float()
    next_value_ETA = torch.cat([value_ETA[:, 1:], torch.zeros_like(value_ETA[:, :1])], dim=1)
    delta_ETA = reward_ETA + GAMMA * next_value_ETA * goes_on_ETA - value_ETA
    total_EA = torch.zeros_like(delta_ETA[:, 0])
    columns = []
    for t in reversed(range(delta_ETA.shape[1])):
        total_EA = delta_ETA[:, t] + GAMMA * LMBDA * goes_on_ETA[:, t] * total_EA
        columns.append(total_EA)
    advantage_ETA = torch.stack(columns[::-1], dim=1)
    return advantage_ETA, advantage_ETA + value_ETA


def ppo_losses(agents: na.CombinedAgents, name: str, frames: Frames) -> dict[str, Tensor]:
    """Clipped policy loss, value loss and entropy bonus of one agent (arXiv:1707.06347, eq. 7).

    Policy and entropy are means over the frames in which the agent acts, values over all.
    """
    number = agents.number(name)
    values_B = agents.values(name, frames)
    targets_B = frames["agents", "value_target"][:, number, 0]
    rows = agents.is_acting(name, frames).nonzero().flatten()
    acting = {key: tensor[rows] for key, tensor in frames.items()}
    policy = agents.evaluate(name, acting)
    log_ratio_B = policy.logprobs_B - acting["agents", "logprob"][:, number]
    ratio_B = log_ratio_B.exp()
    advantage_B = acting["agents", "advantage"][:, number, 0]
    advantage_B = (advantage_B - advantage_B.mean()) / advantage_B.std().clamp(min=1e-6)
    clipped_B = ratio_B.clamp(1 - CLIP_EPSILON, 1 + CLIP_EPSILON)
    return {
        "loss_policy": -torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).mean(),
        "loss_entropy": -ENTROPY_COEF * policy.entropies_B.mean(),
        "loss_value": F.smooth_l1_loss(values_B, targets_B),
        "kl": -log_ratio_B.detach().mean(),
        "entropy": policy.entropies_B.detach().mean(),
    }


def minibatches(frames: Frames, epoch: int) -> Iterator[Frames]:
    """The frames in random order; `epoch` counts over the whole run."""
    num_frames = len(frames["round"])
    generator = na.derived_generator(SEED, "minibatches", epoch)
    order = torch.randperm(num_frames, generator=generator)
    for start in range(0, num_frames, MINIBATCH_SIZE):
        rows = order[start : start + MINIBATCH_SIZE]
        yield {key: tensor[rows] for key, tensor in frames.items()}


def collect(sampler: na.EpisodeSampler, agents: na.CombinedAgents, num_rounds: int) -> TensorDict:
    """One episode per environment, with advantages."""
    with torch.no_grad():
        batch = sampler.collect(num_rounds)
        flat = batch.flatten()
        value_BA = torch.stack([agents.values(name, flat) for name in agents.names], dim=-1)
        value_ETA = value_BA.reshape(*batch.batch_size, -1)
        advantage_ETA, target_ETA = advantages(batch, value_ETA)
    batch["agents", "advantage"] = advantage_ETA.unsqueeze(-1)
    batch["agents", "value_target"] = target_ETA.unsqueeze(-1)
    return batch


def episode_metrics(batch: TensorDict, agents: na.CombinedAgents) -> dict[str, float]:
    """Accuracy of the verifier and rewards of the agents, over the episodes of a batch."""
    is_correct_E = batch["next", "decision"][:, -1] == batch["y"][:, -1, 0]
    reward_EA = batch["next", "agents", "reward"].squeeze(-1).sum(dim=1)
    metrics = {"mean_accuracy": float(is_correct_E.float().mean())}
    for number, name in enumerate(agents.names):
        metrics[f"{name}/mean_episode_reward"] = float(reward_EA[:, number].mean())
    return metrics


def overrides(num_iterations: int) -> list[str]:
    """Parameters that reproduce this loop with the trainer."""
    return [
        f"seed={SEED}",
        f"rl.num_iterations={num_iterations}",
        f"rl.lr={LR}",
        f"rl.num_epochs={NUM_EPOCHS}",
        "rl.pretrain_agents=false",
    ]


def train(num_iterations: int) -> Iterator[dict[str, float]]:
    """Train, and yield the metrics of each iteration."""
    experiment = na.resolve_experiment(trainer="vanilla_ppo", overrides=overrides(num_iterations))
    instance = na.prepare_experiment(experiment, progress=False).scenario_instance
    agents = instance.combined_agents
    num_rounds = instance.protocol_handler.max_message_rounds
    sampler = na.EpisodeSampler(instance.train_environment, agents, key=(SEED, "train"))
    optimizers = {
        name: torch.optim.Adam(agents[name].parameters(), lr=LR, eps=1e-5) for name in agents.names
    }
    for iteration in range(num_iterations):
        # 1. Play an episode in each environment.
        agents.eval()
        batch = collect(sampler, agents, num_rounds)
        frames = dict(batch.flatten().items(include_nested=True, leaves_only=True))
        frames = {key: tensor for key, tensor in frames.items() if key[0] != "next"}
        # 2. Epochs of minibatches. Agents share no weights, so each has its own step.
        agents.train()
        sums: dict[str, list[float]] = {}
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = LR * (1 - iteration / num_iterations)
        for epoch in range(NUM_EPOCHS):
            for minibatch in minibatches(frames, iteration * NUM_EPOCHS + epoch):
                for name, optimizer in optimizers.items():
                    losses = ppo_losses(agents, name, minibatch)
                    optimizer.zero_grad()
                    total = sum(loss for key, loss in losses.items() if key.startswith("loss"))
                    total.backward()
                    weights = agents[name].parameters()
                    losses["grad_norm"] = torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
                    optimizer.step()
                    for key, value in losses.items():
                        sums.setdefault(f"{name}/{key}", []).append(float(value.detach()))
        yield episode_metrics(batch, agents) | {
            name: sum(values) / len(values) for name, values in sums.items()
        }


def main() -> None:
    """Print one line per iteration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-iterations", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for iteration, metrics in enumerate(train(arguments.num_iterations), start=1):
        print(f"{iteration:3}", *(f"{name}={value:.3g}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
