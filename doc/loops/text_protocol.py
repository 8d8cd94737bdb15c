"""Expert iteration of chat models in plain PyTorch: python doc/loops/text_protocol.py

This is the loop of `pure_text_ei` without jobs, checkpoints, tracking and tests: prover and
verifier are one small model in this process. It prints the metrics that the trainer logs. Edit
`select` or `nll_loss` to try an idea.

From nip_astra come
- `resolve_experiment` and `prepare_experiment`: parameters, agents, prompts, data;
- `TextRolloutSampler` and `train_episodes`: conversations that follow the protocol;
- `policy.logprobs`: log-probabilities of given tokens, with gradient.

Shape suffixes: B example, T token.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import nip_astra as na
from nip_astra.samplers.text_rollouts import TextNode, TextRolloutSampler
from nip_astra.trainers.text.rollouts import train_episodes

SEED = 0
NUM_ROLLOUTS = 192  # per iteration
REWARD_THRESHOLD = 0.9  # an agent learns from rollouts in which it earned at least this
LR = 2 * 2e-4  # linear to 0 over the steps of an iteration
NUM_EPOCHS, MINIBATCH_SIZE = 2, 16
MAX_GRAD_NORM = 1.0

Example = tuple[list[int], list[int]]  # tokens of the prompt and of the answer


def rewards_of(rollout: TextNode) -> list[float]:
    """Return of each agent: the sum of its rewards over all rounds."""
    return [
        sum(rewards) for rewards in zip(*(n.outcome.rewards for n in rollout.path()), strict=True)
    ]


def select(rollouts: list[TextNode], agent_names: tuple[str, ...]) -> list[tuple[list[Any], str]]:
    """Prompt and answer of every turn that an agent had in its good rollouts."""
    chosen = []
    for number, name in enumerate(agent_names):
        for rollout in rollouts:
            if rewards_of(rollout)[number] < REWARD_THRESHOLD:
                continue
            for node in rollout.path():
                move = node.moves.get(name)
                if move is not None and not move.is_filled:
                    chosen.append((list(move.prompt), move.answer))
    return chosen


def encode(policy: na.LanguageModel, messages: list[Any], answer: str) -> Example:
    """Tokens of a prompt, and of an answer with the end of its turn."""
    tokenizer = policy.tokenizer
    messages = [dict(message) for message in messages]
    before = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    last = {"role": "assistant", "content": answer}
    whole = tokenizer.apply_chat_template([*messages, last], tokenize=False)
    ids = tokenizer.encode(whole[len(before) :], add_special_tokens=False)
    end = next(place for place, token in enumerate(ids) if token in policy.end_ids)
    return tokenizer.encode(before, add_special_tokens=False), ids[: end + 1]


def nll_loss(policy: na.LanguageModel, examples: list[Example]) -> Tensor:
    """Cross-entropy, mean over the tokens of the answers."""
    context_BC, context_mask_BC = pad([context for context, _ in examples], side="left")
    ids_BT, mask_BT = pad([answer for _, answer in examples])
    logprobs_BT = policy.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)
    return -logprobs_BT.sum() / mask_BT.sum()  # log-probabilities are 0 on padding


def pad(sequences: list[list[int]], *, side: str = "right") -> tuple[Tensor, Tensor]:
    """Tokens and their mask; prompts are padded on the left, so that answers follow directly."""
    ids = [torch.tensor(sequence) for sequence in sequences]
    ones = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    padded, mask = (pad_sequence(x, batch_first=True, padding_side=side) for x in (ids, ones))
    return padded, mask


def fine_tune(policy: na.LanguageModel, examples: list[Example], *, seed: int) -> None:
    """Epochs of minibatches with a new optimizer, as in a fine-tuning job."""
    weights = [weight for weight in policy.module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0)
    steps_per_epoch = -(-len(examples) // MINIBATCH_SIZE)
    for step in range(NUM_EPOCHS * steps_per_epoch):
        epoch, place = divmod(step, steps_per_epoch)
        generator = na.derived_generator(seed, "order", epoch)
        order = torch.randperm(len(examples), generator=generator).tolist()
        batch = order[place * MINIBATCH_SIZE : (place + 1) * MINIBATCH_SIZE]
        nll_loss(policy, [examples[i] for i in batch]).backward()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
        optimizer.param_groups[0]["lr"] = LR * (1 - step / (NUM_EPOCHS * steps_per_epoch))
        optimizer.step()
        optimizer.zero_grad()


def rollout_metrics(rollouts: list[TextNode], agent_names: tuple[str, ...]) -> dict[str, float]:
    """Accuracy of the verifier and returns of the agents. No decision counts as incorrect."""
    decisions = [rollout.outcome.decision for rollout in rollouts]
    labels = [int(rollout.episode.datapoint["y"]) for rollout in rollouts]
    is_correct = [decision == label for decision, label in zip(decisions, labels, strict=True)]
    metrics = {
        "mean_accuracy": sum(is_correct) / len(rollouts),
        "share_undecided": sum(decision == na.CONTINUE for decision in decisions) / len(rollouts),
    }
    for number, name in enumerate(agent_names):
        returns = [rewards_of(rollout)[number] for rollout in rollouts]
        metrics[f"{name}/mean_episode_reward"] = sum(returns) / len(returns)
    return metrics


def overrides(num_iterations: int) -> list[str]:
    """Parameters that reproduce this loop with the trainer."""
    return [
        f"seed={SEED}",
        f"text_rl.num_iterations={num_iterations}",
    ]


def train(num_iterations: int) -> Iterator[dict[str, float]]:
    """Train, and yield the metrics of each iteration."""
    experiment = na.resolve_experiment(trainer="pure_text_ei", overrides=overrides(num_iterations))
    instance = na.prepare_experiment(experiment, progress=False).scenario_instance
    agent_names = instance.game.protocol.agent_names
    ((name, group),) = instance.shared_model_groups.items()
    policy = group.model.model.language_model  # `model.model`: without retries and limits
    policy.trainable = True
    policy.module.requires_grad_(True)
    for layer in (policy.module.get_input_embeddings(), policy.module.get_output_embeddings()):
        layer.requires_grad_(False)  # otherwise words without examples are forgotten
    sampler = TextRolloutSampler(instance.game, instance.agents)
    for iteration in range(num_iterations):
        # 1. Play conversations. Equal keys give equal random numbers.
        episodes = train_episodes(instance, seed=SEED, iteration=iteration, count=NUM_ROLLOUTS)
        key = (SEED, "train", iteration)
        with torch.no_grad():
            rollouts = instance.loop.run(sampler.sample(list(episodes), key=key))
        yield rollout_metrics(rollouts, agent_names)
        # 2. Imitate the good ones. The last iteration trains nothing.
        if iteration + 1 < num_iterations:
            chosen = select(rollouts, agent_names)
            examples = [encode(policy, messages, answer) for messages, answer in chosen]
            seed = na.derive_seed(SEED, "fine-tune job", name, iteration) % 2**31
            fine_tune(policy, examples, seed=seed)


def main() -> None:
    """Print one line per iteration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-iterations", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for iteration, metrics in enumerate(train(arguments.num_iterations), start=1):
        print(f"{iteration:3}", *(f"{name}={value:.4g}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
