"""Results of learning in a test's processes, and their distance from a single process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from nip_astra.distributed.sharding import local_tensor
from nip_astra.distributed.team import open_team
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models import huggingface
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.run import prepare_experiment, run_experiment
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer
from nip_astra.trainers.trainer_base import Trainer

CPU = torch.device("cpu")


def learn(
    resolved: ResolvedExperiment,
    store: str | None,
    sharding: str = "none",
    *,
    in_float64: bool = True,
    scores_by_module: bool = False,
    inspect: Callable[[Any], dict[str, Any]] = lambda trainer: {},
    **settings: Any,
) -> dict[str, Any]:
    """Train in this process or as one of several, without writing files.

    Returns the weights (if sharded, the leader's, which are complete), the log, the number of
    optimizer steps, how many numbers of weights and optimizer state this process holds, and the
    result of `inspect`.
    """
    with pytest.MonkeyPatch.context() as patch, open_team(CPU, store) as team:
        if in_float64:
            load = huggingface.load_model
            patch.setattr(huggingface, "load_model", lambda *source: load(*source).double())
            patch.setattr(huggingface, "computing_dtype", lambda *_, **__: torch.float64)
        # An adapter's initial weights are drawn from torch's own generator.
        torch.manual_seed(3)
        given = ExperimentSettings(progress=False, sharding=sharding, **settings)
        trainer: Any = prepare_experiment(resolved, given, team=team).trainer
        logged: list[dict[str, float]] = []
        trainer.tracker.log_metrics = lambda metrics, step: logged.append(dict(metrics))
        is_of_agents = isinstance(trainer, TensorDictRlTrainer)
        if is_of_agents:
            _learn_in_float64(trainer)
        elif scores_by_module:
            # In both arms: its logits are float32, and another pass rounds differently.
            for agent in trainer.scenario_instance.agents.values():
                _module_model(agent.language_model).scores_by_module = True
        trainer.train()
        module = trainer.agents if is_of_agents else _module_model(trainer.policy).module
        is_whole = sharding == "none" or team.is_leader
        learned = trainer.optimizers.weights if is_of_agents else trainer.learned
        states = [
            value
            for optimizer in (trainer.optimizers.optimizers.values() if is_of_agents else ())
            for state in optimizer.state.values()
            for value in state.values()
            if value.ndim
        ]
        read = getattr(getattr(trainer, "service", None), "reader", module)
        return {
            "weights": {name: one.detach().clone() for name, one in module.named_parameters()}
            if is_whole
            else {},
            "logged": logged,
            "num_steps": trainer.state.num_optimizer_steps,
            "held": _size(learned),
            "remembered": _size(states),
            "read": _size(list(read.parameters())),
            "num_divided": sum(isinstance(one, DTensor) for one in module.parameters()),
            **inspect(trainer),
        }


def _module_model(model: Any) -> Any:
    """The model with a module, which scores for a model of vLLM."""
    return getattr(model, "scorer", model)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() for one in map(local_tensor, tensors))


def _learn_in_float64(trainer: TensorDictRlTrainer) -> None:
    """Have agents learn in float64 from rollouts of float32 agents, without tests."""
    collect = trainer.collect

    def collect_in_float32() -> Any:
        exact = {name: value.clone() for name, value in trainer.agents.state_dict().items()}
        trainer.agents.float()
        batch = collect()
        trainer.agents.double().load_state_dict(exact)
        return batch.apply(lambda one: one.double() if one.dtype == torch.float32 else one)

    trainer.collect = collect_in_float32  # type: ignore[method-assign]
    trainer._test = lambda *_, **__: {}  # type: ignore[method-assign]
    trainer.agents.double()


def check_equal(one: Mapping[str, Any], *others: Mapping[str, Any]) -> None:
    """Check that the leader's losses and weights equal a single process's."""
    leader, *_ = others
    assert {some["num_steps"] for some in others} == {one["num_steps"]}
    assert one["num_steps"] > 1
    assert gap_of(one["weights"], leader["weights"]) < 1e-6
    num_compared = 0
    for mine, theirs in zip(one["logged"], leader["logged"], strict=True):
        for name, value in mine.items():
            if name.endswith(("loss", "loss_policy", "loss_value", "grad_norm")):
                assert theirs[name] == pytest.approx(value, abs=1e-6), name
                num_compared += 1
    assert num_compared


def gap_of(some: Mapping[str, Tensor] | Path, others: Mapping[str, Tensor] | Path) -> float:
    """Return the largest difference of weights, given by name or by their run."""
    mine, theirs = (weights_of(x) if isinstance(x, Path) else x for x in (some, others))
    assert mine.keys() == theirs.keys()
    gaps = [(mine[n] - theirs[n]).abs().max().item() for n in mine if mine[n].numel()]
    return max(gaps)


def weights_of(run: Path) -> dict[str, Tensor]:
    """Return the final weights of a run."""
    result = {}
    for file in sorted(run.glob("model/*.safetensors")):
        result |= {f"{file.name}/{name}": value for name, value in load_file(file).items()}
    return result


def run(resolved: ResolvedExperiment, path: Path, *, stops: bool = False, **settings: Any) -> None:
    """Run an experiment, to the end or to the first checkpoint."""
    save = Trainer._save_checkpoint

    def save_and_stop(self: Trainer, **options: Any) -> None:
        save(self, **options)
        if stops and self.state.iteration == 1:
            raise KeyboardInterrupt

    options = {"progress": False, "checkpoint_period": 1} | settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save_checkpoint", save_and_stop)
        try:
            run_experiment(resolved, runs_dir=str(path.parent), run_id=path.name, **options)
        except (Exception, KeyboardInterrupt):
            if not stops:
                raise
