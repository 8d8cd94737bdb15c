"""Files with the weights of agents that are networks, and the base of their trainers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.checkpoints.weights import save_modules
from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.scenario_instance import ProtocolInstance
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import MODEL_DIR, RunDirectory
from nip_astra.trainers.trainer_base import TensorDictTrainer

AGENTS_DIR = "agents"
"""Folder of a checkpoint with its agents."""
SOLO_PREFIX = "solo_head."
"""Prefix of weights used only by supervised training; they may be missing or unused."""


def save_agents(agents: Iterable[Agent], directory: Path) -> None:
    """Write `<name>.safetensors` for each agent."""
    save_modules({agent.name: agent for agent in agents}, directory)


def load_agent(agent: Agent, path: Path) -> None:
    """Load an agent's weights from a file."""
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the file {path} of the agent {agent.name!r} is missing or broken: {error}. Give a "
            "run that holds this agent."
        ) from error
    own = agent.state_dict()
    faults = [
        f"{name} is missing there"
        for name in own
        if name not in weights and not name.startswith(SOLO_PREFIX)
    ]
    for name, value in weights.items():
        if name not in own:
            faults += [] if name.startswith(SOLO_PREFIX) else [f"{name} is not needed here"]
        elif own[name].shape != value.shape:
            shapes = f"{list(value.shape)} there and {list(own[name].shape)} here"
            faults.append(f"{name} has shape {shapes}")
    if faults:
        advice = "Give both agents the same parameters, or load none."
        was_alone, is_alone = (
            any(n.startswith(SOLO_PREFIX) for n in all_) for all_ in (weights, own)
        )
        if was_alone and not is_alone:
            advice = (
                "It was trained alone, without a policy: set rl.pretrain_agents=true instead of "
                "loading it."
            )
        raise CheckpointError(
            f"the agent {agent.name!r} of {path} has other networks: {'; '.join(faults[:3])}"
            f"{'; and more' if len(faults) > 3 else ''}. {advice}"
        )
    with torch.no_grad():
        for name, value in weights.items():
            if name in own:
                own[name].copy_(value)


LATEST = "latest"
"""Version of a run's agents: the final ones, or else those of its newest checkpoint."""


def agent_file_of_run(run: str, name: str, runs_dir: str, version: str = LATEST) -> Path:
    """Return the file with a run's trained agent: its final one, or else of its newest checkpoint.

    `run` is a run directory, or its name in `runs_dir`; `version` may name a checkpoint.
    """
    directory = RunDirectory.find(run, runs_dir)
    store = CheckpointStore(directory.checkpoints_dir)
    if version == LATEST:
        folders = [directory.path / MODEL_DIR]
        checkpoint = store.latest()
    else:
        folders = []
        checkpoint = store.named(version)
    folders += [] if checkpoint is None else [checkpoint / AGENTS_DIR]
    for folder in folders:
        if (folder / f"{name}.safetensors").is_file():
            if version == LATEST and checkpoint is not None and folder.parent == checkpoint:
                store.verify(checkpoint)
            return folder / f"{name}.safetensors"
    found = sorted({path.stem for folder in folders for path in folder.glob("*.safetensors")})
    raise CheckpointError(
        f"the run {directory.path} has saved {', '.join(found) or 'no agents'}, not {name!r}. Give "
        "a run whose protocol has an agent of this name."
    )


def load_agents_from_runs(agents: Iterable[Agent], runs_dir: str) -> None:
    """Load each agent whose `load_from_run` names a run from that run."""
    downloaded: dict[tuple[str, str], Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for agent in agents:
            run = agent.parameters_of_agent.load_from_run
            version = agent.parameters_of_agent.checkpoint_version
            if run is None:
                continue
            if run.startswith(wandb_runs.SCHEME):
                if (run, version) not in downloaded:
                    to = downloaded[run, version] = Path(folder) / str(len(downloaded))
                    wandb_runs.download_model(run, to, version)
                load_agent(agent, downloaded[run, version] / f"{agent.name}.safetensors")
            else:
                load_agent(agent, agent_file_of_run(run, agent.name, runs_dir, version))


class AgentTrainer(TensorDictTrainer):
    """Base of trainers of agents that are networks.

    Subclasses implement `train`, `_run_test_loop` and `_write_results`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        instance = self.scenario_instance
        if not isinstance(instance, ProtocolInstance):
            raise ConfigurationError(
                f"the trainer {self.hyper_params.trainer!r} needs agents that play a protocol, "
                f"which a scenario of kind {instance.kind!r} lacks. Choose another --scenario."
            )
        self.scenario_instance: ProtocolInstance = instance
        self.test_environment = instance.test_environment
        if not self._has_checkpoint():
            load_agents_from_runs(self.saved_agents, self.settings.runs_dir)

    @property
    def saved_agents(self) -> list[Agent]:
        """Return the agents with files."""
        return list(self.scenario_instance.agents.values())

    def rerun_tests(self, base_run: Path) -> None:
        self._set_seed()
        for agent in self.saved_agents:
            load_agent(agent, agent_file_of_run(str(base_run), agent.name, self.settings.runs_dir))
        with self.test_context():
            self._run_test_loop()
        self._write_results()

    def _run_test_loop(self) -> None:
        raise NotImplementedError

    def _write_results(self) -> None:
        raise NotImplementedError

    def save_models(self, directory: Path) -> None:
        save_agents(self.saved_agents, directory / AGENTS_DIR)

    def load_models(self, directory: Path) -> None:
        for agent in self.saved_agents:
            load_agent(agent, directory / AGENTS_DIR / f"{agent.name}.safetensors")
