"""SimPO of an attacker, as it ships and as a plug-in of a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nip_astra.plugins import load_plugin
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.tiny import experience_of
from tests.trainers.test_ast_family import _trainer

PLUGIN = '''
import nip_astra as na


@na.register_trainer("my_simpo")
class MySimpo(na.AstPreferenceTrainer):
    """`-log sigmoid(beta (c - r) - margin)`, c and r mean log-probabilities (arXiv:2405.14734)."""

    class Parameters(na.AstPreferenceTrainer.Parameters):
        """Strength of the preference and its margin."""

        beta: float = 2.0
        length_normalised: bool = True
        margin: float = 1.0

    def loss(self, batch):
        chosen, rejected = self.pair_logprobs(batch)
        logits = self.parameters.beta * (chosen - rejected) - self.parameters.margin
        return na.LossOutput((-logits).logaddexp(logits.new_zeros(())).mean(), {})
'''


def test_a_plug_in_of_a_few_lines_has_the_loss_of_the_trainer_that_ships(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    assert len(PLUGIN.strip().splitlines()) <= 30
    with plugins_forgotten_after():
        path = tmp_path / "my_simpo.py"
        path.write_text(PLUGIN)
        load_plugin(path)
        own, ours = (_trainer(name, tiny_scenario) for name in ("my_simpo", "ast_simpo"))
        samples = experience_of(ours).samples
        losses = [trainer.loss(trainer.collate_fn(samples)).loss.item() for trainer in (own, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_loss_of_a_pair_of_equal_probes_is_that_of_the_margin_alone(
    tiny_scenario: Path,
) -> None:
    trainer = _trainer("ast_simpo", tiny_scenario, "ast_simpo.margin=0.7")
    sample = experience_of(trainer).samples[0]
    batch = trainer.collate_fn([sample | {"rejected": sample["chosen"]}])
    expected = -torch.nn.functional.logsigmoid(torch.tensor(-0.7))
    assert float(trainer.loss(batch).loss) == pytest.approx(float(expected), rel=1e-5)
