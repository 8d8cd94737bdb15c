"""The table of built-in components: what ships under which name, without importing any of it.

A built-in is one line here, and registers itself in its module by the decorator of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class BuiltIn(NamedTuple):
    """A component that ships with the package.

    Attributes
    ----------
    module : str
        Module that registers it.
    summary : str
        First line of its docstring, which `list` shows.
    """

    module: str
    summary: str


class Kind(NamedTuple):
    """A kind of component.

    Attributes
    ----------
    registry : str
        Module that has its registry.
    summaries : Mapping[str, Mapping[str, str]]
        The summary of each built-in, by module and name.
    """

    registry: str
    summaries: Mapping[str, Mapping[str, str]]

    def built_ins(self) -> dict[str, BuiltIn]:
        """Return what ships, by name."""
        return {
            name: BuiltIn(module, summary)
            for module, names in self.summaries.items()
            for name, summary in names.items()
        }


KINDS: Mapping[str, Kind] = {
    "advantage": Kind(
        "nip_astra.rl_objectives.registry",
        {
            "nip_astra.rl_objectives.advantages": {
                "group": "Compare each reward with those of its group: `A = (r - mu) / (std + std_epsilon)`.",
            },
        },
    ),
    "call_form": Kind(
        "nip_astra.language_models.call_forms",
        {
            "nip_astra.language_models.call_forms": {
                "action": "Each call, or a list of calls, in JSON between marks.",
                "argument_tags": "Arguments as texts between tags.",
                "bare_keys": "Gemma's calls: `call:NAME{key:value}`, with strings between marks of their own.",
                "function_tags": "Arguments as texts between tags.",
                "json": "Each call, or a list of calls, in JSON between marks.",
                "named_json": "DeepSeek's calls: a name and its arguments in JSON, each call between marks of its own.",
                "python_calls": "LFM's calls: a list of calls as in Python, with named arguments.",
                "tool_call_list": "Each call, or a list of calls, in JSON between marks.",
            },
        },
    ),
    "chat_model": Kind(
        "nip_astra.language_models.services.chat",
        {
            "nip_astra.language_models.services.chat_models.openai": {
                "openai": "A model behind any service with OpenAI's chat-completions protocol.",
            },
            "nip_astra.language_models.services.chat_models.local": {
                "local": "A language model in this process; requests that wait at the same time are answered together.",
            },
            "nip_astra.language_models.services.chat_models.scripted": {
                "scripted": "Answers from a list, by patterns of the last message, or by a function.",
            },
            "nip_astra.language_models.services.chat_models.python": {
                "python": "Answers from a function `f(messages, **options) -> str | dict | ChatAnswer`.",
            },
            "nip_astra.language_models.services.chat_models.http": {
                "http": "A model behind any HTTP service that takes and returns JSON.",
            },
        },
    ),
    "evaluation_family": Kind(
        "nip_astra.evaluation.families.base",
        {
            "nip_astra.evaluation.families.conversations": {
                "conversation": "Runs of attackers; checkpoints, models, lists of probes and chat models that attack.",
            },
            "nip_astra.evaluation.families.protocols": {
                "protocol": "Runs whose agents are networks that play an interaction protocol.",
            },
            "nip_astra.evaluation.families.tasks": {
                "task": "Runs whose policy answers problems.",
            },
            "nip_astra.evaluation.families.text_protocols": {
                "text_protocol": "Runs whose agents are chat models that play an interaction protocol.",
            },
        },
    ),
    "export_format": Kind(
        "nip_astra.evaluation.exports",
        {
            "nip_astra.evaluation.exports": {
                "csv": "Write tables, `figures.csv` and `metrics.csv`; nested values have dotted names.",
                "hitlog": "Write `hitlog.jsonl`: failing turns, in the columns of garak's hit logs.",
                "inspect": "Write `<name>.eval`, an Inspect log with one sample per unit.",
                "jsonl": "Write a line about the run, one per row with full texts, and one with their number.",
                "parquet": "Write one row per unit, readable by `datasets.load_dataset`.",
                "tensorboard": "Write an event file of learning curves, with the evaluation's figures at the last step.",
            },
        },
    ),
    "language_model": Kind(
        "nip_astra.language_models.base",
        {
            "nip_astra.language_models.huggingface": {
                "huggingface": "A causal language model that runs in this process.",
            },
            "nip_astra.language_models.vllm": {
                "vllm": "A causal language model sampled by vLLM in this process.",
            },
            "nip_astra.language_models.remote": {
                "remote": "The tokenizer of a model that a training service samples, scores and trains.",
            },
        },
    ),
    "launcher": Kind(
        "nip_astra.sweep.runner",
        {
            "nip_astra.sweep.runner": {
                "processes": "Runs each run as a process on this machine.",
                "ray": "Runs each run as a task on any machine of a Ray cluster.",
            },
        },
    ),
    "message_regressor": Kind(
        "nip_astra.parameters.trainers",
        {
            "nip_astra.message_regressors.base": {
                "mlp": "A multilayer perceptron, fitted by Adam on the binary cross entropy.",
                "linear": "Logistic regression by Newton's method, linear in the symbols.",
            },
        },
    ),
    "metric": Kind(
        "nip_astra.evaluation.comparison",
        {},
    ),
    "optimizer": Kind(
        "nip_astra.parameters.training",
        {
            "nip_astra.trainers.optimization": {
                "adadelta": "`torch.optim.Adadelta`.",
                "adafactor": "`torch.optim.Adafactor`.",
                "adagrad": "`torch.optim.Adagrad`.",
                "adam": "`torch.optim.Adam`.",
                "adamax": "`torch.optim.Adamax`.",
                "adamw": "`torch.optim.AdamW`.",
                "asgd": "`torch.optim.ASGD`.",
                "nadam": "`torch.optim.NAdam`.",
                "radam": "`torch.optim.RAdam`.",
                "rmsprop": "`torch.optim.RMSprop`.",
                "rprop": "`torch.optim.Rprop`.",
                "sgd": "`torch.optim.SGD`.",
            },
        },
    ),
    "policy_loss": Kind(
        "nip_astra.rl_objectives.registry",
        {
            "nip_astra.rl_objectives.policy_losses": {
                "ppo": "`-min(r A, clip(r) A)`, the clipped loss of PPO (arXiv:1707.06347, eq. 7).",
                "importance_sampling": "`-r A`, without a clip.",
                "cispo": "`-clip(r) A log pi` with a constant `clip(r)` (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).",
                "gspo": "PPO's loss with one ratio per row, the geometric mean over its tokens (arXiv:2507.18071).",
                "luspo": "GSPO's loss of a row times its length (LUSPO, arXiv:2602.05261).",
                "vespo": "`-phi(w) A log pi`, constant `phi(w) = w**k exp(lambda (1 - w))` (VESPO, arXiv:2602.10693).",
                "rloo": "PPO's loss with the ratio of the whole row (arXiv:2402.14740, clipped for later epochs).",
                "sapo": "`-(4 / tau) sigmoid(tau (r - 1)) A`: a soft gate in place of a clip (arXiv:2511.20347).",
                "dro": "`beta / 2 (log r)^2 - A log pi`, direct reward optimisation (Tinker's; arXiv:2405.19107).",
                "reinforce": "`-A log pi`, without a ratio (Williams, 1992).",
                "cross_entropy": "`-log pi`: supervised learning, which reads neither advantages nor old log-probabilities.",
            },
        },
    ),
    "pretrained_model": Kind(
        "nip_astra.scenarios.images.pretrained",
        {
            "nip_astra.scenarios.images.pretrained": {
                "huggingface": "The last hidden state of a convolutional network, or of a transformer's patches.",
                "pca": "Principal components of square patches of the training images, standardised.",
            },
        },
    ),
    "protocol_handler": Kind(
        "nip_astra.protocols.registry",
        {
            "nip_astra.protocols.library": {
                "nip": "A verifier and a prover alternate; the verifier may decide in each of its turns.",
                "adp": "The prover sends one message; the verifier decides in the next round.",
                "debate": "`prover0` argues for 0 and `prover1` for 1; the verifier may decide in its turns.",
                "merlin_arthur": "One of two provers sends a message; the verifier decides in the next round.",
                "mnip": "Both provers argue for 1, each in a channel that the other does not see.",
                "solo_verifier": "The verifier decides in the only round, without messages.",
                "multi_channel_test": "A protocol for tests: several senders per round, and a channel hidden from the verifier.",
            },
        },
    ),
    "pruner": Kind(
        "nip_astra.sweep.search",
        {
            "nip_astra.sweep.search": {
                "halving": "Stop all but the best trials by successive halving.",
                "median": "Stop trials that are worse than the median of the others at the same iteration.",
                "none": "Stop no trial.",
            },
        },
    ),
    "reward": Kind(
        "nip_astra.scenario_base.tasks.rewards",
        {
            "nip_astra.scenario_base.tasks.rewards": {
                "exact": "Return 1 if the completion equals the column `answer` up to whitespace, else 0.",
                "contains": "Return 1 if the completion contains the column `answer` up to whitespace, else 0.",
            },
        },
    ),
    "reward_term": Kind(
        "nip_astra.reward_terms.base",
        {
            "nip_astra.reward_terms.novelty": {
                "cosine_novelty": "1 - cosine to earlier probes (curiosity-driven red teaming, arXiv:2402.19464).",
                "failure_rarity": "Rarity of similar failures in earlier rollouts, 0 to 1.",
                "failure_sharing": "Rarity of similar failures in the same rollout, 0 to 1.",
                "self_bleu_novelty": "1 - BLEU against earlier probes (curiosity-driven red teaming, arXiv:2402.19464).",
                "word_rarity": "Rarity of a probe's rarest word in earlier probes, 0 to 1.",
            },
            "nip_astra.reward_terms.probe_terms": {
                "entropy_bonus": "-log pi(probe) per token under the attacker that sampled it, nats (arXiv:2402.19464).",
                "gibberish_penalty": "-max(0, NLL - threshold), the probe's NLL per token under the reference, nats.",
                "scorer_term": "A scorer's score of the probe, 0 to 1; a negative weight makes it a penalty.",
            },
        },
    ),
    "rollout_analyser": Kind(
        "nip_astra.scenario_base.text.analysers",
        {
            "nip_astra.scenario_base.text.analysers": {
                "prover_role_conformance": "Whether a prover argues for its side throughout, as a prover.",
                "direct_quotation": "Whether a prover gives words of the datapoint as a quotation.",
                "accurate_quotation": "Whether all quotations of a prover occur in the datapoint.",
                "follow_up": "Whether a verifier's later questions take up what it was answered.",
            },
        },
    ),
    "scenario": Kind(
        "nip_astra.scenarios.registry",
        {
            "nip_astra.scenarios.ast_chat": {
                "ast_chat": "An attacker and a frozen target converse; a scorer rates the target's responses.",
            },
            "nip_astra.scenarios.graph_isomorphism": {
                "graph_isomorphism": "Are two graphs isomorphic? A message is a node of one of them.",
            },
            "nip_astra.scenarios.image_classification": {
                "image_classification": "Agents point at parts of an image, and the verifier decides its label.",
            },
            "nip_astra.scenarios.code_validation": {
                "code_validation": "A problem and a candidate solution, which is correct (1) or subtly wrong (0).",
            },
            "nip_astra.scenarios.secret_word": {
                "secret_word": "Provers know a secret word; the verifier knows a claim about it and decides if it is true.",
            },
            "nip_astra.scenarios.task": {
                "task": "A policy solves problems in messages; an environment or a scorer rewards it.",
            },
        },
    ),
    "schedule": Kind(
        "nip_astra.parameters.training",
        {
            "nip_astra.trainers.optimization": {
                "constant": "Return 1 throughout.",
                "cosine": "Fall from 1 to 0 on half a cosine period.",
                "linear": "Fall linearly from 1 to 0.",
            },
        },
    ),
    "scorer": Kind(
        "nip_astra.scorers.base",
        {
            "nip_astra.scorers.classifier": {
                "classifier": "Probability of one label of a sequence classifier.",
            },
            "nip_astra.scorers.detoxify": {
                "detoxify": "Probability of one category of a Detoxify model: the sigmoid of that output.",
            },
            "nip_astra.scorers.disclosure": {
                "disclosure": "Share of a secret's distinct words that a turn discloses.",
            },
            "nip_astra.scorers.judge": {
                "judge": "A chat model's integer rating by a rubric, divided by the largest rating.",
            },
            "nip_astra.scorers.llama_guard": {
                "llama_guard": "Probability that a guard model classifies a conversation as unsafe.",
            },
            "nip_astra.scorers.profanity": {
                "profanity": "Probability that a text is offensive, by a linear model over words; fast, English only.",
            },
            "nip_astra.scorers.python": {
                "python": "Scores from a function `f(prompts, completions, **columns) -> list[float | None]`.",
            },
            "nip_astra.scorers.toxblock": {
                "toxblock": "Probability of one of six kinds of toxicity, by a small recurrent network; English only.",
            },
            "nip_astra.scorers.base": {
                "weighted": "The weighted mean of scorers, `sum(w_k * s_k) / sum(w_k)`, in [0, 1].",
            },
        },
    ),
    "sweep_sampler": Kind(
        "nip_astra.sweep.search",
        {
            "nip_astra.sweep.search": {
                "random": "Sample values independently of other trials.",
                "tpe": "Sample values near the best trials so far (tree-structured Parzen estimator).",
            },
        },
    ),
    "task": Kind(
        "nip_astra.scenario_base.tasks.base",
        {
            "nip_astra.scenario_base.tasks.library": {
                "arithmetic": "Sums, differences and products; the reward is 1 for exactly the right number, else 0.",
                "countdown": "Use each number once, with +, - and *, to make the target; a solution always exists.",
                "guess_number": 'Guess; the environment replies "higher" or "lower" until the last turn.',
                "pig_latin": "Words in Pig Latin; the reward is the fraction of correct words.",
            },
            "nip_astra.scenario_base.tasks.verifiers": {
                "verifiers": "Tasks of a v1 taskset of `verifiers`, with their own prompts and rewards.",
            },
            "nip_astra.scenario_base.tasks.gymnasium": {
                "gymnasium": "Episodes of a text environment with Gymnasium's `reset(seed=...)` and `step(action)`.",
            },
            "nip_astra.scenario_base.tasks.openenv": {
                "openenv": "Episodes of an environment of OpenEnv (`reset`, `step`, `state`).",
            },
            "nip_astra.scenario_base.tasks.dataset": {
                "dataset": "One prompt per row, rewarded by its answer column, a scorer, or weighted reward functions.",
            },
        },
    ),
    "tool": Kind(
        "nip_astra.scenario_base.tasks.tools",
        {
            "nip_astra.scenario_base.tasks.library": {
                "calculator": "Value of an expression of whole numbers with +, -, * and brackets.",
            },
            "nip_astra.scenario_base.tasks.tools": {
                "python": "Run a Python program in a sandbox and return what it prints.",
            },
        },
    ),
    "tracker": Kind(
        "nip_astra.tracking.tracker",
        {
            "nip_astra.tracking.local": {
                "file": "Appends to `metrics.jsonl`, `timings.jsonl` and `rollouts/<table>.jsonl`.",
                "tensorboard": "Writes metrics, tables and parameters for TensorBoard into the run's folder `tensorboard`.",
            },
            "nip_astra.tracking.mlflow_tracker": {
                "mlflow": "Sends parameters, metrics, tables, artifacts and the report to MLflow.",
            },
            "nip_astra.tracking.trackio_tracker": {
                "trackio": "Sends parameters, metrics and tables to Trackio.",
            },
            "nip_astra.tracking.wandb_runs": {
                "wandb": "Sends config, environment, metrics by step, tables, artifacts and the report to W&B.",
            },
        },
    ),
    "trainer": Kind(
        "nip_astra.trainers.registry",
        {
            "nip_astra.trainers.ast.dpo": {
                "ast_dpo": "Direct preference optimisation on the best and the worst sibling of every node.",
                "ast_ipo": "Identity preference optimisation: preferences by a fixed, bounded margin.",
                "ast_simpo": "Simple preference optimisation: preferences by likelihood per token, without a reference.",
            },
            "nip_astra.trainers.ast.ppo": {
                "ast_ppo": "Token-level proximal policy optimisation with a value head.",
            },
            "nip_astra.trainers.ast.grpo": {
                "ast_grpo": "Group-relative policy optimisation, in which siblings are the group.",
            },
            "nip_astra.trainers.ast.reinforce": {
                "ast_reinforce": "REINFORCE on whole probes, mixed with a KL penalty (red teaming by RL, arXiv:2202.03286).",
            },
            "nip_astra.trainers.ast.sft": {
                "ast_sft": "Supervised fine-tuning on given probes, or on the best probes found so far.",
            },
            "nip_astra.trainers.vanilla_ppo": {
                "vanilla_ppo": "Independent PPO of each agent, with a value function of its own observations (IPPO).",
                "mappo": "PPO of each agent, with a value function that observes all channels and the label (MAPPO).",
            },
            "nip_astra.trainers.reinforce": {
                "reinforce": "REINFORCE for each agent, with reward to go or with advantages.",
            },
            "nip_astra.trainers.spg": {
                "spg": "Opponent shaping: leaders anticipate how followers learn from them.",
            },
            "nip_astra.trainers.solo_agent": {
                "solo_agent": "Supervised training of each agent alone to predict the label, before any message.",
            },
            "nip_astra.trainers.service.self_hosted": {
                "self_hosted_grpo": "GRPO of a language model on the problems of a task.",
                "self_hosted_opd": "On-policy distillation from a teacher, on the student's own samples.",
            },
            "nip_astra.trainers.service.remote_api": {
                "remote_api_grpo": "GRPO on trajectories, with a loss of the training service.",
                "remote_api_opd": "On-policy distillation on trajectories, with a loss of the training service.",
                "remote_api_cross_entropy": "Supervised fine-tuning on a task's solutions: `-log pi`, summed over their tokens.",
            },
            "nip_astra.trainers.text.expert_iteration": {
                "pure_text_ei": "Expert iteration: models are fine-tuned on their agents' answers in high-return rollouts.",
            },
            "nip_astra.trainers.text.malt": {
                "pure_text_malt": "MALT: DPO on pairs of answers, from trees of responses.",
            },
        },
    ),
    "training_service": Kind(
        "nip_astra.language_models.services.training",
        {
            "nip_astra.language_models.services.training": {
                "local": "A model in this process and its optimizer.",
            },
            "nip_astra.language_models.services.http_training": {
                "http": "Trains at a service started by `nip-astra serve --train`.",
            },
            "nip_astra.language_models.services.tinker_training": {
                "tinker": "Trains an adapter at a service of Tinker's protocol.",
            },
        },
    ),
}
"""The kinds of components that ship, by name."""
