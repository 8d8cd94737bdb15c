"""What is sampled from is what was learnt, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nip_astra.language_models.base import SamplingOptions, pad_left
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.tree_engine.decode_graphs import FixedSteps

CPU = torch.device("cpu")
CONTEXTS = [[2, 4, 6, 7, 3, 5], [2, 4, 8, 3, 5]]
OPTIONS = SamplingOptions(max_new_tokens=4)


def gap(model: HuggingFaceLanguageModel) -> float:
    """How far log-probabilities of sampling are from those of scoring."""
    said = model.generate(CONTEXTS, 1, torch.rand(2, 4), OPTIONS)
    with torch.no_grad():
        scored = model.logprobs(*pad_left(CONTEXTS, CPU), said.ids_BT, said.mask_BT)
    return float((scored - said.logprobs_BT).abs().max())


def use_fixed_shapes(model: HuggingFaceLanguageModel) -> None:
    assert model._decoder is not None
    model._steps = FixedSteps(model._decoder, None, is_required=False)
    model._snapshot = model._new_snapshot()


@pytest.mark.parametrize("has_fixed_shapes", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_of_any_optimizer_is_sampled_from(
    tiny_model: HuggingFaceLanguageModel, has_fixed_shapes: bool, is_fused: bool
) -> None:
    if has_fixed_shapes:
        use_fixed_shapes(tiny_model)
    # A fused step does not count the tensors' versions up.
    optimizer = torch.optim.AdamW(tiny_model.parameters(), lr=0.3, fused=is_fused)
    assert gap(tiny_model) < 1e-4
    ids_BT = torch.tensor([[6, 7], [8, 9]])
    logprobs = tiny_model.logprobs(*pad_left(CONTEXTS, CPU), ids_BT, ids_BT > 0)
    logprobs.sum().backward()
    optimizer.step()
    assert gap(tiny_model) < 1e-4


def test_weights_are_not_copied_again_where_nothing_was_learnt(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    gap(tiny_model)
    first = tiny_model._snapshot.of(tiny_model.parameters())
    gap(tiny_model)
    assert tiny_model._snapshot.of(tiny_model.parameters()) is first


def test_what_inference_mode_sampled_with_can_be_overwritten_outside_of_it(
    tiny_model_dir: Path,
) -> None:
    given = {"model": str(tiny_model_dir), "lora": {"rank": 2}}
    model = HuggingFaceLanguageModel.load(
        HuggingFaceLanguageModel.Parameters.from_dict(given),
        device=CPU,
        scenario_dir=None,
        trainable=True,
    )
    use_fixed_shapes(model)
    with torch.inference_mode():
        model.generate(CONTEXTS, 1, torch.rand(2, 4), OPTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert gap(model) < 1e-4
