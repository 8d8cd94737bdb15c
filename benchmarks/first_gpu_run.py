"""Run GPU code paths on an accelerator, and compare them with the CPU.

    python benchmarks/first_gpu_run.py --list
    python benchmarks/first_gpu_run.py --out first_gpu_run.jsonl
    python benchmarks/first_gpu_run.py --part decoding
    python benchmarks/first_gpu_run.py --row generate

Without `--part`, each part runs in a separate process for at most eight minutes. Each row is
appended to the JSONL file as soon as it is measured; its `status` is measured, skipped (with the
reason) or failed (with the error; later rows still run). A row with a `difference` from the CPU or
a baseline `agrees` if that is within its `tolerance`. Exit code 1: a row failed or does not agree.
Models have random weights; nothing is downloaded. `--small` has sizes for a CPU.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from measuring import Row, build_parser, measure_rows, seconds_of, version_of, wait_for_gpu
from tensordict import TensorDict
from torch import Tensor

from nip_astra.distributed.team import ProcessTeam, team_on_this_machine
from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import Generation, SamplingOptions, pad_left, pad_right
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.language_models.tree_engine import attention as tree_attention
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.vllm import VllmLanguageModel
from nip_astra.parameters.types import TrainerType
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.rl_objectives.policy_losses import PolicyLoss
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rl_objectives.registry import POLICY_LOSSES
from nip_astra.run import run_experiment
from nip_astra.scorers.classifier import ClassifierScorer
from nip_astra.tracking.environment import processor_name
from nip_astra.utils.devices import resolve_device

POCKET_CHAT = Path(__file__).parents[1] / "scenarios" / "pocket_chat" / "models"
PART_SECONDS = 480
PACKAGES = ("nip_astra", "torch", "transformers", "vllm", "trl")
CPU = torch.device("cpu")

Figures = dict[str, Any]


class Shape(NamedTuple):
    """Sizes of a Llama model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


TINY = Shape(64, 96, 2, 4, 2, 320)
SMOL = Shape(576, 1536, 30, 9, 3, 49_152)
LARGE = Shape(2048, 8192, 16, 32, 8, 32_768)  # 1.1 billion weights


class Bench:
    """The device, the sizes, and a temporary folder of random models."""

    def __init__(self, device: torch.device, folder: Path, *, is_small: bool) -> None:
        self.device, self.folder, self.is_small = device, folder, is_small
        self.has_gpu = device.type == "cuda"

    def size(self, full: int, small: int) -> int:
        """`small` with `--small`, otherwise `full`."""
        return small if self.is_small else full

    def model(self, shape: Shape) -> Path:
        """Create a model with random weights and word tokens, and return its folder."""
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = TINY if self.is_small else shape
        folder = self.folder / f"llama_{shape.hidden_size}"
        if folder.exists():
            return folder
        shutil.copytree(POCKET_CHAT / "attacker", folder)
        tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        words = tokens["model"]["vocab"]
        words |= {f"word{number}": number for number in range(len(words), shape.vocab_size)}
        (folder / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
        torch.manual_seed(0)
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = LlamaConfig(
            **shape._asdict(),
            **special,
            max_position_embeddings=4096,
            initializer_range=0.05,
            tie_word_embeddings=True,
        )
        with self.device:
            LlamaForCausalLM(config).save_pretrained(folder)
        return folder

    def load(
        self,
        shape: Shape,
        kind: Any = HuggingFaceLanguageModel,
        device: torch.device | None = None,
        **parameters: Any,
    ) -> Any:
        """Load a trainable model; by default in float32 on the device."""
        values = {"model": str(self.model(shape)), "dtype": "float32", **parameters}
        torch.manual_seed(0)
        keywords = {"device": device or self.device, "scenario_dir": None, "trainable": True}
        return kind.load(kind.Parameters(**values), **keywords)

    def contexts(self, count: int, length: int) -> list[list[int]]:
        """Contexts of random words."""
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(6, TINY.vocab_size, (count, length), generator=generator)
        return [[1, *row] for row in rows.tolist()]

    def rows_to_score(self, count: int, before: int, after: int) -> list[Tensor]:
        """Padded contexts, each repeated twice, and answers with their masks."""
        contexts = [context for context in self.contexts(count // 2, before) for _ in "ab"]
        return [*pad_left(contexts, CPU), *pad_right(self.contexts(count, after), CPU)]


ROWS: list[Row] = []


def row(
    part: str, *arguments: Any, small: Sequence[Any] | None = None, **options: Any
) -> Callable[[Callable[..., Figures]], Callable[..., Figures]]:
    """Register one row per argument, or a single row; `small` lists the arguments of `--small`."""

    def add(function: Callable[..., Figures]) -> Callable[..., Figures]:
        title = function.__name__.replace("_", " ")
        for argument in arguments:
            run = partial(function, argument=argument)
            in_small = small is None or argument in small
            ROWS.append(Row(part, f"{title}: {argument}", run, in_small=in_small, **options))
        if not arguments:
            ROWS.append(Row(part, title, function, **options))
        return function

    return add


def compare(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> Figures:
    """The maximum difference, relative to the largest value of its tensor.

    The denominator is at least 1e-3 of the largest value of all tensors, for tensors that are 0
    except for rounding, such as gradients of key biases.
    """
    actual, expected = ([x.detach().double().cpu() for x in side] for side in (actual, expected))
    floor = 1e-3 * max(float(x.abs().max()) for x in expected) + 1e-12
    relative = [
        float((a - b).abs().max() / b.abs().max().clamp(min=floor))
        for a, b in zip(actual, expected, strict=True)
    ]
    return {"difference": max(relative), "tolerance": tolerance}


# ---- losses, models and trainers compare with the CPU


@row("correctness")
def objectives(bench: Bench) -> Figures:
    """Compare the objectives of `golden.py`, with gradients."""
    import golden

    def moved(name: str) -> Tensor:
        tensor: Tensor = fixed_tensor(name).detach().to(bench.device)
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    def numbers(values: Any) -> list[float]:
        if isinstance(values, list):
            return [number for value in values for number in numbers(value)]
        return [float(values == "True") if values in ("True", "False") else float(values)]

    fixed_tensor, on_cpu = golden.fixed_tensor, golden.objectives()
    with mock.patch.object(golden, "fixed_tensor", moved):
        on_device = golden.objectives()
    differences = {}
    for name, expected in on_cpu.items():
        pair = (on_device[name], expected)
        if on_device[name] == expected:
            differences[name] = 0.0
        elif isinstance(expected, str) or isinstance(on_device[name], str):
            differences[name] = float("inf")
        else:
            # NaN and infinity must occur at the same positions in both.
            ours, theirs = ([torch.tensor(numbers(x)).nan_to_num(1e9, 1e12, -1e12)] for x in pair)
            differences[name] = compare(ours, theirs, 0.0)["difference"]
    worst = sorted(differences, key=lambda name: -differences[name])[:5]
    details = {
        "num_compared": len(differences),
        "worst": {name: differences[name] for name in worst},
    }
    return {"difference": differences[worst[0]], "tolerance": 1e-4, **details}


@row("correctness", *POLICY_LOSSES.names())
def policy_loss(bench: Bench, argument: str) -> Figures:
    """Compare per-token losses and their gradients."""
    generator = torch.Generator().manual_seed(0)
    logprobs_BT, old_BT, advantages_BT = -torch.rand(3, 64, 128, generator=generator)
    mask_BT = torch.rand(64, 128, generator=generator) < 0.9
    results = []
    for device in (bench.device, CPU):
        new_BT = logprobs_BT.to(device).requires_grad_()
        inputs = (old_BT.to(device), advantages_BT.to(device) + 0.5, mask_BT.to(device))
        loss_BT = PolicyLoss.of(argument).of_tokens(new_BT, *inputs)
        results.append([loss_BT, *torch.autograd.grad(loss_BT.sum(), new_BT)])
    on_device, on_cpu = results
    return compare(on_device, on_cpu, 1e-5)


def loss_and_gradients(model: Any, rows: list[Tensor]) -> list[Tensor]:
    """A loss of log-probabilities and entropies, and its gradients."""
    scores = model.token_scores(*rows, needs_entropy=True)
    loss = -scores.logprobs_BT.mean() - 0.1 * scores.entropy_BT.mean()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@row("correctness", None, 8)
def scores_with_lora_rank(bench: Bench, argument: int | None) -> Figures:
    """Compare a loss of scores and its gradients."""
    rows = bench.rows_to_score(bench.size(16, 4), bench.size(96, 12), bench.size(48, 6))
    lora = argument and {"rank": argument}
    models = (bench.load(SMOL, device=device, lora=lora) for device in (bench.device, CPU))
    on_device, on_cpu = (loss_and_gradients(model, rows) for model in models)
    return compare(on_device, on_cpu, 2e-3)


def sample(model: Any, contexts: list[list[int]], num_tokens: int) -> Generation:
    """Sample two turns of equal length per context, with fixed random numbers."""
    generator = torch.Generator().manual_seed(2)
    uniforms_BT = torch.rand(2 * len(contexts), num_tokens, generator=generator)
    options = SamplingOptions(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    generation: Generation = model.generate(contexts, 2, uniforms_BT, options)
    return generation


def gap(scorer: Any, contexts: list[list[int]], sampled: Generation, exact: Any = None) -> Figures:
    """Maximum difference between sampled and scored log-probabilities, nats.

    With an `exact` model, in float32, it is the mean difference, which may be twice the scores' own
    mean error: of two passes in bfloat16 neither is right.
    """
    rows = pad_left([context for context in contexts for _ in "ab"], CPU)
    with torch.no_grad():
        scored_BT, *exact_BT = (
            model.logprobs(*rows, sampled.ids_BT, sampled.mask_BT).cpu()
            for model in (scorer, exact)
            if model is not None
        )
    differences = (scored_BT - sampled.logprobs_BT).abs()
    largest = float(differences.max())
    if exact is None:
        return {"difference": largest, "tolerance": 1e-3}
    error = float((scored_BT - exact_BT[0]).abs().mean())
    figures = {"difference": float(differences.mean()), "tolerance": 2 * error}
    own_error = float((sampled.logprobs_BT - exact_BT[0]).abs().mean())
    return {**figures, "largest_difference": largest, "error_of_sampled": own_error}


@row("correctness")
def sampled_log_probabilities(bench: Bench) -> Figures:
    """Score turns on the CPU that were sampled on the device."""
    on_device, on_cpu = bench.load(SMOL), bench.load(SMOL, device=CPU)
    contexts = bench.contexts(bench.size(8, 2), bench.size(64, 8))
    ours, theirs = (sample(model, contexts, bench.size(32, 4)) for model in (on_device, on_cpu))
    share = float((ours.ids_BT == theirs.ids_BT).float().mean())
    return {**gap(on_cpu, contexts, ours), "share_of_equal_tokens": share}


@row("correctness")
def scorer(bench: Bench) -> Figures:
    """Compare the classifier of pocket_chat."""
    parameters = ClassifierScorer.Parameters(model=str(POCKET_CHAT / "scorer"), label="rude")
    texts = ["do you really know that my cat has a red hat ?", "you are silly .", ""] * 8
    scorers = (
        ClassifierScorer(parameters, device=d, scenario_dir=None) for d in (bench.device, CPU)
    )
    on_device, on_cpu = ([each.score(texts)] for each in scorers)
    return compare(on_device, on_cpu, 1e-4)


@row("correctness")
def protocol_agents(bench: Bench) -> Figures:
    """Compare losses and gradients of PPO on the same frames of graph isomorphism."""
    from our_proofs import graph_trainer

    sizes = (bench.size(512, 32), bench.size(128, 16), 1, 1)
    trainers = {device: graph_trainer(*sizes, device) for device in (bench.device.type, "cpu")}
    frames, results = trainers["cpu"].collect().flatten(), []
    for device in (bench.device.type, "cpu"):
        trainer, parameters = trainers[device], trainers[device].hyper_params
        trainer.agents.load_state_dict(trainers["cpu"].agents.state_dict())
        losses = IppoObjective(trainer.agents, parameters.ppo, parameters.rl)(frames.to(device))
        values = [value for name, value in sorted(losses.items()) if name.startswith("loss_")]
        weights = [w for w in trainer.agents.parameters() if w.requires_grad]
        total = torch.stack([value.sum() for value in values]).sum()
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
        results.append([*values, *(g for g in gradients if g is not None)])
    on_device, on_cpu = results
    return compare(on_device, on_cpu, 1e-3)


@row("trainers", *TrainerType, small=("self_hosted_grpo",))
def trainer(bench: Bench, argument: str) -> Figures:
    """Metrics of a test run on both; random numbers of protocol agents differ on a GPU."""
    lines: list[dict[str, float]] = []
    for run_id, device in (("device", bench.device.type), ("cpu", "cpu")):
        options: Figures = {
            "device": device,
            "runs_dir": str(bench.folder / argument),
            "run_id": run_id,
        }
        settings = ExperimentSettings(progress=False, test_run=True, num_threads=1, **options)
        run_experiment(resolve_experiment(trainer=argument), settings)
        metrics = bench.folder / argument / run_id / "metrics.jsonl"
        lines.append(json.loads(metrics.read_text(encoding="utf-8").splitlines()[0]))
    parts = ("loss", "grad_norm", "reward", "time/", "seconds")
    names = [name for name in lines[0] if any(part in name for part in parts)]
    return {name: [line.get(name) for line in lines] for name in names}


# ---- decoding, attention, precision

DTYPES = ("float32", "bfloat16")


@row("decoding", *itertools.product(DTYPES, ("never", "always"), (16, 256)),
     small=[("float32", "never", 16)])  # fmt: skip
def decode_graphs(bench: Bench, argument: tuple[str, str, int]) -> Figures:
    """Decode two rows per context; `always` uses CUDA graphs."""
    dtype, graphs, num_rows = argument
    model = bench.load(LARGE, dtype=dtype, decode_graphs=graphs)
    num_tokens = bench.size(128, 4)
    contexts = bench.contexts(bench.size(num_rows // 2, 2), bench.size(512, 8))
    play = partial(sample, model, contexts, num_tokens)
    exact = bench.load(LARGE) if dtype != "float32" else None
    figures = gap(model, contexts, play(), exact)
    speed = 2 * len(contexts) * num_tokens / seconds_of(play)
    return {**figures, "tokens_per_second": speed, **count_syncs(bench, play)}


@row("attention", *itertools.product(DTYPES, (512, 2048, 8192, 32_768)), small=[("float32", 512)])
def flex_attention(bench: Bench, argument: tuple[str, int]) -> Figures:
    """Compare with dense attention on a trie of eight answers; with gradients on a GPU only."""
    dtype, size = getattr(torch, argument[0]), bench.size(argument[1], 128)
    prompt, *answers = bench.contexts(9, size // 9)
    trie = build_trie([[*prompt, *answer] for answer in answers]).to(bench.device)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(trie.num_tokens, heads, 64, generator=generator).to(bench.device, dtype)
        for heads in (8, 2, 2)
    ]
    for tensor in inputs if bench.has_gpu else ():
        tensor.requires_grad_()
    compiled = tree_attention.compiled_flex_attention() if bench.has_gpu else None
    if bench.has_gpu and compiled is None:
        raise RuntimeError("flex attention was not compiled; see the log")

    # Uncompiled, all pairs of the padded trie are computed.
    least = bench.size(tree_attention.SMALLEST_FLEX, 128)

    @mock.patch.object(tree_attention, "SMALLEST_FLEX", least)
    def build() -> Any:
        return tree_attention.FlexTrieAttention(trie, *([compiled] if compiled else []))

    def run(attention: Callable[..., Tensor]) -> list[Tensor]:
        attended = attention(0, inputs[0] / 8, *inputs[1:])
        loss = attended.float().square().sum()
        return [attended, *(torch.autograd.grad(loss, inputs) if bench.has_gpu else ())]

    outputs = run(build())
    attention = build()
    figures = {
        "num_tokens": trie.num_tokens,
        "mask_seconds": best_of_three(build),
        "seconds": best_of_three(partial(run, attention)),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }
    if size <= 8192:
        dense = partial(run, tree_attention.TrieAttention(trie, dtype))
        figures |= compare(outputs, dense(), 1e-4 if dtype == torch.float32 else 3e-2)
        figures["dense_seconds"] = best_of_three(dense)
    return figures


def best_of_three(function: Callable[[], object]) -> float:
    """Minimum time of three calls, seconds."""
    return min(seconds_of(function) for _ in range(3))


@row("precision", None, 8)
def bfloat16_with_lora_rank(bench: Bench, argument: int | None) -> Figures:
    """Compare losses and gradients in bfloat16 with float32."""
    rows = bench.rows_to_score(bench.size(16, 4), bench.size(256, 12), bench.size(64, 6))
    results, seconds = [], {}
    for dtype in reversed(DTYPES):
        model = bench.load(LARGE, dtype=dtype, lora=argument and {"rank": argument})
        results.append([x.cpu() for x in loss_and_gradients(model, rows)])
        seconds[f"{dtype}_seconds"] = seconds_of(partial(loss_and_gradients, model, rows))
        del model
    exact, found = (torch.cat([g.double().flatten() for g in result[1:]]) for result in results)
    cosine = float(torch.cosine_similarity(exact, found, dim=0))
    return {**compare(results[0][:1], results[1][:1], 1e-2), "gradient_cosine": cosine, **seconds}


# ---- vLLM and processes


@row("vllm", "full", "lora", "sleep", needs=("vllm",))
def engine(bench: Bench, argument: str) -> Figures:
    """Sample, change the weights and sample again; `sleep` frees memory in between."""
    model = bench.load(
        SMOL,
        VllmLanguageModel,
        dtype="float32" if bench.is_small else "bfloat16",
        lora={"rank": 8} if argument == "lora" else None,
        gpu_memory_utilization=0.2,
        max_model_len=1024,
        sleep_during_updates=argument == "sleep",
    )
    contexts = bench.contexts(bench.size(64, 2), bench.size(256, 8))
    play = partial(sample, model, contexts, bench.size(64, 4))
    play()
    figures: Figures = {"before": model.take_metrics()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    free_before = free_bytes(bench)
    model.token_scores(*bench.rows_to_score(4, 12, 6)).logprobs_BT.mean().backward()
    figures |= {"freed_bytes": free_bytes(bench) - free_before, "first_seconds": seconds_of(play)}
    figures["after"] = model.take_metrics()
    # Ours twice: the first call prepares the sampler's weights.
    for name, sampler in (("vllm", model), ("our", model.scorer), ("our", model.scorer)):
        figures[f"{name}_seconds"] = seconds_of(partial(sample, sampler, *play.args[1:]))
    return {"difference": figures["after"]["sampler_gap/mean"], "tolerance": 0.1, **figures}


def free_bytes(bench: Bench) -> int:
    """Free memory of the GPU."""
    wait_for_gpu()
    return torch.cuda.mem_get_info(bench.device)[0] if bench.has_gpu else 0


@row("sharding", None, 8)
def fsdp_with_lora_rank(bench: Bench, argument: int | None) -> Figures:
    """Compare two steps of FSDP2 with NCCL on one device with an unsharded model."""
    rows = bench.rows_to_score(bench.size(8, 4), bench.size(96, 12), bench.size(48, 6))
    batch = TensorDict({str(n): row for n, row in enumerate(rows)}, batch_size=[len(rows[0])])

    def steps(team: ProcessTeam | None) -> list[Tensor]:
        model = bench.load(SMOL, lora=argument and {"rank": argument})
        model.scores_by_module = True
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        service = LocalTrainingService(model, optimizer)
        if team is not None:
            service = ShardedService(service, team)

        def loss(batch: TensorDict) -> LossOutput:
            scores = model.token_scores(*(batch[str(n)] for n in range(4)))
            return LossOutput(-scores.logprobs_BT.mean(), {})

        losses = []
        for _ in "ab":
            losses.append(service.forward_backward([batch], loss)["loss"])
            service.optim_step(lr=0.1)
        if isinstance(service, ShardedService):
            service.gather()
        return [torch.tensor(losses), *(p.detach().clone() for p in model.parameters())]

    with team_on_this_machine(str(bench.folder / f"store_{argument}"), 0, 1):
        nccl = torch.distributed.new_group(backend="nccl") if bench.has_gpu else None
        sharded = steps(ProcessTeam(nccl))
    return compare(sharded, steps(None), 1e-4)


# ---- speed compare with transformers and TRL


@row("trees", "fp32", "bf16", small=("fp32",))
def beside_plain_generate(bench: Bench, argument: str) -> Figures:
    """Rollout, update and iteration of `ast_speed.py`; the baseline takes most of the time."""
    from ast_speed import Comparison
    from our_ast import Setting

    sizes = {"episodes": 4, "pairs": 16, "turn_tokens": 16}
    if bench.is_small:
        sizes = {"depth": 1, "episodes": 1, "context": 8, "turn_tokens": 4}
    setting = Setting("pocket_chat", device=bench.device.type, **sizes)
    path = bench.model(SMOL)
    models = [f"ast_chat.{role}.language_model.model={path}" for role in ("attacker", "target")]
    figures = Comparison(setting, [argument], 1, *models).run(("update", "rollout", "iteration"), 1)
    return {"ratios": figures["ratios"], "deviation": figures["deviation"]}


@row("trees")
def generate(bench: Bench) -> Figures:
    """Seconds to sample pairs of answers with our sampler and with `generate`."""
    model = bench.load(LARGE, dtype="float32" if bench.is_small else "bfloat16")
    num_tokens, num_words = bench.size(128, 4), bench.size(512, 8)
    contexts = bench.contexts(bench.size(32, 1), num_words)
    module = model.module.to(model.dtype)
    ids_BC = torch.tensor(contexts, device=bench.device).repeat_interleave(2, dim=0)
    length = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
    variants = {
        "our": partial(sample, model, contexts, num_tokens),
        "plain": partial(module.generate, ids_BC, do_sample=True, top_k=None, **length),
    }
    # The first call is a warm-up.
    return {f"{name}_seconds": [seconds_of(f) for _ in "ab"][1] for name, f in variants.items()}


@row("trees", needs=("trl", "datasets"))
def beside_grpo_of_trl(bench: Bench) -> Figures:
    """Compare a step of `grpo_step.py`."""
    import grpo_step

    prompts = bench.contexts(bench.size(8, 1), bench.size(512, 8))
    answers = bench.contexts(8 * len(prompts), bench.size(128, 4))
    work = grpo_step.Work(prompts, answers, [float(n % 3 == 0) for n in range(len(answers))])
    arguments, device = (work, str(bench.model(SMOL)), "float32"), bench.device.type
    ours = grpo_step.OurStep(*arguments, rows_at_once=len(answers), device=device)
    theirs = grpo_step.TrlStep(*arguments, rows_at_once=8, device=device)
    ours()
    theirs()
    first = compare([torch.tensor(ours.first)], [torch.tensor(theirs.first)], 1e-3)
    seconds = {"seconds": seconds_of(ours), "trl_seconds": seconds_of(theirs)}
    return {**first, **seconds, "forwarded_per_unique": ours.forwarded_per_unique}


# ---- memory and device synchronisations


def count_syncs(bench: Bench, function: Callable[[], object]) -> Figures:
    """Number of device synchronisations of a call, and their most frequent places."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if bench.has_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            if bench.has_gpu:
                torch.cuda.set_sync_debug_mode("default")
    syncs = [warning for warning in caught if "synchroniz" in str(warning.message)]
    places = Counter(f"{Path(sync.filename).name}:{sync.lineno}" for sync in syncs)
    return {"num_syncs": len(syncs), "syncs": dict(places.most_common(10))}


@row("memory", "rollout", "update", "recomputing update")
def syncs_and_peak(bench: Bench, argument: str) -> Figures:
    """A rollout of 64 rows, or an update of 32."""
    model = bench.load(LARGE, dtype="float32" if bench.is_small else "bfloat16")
    if argument == "recomputing update":
        model.recompute_layers()
    rows = bench.rows_to_score(bench.size(32, 4), bench.size(512, 12), bench.size(128, 6))
    work: Callable[[], object] = partial(loss_and_gradients, model, rows)
    if argument == "rollout":
        contexts = bench.contexts(bench.size(32, 2), bench.size(512, 8))
        work = partial(sample, model, contexts, bench.size(64, 4))
    work()
    return {"work_seconds": seconds_of(work), **count_syncs(bench, work)}


@row("memory", "prefill", "update")
def beside_products(bench: Bench, argument: str) -> Figures:
    """Prefill of 128 prompts, or an update of 32 answers, beside its products with weights."""
    model = bench.load(LARGE, dtype="float32" if bench.is_small else "bfloat16")
    is_update, length = argument == "update", bench.size(512, 12)
    rows = bench.rows_to_score(bench.size(32, 4), length, bench.size(128, 6))
    contexts = bench.contexts(bench.size(128, 4), length)
    num_tokens = sum(map(len, contexts))
    work: Callable[[], object] = partial(sample, model, contexts, 1)
    if is_update:
        num_tokens = rows[2].numel() + rows[0].numel() // 2
        work = partial(loss_and_gradients, model, rows)
    generator = torch.Generator(bench.device).manual_seed(0)
    options: Figures = {"generator": generator, "device": bench.device, "dtype": model.dtype}
    linears = (m for m in model.module.modules() if isinstance(m, torch.nn.Linear))
    *weights, head = (linear.weight.detach().to(model.dtype) for linear in linears)
    sizes = {weight.shape[1] for weight in (*weights, head)}
    inputs = {size: torch.randn(num_tokens, size, **options) for size in sizes}
    # The head reads scored positions alone.
    num_scored = rows[2].numel() if is_update else len(contexts)

    def products() -> None:
        for weight in (*weights, head):
            x = inputs[weight.shape[1]][: num_scored if weight is head else num_tokens]
            product = x @ weight.T
            if is_update:
                product @ weight, product.T @ x

    work()
    products()
    seconds = {"work": best_of_three(work), "products": best_of_three(products)}
    return {**seconds, "ratio": seconds["work"] / seconds["products"], "num_tokens": num_tokens}


# ---- running

PARTS = tuple(dict.fromkeys(each.part for each in ROWS))


def run_rows(rows: Sequence[Row], device: torch.device, out: Path, *, is_small: bool) -> bool:
    """Run rows in this process; True if all succeed and agree."""
    has_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if has_gpu else processor_name()
    versions = {package: version_of(package) for package in PACKAGES}
    versions["cuda"] = torch.version.cuda
    about = {"device": name, "versions": versions, "is_small": is_small}
    with tempfile.TemporaryDirectory(prefix="first_gpu_run_") as folder:
        bench = Bench(device, Path(folder), is_small=is_small)
        return measure_rows(rows, bench, out, has_gpu=has_gpu, about=about)


def run_in_subprocess(part: str, arguments: Sequence[str], out: Path) -> bool:
    """Run a part in a subprocess, and add a row if it crashes; True if all succeed and agree."""
    command = [sys.executable, __file__, *arguments, "--part", part]
    try:
        code = subprocess.run(command, timeout=PART_SECONDS, check=False).returncode
        error = "" if code in (0, 1) else f"the process exited with code {code}"
    except subprocess.TimeoutExpired:
        code, error = 1, f"more than {PART_SECONDS} s"
    if error:
        with out.open("a", encoding="utf-8") as file:
            record = {"part": part, "row": "all", "status": "failed", "error": error}
            file.write(json.dumps(record) + "\n")
    return code == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected part, or all parts."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(
        __doc__,
        part={"choices": PARTS, "help": "run one part, in this process; default: all"},
        device={"default": "auto", "help": "cpu, cuda, or auto"},
        row={"choices": [row.name for row in ROWS], "help": "run one row, in this process"},
        small=False,
        list=False,
        out={"type": Path, "default": Path("first_gpu_run.jsonl"), "help": "JSONL file to extend"},
    )
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{each.part} | {each.name}" for each in ROWS))
        return 0
    try:
        device = resolve_device(options.device)
    except ConfigurationError as error:
        parser.error(str(error))
    if options.row is not None or options.part is not None:
        rows = [
            each
            for each in ROWS
            if options.part in (None, each.part)
            and options.row in (None, each.name)
            and (each.in_small or not options.small)
        ]
        if not rows:
            parser.error(f"the part {options.part} has no such row, or --small leaves it out")
        return int(not run_rows(rows, device, options.out, is_small=options.small))
    results = [run_in_subprocess(part, arguments, options.out) for part in PARTS]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
