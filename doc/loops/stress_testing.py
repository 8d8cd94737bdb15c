"""Online DPO of an attacker in plain PyTorch: python doc/loops/stress_testing.py

This is the loop of `ast_dpo` without checkpoints, tracking, dev evaluation and processes. It prints
the metrics that the trainer logs. Edit `select_pairs` or `dpo_loss` to try an idea.

From nip_astra come
- `resolve_experiment` and `prepare_experiment`: parameters, models, prompts;
- `sampler.sample`: conversation trees with scores, rewards and log-probabilities of the reference;
- `policy.logprobs`: log-probabilities of given tokens, with gradient.

Shape suffixes: B pair, T token, N node of the tree, G sibling.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import nip_astra as na

SEED = 0
BETA = 0.1  # inverse temperature; larger stays closer to the reference
MIN_REWARD_DIFFERENCE = 0.1
MIN_CHOSEN_SCORE = 0.5  # the chosen probe must have made the target fail
LR = 4e-4
MINIBATCH_SIZE = 32  # pairs per optimizer step
MAX_GRAD_NORM = 1.0
EPISODES = 4  # trees per iteration
TREE = {"tree_width": 4, "tree_depth": 3}  # siblings per turn, turns
FAILURE_THRESHOLD = 0.5

Pair = dict[str, Tensor]


def select_pairs(tree: na.RolloutTree) -> list[Pair]:
    """The best and the worst sibling of each node, if they differ enough."""
    nodes, pairs = tree.nodes, []
    for group_G in tree.sibling_groups():
        rewards_G = nodes["reward"][group_G]
        group_G, rewards_G = (
            group_G[~rewards_G.isnan()],
            rewards_G[~rewards_G.isnan()],
        )  # no verdict
        if len(group_G) < 2:
            continue
        best, worst = int(group_G[rewards_G.argmax()]), int(group_G[rewards_G.argmin()])
        if rewards_G.max() - rewards_G.min() <= MIN_REWARD_DIFFERENCE:
            continue
        if nodes["response_score"][best] < MIN_CHOSEN_SCORE:
            continue
        chosen, rejected = (nodes["probe"][i][nodes["probe_mask"][i]] for i in (best, worst))
        if torch.equal(chosen, rejected):
            continue
        # Log-probabilities of the whole probe: sums over its tokens, 0 on padding.
        reference_N = nodes["reference_logprobs"].sum(dim=1)
        pairs.append(
            {
                "context": torch.tensor(tree.context_of(best)),
                "chosen": chosen,
                "rejected": rejected,
                "reference_logratio": reference_N[best] - reference_N[worst],
            }
        )
    return pairs


def dpo_loss(policy: na.LanguageModel, pairs: list[Pair]) -> tuple[Tensor, dict[str, float]]:
    """-log sigmoid(beta h), mean over pairs (arXiv:2305.18290, eq. 7).

    h is the log-ratio of chosen to rejected under the policy, minus that under the reference.
    """
    context_BC, context_mask_BC = pad([pair["context"] for pair in pairs], side="left")
    # One call for both, so that shared contexts are forwarded once.
    answers = [pair[name] for name in ("chosen", "rejected") for pair in pairs]
    ids_BT, mask_BT = pad(answers, side="right")
    logprobs_BT = policy.logprobs(
        context_BC.repeat(2, 1), context_mask_BC.repeat(2, 1), ids_BT, mask_BT
    )
    chosen_B, rejected_B = logprobs_BT.sum(dim=1).chunk(2)
    reference_B = torch.stack([pair["reference_logratio"] for pair in pairs])
    margin_B = BETA * (chosen_B - rejected_B - reference_B)
    metrics = {
        "preference_margin": float(margin_B.detach().mean()),
        "preference_accuracy": float((margin_B.detach() > 0).float().mean()),
    }
    return -F.logsigmoid(margin_B).mean(), metrics


def pad(sequences: list[Tensor], *, side: str) -> tuple[Tensor, Tensor]:
    """Token ids and their mask; contexts are padded on the left, so that probes follow directly."""
    ids = pad_sequence(sequences, batch_first=True, padding_side=side)
    ones = [torch.ones(len(s), dtype=torch.bool) for s in sequences]
    return ids, pad_sequence(ones, batch_first=True, padding_side=side)


def prompts_of(prompts: list[str], iteration: int) -> list[str]:
    """The opening prompts of an iteration: passes through all prompts in random orders."""
    chosen = []
    for number in range(iteration * EPISODES, (iteration + 1) * EPISODES):
        epoch, index = divmod(number, len(prompts))
        generator = na.derived_generator(SEED, "prompts", epoch)
        order = torch.randperm(len(prompts), generator=generator).tolist()
        chosen.append(prompts[order[index]])
    return chosen


def minibatches(pairs: list[Pair], iteration: int) -> Iterator[list[Pair]]:
    """The pairs in random order; the last minibatch may be smaller."""
    generator = na.derived_generator(SEED, "shuffle", iteration, 0)
    order = torch.randperm(len(pairs), generator=generator).tolist()
    for start in range(0, len(order), MINIBATCH_SIZE):
        yield [pairs[i] for i in order[start : start + MINIBATCH_SIZE]]


def tree_metrics(tree: na.RolloutTree) -> dict[str, float]:
    """Metrics of a rollout, over nodes."""
    nodes = tree.nodes
    scores_N, mask_NT = nodes["response_score"], nodes["probe_mask"]
    is_rated_N = ~scores_N.isnan()
    return {
        "mean_reward": float(nodes["reward"].nanmean()),
        "failure_rate": float((scores_N >= FAILURE_THRESHOLD)[is_rated_N].float().mean()),
        "probe_nll": float(-(nodes["reference_logprobs"] * mask_NT).sum() / mask_NT.sum()),
    }


def overrides(num_iterations: int) -> list[str]:
    """Parameters that reproduce this loop with the trainer."""
    return [f"seed={SEED}", f"training.num_iterations={num_iterations}"]


def train(num_iterations: int) -> Iterator[dict[str, float]]:
    """Train, and yield the metrics of each iteration."""
    experiment = na.resolve_experiment(trainer="ast_dpo", overrides=overrides(num_iterations))
    instance = na.prepare_experiment(experiment, progress=False).scenario_instance
    policy = instance.agents["attacker"].language_model
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    for iteration in range(num_iterations):
        # 1. Sample trees. Equal keys give equal random numbers.
        with torch.no_grad():
            prompts = prompts_of(instance.datasets["train"], iteration)
            tree = instance.sampler.sample(prompts, **TREE, key=(SEED, "train", iteration))
        # 2. Compare siblings.
        pairs = select_pairs(tree)
        metrics = tree_metrics(tree) | {"pairs/kept": float(len(pairs))}
        # 3. One optimizer step per minibatch. Step metrics are averaged over the iteration.
        steps = []
        for batch in minibatches(pairs, iteration):
            loss, step = dpo_loss(policy, batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            steps.append({"loss": float(loss.detach()), "grad_norm": float(norm)} | step)
        for name in steps[0] if steps else ():
            metrics[name] = sum(step[name] for step in steps) / len(steps)
        yield metrics


def main() -> None:
    """Print one line per iteration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-iterations", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for iteration, metrics in enumerate(train(arguments.num_iterations), start=1):
        print(f"{iteration:3}", *(f"{name}={value:.4g}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
