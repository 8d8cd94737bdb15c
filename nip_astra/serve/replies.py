"""Answers in the form that OpenAI's clients read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from nip_astra.language_models.sequences import Progress, TokenRecord
from nip_astra.serve.engine_client import Answer


class Reply:
    """What every part of one answer of the service says of it.

    Parameters
    ----------
    kind : str
        Prefix of the name: chatcmpl or cmpl.
    """

    def __init__(self, kind: str, model: str, tokenizer: Any) -> None:
        self.identity = f"{kind}-{secrets.token_hex(12)}"
        self.model, self.tokenizer = model, tokenizer
        self.created = int(time.time())

    def head(self, object_name: str) -> dict[str, Any]:
        """The fields that stand in every object."""
        return {
            "id": self.identity,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    # ---- chat

    def chat(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        """A whole answer of /v1/chat/completions."""
        choices = [
            {
                "index": place,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self.chat_logprobs(answer.progress),
                "finish_reason": answer.progress.finish_reason,
            }
            for place, answer in enumerate(answers)
        ]
        return {**self.head("chat.completion"), "choices": choices, "usage": usage}

    def chat_chunk(
        self, place: int, delta: dict[str, Any], progress: Progress | None = None
    ) -> dict[str, Any]:
        """A part of a streamed answer."""
        choice = {
            "index": place,
            "delta": delta,
            "logprobs": None if progress is None else self.chat_logprobs(progress),
            "finish_reason": None if progress is None else progress.finish_reason,
        }
        return {**self.head("chat.completion.chunk"), "choices": [choice]}

    def chat_logprobs(self, progress: Progress) -> dict[str, Any] | None:
        """Log-probabilities of tokens as chat clients read them."""
        if progress.request.num_top is None:
            return None
        content = [
            {
                **self._token(record.token, record.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in record.top],
            }
            for record in progress.tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text_of(token)
        is_whole = "\ufffd" not in text
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()) if is_whole else None,
        }

    def text_of(self, token: int) -> str:
        """The text of one token alone."""
        text: str = self.tokenizer.decode([token])
        return text

    # ---- completions

    def completion(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        """A whole answer of /v1/completions."""
        choices = [
            self._completion_choice(place, answer.text, answer.progress, 0)
            for place, answer in enumerate(answers)
        ]
        return {**self.head("text_completion"), "choices": choices, "usage": usage}

    def completion_chunk(self, place: int, progress: Progress, offset: int) -> dict[str, Any]:
        """A part of a streamed answer.

        Parameters
        ----------
        offset : int
            Characters of the answer that were told before.
        """
        choice = self._completion_choice(place, progress.text, progress, offset)
        return {**self.head("text_completion"), "choices": [choice]}

    def _completion_choice(
        self, place: int, text: str, progress: Progress, offset: int
    ) -> dict[str, Any]:
        logprobs = None
        if progress.request.num_top is not None:
            logprobs = self._completion_logprobs(progress.tokens, offset)
        return {
            "index": place,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": progress.finish_reason,
        }

    def _completion_logprobs(self, records: Sequence[TokenRecord], offset: int) -> dict[str, Any]:
        texts = [self.text_of(record.token) for record in records]
        offsets = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [record.logprob for record in records],
            "top_logprobs": [
                {self.text_of(token): logprob for token, logprob in record.top}
                for record in records
            ],
            "text_offset": offsets,
        }


def tokens_reply(answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
    """An answer of /inference/v1/generate, in vLLM's form."""
    return {
        "request_id": f"generate-{secrets.token_hex(12)}",
        "choices": [
            {
                "index": place,
                "token_ids": [record.token for record in answer.progress.tokens],
                "logprobs": _token_logprobs(answer.progress),
                "finish_reason": answer.progress.finish_reason,
            }
            for place, answer in enumerate(answers)
        ],
        "usage": usage,
    }


def _token_logprobs(progress: Progress) -> dict[str, Any] | None:
    if progress.request.num_top is None:
        return None

    def told(token: int, logprob: float) -> dict[str, Any]:
        # A token is named by its number: not every one is a text.
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}

    content = [
        {
            **told(record.token, record.logprob),
            "top_logprobs": [told(token, logprob) for token, logprob in record.top],
        }
        for record in progress.tokens
    ]
    return {"content": content}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """What a request cost."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
