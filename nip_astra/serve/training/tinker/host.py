"""Sessions, models in training and sampling sessions of Tinker's protocol."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nip_astra.serve.api_errors import ApiError, held
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.training.bases import Bases
from nip_astra.serve.training.tinker.bodies import (
    CreateModelBody,
    LoadBody,
    LoraBody,
    SampleBody,
    SaveBody,
    SaveForSamplerBody,
)
from nip_astra.serve.training.tinker.models import TinkerModel, build_model
from nip_astra.serve.training.tinker.sampling import SampleRequest, Samplers, SamplerSource, plan
from nip_astra.serve.training.tinker.store import (
    Checkpoint,
    CheckpointFolder,
    LoraShape,
    RunRecord,
)
from nip_astra.serve.training.work import SECONDS_SILENT, WorkQueue
from nip_astra.utils.seeding import derive_seed

_SESSION_LOST = (
    "the session {name} was to go on, but this service does not know it: it was started anew "
    "since, or the session has ended. Make a new ServiceClient, and go on from a saved state."
)
_MODEL_LOST = (
    "the model {name} was to be trained, but this service does not hold it: its session ended or "
    "was silent for too long, or the service was started anew. Make a client from a saved state, "
    "create_training_client_from_state_with_optimizer."
)
_SAMPLER_LOST = (
    "the sampling session {name} was to go on, but this service does not know it: it was started "
    "anew since. Make a new sampling client from saved weights."
)


@dataclass
class Session:
    """A client's session.

    Attributes
    ----------
    seen_at : float
        When the client was last heard of, `time.monotonic`.
    unnamed : list of Checkpoint
        Weights to sample from that have no name of the client's, and go with the session.
    """

    name: str
    created: float
    about: Mapping[str, Any]
    seen_at: float = field(default_factory=time.monotonic)
    model_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)
    unnamed: list[Checkpoint] = field(default_factory=list)


class TinkerHost:
    """What clients of Tinker's protocol hold at this service."""

    def __init__(self, bases: Bases, work: WorkQueue, settings: ServiceSettings) -> None:
        self.bases, self.work, self.settings = bases, work, settings
        self.store = CheckpointFolder(Path(settings.state_folder()) / "tinker")
        self.samplers = Samplers(bases)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, TinkerModel] = {}
        self.sources: dict[str, SamplerSource] = {}
        self._joined = itertools.count(1)
        self._lock = threading.Lock()

    # ---- sessions

    def open_session(self, about: Mapping[str, Any]) -> Session:
        """Begin a session."""
        session = Session(str(uuid.uuid4()), time.time(), about)
        self.sessions[session.name] = session
        return session

    def session(self, name: str) -> Session:
        """A session that goes on.

        Raises
        ------
        ApiError
            404 where there is none.
        """
        found = held(self.sessions, name, reason=_SESSION_LOST, code="session_lost")
        found.seen_at = time.monotonic()
        return found

    def close_session(self, name: str) -> None:
        """End a session: its models are given up, what they saved under a name stays."""
        session = self.sessions.pop(name, None)
        if session is None:
            return
        for model_id in session.model_ids:
            self._forget(model_id)
        for sampler_id in session.sampler_ids:
            self.sources.pop(sampler_id, None)
        for checkpoint in session.unnamed:
            self.store.delete(checkpoint)

    # ---- models

    def model_id(self, session_id: str, number: int) -> str:
        """What the model of a session is called; the SDK works it out by itself as well."""
        return f"{session_id}:train:{number}"

    def model(self, model_id: str) -> TinkerModel:
        """A model in training.

        Raises
        ------
        ApiError
            404 where there is none.
        """
        return held(self.models, model_id, reason=_MODEL_LOST, code="model_lost")

    def create(self, body: CreateModelBody) -> Callable[[], TinkerModel]:
        """Say how a new model is made; a request that is wrong is refused at once."""
        body.optimizer_config.check()
        session = self.session(body.session_id)
        base = self.bases.get(body.base_model)
        lora = body.lora_config or LoraBody(rank=32)
        shape = LoraShape(lora.rank, lora.train_unembed, lora.train_mlp, lora.train_attn)
        record = self._record(session, body.model_seq_id, base.name, shape, body.user_metadata)
        return lambda: self._add(session, record, seed=abs(lora.seed or 0))

    def create_from(self, body: LoadBody) -> Callable[[], TinkerModel]:
        """Say how a model is made from a saved state."""
        assert body.session_id is not None
        assert body.model_seq_id is not None
        if body.optimizer_config is not None:
            body.optimizer_config.check()
        session, number = self.session(body.session_id), body.model_seq_id
        checkpoint = self.store.find(body.path)
        origin = self.store.run(checkpoint.run_id)
        base = self.bases.get(body.base_model or origin.base_model)
        if base is not self.bases.get(origin.base_model):
            raise ApiError(
                400,
                f"the checkpoint {body.path!r} was to be put on the model {base.name!r}, but it "
                f"is one of {origin.base_model!r}. Leave base_model out.",
                param="base_model",
            )
        record = self._record(session, number, base.name, origin.lora, body.user_metadata)

        def build() -> TinkerModel:
            model = self._add(session, record, seed=0)
            try:
                model.load(checkpoint, with_optimizer=body.optimizer)
            except BaseException:
                self._forget(record.run_id)
                raise
            return model

        return build

    def _record(
        self,
        session: Session,
        number: int,
        base_model: str,
        lora: LoraShape,
        user_metadata: Mapping[str, Any] | None,
    ) -> RunRecord:
        model_id = self.model_id(session.name, number)
        about = {key: str(value) for key, value in (user_metadata or {}).items()}
        return RunRecord(model_id, base_model, lora, about or None, time.time())

    def _add(self, session: Session, record: RunRecord, *, seed: int) -> TinkerModel:
        with self._lock:
            found = self.models.get(record.run_id)
            if found is not None:
                return found
            self._make_room()
        model = build_model(self.bases, record, seed=seed)
        self.store.add_run(record)
        self.work.open_lane(record.run_id)
        self.models[record.run_id] = model
        session.model_ids.append(record.run_id)
        return model

    def _make_room(self) -> None:
        """Give up models of sessions that were not heard of, where there is no room."""
        most = self.settings.max_training_models
        if len(self.models) < most:
            return
        # The SDK reports every few seconds.
        seconds = min(self.settings.training_idle_seconds, SECONDS_SILENT)
        for session in list(self.sessions.values()):
            if time.monotonic() - session.seen_at > seconds:
                self.close_session(session.name)
        if len(self.models) >= most:
            raise ApiError(
                400,
                f"a model was to be trained, but {most} are in training, which is the most that "
                "this service holds. Close a ServiceClient, or start the service with a higher "
                "max_training_models.",
                code="models_full",
            )

    def _forget(self, model_id: str) -> None:
        self.models.pop(model_id, None)
        self.work.close_lane(model_id)

    # ---- saving

    def save(self, body: SaveBody) -> Checkpoint:
        """Save weights and optimizer."""
        model = self.model(body.model_id)
        return self.store.save(
            body.model_id,
            "training",
            body.path,
            model.write_state,
            ttl_seconds=body.ttl_seconds,
            overwrite=body.overwrite,
            user_metadata=body.user_metadata,
        )

    def save_for_sampler(self, body: SaveForSamplerBody) -> tuple[Checkpoint, str | None]:
        """Save weights to sample from, and open a sampling session where they have no name."""
        model = self.model(body.model_id)
        checkpoint = self.store.save(
            body.model_id,
            "sampler",
            body.path,
            model.write_weights,
            ttl_seconds=body.ttl_seconds,
            user_metadata=body.user_metadata,
        )
        if body.path is not None:
            return checkpoint, None
        session = self.session(body.model_id.partition(":")[0])
        session.unnamed.append(checkpoint)
        return checkpoint, self.add_sampler(session, self.source_of(checkpoint))

    # ---- sampling

    def source(self, base_model: str | None, model_path: str | None) -> SamplerSource:
        """What a client means to sample from.

        Raises
        ------
        ApiError
            Where there is none such.
        """
        if model_path is not None:
            return self.source_of(self.store.find(model_path))
        if base_model is None:
            raise ApiError(
                400,
                "a sampling session was asked for without base_model and model_path. Give one.",
            )
        return SamplerSource(self.bases.get(base_model))

    def source_of(self, checkpoint: Checkpoint) -> SamplerSource:
        """A checkpoint to sample from."""
        record = self.store.run(checkpoint.run_id)
        return SamplerSource(self.bases.get(record.base_model), record.lora, checkpoint)

    def add_sampler(self, session: Session, source: SamplerSource) -> str:
        """Open a sampling session."""
        name = f"{session.name}:sample:{len(session.sampler_ids)}"
        session.sampler_ids.append(name)
        self.sources[name] = source
        return name

    def sampler(self, name: str) -> SamplerSource:
        """What a sampling session samples from.

        Raises
        ------
        ApiError
            404 where there is none.
        """
        return held(self.sources, name, reason=_SAMPLER_LOST, code="sampler_lost")

    def join_sampler(self, name: str) -> int:
        """A number for a copy of a sampling client, so that its requests are told apart."""
        self.sampler(name)
        return next(self._joined)

    def plan_sample(self, body: SampleBody) -> SampleRequest:
        """Check a request for samples."""
        if body.sampling_session_id is not None:
            source = self.sampler(body.sampling_session_id)
        else:
            source = self.source(body.base_model, body.model_path)
        name = body.sampling_session_id or uuid.uuid4().hex
        return plan(source, body, seed=derive_seed(name, body.seq_id or 0))
