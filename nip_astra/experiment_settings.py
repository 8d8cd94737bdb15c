"""Where and how a run takes place. Changing settings must not change the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import ConfigDict, Field

from nip_astra.parameters.parameters_base import MAX_WHOLE, SubParameters
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import Tracker

MAX_THREADS = 256
"""More cores than training here can use; a thousand threads stall a machine."""


SETTINGS_OF_OTHERS = frozenset(
    {
        "checkpoint_period",
        "device",
        "device_price",
        "dump_period",
        "gradient_checkpointing",
        "max_service_cost",
        "max_service_requests",
        "max_service_tokens",
        "num_checkpoints_kept",
        "num_rollout_samples",
        "num_threads",
        "progress",
        "rollout_sample_period",
        "run_id",
        "sharding",
        "test_run",
    }
)
"""Settings that a stored run of others may choose: they reach nothing outside of its folder."""


class ExperimentSettings(SubParameters):
    """Device, tracking and paths. The fields after `progress` live in the process only."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where models run; auto takes a GPU where there is one."""
    runs_dir: str = "runs"
    """Folder in which run directories are made."""
    run_id: str | None = None
    """Name of the run and of its directory; null makes one from trainer, scenario and time."""
    trackers: list[str] = []
    """Trackers that mirror the run directory, by name: `wandb`, `mlflow`, `trackio`, `tensorboard`,
    or one of a plug-in.
    `file`, which writes the directory, is always there."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Mode of the tracker `wandb` (Weights & Biases): offline or online turns it on; where
    `trackers` names it, disabled stands for online."""
    wandb_project: str | None = None
    """W&B project; null takes WANDB_PROJECT of the environment, or nip_astra."""
    wandb_entity: str | None = None
    """W&B user or team; null takes WANDB_ENTITY of the environment, or the account's own."""
    wandb_group: str | None = None
    """Group of runs on W&B; null takes WANDB_RUN_GROUP of the environment, or none."""
    wandb_tags: list[str] = []
    """Tags of the run on W&B; with none, those of WANDB_TAGS in the environment."""
    num_threads: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    """CPU cores to use; null takes all, of which four at most play conversations of small models,
    and one trains agents of a protocol. Large models compute in so many threads of torch, parts of
    a rollout of small models are played by so many processes, and agents of a protocol learn in so
    many where their losses can be divided. Where small models learn the numbers are the same
    whatever the number of cores; torch cuts the sums of large models by its threads, so that their
    last digits may depend on it."""
    num_actors: int = Field(default=0, ge=0, le=1024)
    """Actors of Ray, on one machine or many, that play the parts of a rollout or an evaluation in
    place of processes of this one; 0 for none. How many there are changes no number. More than
    `num_rollout_parts` have nothing to do. Needs the extra `ray`."""
    actor_cpus: float = Field(default=1, ge=0)
    """CPU cores that an actor takes of a cluster, and threads of torch where models are large."""
    actor_gpus: float = Field(default=0, ge=0)
    """GPUs that an actor takes of a cluster."""
    ray_address: str | None = None
    """Address of the Ray cluster that a sweep `--on ray`, and `num_actors`, use, or "auto"; null
    takes RAY_ADDRESS of the environment, and without that starts Ray on this machine."""
    checkpoint_period: int = Field(default=10, ge=0)
    """Iterations between checkpoints; 0 saves at the end and on a signal only."""
    num_checkpoints_kept: int = Field(default=2, ge=1)
    """Newest checkpoints kept, beside the best."""
    rollout_sample_period: int = Field(default=10, ge=1)
    """Iterations between tables of sample conversations."""
    num_rollout_samples: int = Field(default=2, ge=0)
    """Episodes in a table of sample conversations, with all their nodes, the worst first."""
    dump_period: int = Field(default=0, ge=0)
    """Iterations from one dump to the next of what a trainer on trajectories does, stage by stage,
    for `compare-dumps`; 0 writes none. Dumps take as much room as the weights do."""
    max_service_requests: int | None = Field(default=None, ge=0, le=MAX_WHOLE)
    """Most requests of the run to chat models, attempts that fail included; then it stops, and can
    be resumed with more. null for no bound."""
    max_service_tokens: int | None = Field(default=None, ge=0, le=MAX_WHOLE)
    """Most tokens that chat models may read and say for the run; then it stops, and can be resumed
    with more. null for no bound."""
    max_service_cost: float | None = Field(default=None, ge=0)
    """Most money that chat models may cost, by their `prices`; then the run stops, and can be
    resumed with more. null for no bound."""
    service_cache: str | None = None
    """File in which answers of chat models are remembered, for instance for several runs; null
    keeps them in the run directory."""
    device_price: float | None = Field(default=None, ge=0)
    """Price of one device and hour, by which --dry-run reckons what a run on many costs; null for
    no costs."""
    sharding: Literal["none", "fsdp"] = "none"
    """What each of several processes holds of what learns. none: all; fsdp: a part of weights,
    gradients and optimizer (FSDP2), for models that with these do not fit one device. Of a language
    model with an adapter that is a part of the base too. The first process holds the weights whole
    beside its part, to play with. One process holds all either way. The numbers are the same up to
    rounding."""
    gradient_checkpointing: bool = False
    """Whether a language model that learns forgets what is inside its layers, and computes it again
    in the backward pass: less memory, about a third more time, the same gradients."""
    process_store: str | None = None
    """File, on a disk that all see, by which the processes of a run find each other where no port
    can be used; a new one for every start. null takes the address that torchrun gives."""
    test_run: bool = False
    """Whether every loop is cut to one iteration, to see that all parts work."""
    progress: bool = True
    """Whether a progress bar is shown."""
    progress_path: str | None = None
    """File that holds how many iterations of how many are done, for whoever keeps several runs
    going; null writes none."""

    run_directory: RunDirectory | None = Field(default=None, exclude=True)
    """Where the run's files go."""
    tracker: Tracker | None = Field(default=None, exclude=True)
    """Takes metrics, tables and artifacts."""
    tqdm_func: Callable[..., Any] | None = Field(default=None, exclude=True)
    """Makes the progress bar in place of tqdm."""
    global_tqdm_step_fn: Callable[[], None] | None = Field(default=None, exclude=True)
    """Called once an iteration, for instance by a sweep's own bar."""
    team: Any = Field(default=None, exclude=True)
    """The `distributed.team.Team` of processes that train the run together; null for this one."""
    stop_flag: Callable[[], str | None] | None = Field(default=None, exclude=True)
    """The name of the signal that asked the run to stop, or None."""

    def outside(self) -> dict[str, str]:
        """Settings other than defaults that reach outside of a run's folder, as text."""
        return {
            name: str(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if name not in SETTINGS_OF_OTHERS
            and not field.exclude
            and getattr(self, name) != field.default
        }
