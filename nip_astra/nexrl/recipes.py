"""Read NexRL's recipes: parameter files whose `trainer` is a group.

Each value of a recipe has a rule by its dotted path: a parameter of ours, a reason to leave it out,
or both depending on other values. Values that only place the parts of NexRL in a cluster, or switch
off what is off here, are left out with a warning; a value without a rule is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from nip_astra.errors import ParameterError, ParameterFault, nearest_names, reason_of, show_value
from nip_astra.parameters.conversion import can_be_set, set_value
from nip_astra.parameters.files import flatten

logger = logging.getLogger(__name__)

SCENARIO = "arithmetic"
"""Scenario of recipes without data files."""
SECTIONS = (
    *("trainer", "project_name", "experiment_name", "launch_mode", "multi_model", "logger"),
    *("environment", "resume", "data", "rollout_worker", "trajectory_pool", "service", "weight"),
    *("validate", "runtime_monitor", "debug", "resource"),
)
"""Groups and values of a recipe; all others are ours."""
LOCAL_BACKENDS = ("self-hosted", "direct-zmq", "http", "nextrainer", "mock", "local")
"""Training services that NexRL starts itself, for which the run trains in its own process."""
TINKER_POLICY: dict[str, Any] = {
    "task.policy.language_model.lora": {"rank": 32, "alpha": 32.0},
    "task.policy.min_new_tokens": 0,
}
"""Policy settings implied by training through Tinker; recipes leave them to the service."""

# ---- what a rule says

PLACES = "it places NexRL's parts in a cluster, or the loop here does it anyway"
SWITCHED_OFF = "it is switched off, or belongs to a part that is"
LACKING = "it changes training and has no counterpart here"

MAX_LISTED = 8
"""Harmless values and groups that a warning lists."""

SetOur = str
"""A rule that sets a parameter of ours; `{trainer}` stands for the trainer's section."""


@dataclass(frozen=True)
class LeaveOut:
    """A rule that leaves a value out; `only` limits it to some values, others are refused."""

    reason: str
    only: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Convert:
    """A rule that sets a parameter of ours to a function of the value."""

    path: str
    function: Callable[[Any], Any]


@dataclass(frozen=True)
class Place:
    """A rule that sets a place of ours, unless the value refers to something unset."""

    path: str


@dataclass(frozen=True)
class Depends:
    """A rule that holds where another value of the recipe is set, and else leaves out."""

    switch: str
    rule: SetOur | Convert


Rule = SetOur | LeaveOut | Convert | Place | Depends


def _language_model(name: Any) -> dict[str, Any]:
    return {"_type": "huggingface", "model": str(name)}


def _kl_estimator(name: Any) -> Any:
    return {"kl": "k1", "abs": "k1", "mse": "k2", "low_var_kl": "k3"}.get(str(name), name)


def _reduction(name: Any) -> Any:
    names = {
        "token-mean": "token",
        "seq-mean-token-mean": "sequence",
        "seq-mean-token-sum": "sequence_sum",
    }
    return names.get(str(name), name)


def _loss(name: Any) -> Any:
    is_clipped = str(name).startswith("NX_")
    return "ppo" if is_clipped else name


def _tracking(backends: Any) -> Any:
    names = [backends] if isinstance(backends, str) else backends
    return "online" if "wandb" in names else "disabled"


def _one_or_more(files: Any) -> Any:
    """Return a list of one file as the file."""
    return files[0] if isinstance(files, list) and len(files) == 1 else files


BACKEND = "{trainer}.train_service.backend"
_OFF = (False, None, 0, "", "disable", "disabled")
_OPTIMIZER = LeaveOut("the optimizer has betas .9 and .999 and epsilon 1e-8")

RULES: dict[str, Rule] = {
    "project_name": "settings.wandb_project",
    "experiment_name": "settings.run_id",
    "logger.backend": Convert("settings.wandb", _tracking),
    "logger.*": LeaveOut(PLACES),
    "launch_mode": LeaveOut(PLACES),
    "multi_model": LeaveOut(SWITCHED_OFF, only=(False, "false")),
    "environment.*": LeaveOut(PLACES),
    "resource.*": LeaveOut(PLACES),
    "resume.mode": LeaveOut("a run is resumed by `resume RUN`"),
    "resume.*": LeaveOut(PLACES),
    "runtime_monitor.*": LeaveOut(PLACES),
    "debug.*": LeaveOut("stages are dumped by settings.dump_period"),
    "trajectory_pool.*": LeaveOut(PLACES),
    # Data, and what samples them.
    "data.data_files": Convert("task.task.train", _one_or_more),
    "data.prompt_key": "task.task.column",
    "data.batch_size": "training.num_episodes_per_experience",
    "data.rollout_repeat_n": "{trainer}.group_size",
    "data.seed": "seed",
    "data.max_response_length": "task.policy.max_new_tokens",
    "data.*": LeaveOut(PLACES),
    "rollout_worker.max_response_length": "task.policy.max_new_tokens",
    "rollout_worker.temperature": "task.policy.temperature",
    "rollout_worker.nexau_*": LeaveOut(LACKING),
    "rollout_worker.custom_*": LeaveOut(LACKING),
    "rollout_worker.*": LeaveOut(PLACES),
    "validate.data.data_files": Convert("task.task.test", _one_or_more),
    "validate.eval.validate_freq": "training.eval_period",
    "validate.*": LeaveOut(PLACES),
    "weight.sync_mode": LeaveOut(PLACES, only=("sync", "batch-async")),
    "weight.staleness_threshold": "{trainer}.max_staleness",
    "weight.*": LeaveOut(PLACES),
    # The trainer.
    "trainer.type": LeaveOut(PLACES),
    "trainer.total_train_steps": "training.num_iterations",
    "trainer.save_freq": "settings.checkpoint_period",
    "trainer.checkpoint_path": Place("settings.runs_dir"),
    "trainer.sync_weight_path": LeaveOut(PLACES),
    "trainer.remove_previous_ckpt": Convert(
        "settings.num_checkpoints_kept", lambda is_removed: 1 if is_removed else 2
    ),
    "trainer.identifier": LeaveOut(PLACES),
    "trainer.teachers": Convert(
        "{trainer}.distillation.teacher",
        lambda teachers: (
            _language_model(teachers[0].get("checkpoint") or teachers[0]["base_model"])
            if len(teachers) == 1
            else teachers
        ),
    ),
    "trainer.algorithm.type": LeaveOut(PLACES),
    "trainer.algorithm.inference_service.*": LeaveOut(PLACES),
    "trainer.algorithm.do_old_log_prob_compute": "{trainer}.policy_loss.rescore",
    "trainer.algorithm.use_kl_in_reward": LeaveOut(SWITCHED_OFF, only=_OFF),
    "trainer.algorithm.use_kl_loss": LeaveOut(PLACES, only=(True, False)),
    "trainer.algorithm.kl_penalty": Depends(
        "trainer.algorithm.use_kl_loss", Convert("{trainer}.policy_loss.kl.value", _kl_estimator)
    ),
    "trainer.algorithm.kl_ctrl.*": LeaveOut(SWITCHED_OFF),
    "trainer.algorithm.critic.*": LeaveOut(SWITCHED_OFF),
    "trainer.algorithm.loss_agg_mode": Convert("{trainer}.policy_loss.reduction", _reduction),
    "trainer.algorithm.kl_penalty_coef": "{trainer}.distillation.weight",
    "trainer.algorithm.kl_discount_factor": "{trainer}.distillation.discount",
    "trainer.algorithm.distillation_coeff": "{trainer}.distillation.weight",
    "trainer.algorithm.distillation_epochs": "training.num_epochs",
    "trainer.algorithm.temperature": LeaveOut(PLACES),
    "trainer.algorithm.entropy_coeff": LeaveOut(LACKING),
    # Training services: that of the policy is `actor`, whatever its name.
    "actor.backend": BACKEND,
    "actor.url": "{trainer}.train_service.base_url",
    "actor.identifier": LeaveOut(PLACES),
    "actor.role": LeaveOut(PLACES),
    "actor.world_size": LeaveOut(PLACES),
    "actor.resource*": LeaveOut(PLACES),
    "actor.config.loss_fn": "{trainer}.policy_loss.loss",
    "actor.config.learning_rate": "training.lr",
    "actor.config.weight_decay": "training.weight_decay",
    "actor.config.grad_clip_norm": "training.max_grad_norm",
    "actor.config.beta1": _OPTIMIZER,
    "actor.config.beta2": _OPTIMIZER,
    "actor.config.eps": _OPTIMIZER,
    "actor.config.entropy_coeff": LeaveOut(LACKING),
    "actor.config.kl_penalty_coef": "{trainer}.distillation.weight",
    "actor.config.kl_discount_factor": "{trainer}.distillation.discount",
    "actor.actor.model.path": Convert("task.policy.language_model", _language_model),
    "actor.actor.optim.lr": "training.lr",
    "actor.actor.optim.warmup_style": "training.lr_schedule",
    "actor.actor.optim.lr_warmup_steps": "training.num_warmup_steps",
    "actor.actor.optim.weight_decay": "training.weight_decay",
    "actor.actor.optim.lr_warmup_steps_ratio": LeaveOut(LACKING),
    "actor.actor.grad_clip": "training.max_grad_norm",
    "actor.actor.ppo_epochs": "training.num_epochs",
    "actor.actor.ppo_mini_batch_size": "training.minibatch_size",
    "actor.actor.loss_func_type": Convert("{trainer}.policy_loss.loss", _loss),
    "actor.actor.loss_agg_mode": Convert("{trainer}.policy_loss.reduction", _reduction),
    "actor.actor.clip_ratio": LeaveOut(PLACES),
    "actor.actor.clip_ratio_low": "{trainer}.policy_loss.clip_low",
    "actor.actor.clip_ratio_high": "{trainer}.policy_loss.clip_high",
    # Unreachable in NexRL as well.
    "actor.actor.clip_ratio_c": LeaveOut(SWITCHED_OFF),
    "actor.actor.use_kl_loss": LeaveOut(PLACES),
    "actor.actor.kl_loss_coef": Depends(
        "actor.actor.use_kl_loss", "{trainer}.policy_loss.kl.weight"
    ),
    "actor.actor.kl_loss_type": Depends(
        "actor.actor.use_kl_loss", Convert("{trainer}.policy_loss.kl.value", _kl_estimator)
    ),
    "actor.actor.entropy_coeff": LeaveOut(LACKING),
    "actor.actor.*": LeaveOut(PLACES),
    "teacher.*": LeaveOut(PLACES),
    "service.inference_service.*": LeaveOut(PLACES),
    "service.tinker_service.base_url": "{trainer}.train_service.base_url",
    "service.tinker_service.*": LeaveOut(PLACES),
    "service.weaver_service.base_url": "{trainer}.train_service.base_url",
    "service.weaver_service.*": LeaveOut(PLACES),
}
"""Rules by path, `*` for any rest; the first that matches holds."""
_OF_DISTILLATION: dict[str, Rule] = {
    "use_distillation_clipping": LeaveOut(SWITCHED_OFF, only=_OFF),
    "distillation_cliprange*": LeaveOut(SWITCHED_OFF),
    "do_old_student_log_prob_compute": LeaveOut(PLACES),
    "train_token_start_pct": LeaveOut(SWITCHED_OFF, only=(0,)),
    "train_token_end_pct": LeaveOut(SWITCHED_OFF, only=(1,)),
    "advantage_start_pct": LeaveOut(SWITCHED_OFF, only=(0,)),
    "advantage_end_pct": LeaveOut(SWITCHED_OFF, only=(1,)),
}
RULES |= {
    f"trainer.{group}{name}": rule
    for group in ("", "algorithm.")
    for name, rule in _OF_DISTILLATION.items()
}
# Distillation learns by a loss without clipping.
_OF_DISTILLING_TRAINERS: dict[str, Rule] = {
    "actor.actor.clip_ratio_low": LeaveOut(SWITCHED_OFF),
    "actor.actor.clip_ratio_high": LeaveOut(SWITCHED_OFF),
    "actor.actor.loss_func_type": LeaveOut(SWITCHED_OFF),
}
# Fine-tuning on solutions samples nothing.
_OF_FINE_TUNING_TRAINERS: dict[str, Rule] = {
    "data.rollout_repeat_n": LeaveOut(SWITCHED_OFF),
    "weight.staleness_threshold": LeaveOut(SWITCHED_OFF),
}
REWARD_OF_WORKER = {
    "simple": "nip_astra.nexrl.evaluators:tagged_answer",
    "agent": "nip_astra.nexrl.evaluators:boxed_answer",
}
"""Reward functions of the types of `rollout_worker`."""


def is_recipe(values: Mapping[str, Any]) -> bool:
    """Return whether values are a recipe of NexRL."""
    return isinstance(values.get("trainer"), Mapping)


def read_recipe(values: Mapping[str, Any], *, folder: Path, source: str) -> dict[str, Any]:
    """Convert the values of a recipe to ours.

    A custom trainer is named after its class; its file is looked up from the folder of the
    recipe, then from the working directory. `${a.b}` refers to values of the recipe.
    """
    recipe = _Recipe(values, folder, source)
    recipe.convert()
    if recipe.faults:
        raise ParameterError(recipe.faults)
    recipe.report()
    return recipe.ours


class _Recipe:
    """A recipe in conversion: its values, those of ours so far, and what was left out or wrong."""

    def __init__(self, values: Mapping[str, Any], folder: Path, source: str) -> None:
        self.config: DictConfig = OmegaConf.create(dict(values))
        self.theirs = {name: value for name, value in values.items() if name in SECTIONS}
        self.ours = {name: value for name, value in values.items() if name not in SECTIONS}
        self.folder, self.source = folder, source
        self.faults: list[ParameterFault] = []
        self.left_out: dict[str, list[str]] = {}
        self.used: list[str] = []
        self.switches: dict[str, Any] = {}
        group = values["trainer"]
        path = group.get("custom_trainer_module_path")
        self.custom_file = None if path is None else str(path)
        class_name = str(group.get("custom_trainer_class_name") or "CustomTrainer")
        self.class_name = None if path is None else class_name
        self.trainer = group.get("type") if path is None else _snake_case(class_name)
        self.rules = dict(RULES)
        if self.custom_file is not None:
            # A custom trainer loads its teachers itself.
            del self.rules["trainer.teachers"]
        if "opd" in str(self.trainer):
            self.rules |= _OF_DISTILLING_TRAINERS
        if "cross_entropy" in str(self.trainer):
            self.rules |= _OF_FINE_TUNING_TRAINERS

    # ---- reading

    def value(self, path: str, default: Any = None) -> Any:
        """Return a value with its references resolved; a reference to a value of ours stays."""
        try:
            value = OmegaConf.select(self.config, path, default=default)
            if isinstance(value, DictConfig | ListConfig):
                return OmegaConf.to_container(value, resolve=True)
        except InterpolationKeyError:
            node = OmegaConf.select(self.config, path.rpartition(".")[0])
            return OmegaConf.to_container(node, resolve=False)[path.rpartition(".")[2]]  # type: ignore[index,call-overload,union-attr]
        return value

    def canonical(self, path: str) -> str:
        """Return the path that rules use: training services are named by their role."""
        for prefix in ("trainer.train_service", "service.train_service"):
            if path != prefix and not path.startswith(f"{prefix}."):
                continue
            rest = path.removeprefix(prefix).removeprefix(".")
            name, _, inside = rest.partition(".")
            service = OmegaConf.select(self.config, f"{prefix}.{name}") if name else None
            is_named = isinstance(service, DictConfig) and ("role" in service or "url" in service)
            is_named |= isinstance(service, DictConfig) and "backend" in service
            if not is_named:
                return f"actor.{rest}" if rest else "actor"
            assert isinstance(service, DictConfig)
            role = service.get("role") or "actor"
            return f"{role}.{inside}" if inside else str(role)
        return path

    # ---- converting

    def convert(self) -> None:
        """Apply the rule of each value."""
        leaves = {path: value for path, value in flatten(self.theirs) if value not in (None, {})}
        canonical = {path: self.canonical(path) for path in leaves}
        self.switches = {
            name: self.value(path) for path, name in canonical.items() if "use_kl" in name
        }
        backends = [self.value(path) for path, name in canonical.items() if name == "actor.backend"]
        if not backends or backends[0] in LOCAL_BACKENDS:
            self.rules |= {"actor.backend": Convert(BACKEND, lambda _: "local")}
            self.rules |= {"actor.url": LeaveOut(PLACES)}
        algorithm = self.theirs["trainer"].get("algorithm")
        if self.custom_file is not None and isinstance(algorithm, Mapping):
            # A custom trainer reads its whole algorithm itself.
            leaves = {n: v for n, v in leaves.items() if not n.startswith("trainer.algorithm.")}
            self._set("trainer.algorithm", "{trainer}.algorithm", self.value("trainer.algorithm"))
        has_own_task = "scenario" in self.ours or "task" in self.ours
        self._convert_task(has_own_task)
        for path in leaves:
            name = canonical[path]
            if has_own_task and name.startswith(("data.data_files", "data.prompt_key", "validate")):
                self.left_out.setdefault(PLACES, []).append(path)
            else:
                self._convert_value(path, name)
        self._convert_models()
        self._name_trainer()
        self.ours.setdefault("scenario", SCENARIO)

    def _convert_value(self, path: str, name: str) -> None:
        for pattern, rule in self.rules.items():
            if fnmatchcase(name, pattern):
                self._apply(rule, path)
                return
        if path.startswith("trainer.custom_trainer_"):
            return
        raw_value = show_value(self._raw(path))
        if any(pattern.startswith(f"{name}.") for pattern in self.rules):
            self._refuse(path, raw_value, "must be a group", "Write `name: value` below it.")
        elif self.custom_file is not None and path.startswith("trainer."):
            inside = path.removeprefix("trainer.")
            self._set(path, f"{{trainer}}.trainer_values.{inside}", self.value(path))
        else:
            valid_names = [pattern for pattern in self.rules if "*" not in pattern]
            near = ", ".join(nearest_names(path, valid_names)) or "none is near"
            self._refuse(
                path,
                raw_value,
                "has no counterpart",
                f"Known: {near}. See the guide coming-from-nexrl.",
            )

    def _apply(self, rule: Rule, path: str) -> None:
        if isinstance(rule, Depends):
            is_on = self.switches.get(rule.switch)
            rule = rule.rule if is_on else LeaveOut(SWITCHED_OFF)
        if isinstance(rule, Place):
            is_known = self.value_or_none(path) is not None
            rule = rule.path if is_known else LeaveOut(PLACES)
        if isinstance(rule, LeaveOut):
            self._leave_out(rule, path)
            return
        value = self._resolved(path)
        if value is None:
            return
        if isinstance(rule, Convert):
            self._set(path, rule.path, rule.function(value))
        else:
            self._set(path, rule, value)

    def _leave_out(self, rule: LeaveOut, path: str) -> None:
        if rule.only is not None and self._resolved(path) not in rule.only:
            problem, hint = "has no counterpart", "See the guide coming-from-nexrl."
            self._refuse(path, show_value(self._raw(path)), problem, hint)
        elif self._raw(path) not in _OFF:
            self.left_out.setdefault(rule.reason, []).append(path)

    def _set(self, path: str, target: str, value: Any) -> None:
        target = target.format(trainer=self.trainer)
        self.used.append(path)
        if self.is_same(target, value):
            return
        if can_be_set(self.ours, target):
            set_value(self.ours, target, value)
            return
        hint = "Give one of them; what encloses it must be a group."
        self._refuse(path, show_value(value), f"conflicts with {target}", hint)

    def is_same(self, target: str, value: Any) -> bool:
        """Return whether a parameter of ours already has a value: recipes repeat some of theirs."""
        return bool(OmegaConf.select(OmegaConf.create(self.ours), target) == value)

    def _resolved(self, path: str) -> Any:
        try:
            return self.value(path)
        except OmegaConfBaseException as error:
            hint = "Set what it refers to, for instance the environment variable."
            self._refuse(path, show_value(self._raw(path)), f"is unknown: {reason_of(error)}", hint)
            return None

    def _raw(self, path: str) -> Any:
        value: Any = self.theirs
        for name in path.split("."):
            value = value[name]
        return value

    def _refuse(self, path: str, value: str, problem: str, hint: str) -> None:
        self.faults.append(ParameterFault(path, value, problem, hint, self.source))

    # ---- parts of several values

    def _convert_task(self, has_own_task: bool) -> None:
        """Make a task of data files, and its reward of the rollout worker."""
        has_data = self.value_or_none("data.type") != "mock" and bool(
            self.theirs.get("data", {}).get("data_files")
        )
        if not has_data or self.value_or_none("validate.data.type") == "mock":
            for group in ("validate.data",) if has_data else ("validate.data", "data.data_files"):
                self.rules = {f"{group}*": LeaveOut(SWITCHED_OFF)} | self.rules
        if has_own_task or not has_data:
            self.rules = {"data.prompt_key": LeaveOut(PLACES)} | self.rules
            return
        self.ours["scenario"] = "dataset"
        worker = self.theirs.get("rollout_worker", {})
        kind, evaluator = worker.get("type"), worker.get("evaluator_module_path")
        task: dict[str, Any] = {"_type": "dataset", "reward": "functions"}
        if kind == "pig_latin":
            task |= {"reward": "exact", "answer_column": "output"}
        elif evaluator:
            file, _, name = str(evaluator).rpartition(":")
            reference = f"{(self.folder / file).resolve()}:{name}"
            task["functions"] = {"evaluator": {"function": reference}}
        elif kind in REWARD_OF_WORKER:
            task["functions"] = {"answer": {"function": REWARD_OF_WORKER[kind]}}
        self.ours["task"] = {"task": task}

    def _convert_models(self) -> None:
        """Set the policy's model and adapter, and the teacher, from the services."""
        service = self.theirs.get("service") or {}
        inference = service.get("inference_service") or {}
        for name in ("model_path", "model"):
            if inference.get(name) and can_be_set(self.ours, "task.policy.language_model"):
                model = self._resolved(f"service.inference_service.{name}")
                if model is not None:
                    target = "task.policy.language_model"
                    path = f"service.inference_service.{name}"
                    self._set(path, target, _language_model(model))
                break
        for name in ("weaver_service", "tinker_service"):
            group = service.get(name) or {}
            rank = group.get("lora_rank")
            if rank and group.get("training_mode") != "full_ft":
                adapter = {"rank": rank, "alpha": 32.0}
                self._set(f"service.{name}.lora_rank", "task.policy.language_model.lora", adapter)
        for name, train_service in (service.get("train_service") or {}).items():
            if isinstance(train_service, Mapping) and train_service.get("role") == "teacher":
                path = f"service.train_service.{name}.actor.model.path"
                model = self._resolved(path)
                if model is not None:
                    self._set(path, "{trainer}.distillation.teacher", _language_model(model))

    def value_or_none(self, path: str) -> Any:
        """Return a value; None if it is unset or refers to something unknown."""
        try:
            return self.value(path)
        except OmegaConfBaseException:
            return None

    def _name_trainer(self) -> None:
        self.ours["trainer"] = self.trainer
        backend_path = f"{self.trainer}.train_service.backend"
        backend = OmegaConf.select(OmegaConf.create(self.ours), backend_path)
        if backend == "tinker":
            self._add_adapter()
        if self.custom_file is None:
            return
        self.ours["custom_trainer_class_name"] = self.class_name
        files = [
            (start / Path(self.custom_file).expanduser()).resolve()
            for start in (self.folder, Path.cwd())
        ]
        is_file = self.custom_file.endswith(".py")
        existing = next((file for file in files if is_file and file.is_file()), None)
        self.ours["custom_trainer_module_path"] = str(existing or self.custom_file)
        if is_file and existing is None:
            tried = " and ".join(dict.fromkeys(map(str, files)))
            self._refuse(
                "trainer.custom_trainer_module_path",
                show_value(self.custom_file),
                f"no such file; tried {tried}",
                "",
            )

    def _add_adapter(self) -> None:
        """Train an adapter, with Tinker's settings if the recipe has none."""
        added = {
            path: value for path, value in TINKER_POLICY.items() if can_be_set(self.ours, path)
        }
        for path, value in added.items():
            set_value(self.ours, path, value)
        if added:
            logger.warning(
                "%s: the backend tinker trains adapters, so the policy has %s",
                self.source,
                " and ".join(f"{path}={value}" for path, value in added.items()),
            )

    def report(self) -> None:
        """Log what was left out, and why."""
        for reason, paths in self.left_out.items():
            names = self._shortened(paths)
            num_more = len(names) - MAX_LISTED
            if reason in (PLACES, SWITCHED_OFF) and num_more > 0:
                names = [*names[:MAX_LISTED], f"and {num_more} more"]
            logger.warning("%s: %s left out; %s", self.source, ", ".join(names), reason)

    def _shortened(self, paths: list[str]) -> list[str]:
        """Return paths, with groups of which nothing was used in place of their values."""
        shortened: dict[str, None] = {}
        for path in paths:
            parts = path.split(".")
            groups = [".".join(parts[:end]) for end in range(1, len(parts))]
            unused_groups = (group for group in groups if not self._is_used_within(group))
            # The outermost of them.
            shortened[next(unused_groups, path)] = None
        return list(shortened)

    def _is_used_within(self, group: str) -> bool:
        return any(f"{path}.".startswith(f"{group}.") for path in self.used)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
