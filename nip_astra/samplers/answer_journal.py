"""Answers of chat models as they come in, so that a process that was killed asks nothing twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nip_astra.errors import DataError


@dataclass(frozen=True)
class KeptAnswers:
    """What came of one request.

    Attributes
    ----------
    texts : tuple of str
        One a sample.
    are_cut : tuple of bool
        Whether a sample ended for its length.
    failures : tuple of str
        Why there is no text, by sample; empty where there is one.
    prompt_tokens, completion_tokens : int
        Of all samples together.
    is_cached : bool
        Whether nothing was paid.
    are_final : tuple of bool
        Whether the model behind a sample was asked again already, by sample; empty for none.
    """

    texts: tuple[str, ...]
    are_cut: tuple[bool, ...]
    failures: tuple[str, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cached: bool = False
    are_final: tuple[bool, ...] = ()


@dataclass
class AnswerJournal:
    """Answers by the id of their request, in memory and in a file of JSON lines.

    Attributes
    ----------
    path : Path or None
        The file, to which each answer is added as it comes; None keeps them in memory only.
    run_key : str or None
        Names the run at its services, before the ids of its requests.
    """

    path: Path | None = None
    run_key: str | None = None
    _by_id: dict[str, KeptAnswers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._by_id = dict(self._read(self.path))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> KeptAnswers | None:
        """What came of a request; None where it has not been answered."""
        return self._by_id.get(request_id)

    def put(self, request_id: str, answers: KeptAnswers) -> None:
        """Keep what came of a request; it is in the file when this returns."""
        self._by_id[request_id] = answers
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"id": request_id, **vars(answers)}, ensure_ascii=False)
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")

    def tokens(self) -> tuple[int, int]:
        """Tokens of prompts and of answers that were paid for."""
        paid = [one for one in self._by_id.values() if not one.is_cached]
        return sum(one.prompt_tokens for one in paid), sum(one.completion_tokens for one in paid)

    def _read(self, path: Path) -> Iterator[tuple[str, KeptAnswers]]:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            # A killed process leaves half a line; what is added next must begin a new one.
            with path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(content[:whole].decode("utf-8").split("\n")[:-1], start=1):
            try:
                values = json.loads(line)
                request_id = values.pop("id")
                lists = {name: tuple(one) for name, one in values.items() if isinstance(one, list)}
                yield request_id, KeptAnswers(**(values | lists))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"line {number} of {path} was to hold answers of a model, but cannot be read: "
                    f"{error!r}. Remove the line; its request is asked again."
                ) from error
