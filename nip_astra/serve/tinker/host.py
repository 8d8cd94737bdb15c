"""Sessions, models in training and sampling sessions of Tinker's protocol."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nip_astra.serve.requests import ApiError, bad_request
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.tinker.bodies import (
    CreateModelBody,
    LoadBody,
    SampleBody,
    SamplingSessionBody,
    SaveBody,
    SaveForSamplerBody,
)
from nip_astra.serve.tinker.models import TinkerModel, build_model
from nip_astra.serve.tinker.sampling import SampleRequest, Samplers, SamplerSource, plan
from nip_astra.serve.tinker.store import Checkpoint, CheckpointFolder, LoraShape, RunRecord
from nip_astra.serve.training import SECONDS_SILENT, Bases, WorkQueue, lookup
from nip_astra.utils.seeding import derive_seed

MAX_UNNAMED = 32
"""Maximum unnamed weights of a session; those that were sampled from least recently are deleted. A
client may save some before each rollout."""
_SESSION_LOST = (
    "unknown session {name}: it has ended, or the service was restarted. Create a new "
    "ServiceClient, and continue from a saved state."
)
_MODEL_LOST = (
    "unknown model {name}: its session ended or was silent for too long, or the service was "
    "restarted. Continue from a saved state by create_training_client_from_state_with_optimizer."
)
_SAMPLER_LOST = (
    "unknown sampling session {name}: its weights had no name and were not used for long, or the "
    "service was restarted. Create a new sampling client from saved weights."
)


@dataclass
class Session:
    """A client's session.

    `unnamed` holds checkpoints by their sampling session, the one used last at the end; they are
    deleted with the session.
    """

    name: str
    about: Mapping[str, Any]
    seen_at: float = field(default_factory=time.monotonic)
    model_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)
    unnamed: OrderedDict[str, Checkpoint] = field(default_factory=OrderedDict)


def name_model(session_id: str, number: int) -> str:
    """Return the name of a session's model; the SDK derives it as well."""
    return f"{session_id}:train:{number}"


class TinkerHost:
    """The sessions, models and checkpoints of all clients."""

    def __init__(
        self, bases: Bases, work: WorkQueue, settings: ServiceSettings, store: CheckpointFolder
    ) -> None:
        self.bases, self.work, self.settings, self.store = bases, work, settings, store
        self.samplers = Samplers(bases)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, TinkerModel] = {}
        self.sources: dict[str, SamplerSource] = {}
        self._joined = itertools.count(1)
        # Requests arrive in the event loop, models are built and closed in the work thread.
        # Reentrant, as making room closes sessions.
        self._lock = threading.RLock()

    # ---- sessions

    def open_session(self, about: Mapping[str, Any]) -> Session:
        session = Session(str(uuid.uuid4()), about)
        self.sessions[session.name] = session
        return session

    def session(self, name: str) -> Session:
        session = lookup(self.sessions, name, reason=_SESSION_LOST, code="session_lost")
        session.seen_at = time.monotonic()
        return session

    def close_session(self, name: str) -> None:
        """Close a session and its models; named checkpoints stay."""
        with self._lock:
            session = self.sessions.pop(name, None)
        if session is None:
            return
        for model_id in session.model_ids:
            self._close_model(model_id)
        for sampler_id in session.sampler_ids:
            self.sources.pop(sampler_id, None)
        for checkpoint in session.unnamed.values():
            self.store.delete(checkpoint)

    # ---- models

    def model(self, model_id: str) -> TinkerModel:
        return lookup(self.models, model_id, reason=_MODEL_LOST, code="model_lost")

    def create(self, body: CreateModelBody) -> Callable[[], None]:
        """Return the function that creates a new model; refuse an invalid request at once."""
        session = self.session(body.session_id)
        base = self.bases.get(body.base_model)
        lora = body.lora_config
        shape = LoraShape(lora.rank, lora.train_unembed, lora.train_mlp, lora.train_attn)
        record = _make_record(session, body.model_seq_id, base.name, shape, body.user_metadata)

        def build() -> None:
            self._add_model(session, record, seed=abs(lora.seed or 0))

        return build

    def create_from(self, body: LoadBody, session_id: str, number: int) -> Callable[[], None]:
        """Return the function that creates a model from a saved state."""
        session = self.session(session_id)
        checkpoint = self.store.find(body.path)
        origin = self.store.run(checkpoint.run_id)
        base = self.bases.get(body.base_model or origin.base_model)
        if base is not self.bases.get(origin.base_model):
            raise bad_request(
                f"the checkpoint {body.path!r} is of {origin.base_model!r}, not of {base.name!r}. "
                "Leave base_model out.",
                "base_model",
            )
        record = _make_record(session, number, base.name, origin.lora, body.user_metadata)

        def build() -> None:
            # Its initial weights are replaced at once: any seed will do.
            model = self._add_model(session, record, seed=0)
            try:
                model.load(checkpoint, with_optimizer=body.optimizer)
            except BaseException:
                self._close_model(record.run_id)
                raise

        return build

    def _add_model(self, session: Session, record: RunRecord, *, seed: int) -> TinkerModel:
        with self._lock:
            existing_model = self.models.get(record.run_id)
            if existing_model is not None:
                return existing_model
            self._make_room()
        # Without the lock: other clients are served while the weights are copied.
        model = build_model(self.bases, record, seed=seed)
        with self._lock:
            # It may have ended meanwhile, and nothing would close its model.
            self.session(session.name)
            self.store.add_run(record)
            self.work.open_lane(record.run_id)
            self.models[record.run_id] = model
            session.model_ids.append(record.run_id)
        return model

    def _make_room(self) -> None:
        """Close silent sessions if the service is full."""
        limit = self.settings.max_training_models
        if len(self.models) < limit:
            return
        # The SDK reports every few seconds.
        max_silence = min(self.settings.training_idle_seconds, SECONDS_SILENT)
        for session in list(self.sessions.values()):
            if time.monotonic() - session.seen_at > max_silence:
                self.close_session(session.name)
        if len(self.models) >= limit:
            # Not 429, after which the SDK would try again for minutes.
            raise ApiError(
                400,
                f"{limit} models are in training, the limit of this service. Close a "
                "ServiceClient, or start the service with a higher max_training_models.",
                code="models_full",
            )

    def _close_model(self, model_id: str) -> None:
        self.models.pop(model_id, None)
        self.work.close_lane(model_id)

    # ---- saving

    def save(self, body: SaveBody) -> Checkpoint:
        return self.store.save(
            body.model_id,
            "training",
            body.path,
            self.model(body.model_id).service.save_state,
            ttl_seconds=body.ttl_seconds,
            overwrite=body.overwrite,
            user_metadata=body.user_metadata,
        )

    def save_for_sampler(self, body: SaveForSamplerBody) -> tuple[Checkpoint, str | None]:
        """Save weights to sample from; if unnamed, also open a sampling session for them."""
        checkpoint = self.store.save(
            body.model_id,
            "sampler",
            body.path,
            self.model(body.model_id).write_weights,
            ttl_seconds=body.ttl_seconds,
            user_metadata=body.user_metadata,
        )
        if body.path is not None:
            return checkpoint, None
        session = self.session(body.model_id.partition(":")[0])
        name = self.add_sampler(session, self._checkpoint_source(checkpoint))
        with self._lock:
            session.unnamed[name] = checkpoint
            while len(session.unnamed) > MAX_UNNAMED:
                unused_name, unused_checkpoint = session.unnamed.popitem(last=False)
                self.sources.pop(unused_name, None)
                self.store.delete(unused_checkpoint)
        return checkpoint, name

    # ---- sampling

    def source(self, body: SamplingSessionBody | SampleBody) -> SamplerSource:
        """Return the weights that a client names; raise `ApiError` 404 without any."""
        if body.model_path is not None:
            return self._checkpoint_source(self.store.find(body.model_path))
        if body.base_model is None:
            raise bad_request("a sampling session needs base_model or model_path.")
        return SamplerSource(self.bases.get(body.base_model))

    def _checkpoint_source(self, checkpoint: Checkpoint) -> SamplerSource:
        record = self.store.run(checkpoint.run_id)
        return SamplerSource(self.bases.get(record.base_model), record.lora, checkpoint)

    def add_sampler(self, session: Session, source: SamplerSource) -> str:
        name = f"{session.name}:sample:{len(session.sampler_ids)}"
        session.sampler_ids.append(name)
        self.sources[name] = source
        return name

    def sampler(self, name: str) -> SamplerSource:
        source = lookup(self.sources, name, reason=_SAMPLER_LOST, code="sampler_lost")
        session = self.sessions.get(name.partition(":")[0])
        with self._lock:
            if session is not None and name in session.unnamed:
                session.unnamed.move_to_end(name)
        return source

    def join_sampler(self, name: str) -> int:
        """Return a number for a copy of a sampling client, which makes its requests distinct."""
        self.sampler(name)
        return next(self._joined)

    def plan_sample(self, body: SampleBody) -> SampleRequest:
        if body.sampling_session_id is not None:
            source = self.sampler(body.sampling_session_id)
        else:
            source = self.source(body)
        # By session and number: a repeated request without a seed gets the same answers.
        name = body.sampling_session_id or uuid.uuid4().hex
        return plan(source, body, seed=derive_seed(name, body.seq_id or 0))


def _make_record(
    session: Session,
    number: int,
    base_model: str,
    lora: LoraShape,
    user_metadata: Mapping[str, Any] | None,
) -> RunRecord:
    texts = {name: str(content) for name, content in (user_metadata or {}).items()}
    model_id = name_model(session.name, number)
    return RunRecord(model_id, base_model, lora, texts or None, time.time())
