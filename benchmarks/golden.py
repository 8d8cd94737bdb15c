"""Compare two checkouts exactly: runs, resumed runs, evaluations, objectives, completions.

    python benchmarks/golden.py --base ../base            # everything, about 25 minutes on one core
    python benchmarks/golden.py --base ../base --quick    # five runs, objectives, completions

Each checkout runs in a separate process with one thread, through the public functions
`resolve_experiment`, `run_experiment`, `resume_experiment` and the command `evaluate`. Compares
every value of `metrics.jsonl` and `results.json`, the SHA-256 of every file of weights, every
sampled text, and every objective with its gradient. Exit code 0: equal; 1: different, with the
first differences of each part; 2: a part failed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from measuring import build_parser

HERE = Path(__file__).resolve()
TREE = HERE.parents[1]
TIMES = (
    "second",
    "time",
    "per_token",
    "tokens_per",
    "cpu",
    "memory",
    "peak_",
    "created",
    "gib",
    "jobs",
)
"""Name parts of figures that differ between two runs of the same code."""
RANDOM_ID = re.compile(r"job-[0-9a-f]+")

# ---- runs


class Case(NamedTuple):
    """A short run: a preset `trainer/scenario` with overrides."""

    preset: str
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique name of the run's folder."""
        changed = "".join(f"-{override.rpartition('.')[2]}" for override in self.overrides)
        return "".join(c if c.isalnum() else "-" for c in self.preset + changed)


SMALL: dict[str, tuple[str, ...]] = {
    "ast_chat": (
        "training.num_iterations=2",
        "training.num_episodes_per_experience=2",
        "training.eval_period=1",
        "ast_chat.evaluation.num_episodes=4",
        "ast_chat.evaluation.num_dev_episodes=4",
        "ast_chat.evaluation.use_random_search=false",
    ),
    "task": (
        "training.num_iterations=2",
        "training.num_episodes_per_experience=4",
        "training.eval_period=1",
        "task.evaluation.num_problems=8",
        "task.evaluation.num_dev_problems=4",
    ),
    "secret_word": (
        "text_rl.num_iterations=2",
        "text_rl.rollouts_per_iteration=12",
        "text_rl.min_fine_tune_examples=1",
        "secret_word.num_test=8",
    ),
    "graph_isomorphism": (
        "graph_isomorphism.dataset.num_train=60",
        "graph_isomorphism.dataset.num_test=30",
    ),
    "image_classification": ("image_classification.dataset.max_train_size=120",),
}
"""Overrides by kind of scenario."""
SMALL_RL = (
    "rl.num_iterations=2",
    "rl.num_test_iterations=1",
    "rl.frames_per_batch=96",
    "rl.minibatch_size=48",
    "rl.num_epochs=2",
)
SMALL_SOLO = ("solo_agent.num_epochs=2", "solo_agent.minibatch_size=16")

QUICK = (
    Case("ast_dpo/pocket_chat"),
    Case("ast_ppo/pocket_chat"),
    Case("vanilla_ppo/graph_isomorphism_small"),
    Case("pure_text_malt/secret_word"),
    Case("self_hosted_grpo/arithmetic"),
)
CASES = (
    *QUICK,
    *(Case(f"ast_{name}/pocket_chat") for name in ("ipo", "grpo", "reinforce", "sft", "simpo")),
    *(
        Case("ast_grpo/pocket_chat", (f"ast_grpo.variant={name}",))
        for name in ("dr_grpo", "dapo", "cispo", "gspo", "rloo")
    ),
    *(Case("ast_dpo/pocket_chat", (f"ast_dpo.loss={name}",)) for name in ("hinge", "kto")),
    Case("ast_simpo/pocket_chat", ("ast_simpo.loss=orpo",)),
    Case("ast_dpo/pocket_chat", ("ast_dpo.credit.kind=mean_child",)),
    Case("ast_ppo/pocket_chat", ("ast_ppo.kl.target=0.01",)),
    *(Case(f"{name}/graph_isomorphism_small") for name in ("mappo", "solo_agent")),
    *(
        Case(f"{name}/image_classification")
        for name in ("vanilla_ppo", "mappo", "reinforce", "spg", "solo_agent")
    ),
    Case("vanilla_ppo/graph_isomorphism_small", ("ppo.loss_type=kl_penalty",)),
    Case("vanilla_ppo/graph_isomorphism_small", ("rl.use_shared_body=true",)),
    Case("spg/image_classification", ("spg.variant=psos",)),
    Case("pure_text_ei/secret_word"),
    Case("self_hosted_opd/arithmetic"),
    *(
        Case("self_hosted_grpo/arithmetic", (f"self_hosted_grpo.policy_loss.loss={name}",))
        for name in ("cispo", "gspo", "sapo")
    ),
    *(Case(f"remote_api_{name}/arithmetic") for name in ("grpo", "opd", "cross_entropy")),
)


def run_case(case: Case, checkout: Path, folder: Path) -> dict[str, Any]:
    """Run a case, resume it from its first checkpoint, and return the outputs of both."""
    from nip_astra import resolve_experiment, run_experiment

    preset = checkout / "parameters" / f"{case.preset}.yaml"
    default = resolve_experiment(parameter_file=preset)
    small = list(SMALL[default.kind])
    if default.trainer_class.trainer_type == "solo_agent":
        small += SMALL_SOLO
    elif default.kind in ("graph_isomorphism", "image_classification"):
        small += SMALL_RL
        small += SMALL_SOLO if default.hyper_params.rl.pretrain_agents else ()
    resolved = resolve_experiment(parameter_file=preset, overrides=[*small, *case.overrides])
    run_experiment(
        resolved,
        runs_dir=str(folder),
        run_id=case.name,
        progress=False,
        num_threads=1,
        checkpoint_period=1,
        num_checkpoints_kept=9,
        rollout_sample_period=1,
    )
    run = folder / case.name
    return {"run": run_outputs(run), "resumed": run_outputs(resume_copy(run))}


def resume_copy(run: Path) -> Path:
    """Copy a run, and resume the copy from its first checkpoint."""
    import shutil

    from nip_astra import resume_experiment

    copy = run.with_name(f"{run.name}-resumed")
    shutil.copytree(run, copy)
    for name in ("results.json", "report.html"):
        (copy / name).unlink()
    first, *later = sorted((copy / "checkpoints").glob("step_*"))
    for checkpoint in later:
        shutil.rmtree(checkpoint)
    (copy / "checkpoints" / "latest").write_text(f"{first.name}\n")
    resume_experiment(copy, progress=False)
    return copy


def run_outputs(run: Path) -> dict[str, Any]:
    """Metrics, results, texts and weight digests of a run."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    texts = {
        str(path.relative_to(run)): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((run / "rollouts").rglob("*.jsonl"))
    }
    weights = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.glob("model/**/*.safetensors"))
    }
    last = max((run / "checkpoints").glob("step_*"), key=lambda path: path.name)
    weights |= {
        f"last/{path.relative_to(last)}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(last.rglob("*.safetensors"))
    }
    results = json.loads((run / "results.json").read_text())
    return {
        "metrics": drop_times(metrics),
        "results": drop_times(results),
        "texts": drop_times(texts),
        "weights": weights,
    }


def drop_times(value: Any) -> Any:
    """Drop times, memory and folder names from nested values."""
    if isinstance(value, Mapping):
        return {
            current_name(name): drop_times(item)
            for name, item in value.items()
            if not any(part in name for part in TIMES) and not str(item).startswith("/")
        }
    if isinstance(value, list):
        return [drop_times(item) for item in value]
    return RANDOM_ID.sub("job", value) if isinstance(value, str) else value


def current_name(metric: str) -> str:
    """The current name of a metric, which may have an agent prefix."""
    for old, new in METRIC_NAMES.items():
        if metric == old or metric.endswith(f"/{old}"):
            return metric.removesuffix(old) + new
    return metric


def evaluate_run(run: Path, checkout: Path) -> Any:
    """The JSON that `evaluate` prints for a run, or its error."""
    words = ["evaluate", str(run), "--num-episodes", "8", "--json", "--name", "golden"]
    words += ["--probability-episodes", "8"] if run.name.startswith("ast_dpo") else []
    completed = subprocess.run(
        [sys.executable, "-m", "nip_astra", *words], cwd=checkout, capture_output=True, text=True
    )
    return (
        drop_times(json.loads(completed.stdout)) if completed.returncode == 0 else completed.stderr
    )


# ---- objectives

SIZES = {"B": 6, "T": 7, "E": 5, "H": 6, "P": 4, "G": 4, "N": 12, "A": 2, "V": 9}
PARENTS_N = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 5]
DEPTHS_N = [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]
UNUSED = ("normaliser", "max_length", "return")
"""Options left at their defaults, except the length that one reduction needs."""
OLDER_LOSSES = {
    "ppo": "clipped_loss",
    "importance_sampling": "importance_sampling_loss",
    "cispo": "cispo_loss",
    "gspo": "gspo_token_loss",
    "sapo": "sapo_loss",
}
"""Functions of policy losses in older checkouts."""
OBJECTIVE_NAMES: dict[tuple[str, str], str] = {
    ("token_gae", "token_gae"): "tree_gae",
    ("run_advantages", "run_advantages"): "group_advantages",
    # Losses are compared by `policy_losses`; the rest has other arguments or no longer exists.
    **{("policy_losses", name): "" for name in (*OLDER_LOSSES, "rloo", "dro", "reinforce")},
    **{("policy_losses", name): "" for name in ("cross_entropy", "policy_loss")},
    **{("token_losses", name): "" for name in OLDER_LOSSES.values()},
    **{("policy_gradient", f"{name}_loss"): "" for name in ("ppo_policy", "group_policy")},
    ("policy_gradient", "reinforce_loss"): "",
    **{("advantages", name): "" for name in ("gae", "discounted_sums", "compute_advantages")},
    ("advantages", "codes_of"): "",
    ("run_advantages", "codes_of"): "",
    **{("episode_gae", name): "" for name in ("gae", "reward_to_go")},
    ("advantages", "reward_to_go"): "",
    **{("reductions", name): "" for name in ("batch_totals", "reduce_share")},
    ("ippo", "normalise"): "",
    ("ratios", "is_gradient_clipped"): "",
    **{("registry", name): "" for name in ("with_options", "options_of", "has_option")},
    **{("registry", f"register_{name}"): "" for name in ("policy_loss", "advantage")},
}
"""Names of renamed functions; an empty name excludes the function."""
METRIC_NAMES: dict[str, str] = runpy.run_path(
    str(TREE / "nip_astra" / "tracking" / "figure_names.py")
)["CURRENT_NAMES"]
"""Current names of renamed metrics; by path, since a base may not have the module."""
ADDED = (
    *("logprob", "grpo/used_fraction", "grpo/num_groups", "grpo/group_std_mean"),
    *(f"grpo/advantage_{name}" for name in ("mean", "std", "min", "max")),
    *("num_unclustered_probes", "stopped_early", "best_dev"),
)
"""Metrics and results that older checkouts do not have."""
NUMBERS = {"clip_range": 0.2, "beta": 0.3, "n": 3, "margin": 2, "max_length": 9, "alpha": 0.4}


def objectives() -> dict[str, Any]:
    """Values and gradients of each public function of `rl_objectives` on fixed tensors."""
    import importlib
    import pkgutil

    import nip_astra.rl_objectives as package

    results = policy_losses() | sibling_advantages()
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        space = vars(importlib.import_module(module.name))
        for name, function in sorted(space.items()):
            is_own = getattr(function, "__module__", "") == module.name
            name = OBJECTIVE_NAMES.get((module.name.rpartition(".")[2], name), name)
            is_public = name and name[0] != "_" and is_own and inspect.isfunction(function)
            if is_public and "rewards_PG" not in inspect.signature(function).parameters:
                for choice in option_combinations(function):
                    label = ",".join(f"{key}={value}" for key, value in choice.items())
                    results[f"{name}({label})"] = objective_value(function, choice)
    return results


def policy_losses() -> dict[str, Any]:
    """Per-token policy losses and their gradients, by current name."""
    names = ("logprobs_BT", "old_logprobs_BT", "advantages_BT", "mask_BT")
    results = {}
    for name, older in OLDER_LOSSES.items():
        inputs = [fixed_tensor(input_name) for input_name in names]
        try:
            from nip_astra.rl_objectives import token_losses

            loss_BT = getattr(token_losses, older)(*inputs)
        except ImportError:
            from nip_astra.rl_objectives.policy_losses import PolicyLoss

            loss_BT = PolicyLoss.of(name).of_tokens(*inputs)
        loss_BT.sum().backward()
        tensors = (loss_BT.detach(), inputs[0].grad)
        # Adding 0.0 removes the sign of zeros.
        results[f"policy loss {name}"] = [
            [repr(x + 0.0) for x in tensor.flatten().tolist()] for tensor in tensors
        ]
    return results


def sibling_advantages() -> dict[str, Any]:
    """Advantages of groups of equal size for every baseline and scale."""
    from nip_astra.rl_objectives import advantages

    rewards_PG = fixed_tensor("rewards_PG").detach()
    groups = fixed_tensor("group_N").new_tensor(range(len(rewards_PG)))
    group_N = groups.repeat_interleave(rewards_PG.shape[1])
    is_dense = "scale" not in inspect.signature(advantages.group_advantages).parameters
    results = {}
    for baseline, epsilon in product(("mean", "leave_one_out", "none"), (None, 1e-4)):
        if baseline == "none" and epsilon:
            continue
        options: dict[str, Any] = {"baseline": baseline, "std_epsilon": epsilon}
        if not is_dense:
            options |= {"std_epsilon": epsilon or 0.0, "scale": "group" if epsilon else "none"}
        inputs = (rewards_PG,) if is_dense else (rewards_PG.flatten(), group_N)
        values = advantages.group_advantages(*inputs, **options)[0].flatten().tolist()
        results[f"sibling advantages {baseline} {epsilon}"] = [repr(x + 0.0) for x in values]
    return results


def option_combinations(function: Any) -> Iterator[dict[str, Any]]:
    """All combinations of a function's literal options, without and with optional tensors."""
    lists: dict[str, list[Any]] = {"optional": [False]}
    for name, hint in get_type_hints(function).items():
        if get_origin(hint) is Literal:
            lists[name] = list(get_args(hint))
        elif name == "advantages":
            lists["shape"] = ["BT", "B"]
        elif NoneType in get_args(hint) and name not in UNUSED:
            lists["optional"] = [False, True]
    for values in product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def objective_value(function: Any, choice: Mapping[str, Any]) -> Any:
    """The function's values and gradients as text, or the name of its error."""
    import torch

    arguments = {name: value for name, value in choice.items() if name not in ("optional", "shape")}
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        kinds = (hints.get(name), *get_args(hints.get(name)))
        is_optional = parameter.default is not parameter.empty
        if name in arguments or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_chosen = choice["optional"] and NoneType in kinds and name not in UNUSED
        if is_optional and not is_chosen and name != "mask":
            if name == "max_length" and "sum_over_length" in str(arguments.values()):
                arguments[name] = NUMBERS[name]
            continue
        shaped = f"{name}_{choice['shape']}" if name == "advantages" else name
        arguments[name] = fixed_tensor(shaped) if torch.Tensor in kinds else NUMBERS.get(name, 0.5)
    leaves = [x for x in arguments.values() if getattr(x, "requires_grad", False)]
    try:
        outputs = list(tensors_in(function(**arguments)))
        total = sum(output.double().nansum() for output in outputs if output.requires_grad)
        if isinstance(total, torch.Tensor):
            torch.autograd.backward(total)
    except Exception as error:  # errors are compared as well
        return f"{type(error).__name__}"
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [[repr(value) for value in x.flatten().tolist()] for x in (*outputs, *gradients)]


def fixed_tensor(name: str) -> Any:
    """The fixed tensor of a name, whose suffix is its shape."""
    import torch

    suffix = name.rpartition("_")[2]
    is_shape = suffix.isupper() and set(suffix) <= set(SIZES)
    shape = [SIZES[letter] for letter in (suffix if is_shape else "BT")]
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if name == "parent_N":
        return torch.tensor(PARENTS_N)
    if name == "depth_N":
        return torch.tensor(DEPTHS_N)
    if name in ("group_N", "run_N", "episode_B", "round_B"):
        return torch.arange(math.prod(shape)) // (3 if name in ("group_N", "episode_B") else 1)
    if "mask" in name:
        lengths = torch.arange(shape[0])[:, None] % shape[-1] + 1
        mask = torch.arange(shape[-1]) < lengths if len(shape) == 2 else noise > -1
        return mask.expand(shape) if len(shape) == 2 else mask
    if name.startswith("is_"):
        return noise > 0.3
    if name.startswith(("lengths", "counts")):
        return noise.abs().mul(4).long() + 1
    value = -noise.abs() if "logprobs" in name else noise
    return value.float().requires_grad_()


def tensors_in(value: Any) -> Iterator[Any]:
    """All tensors of a nested value, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
    elif isinstance(value, int | float):
        yield torch.tensor(value)


# ---- completions


def completions() -> dict[str, Any]:
    """Responses of the text service for fixed seeds, with log-probabilities."""
    import httpx

    from nip_astra import start_service

    results = {}
    models = {"target": "scenario://pocket_chat/models/target"}
    with start_service(models, num_threads=1) as service:
        for seed, temperature in product((0, 1), (0.0, 1.0)):
            body = {
                "model": "target",
                "messages": [{"role": "user", "content": "hello there ."}],
                "seed": seed,
                "temperature": temperature,
                "max_tokens": 12,
                "n": 2,
                "logprobs": True,
            }
            response = httpx.post(f"{service.base_url}/chat/completions", json=body, timeout=60)
            results[f"seed {seed}, temperature {temperature}"] = response.json().get("choices")
    return results


# ---- two checkouts


def collect(checkout: Path, out: Path, cases: Sequence[Case]) -> None:
    """Compute all parts in this process, and write each when it is done."""
    import torch

    torch.set_num_threads(1)
    results: dict[str, Any] = {}

    def record(name: str, compute: Any, *arguments: Any) -> None:
        try:
            results[name] = compute(*arguments)
        except Exception as error:  # the other parts are still compared
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        out.write_text(json.dumps(results))

    record("objectives", objectives)
    record("completions", completions)
    folder = out.parent / f"runs-{out.stem}"
    for case in cases:
        print(f"{out.stem}: {case.name}", flush=True)
        record(case.name, run_case, case, checkout, folder)
        if case in QUICK and len(cases) > len(QUICK) and not case.preset.startswith("vanilla"):
            record(f"evaluate {case.name}", evaluate_run, folder / case.name, checkout)


def differences(base: Any, tree: Any, path: str = "") -> Iterator[str]:
    """Describe each difference between two nested values."""
    if isinstance(base, Mapping) and isinstance(tree, Mapping):
        for name in dict.fromkeys([*base, *tree]):
            if name in ADDED and name not in base:
                continue
            if name not in tree or name not in base:
                yield f"{path}/{name}: only in the {'base' if name in base else 'tree'}"
            else:
                yield from differences(base[name], tree[name], f"{path}/{name}")
    elif isinstance(base, list) and isinstance(tree, list) and len(base) == len(tree):
        for index, (old, new) in enumerate(zip(base, tree, strict=True)):
            yield from differences(old, new, f"{path}[{index}]")
    elif base != tree and not (base != base and tree != tree):
        yield f"{path}: {str(base)[:60]} / {str(tree)[:60]}"


def compare(base: Mapping[str, Any], tree: Mapping[str, Any]) -> int:
    """Print the state of each part with its first differences, and return the exit code."""
    code = 0
    for name in dict.fromkeys([*base, *tree]):
        sides = (base.get(name), tree.get(name))
        errors = [side["error"] for side in sides if side is not None and is_error(side)]
        lines = list(differences(*sides))
        state = "failed" if errors else "different" if lines else "equal"
        code = max(code, {"equal": 0, "different": 1, "failed": 2}[state])
        print(f"{state:10} {name}")
        for line in [*(str(error) for error in errors), *lines[:5]]:
            print(f"           {line[:160]}")
        if len(lines) > 5:
            print(f"           and {len(lines) - 5} more")
    return code


def is_error(value: Any) -> bool:
    """Whether a part failed."""
    return isinstance(value, Mapping) and set(value) == {"error"}


def main() -> int:
    """Compute in both checkouts, and compare the results."""
    parser = build_parser(
        __doc__,
        base=TREE,
        tree=TREE,
        quick=False,
        only={"nargs": "*", "help": "parts of the names of cases to run"},
        collect={"type": Path, "help": "internal: output file"},
    )
    options = parser.parse_args()
    cases = QUICK if options.quick else CASES
    if options.only:
        cases = tuple(case for case in CASES if any(part in case.name for part in options.only))
    if options.collect:
        collect(options.tree, options.collect, cases)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name, checkout in (("base", options.base), ("tree", options.tree)):
            out = Path(folder) / f"{name}.json"
            words = [sys.executable, str(HERE), "--collect", str(out), "--tree", str(checkout)]
            words += ["--quick"] if options.quick else []
            words += ["--only", *options.only] if options.only else []
            paths = os.pathsep.join([str(checkout.resolve()), str(HERE.parent)])
            environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
            environment |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
            subprocess.run(words, cwd=checkout, env=environment, check=True)
            results.append(json.loads(out.read_text()))
        if options.out is not None:
            options.out.write_text(json.dumps({"base": results[0], "tree": results[1]}) + "\n")
        return compare(*results)


if __name__ == "__main__":
    sys.exit(main())
