"""Weights that are sharded among processes learn the same as whole weights."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.checkpoints.tensors import compare_dumps
from nip_astra.distributed.team import Team
from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.evaluation.api import export
from nip_astra.language_models import huggingface
from nip_astra.language_models.sampling import SamplingOptions
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.language_models.vllm import VllmLanguageModel
from nip_astra.language_models.vllm_backend.engine import Request
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.run import prepare_experiment, resume_experiment, run_experiment
from nip_astra.trainers.language_model_base import distribute
from tests.distributed.processes import together
from tests.distributed.test_training_together import check_equal, gap_of, learn, run
from tests.kit.messages import says
from tests.kit.resuming import short_experiment
from tests.kit.tiny import CPU, make_language_model, sampled_by_vllm
from tests.language_models import fake_vllm

pytestmark = pytest.mark.usefixtures("no_plugins_left")


def learned(resolved: ResolvedExperiment, store: str, sharding: str) -> dict[str, Any]:
    """What a process learns, and whether it keeps whole weights: of the base, and of a model."""
    whole: list[Any] = []
    divide = ShardedService.__init__

    def recorded(self: ShardedService, local: LocalTrainingService, team: Team) -> None:
        # Of an adapter, the first weight belongs to the base.
        module: Any = local.model.module  # type: ignore[attr-defined]
        whole.append(weakref.ref(next(module.parameters())))
        whole.append(weakref.ref(local.learned[0]))
        divide(self, local, team)

    def inspect(trainer: Any) -> dict[str, Any]:
        assert {one.dtype for one in trainer.policy.module.parameters()} == {torch.float64}
        gc.collect()
        return {
            "is_sharded": isinstance(trainer.service, ShardedService),
            "keeps_whole": [one() is not None for one in whole],
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedService, "__init__", recorded)
        return learn(resolved, store, sharding, scores_by_module=True, inspect=inspect)


def case(name: str, trainer: str, *overrides: str, is_slow: bool = True) -> Any:
    return pytest.param(trainer, overrides, marks=[pytest.mark.slow] * is_slow, id=name)


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        case("ast_dpo", "ast_dpo", "training.max_grad_norm=0.05", is_slow=False),
        # Three batches a step, of a single row: two are distributed; for one, another process reads
        # a row. The target is the base below the adapter, like the reference.
        case(
            *("ast_dpo_lora", "ast_dpo", "ast_chat.attacker.language_model.lora={rank: 2}"),
            "ast_chat.target.language_model.model=SCENARIO/attacker",
            *("training.minibatch_size=1", "training.gradient_accumulation_steps=3"),
        ),
        # With a value head, which every process holds whole.
        case("ast_ppo", "ast_ppo"),
        case("self_hosted_grpo_lora", "self_hosted_grpo", "task.policy.language_model.lora.rank=2"),
        case("self_hosted_grpo", "self_hosted_grpo"),
        # Played by a copy with older weights, which the leader holds.
        case("ast_dpo_ahead", "ast_dpo", "ast_dpo.max_staleness=1"),
    ],
)
def test_sharded_weights_learn_the_same_as_whole_weights(
    trainer: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "scenario"
    given = [one.replace("SCENARIO", str(folder)) for one in overrides]
    resolved = short_experiment(trainer, folder, *given, num_iterations=2)
    whole, _ = together(lambda store: learned(resolved, store, "none"), tmp_path)
    leader, other = together(lambda store: learned(resolved, store, "fsdp"), tmp_path)
    assert (whole["is_sharded"], leader["is_sharded"], other["is_sharded"]) == (False, True, True)
    check_equal(whole, leader, other)
    # The leader's own model; elsewhere whole weights are released.
    assert leader["keeps_whole"] == [True, True]
    assert other["keeps_whole"] == [False, False]
    # Each holds about half of the trained weights, and of the frozen weights below an adapter.
    for one in (leader, other):
        assert one["held"] < 0.65 * whole["held"]
        assert one["read"] < 0.65 * whole["read"]


def test_a_weight_that_one_process_holds_whole_and_labelled_networks_are_refused(
    tmp_path: Path,
) -> None:
    resolved = short_experiment("self_hosted_grpo", tmp_path / "scenario")
    prepared: Any = prepare_experiment(resolved, progress=False, sharding="fsdp").trainer
    team = Team()
    team.size = 2
    with pytest.raises(ConfigurationError) as caught:
        distribute(prepared.service, object(), [], team, prepared.settings)  # type: ignore[arg-type]
    assert says(caught.value, "sharding=fsdp", "object")
    resolved = short_experiment("solo_agent", tmp_path / "agents")
    with pytest.raises(ConfigurationError) as caught:
        prepare_experiment(resolved, progress=False, sharding="fsdp")
    assert says(caught.value, "sharding=fsdp", "'solo_agent'")


@pytest.mark.slow
def test_dumps_of_sharded_weights_are_complete(tmp_path: Path) -> None:
    """With rollouts played ahead by a copy of the weights."""
    given = ("self_hosted_grpo.max_staleness=1",)
    resolved = short_experiment("self_hosted_grpo", tmp_path / "scenario", *given, num_iterations=2)

    def dumped(store: str, sharding: str) -> None:
        settings = {"progress": False, "dump_period": 1, "sharding": sharding}
        settings |= {"runs_dir": str(tmp_path), "run_id": sharding, "process_store": store}
        # The same pass in both arms: another rounds differently.
        huggingface.build_decoder = lambda _: None
        run_experiment(resolved, **settings)

    for sharding in ("none", "fsdp"):
        together(partial(dumped, sharding=sharding), tmp_path)
    comparison = compare_dumps(tmp_path / "none", tmp_path / "fsdp", tolerance=1e-4)
    assert comparison.num_stages > 10
    assert not comparison.differences


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["null", "{rank: 2}"], ids=["full", "lora"])
def test_sharded_weights_learn_rounded_and_recomputed_like_whole_weights(
    lora: str, tmp_path: Path
) -> None:
    """Layers are sent in bfloat16, except adapters, and recomputed in the backward pass."""
    model = "ast_chat.attacker.language_model"
    given = (f"{model}.dtype=bfloat16", f"{model}.lora={lora}")
    resolved = short_experiment("ast_dpo", tmp_path / "scenario", *given, num_iterations=2)
    rounded = partial(
        *(learn, resolved),
        in_float64=False,
        scores_by_module=True,
        inspect=lambda trainer: {"dtype": trainer.policy.dtype},
    )
    # Of an adapter by two processes: other batch shapes round differently and draw other tokens.
    whole = rounded(None) if lora == "null" else together(rounded, tmp_path)[0]
    plain, leader = (
        together(partial(rounded, sharding="fsdp", gradient_checkpointing=recomputes), tmp_path)[0]
        for recomputes in (False, True)
    )
    assert leader["dtype"] == torch.bfloat16
    # Recomputed values are equal to the bit.
    assert gap_of(leader["weights"], plain["weights"]) == 0
    # Norms are sent rounded, and Adam takes full steps even for tiny gradients.
    for mine, theirs, gap in zip(leader["logged"], whole["logged"], (2e-3, 3e-2), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=gap)


def test_parts_are_joined_for_others_and_a_lost_part_is_reported_with_an_intact_checkpoint(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    resolved = short_experiment("ast_dpo", tmp_path / "scenario", num_iterations=2)
    together(lambda store: run(resolved, path, process_store=store, sharding="fsdp"), tmp_path)
    weights = load_file(path / "model" / "model.safetensors")
    export(path, "huggingface", tmp_path / "joined")
    joined = AutoModelForCausalLM.from_pretrained(tmp_path / "joined").state_dict()
    assert all(torch.equal(joined[name], weights[name]) for name in weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "joined").encode("hello")
    (path / "results.json").unlink()
    latest = CheckpointStore(path / "checkpoints").latest()
    assert latest is not None
    lost, *_ = sorted((latest / "attacker" / "shards").iterdir())
    content = lost.read_bytes()

    def failed() -> str:
        with pytest.raises(CheckpointError) as caught:
            resume_experiment(path, progress=False)
        return str(caught.value)

    lost.unlink()
    assert says(failed(), f"shards/{lost.name} is missing", "newest valid")
    lost.write_bytes(content[:-1] + b"x")
    assert says(failed(), f"shards/{lost.name} is corrupt")


# ---- turns that vLLM samples in the first process, with the stand-in


@pytest.fixture
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


def seen_in(trainer: Any) -> dict[str, Any]:
    engines = fake_vllm.LLM.started
    named = engines[0].module.named_parameters() if engines else ()
    return {
        "is_sharded": isinstance(trainer.service, ShardedService),
        "engine": {name: weight.clone() for name, weight in named},
        "calls": [engine.calls for engine in engines],
    }


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize(
    "lora", ["null", pytest.param("{rank: 2}", marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_the_engine_of_the_leader_gets_the_jointly_learned_weights(
    lora: str, tmp_path: Path
) -> None:
    options = [
        *sampled_by_vllm(tmp_path / "scenario", "attacker"),
        f"ast_chat.attacker.language_model.lora={lora}",
    ]
    resolved = short_experiment("ast_dpo", tmp_path / "scenario", *options, num_iterations=2)
    how: dict[str, Any] = {"in_float64": False, "scores_by_module": True, "inspect": seen_in}
    leader, other = together(lambda store: learn(resolved, store, "fsdp", **how), tmp_path)
    assert leader["is_sharded"]
    # Only the leader's engine samples, from each iteration's weights.
    assert other["calls"] == [[]]
    (calls,) = leader["calls"]
    loaded = "load_weights" if lora == "null" else "add_lora"
    assert calls.count(loaded) >= 2
    if lora == "null":
        for name, weight in leader["engine"].items():
            torch.testing.assert_close(weight, leader["weights"][name], atol=0, rtol=0)
        return
    whole, _ = together(lambda store: learn(resolved, store, **how), tmp_path)
    assert not whole["is_sharded"]
    assert leader["calls"] == whole["calls"]
    for name, weight in leader["weights"].items():
        # float32.
        torch.testing.assert_close(weight, whole["weights"][name], atol=2e-4, rtol=0)


@pytest.mark.usefixtures("_vllm")
def test_engines_in_actors_are_started_by_the_first_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = make_language_model(tmp_path / "model", seed=1)
    parameters = VllmLanguageModel.Parameters(model=str(folder), num_engines=2)
    model = VllmLanguageModel.load(parameters, device=CPU, scenario_dir=None, trainable=True)
    with pytest.raises(ConfigurationError) as caught:
        model.ask([Request((1,), 0)], SamplingOptions(max_new_tokens=1))
    assert says(caught.value, "process 1", "the first process alone", "huggingface")
