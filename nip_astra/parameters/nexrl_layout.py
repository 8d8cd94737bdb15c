"""Read parameter files in the layout of NexRL, in which `trainer` is a group."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nip_astra.errors import ParameterError, ParameterFault
from nip_astra.parameters.faults import show

logger = logging.getLogger(__name__)

SCENARIO = "arithmetic"
"""What a file plays that names no scenario, since it has none to name."""

_BACKENDS = {"self-hosted": "local", "direct-zmq": "local", "mock": "local"}
_OF_TINKER: dict[str, Any] = {
    "task.policy.language_model.lora": {"rank": 32, "alpha": 32.0},
    "task.policy.min_new_tokens": 0,
}
"""What training through Tinker's protocol means for a policy; NexRL's files leave it to the
service."""
_OF_A_CLUSTER = ("world_size", "resource", "identifier", "role")
_TRAINER = {
    "total_train_steps": "training.num_iterations",
    "save_freq": "settings.checkpoint_period",
}
_SERVICE_CONFIG = {
    "loss_fn": "{name}.policy_loss.loss",
    "learning_rate": "training.lr",
    "weight_decay": "training.weight_decay",
    "grad_clip_norm": "training.max_grad_norm",
}
_ALGORITHM = {
    "do_old_log_prob_compute": "{name}.policy_loss.rescore",
    "kl_penalty_coef": "{name}.distillation.weight",
    "kl_discount_factor": "{name}.distillation.discount",
}
"""Values of the built-in trainers; a trainer of one's own reads all of its `algorithm` itself."""


def is_nexrl_layout(values: Mapping[str, Any]) -> bool:
    """Whether `trainer` is a group rather than a name."""
    return isinstance(values.get("trainer"), Mapping)


def from_nexrl_layout(values: Mapping[str, Any], *, folder: Path, source: str) -> dict[str, Any]:
    """The values as files of ours have them.

    The trainer's class names it; its file is looked for from the folder of the parameter file, then
    from the working directory. Places of a cluster (`world_size` and the like, and the `url` of
    what runs in this process) are left out with a warning.

    Raises
    ------
    ParameterError
        For every value that has no counterpart.
    """
    given = dict(values["trainer"])
    found = {name: value for name, value in values.items() if name != "trainer"}
    found.setdefault("scenario", SCENARIO)
    path, class_name = (
        given.pop(name, None)
        for name in ("custom_trainer_module_path", "custom_trainer_class_name")
    )
    kind = given.pop("type", None)
    if path is None:
        found["trainer"] = kind
    else:
        class_name = str(class_name or "CustomTrainer")
        found["trainer"] = _snake(class_name)
        found["custom_trainer_class_name"] = class_name
    reading = _Reading(found, str(found["trainer"]), source)
    if path is not None:
        reading.module_path(str(path), folder)
    reading.service(reading.group(given.pop("train_service", None), "trainer.train_service"))
    algorithm = reading.group(given.pop("algorithm", None), "trainer.algorithm")
    if path is None:
        reading.take(algorithm, _ALGORITHM, "trainer.algorithm")
    elif algorithm:
        reading.put("{name}.algorithm", algorithm)
    reading.take(given, _TRAINER, "trainer")
    if reading.faults:
        raise ParameterError(reading.faults)
    return found


class _Reading:
    """Values in the making, and what has no place among them."""

    def __init__(self, values: dict[str, Any], trainer: str, source: str) -> None:
        self.values, self.trainer, self.source = values, trainer, source
        self.faults: list[ParameterFault] = []

    def put(self, place: str, value: Any) -> None:
        """Set a value at a dotted place; what is no group on the way is a fault."""
        *groups, name = place.format(name=self.trainer).split(".")
        into: dict[str, Any] = self.values
        for depth, group in enumerate(groups, start=1):
            if into.get(group) is None:
                into[group] = {}
            if not isinstance(into[group], Mapping):
                self._tell_no_group(".".join(groups[:depth]), into[group])
                return
            into = into[group]
        into[name] = value

    def group(self, value: Any, place: str) -> dict[str, Any]:
        """The values of a group; what is none is a fault."""
        if isinstance(value, Mapping):
            return dict(value)
        if value is not None:
            self._tell_no_group(place, value)
        return {}

    def _tell_no_group(self, place: str, value: Any) -> None:
        fault = ParameterFault(
            place, show(value), "must be a group", "Write `name: value` below it.", self.source
        )
        if fault not in self.faults:
            self.faults.append(fault)

    def module_path(self, path: str, folder: Path) -> None:
        """Find a trainer's file from a folder, or else from the working directory."""
        places = [(start / Path(path).expanduser()).resolve() for start in (folder, Path.cwd())]
        is_file = path.endswith(".py")
        found = next((place for place in places if place.is_file()), None)
        if is_file and found is None:
            tried = " and ".join(dict.fromkeys(map(str, places)))
            self.faults.append(
                ParameterFault(
                    "trainer.custom_trainer_module_path",
                    show(path),
                    f"no such file; tried {tried}",
                    "Give it from the folder of the parameter file, or from the working directory.",
                    self.source,
                )
            )
        self.values["custom_trainer_module_path"] = str(found) if is_file and found else path

    def take(self, values: Mapping[str, Any], places: Mapping[str, str], prefix: str) -> None:
        """Put each value where it belongs; one without a place is a fault."""
        for name, value in values.items():
            if name in places:
                self.put(places[name], value)
                continue
            known = ", ".join(places)
            self.faults.append(
                ParameterFault(
                    f"{prefix}.{name}",
                    show(value),
                    "has no counterpart",
                    f"Known here: {known}. The guide coming-from-nexrl says where all else is.",
                    self.source,
                )
            )

    def service(self, values: Mapping[str, Any]) -> None:
        """Read where the policy learns."""
        values = dict(values)
        backend = values.pop("backend", None)
        if isinstance(backend, str):
            self.put("{name}.train_service.backend", _BACKENDS.get(backend, backend))
        elif backend is not None:
            self.faults.append(
                ParameterFault(
                    "trainer.train_service.backend",
                    show(backend),
                    "must be a name",
                    f"Names of NexRL: {', '.join(_BACKENDS)}, tinker.",
                    self.source,
                )
            )
        if backend == "tinker":
            self._adapt_policy()
        is_local = backend is None or backend in (*_BACKENDS, "local")
        left = [name for name in _OF_A_CLUSTER if values.pop(name, None) is not None]
        url = values.pop("url", None)
        if url is not None and is_local:
            left.append("url")
        elif url is not None:
            self.put("{name}.train_service.base_url", url)
        if left:
            logger.warning(
                "%s: trainer.train_service.%s left out; it says how NexRL's cluster is laid out",
                self.source,
                ", ".join(left),
            )
        config = self.group(values.pop("config", None), "trainer.train_service.config")
        self.take(config, _SERVICE_CONFIG, "trainer.train_service.config")
        self.take(values, {}, "trainer.train_service")

    def _adapt_policy(self) -> None:
        """Let an adapter be trained, where the file does not say which."""
        missing = [place for place in _OF_TINKER if not _is_set(self.values, place)]
        for place in missing:
            self.put(place, _OF_TINKER[place])
        if missing:
            logger.warning(
                "%s: trainer.train_service.backend tinker trains adapters, so the policy has %s; "
                "set these in the file where they are to be others",
                self.source,
                " and ".join(f"{place}={_OF_TINKER[place]}" for place in missing),
            )


def _is_set(values: Mapping[str, Any], place: str) -> bool:
    found: Any = values
    for name in place.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return True


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
