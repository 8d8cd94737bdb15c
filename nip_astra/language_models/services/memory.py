"""Answers that are remembered, so that nobody is paid for them twice."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from nip_astra.language_models.services.chat import (
    NOTHING_USED,
    ChatAnswer,
    ChatModel,
    ChatRequest,
    ChatUsage,
    FinishReason,
)
from nip_astra.language_models.services.usage import connect, guarded


class AnswerMemory:
    """Answers by model, place, request and sample number, in a SQLite file.

    Failures are not remembered. May be used from several threads and processes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = connect(path)
        self._lock = threading.Lock()
        with guarded(path):
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) "
                "WITHOUT ROWID"
            )

    def recall(self, keys: Sequence[str]) -> list[ChatAnswer | None]:
        """The answer of each key; None where there is none."""
        found = []
        with self._lock, guarded(self.path):
            for key in keys:
                row = self._database.execute(
                    "SELECT answer FROM answers WHERE key = ?", (key,)
                ).fetchone()
                found.append(None if row is None else _read(row[0]))
        return found

    def usage_of(self, keys: Sequence[str]) -> ChatUsage:
        """The tokens that answers took when they were given, as far as that was kept."""
        marks = ", ".join("?" * len(keys))
        with self._lock, guarded(self.path):
            rows = self._database.execute(
                f"SELECT answer FROM answers WHERE key IN ({marks})", list(keys)
            ).fetchall()
        counts = [json.loads(text).get("usage", (0, 0)) for (text,) in rows]
        return ChatUsage(sum(read for read, _ in counts), sum(said for _, said in counts))

    def remember(self, answers: Mapping[str, ChatAnswer], usage: ChatUsage = NOTHING_USED) -> None:
        """Keep answers, which together took so many tokens; one that is there already stays."""
        taken = dict.fromkeys(answers, NOTHING_USED) | dict.fromkeys(list(answers)[:1], usage)
        rows = [
            (key, json.dumps(asdict(answer) | {"usage": taken[key]}))
            for key, answer in answers.items()
        ]
        with self._lock, guarded(self.path):
            self._database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", rows)


def key_of(model: ChatModel, request: ChatRequest, sample: int) -> str:
    """What an answer is remembered by."""
    asked = asdict(request)
    del asked["num_samples"], asked["first_sample"], asked["key"]
    whole = {"model": model.name, "place": model.place, "sample": sample, **asked}
    text = json.dumps(whole, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(text: str) -> ChatAnswer | None:
    try:
        found = json.loads(text)
        logprobs = found["token_logprobs"]
        return ChatAnswer(
            str(found["text"]),
            FinishReason(found["finish_reason"]),
            found["refusal"],
            None if logprobs is None else tuple(float(value) for value in logprobs),
        )
    except (ValueError, LookupError, TypeError):
        # Of another version: asked for again.
        return None
