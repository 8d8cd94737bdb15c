"""GRPO of a policy on arithmetic in plain PyTorch: python doc/loops/task.py

This is the loop of `self_hosted_grpo` without checkpoints, tracking, evaluation and processes. It
prints the metrics that the trainer logs. Edit `advantages` or `clipped_loss` to try an idea.

From nip_astra come
- `resolve_experiment` and `prepare_experiment`: parameters, policy, task;
- `play_task`: trajectories with rewards and log-probabilities of the sampled tokens;
- `policy.logprobs`: log-probabilities of given tokens, with gradient.

Shape suffixes: B trajectory, T token of the response, N trajectory of an iteration.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import nip_astra as na

SEED = 0
PROBLEMS, RUNS = 32, 8  # problems per iteration, runs of each
MAX_TURNS = 8
LR = 5e-4
MINIBATCH_SIZE = 256  # trajectories per optimizer step
MAX_GRAD_NORM = 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.2  # distances of the ratio from 1

Sample = dict[str, Tensor]


def advantages(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-6) over the runs of a problem (arXiv:2402.03300).

    The standard deviation is unbiased. A problem whose runs have equal rewards gives exactly 0.
    """
    advantages_N = torch.zeros_like(rewards_N)
    for group in group_N.unique():
        is_own_N = group_N == group
        rewards_G = rewards_N[is_own_N]
        if len(rewards_G) > 1 and rewards_G.max() > rewards_G.min():
            std = rewards_G.std()
            advantages_N[is_own_N] = (rewards_G - rewards_G.mean()) / (std + 1e-6)
    return advantages_N


def clipped_loss(
    policy: na.LanguageModel, samples: list[Sample]
) -> tuple[Tensor, dict[str, float]]:
    """max(-ratio A, -clip(ratio) A), mean over the trained tokens (arXiv:1707.06347, eq. 7)."""
    context_BC, context_mask_BC = pad([s["context"] for s in samples], side="left")
    response_BT, response_mask_BT = pad([s["response"] for s in samples])
    old_BT, _ = pad([s["old_logprobs"] for s in samples])
    mask_BT = pad([s["is_trained"] for s in samples])[0] & response_mask_BT
    advantage_B1 = torch.stack([s["advantage"] for s in samples]).unsqueeze(1)
    logprobs_BT = policy.logprobs(context_BC, context_mask_BC, response_BT, response_mask_BT)
    # Masked before exp: padding must not give infinity times 0.
    ratio_BT = torch.where(mask_BT, logprobs_BT - old_BT, 0.0).exp()
    clipped_BT = ratio_BT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss_BT = torch.maximum(-ratio_BT * advantage_B1, -clipped_BT * advantage_B1)
    loss = torch.where(mask_BT, loss_BT, 0.0).sum() / mask_BT.sum()
    return loss, {"ratio_mean": float(row_means(ratio_BT.detach(), mask_BT).mean())}


def row_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the tokens of each trajectory."""
    return torch.where(mask_BT, values_BT, 0.0).sum(dim=1) / mask_BT.sum(dim=1)


def pad(sequences: list[Tensor], *, side: str = "right") -> tuple[Tensor, Tensor]:
    """Sequences and their mask; contexts are padded on the left, so that responses follow."""
    padded = pad_sequence(sequences, batch_first=True, padding_side=side)
    ones = [torch.ones(len(s), dtype=torch.bool) for s in sequences]
    return padded, pad_sequence(ones, batch_first=True, padding_side=side)


def problems_of(task: na.Task, iteration: int) -> list[int]:
    """The problems of an iteration: passes through a data set in random orders."""
    numbers = range(iteration * PROBLEMS, (iteration + 1) * PROBLEMS)
    count = task.num_problems("train")
    if count is None:  # problems are generated
        return list(numbers)
    chosen = []
    for number in numbers:
        epoch, index = divmod(number, count)
        order = torch.randperm(count, generator=na.derived_generator(SEED, "problems", epoch))
        chosen.append(int(order[index]))
    return chosen


def samples_of(trajectories: list[na.Trajectory]) -> list[Sample]:
    """The prompt as context, and the rest to learn from, with an advantage per trajectory."""
    rewards_N = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    problems = list(dict.fromkeys(t["group_id"] for t in trajectories))
    group_N = torch.tensor([problems.index(t["group_id"]) for t in trajectories])
    samples = []
    for trajectory, advantage in zip(trajectories, advantages(rewards_N, group_N), strict=True):
        start = int(trajectory.loss_mask.nonzero()[0])  # first token that the policy generated
        samples.append(
            {
                "context": trajectory.tokens[:start],
                "response": trajectory.tokens[start:],
                "is_trained": trajectory.loss_mask[start:].bool(),
                "old_logprobs": trajectory.logprobs[start:],
                "advantage": advantage.float(),
            }
        )
    return samples


def minibatches(samples: list[Sample], iteration: int) -> Iterator[list[Sample]]:
    """The samples in random order; the last minibatch may be smaller."""
    generator = na.derived_generator(SEED, "shuffle", iteration, 0)
    order = torch.randperm(len(samples), generator=generator).tolist()
    for start in range(0, len(order), MINIBATCH_SIZE):
        yield [samples[i] for i in order[start : start + MINIBATCH_SIZE]]


def overrides(num_iterations: int) -> list[str]:
    """Parameters that reproduce this loop with the trainer."""
    return [f"seed={SEED}", f"training.num_iterations={num_iterations}"]


def train(num_iterations: int) -> Iterator[dict[str, float]]:
    """Train, and yield the metrics of each iteration."""
    experiment = na.resolve_experiment(
        trainer="self_hosted_grpo", overrides=overrides(num_iterations)
    )
    instance = na.prepare_experiment(experiment, progress=False).scenario_instance
    agent, task = instance.agents["policy"], instance.task
    policy = agent.language_model
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    for iteration in range(num_iterations):
        # 1. Run the problems. Equal keys give equal random numbers.
        plan = na.TaskPlan("train", RUNS, MAX_TURNS, (SEED, "rollout", iteration))
        with torch.no_grad():
            rollout = na.play_task(agent, task, problems_of(task, iteration), plan)
        samples = samples_of(rollout.trajectories)
        rewards = torch.tensor([t.reward for t in rollout.trajectories])
        metrics = {"rollout/reward_mean": float(rewards.mean())}
        # 2. One optimizer step per minibatch. Step metrics are averaged over the iteration.
        steps = []
        for batch in minibatches(samples, iteration):
            loss, step = clipped_loss(policy, batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            steps.append({"loss": float(loss.detach()), "grad_norm": float(norm)} | step)
        for name in steps[0]:
            metrics[name] = sum(step[name] for step in steps) / len(steps)
        yield metrics


def main() -> None:
    """Print one line per iteration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-iterations", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for iteration, metrics in enumerate(train(arguments.num_iterations), start=1):
        print(f"{iteration:3}", *(f"{name}={value:.4g}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
