"""A scenario and trainer without models, as a plug-in file, to test the running of experiments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.trainers.registry import TRAINERS

PLUGIN = '''
"""A trainer that counts."""

import os
import signal
from pathlib import Path

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.registry import Scenario, register_scenario
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.trainer_base import Trainer, attach_progress_bar


@register_scenario("toy_kind")
class ToyScenario(Scenario):
    """Nothing at all."""

    @classmethod
    def build(cls, hyper_params, parameters, settings, *, scenario_dir, trainer_type):
        return ScenarioInstance(kind="toy_kind")


@register_trainer("toy_trainer")
class ToyTrainer(Trainer):
    """Counts, and breaks off where the environment says so."""

    class Parameters(SubParameters):
        """How far to count from."""

        offset: float
        """What is added to each count."""

    def train(self):
        self.start = getattr(self, "start", 0)
        with self._open_progress_bar():
            self._count()
        self.results["last"] = self.hyper_params.training.num_iterations + self.parameters.offset

    @attach_progress_bar(lambda self: self.hyper_params.training.num_iterations)
    def _count(self, iteration_context):
        iteration_context.set_description("Counting")
        for index in iteration_context.iterate(self.start):
            self.tracker.log_metrics({"count": index + self.parameters.offset}, step=index)
            if os.environ.get("TOY_BREAK") == f"{index}":
                raise ArithmeticError("broken off")
            if os.environ.get("TOY_SIGNAL", "").startswith(f"{index}:"):
                for name in os.environ["TOY_SIGNAL"].split(":")[1:]:
                    os.kill(os.getpid(), getattr(signal, name))
            self._save(index + 1)
            self._raise_if_stopped()

    def _save(self, done):
        def write(folder):
            save_state(folder / "state", {"done": done, "tracker": self.tracker.position()})

        store = self._checkpoint_store()
        if store is not None:
            store.save(done, write, metadata={})

    def resume(self, checkpoint):
        state = load_state(checkpoint / "state")
        self.start = state["done"]
        self.tracker.rewind(state["tracker"])
'''

SCENARIO = """
kind: toy_kind
training:
  num_iterations: 4
toy_trainer:
  offset: 0.5
"""


@contextmanager
def toy_scenario_in(folder: Path) -> Iterator[Path]:
    """Write the scenario with its plug-in; its registrations are forgotten after the block."""
    folder.mkdir(parents=True)
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "scenario.yaml").write_text(SCENARIO)
    yield folder
    forget_toys()


def forget_toys() -> None:
    """Let the plug-in of another folder register the names."""
    for registry, name in ((TRAINERS, "toy_trainer"), (SCENARIOS, "toy_kind")):
        if name in registry.names():
            registry.forget(name)
