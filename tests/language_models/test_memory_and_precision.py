"""Recomputed layers give the same gradients, and rounded layers nearly the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import SamplingOptions, pad_left, pad_right
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.plain_forward import layers_of
from nip_astra.run import prepare_experiment
from nip_astra.trainers.language_model_base import distribute
from tests.kit.messages import says
from tests.kit.resuming import short_experiment
from tests.kit.tiny import CPU, load_backend, make_gpt2, make_language_model

ROWS = (*pad_left([[2, 6, 7], [2, 6]], CPU), *pad_right([[8, 9, 3], [9, 3]], CPU))


@pytest.fixture(params=["decoder", "own forward pass"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    make = make_language_model if request.param == "decoder" else make_gpt2
    return partial(load_backend, make(tmp_path / "model"))


def gradients_of(model: HuggingFaceLanguageModel) -> tuple[Tensor, list[Tensor]]:
    scores = model.token_scores(*ROWS, needs_entropy=True)
    (scores.logprobs_BT.exp().sum() + scores.entropy_BT.sum()).backward()
    return scores.logprobs_BT.detach(), [weight.grad for weight in model.parameters()]  # type: ignore[misc]


def test_layers_computed_again_keep_less_and_give_the_same_gradients(
    load: Callable[..., Any],
) -> None:
    kept, result = [], []
    for recomputes in (False, True):
        model = load()
        if recomputes:
            model.recompute_layers()
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.logprobs(*ROWS)
        kept.append(sum(sizes))
        result.append(gradients_of(model))
    (logprobs, gradients), (again, gradients_again) = result
    assert torch.equal(logprobs, again)
    assert len(gradients) > 20
    for first, second in zip(gradients, gradients_again, strict=True):
        assert torch.equal(first, second)
    assert kept[1] < 0.7 * kept[0]


def test_a_model_learns_in_bfloat16_on_weights_of_float32(load: Callable[..., Any]) -> None:
    exact, rounded = load(), load(dtype="bfloat16")
    assert rounded.dtype == torch.bfloat16
    assert {weight.dtype for weight in rounded.parameters()} == {torch.float32}
    logprobs, gradients = gradients_of(exact)
    nearly, rounded_gradients = gradients_of(rounded)
    assert nearly.dtype == torch.float32
    # Nats, about 5; bfloat16 has 8 bits, so the error is about a percent.
    assert 0 < (nearly - logprobs).abs().max() < 0.08
    whole, nearly_whole = (
        torch.cat([item.flatten() for item in some]) for some in (gradients, rounded_gradients)
    )
    assert torch.cosine_similarity(whole, nearly_whole, dim=0) > 0.998
    options = SamplingOptions(max_new_tokens=3)
    drawn = rounded.generate([[2, 6, 7]], 2, torch.full((2, 3), 0.4), options)
    with torch.no_grad():
        scored_BT = rounded.logprobs(*pad_left([[2, 6, 7]] * 2, CPU), drawn.ids_BT, drawn.mask_BT)
    assert torch.allclose(scored_BT, drawn.logprobs_BT, atol=0.05)
    hidden = rounded.token_scores(*ROWS, needs_hidden=True).hidden_BTX
    assert rounded.logits_of(hidden[0]).dtype == torch.float32


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        layers_of(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert says(caught.value, "layers of Sequential", "GradientCheckpointingLayer", "sharding")


@pytest.mark.usefixtures("no_plugins_left")
def test_the_setting_reaches_the_policy(tmp_path: Path) -> None:
    resolved = short_experiment("self_hosted_grpo", tmp_path / "scenario", num_iterations=1)
    settings = ExperimentSettings(progress=False, gradient_checkpointing=True)
    trainer: Any = prepare_experiment(resolved, settings).trainer
    assert trainer.policy.recomputes_layers
    with pytest.raises(ConfigurationError) as caught:
        distribute(object(), trainer.policy, [], trainer.team, trainer.settings)  # type: ignore[arg-type]
    assert says(caught.value, "gradient_checkpointing", "object", "to false")
    resolved = short_experiment("vanilla_ppo", tmp_path / "agents")
    with pytest.raises(ConfigurationError) as caught:
        prepare_experiment(resolved, progress=False, gradient_checkpointing=True)
    assert says(caught.value, "gradient_checkpointing=true", "Leave it out")
