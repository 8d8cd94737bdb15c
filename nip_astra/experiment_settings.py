"""Device, tracking and paths of a run, none of which may change its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import ConfigDict, Field

from nip_astra.deadlines import DEFAULT_DEADLINE
from nip_astra.parameters.parameters_base import MAX_WHOLE, SubParameters
from nip_astra.tracking.run_directory import RunDirectory

MAX_THREADS = 256
"""Upper bound of `num_threads`, beyond what training can use."""


SETTINGS_OF_OTHERS = frozenset(
    {
        "call_deadline",
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
"""Settings that another user's run may set, because they affect only its folder."""


class ExperimentSettings(SubParameters):
    """Device, tracking and paths. Fields after `progress_path` are not stored."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Device of models; auto uses a GPU if there is one."""
    runs_dir: str = "runs"
    """Folder of run directories."""
    run_id: str | None = None
    """Name of the run and its directory; null generates one from trainer, scenario and time."""
    trackers: list[str] = []
    """Trackers besides `file`, which writes the run directory: `wandb`, `mlflow`, `trackio`,
    `tensorboard`, or one of a plug-in."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Mode of the tracker `wandb` (Weights & Biases), which offline and online enable; if
    `trackers` names it, disabled means online."""
    wandb_project: str | None = None
    """W&B project; null for the environment variable WANDB_PROJECT, or nip_astra."""
    wandb_entity: str | None = None
    """W&B user or team; null for WANDB_ENTITY, or the account's default."""
    wandb_group: str | None = None
    """Group of runs on W&B; null for WANDB_RUN_GROUP, or none."""
    wandb_tags: list[str] = []
    """Tags of the run on W&B; by default those of WANDB_TAGS."""
    num_threads: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    """Number of CPU cores: torch threads for large models, processes for parts of rollouts of small
    models and for protocol agents whose losses can be divided. null uses all, but at most four for
    conversations of small models and one to train protocol agents. Results of small models do not
    depend on it; last digits of large models may."""
    num_actors: int = Field(default=0, ge=0, le=1024)
    """Number of Ray actors, on one or more machines, that sample the parts of rollouts and
    evaluations instead of local processes; 0 for none, at most `num_rollout_parts` are used.
    Results do not depend on it. Needs the extra `ray`."""
    actor_cpus: float = Field(default=1, ge=0)
    """CPU cores per actor, and torch threads for large models."""
    actor_gpus: float = Field(default=0, ge=0)
    """GPUs per actor."""
    ray_address: str | None = None
    """Ray cluster for `num_actors` and for a sweep `--on ray`, or "auto"; null for RAY_ADDRESS, or
    else a new one on this machine."""
    call_deadline: float = Field(default=DEFAULT_DEADLINE, gt=0)
    """Seconds after which a call of a reward function, tool, environment or own reward term is
    interrupted, and the run saves and ends. After 10 s a line names the call. Also the time given
    to trackers at the end."""
    checkpoint_period: int = Field(default=10, ge=0)
    """Iterations between checkpoints; 0 saves only at the end and on a signal."""
    num_checkpoints_kept: int = Field(default=2, ge=1)
    """Number of recent checkpoints kept, in addition to the best."""
    rollout_sample_period: int = Field(default=10, ge=1)
    """Iterations between tables of sampled conversations."""
    num_rollout_samples: int = Field(default=2, ge=0)
    """Episodes in a table of sampled conversations, with all nodes, the worst first."""
    dump_period: int = Field(default=0, ge=0)
    """Iterations between stage dumps of a trainer on trajectories, for `compare-dumps`; 0 for none.
    Dumps are as large as the weights."""
    max_service_requests: int | None = Field(default=None, ge=0, le=MAX_WHOLE)
    """Maximum number of the run's requests to chat models, including failed ones; then it stops and
    can be resumed. null for no limit."""
    max_service_tokens: int | None = Field(default=None, ge=0, le=MAX_WHOLE)
    """Maximum tokens of the run's chat models; then it stops and can be resumed. null for no
    limit."""
    max_service_cost: float | None = Field(default=None, ge=0)
    """Maximum cost of chat models by their `prices`; then the run stops and can be resumed. null
    for no limit."""
    service_cache: str | None = None
    """Cache file of chat models' answers, for instance for several runs; null for one in the run
    directory."""
    device_price: float | None = Field(default=None, ge=0)
    """Price per device and hour, for the estimates of --dry-run; null for none."""
    sharding: Literal["none", "fsdp"] = "none"
    """How processes share trained models. none: each has a copy; fsdp: weights (of a base model
    too), gradients and optimizer are sharded (FSDP2), for models that exceed one device. The first
    process also keeps all weights for sampling. Results are equal up to rounding."""
    gradient_checkpointing: bool = False
    """Whether activations of a trained language model are recomputed in the backward pass: less
    memory, about a third more time, the same gradients."""
    process_store: str | None = None
    """File on a shared disk through which the processes of a run connect if no port can be used; a
    new one for every start. null for torchrun's address."""
    test_run: bool = False
    """Whether every loop is limited to one iteration, as a smoke test."""
    progress: bool = True
    """Whether a progress bar is shown."""
    progress_path: str | None = None
    """File with the numbers of completed and all iterations, for schedulers; null for none."""

    run_directory: RunDirectory | None = Field(default=None, exclude=True)
    """Path of the run's files; a run makes its own."""
    tqdm_func: Callable[..., Any] | None = Field(default=None, exclude=True)
    """Creates bars with tqdm's methods, instead of the progress line."""
    global_tqdm_step_fn: Callable[[], None] | None = Field(default=None, exclude=True)
    """Called once per iteration, for instance for a sweep's bar."""

    def outside(self) -> dict[str, str]:
        """Return the changed settings that affect more than a run's folder, as text."""
        return {
            name: str(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if name not in SETTINGS_OF_OTHERS
            and not field.exclude
            and getattr(self, name) != field.default
        }
