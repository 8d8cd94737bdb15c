"""Snapshots of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nip_astra.language_models.sources import load_causal_lm
from nip_astra.language_models.tree_engine.weights import frozen_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_overwritten_snapshot_equals_a_new_one_in_the_same_memory(
    tiny_model_dir: Path, dtype: torch.dtype
) -> None:
    module = load_causal_lm(str(tiny_model_dir), None)
    old = frozen_weights(module, dtype, use_adapter=False)
    places = [old.embedding_VX.data_ptr(), old.layers[0].input_norm.data_ptr()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape))
    new = frozen_weights(module, dtype, use_adapter=False)
    assert frozen_weights(module, dtype, use_adapter=False, into=old) is old
    assert places == [old.embedding_VX.data_ptr(), old.layers[0].input_norm.data_ptr()]
    assert torch.equal(old.embedding_VX, new.embedding_VX)
    assert torch.equal(old.final_norm, new.final_norm)
    x = torch.randn(3, old.embedding_VX.shape[1]).to(dtype)
    assert torch.equal(old.head(x), new.head(x))
    for ours, fresh in zip(old.layers, new.layers, strict=True):
        assert torch.equal(ours.input_norm, fresh.input_norm)
        assert torch.equal(ours.mlp_norm, fresh.mlp_norm)
        assert torch.equal(ours.qkv(x), fresh.qkv(x))
        assert torch.equal(ours.gate_up(x), fresh.gate_up(x))
