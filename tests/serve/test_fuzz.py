"""Thousands of malformed requests to every route: each ends in a JSON error."""

from __future__ import annotations

import base64
import copy
import json
import math
import random
import re
import socket
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

import httpx
import pytest
import torch
import yaml

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.language_models.services.http_training import DONE_HEADER, KEY_HEADER
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer
from nip_astra.serve import http_routes
from nip_astra.serve.tinker import routes as tinker_routes
from tests.kit.tiny import make_byte_tokenizer, make_language_model
from tests.serve.running import Running, running, training_server

SECONDS = 5.0
"""A request that takes longer hangs."""
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE")
HUGE = "9" * 5000
WRONG: list[Any] = [
    *(None, True, -1, 0, 2, 10**15, 30_000_000, 2**63, 10**40, 1e308, -0.5, 1e-320, math.nan),
    *(math.inf, "", "x", "\x00", "\ud800", "é", "../../etc/passwd", "/etc", "9" * 500, HUGE),
    *([], [[]], {}, {"a": 1}, [None], [1, "a"], [{}], [{"role": "user"}], [[3, 10**9]], [-5]),
    *([10**9], [2**70], {"type": "dpo"}, {"type": "image"}, [[{"a": []}]], [0] * 3000),
]
NAMES = [
    *("model", "messages", "prompt", "max_tokens", "n", "seed", "stop", "top_p", "temperature"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "logit_bias", "metadata", "suffix"),
    *("method", "hyperparameters", "training_file", "tools", "__class__", "", "\u202e", "a" * 999),
    *("tool_choice", "response_format", "name", "tool_calls", "tool_call_id", "schema", "strict"),
    *("echo", "user", "top_k", "return_token_ids", "service_tier", "reasoning_effort", "best_of"),
    *("type", "kind", "path", "ttl_seconds", "user_metadata", "overwrite", "files", "options"),
]
PARTS = [
    *("x", "%00", "%ff", "..%2f..%2fetc%2fpasswd", "'--", "0", "-1", HUGE[:300], "%ed%a0%80", "é"),
    *("a" * 3000, "tinker:%2f%2f", "%f0%9f", "a:train:0", "weights", "%20"),
]
QUERIES = [
    *("limit=-1", "limit=0", f"limit={HUGE}", "limit=²", "limit=9999999999999", "limit=x"),
    *("offset=-5", f"offset={HUGE}", "offset=99999999999999999999999", "limit=&offset="),
    *("after=%f0%9f", "after=x", "order=asc", "order=%00", "purpose=x", "metadata[a]=b", "a=%ud8"),
]
HEADERS: list[dict[str, str | bytes]] = [
    *({"Origin": "http://["}, {"Origin": "http://[::1"}, {"Origin": "null"}, {"Origin": b"\xff"}),
    *({"Origin": "http://localhost:99999999"}, {"Host": "["}, {"Host": "127.0.0.1:x"}),
    *({"Content-Type": "text/plain"}, {"Content-Type": b"\xff"}, {"Content-Encoding": "gzip"}),
    *({KEY_HEADER: ""}, {KEY_HEADER: b"\xe9" * 300}, {"Idempotency-Key": b"\xff"}),
    *({"Range": "bytes=9-1,x"}, {"Accept": "x"}, {"Cookie": b"\x80"}, {"Authorization": "Bearer"}),
    *({"Content-Type": "multipart/form-data"}, {"Content-Type": "application/json; charset=x"}),
]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A body with bytes cut out, changed or doubled."""
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(content) + 1)
        start, end = content[:place], content[place:]
        content = chance.choice(
            [
                start + end[chance.randint(1, 9) :],
                start + bytes([chance.randrange(256)]) + end,
                start + content[: chance.randint(0, 40)] + end,
                start,
            ]
        )
    return content


def parts_of(body: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within a value with each of its first keys."""
    keys: Any = range(len(body)) if isinstance(body, list) else ()
    for key in list(body if isinstance(body, dict) else keys)[:20]:
        yield body, key
        yield from parts_of(body[key])


def changed(body: Any, chance: random.Random, wrong: Sequence[Any] = WRONG) -> Any:
    """A value with some of its parts, however deep, replaced, removed or added."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 2))):
        places = list(parts_of(body))
        value = copy.deepcopy(chance.choice(wrong))
        kind = chance.randrange(12)
        if not places or kind == 0:
            if isinstance(body, dict):
                body[chance.choice(NAMES)] = value
            continue
        holder, key = chance.choice(places)
        if kind == 1:
            del holder[key]
        elif kind > 5 and isinstance(holder[key], int | float | str):
            # Of the right type, so that it is refused late or not at all.
            kind_of_value = str if isinstance(holder[key], str) else int | float
            holder[key] = chance.choice([one for one in wrong if isinstance(one, kind_of_value)])
        else:
            holder[key] = value
    return body


def as_json(body: Any, chance: random.Random) -> bytes:
    """A body as JSON, or almost JSON."""
    text = json.dumps(body)
    if chance.random() > 0.45:
        return json.dumps(changed(body, chance)).encode()
    return chance.choice(
        [
            *[text.encode()] * 3,
            damaged(text.encode(), chance),
            json.dumps(chance.choice(WRONG)).encode(),
            chance.choice([b"", b"[" * 5000, b'{"a":' * 900 + b"1" + b"}" * 900, b"\xff\xfe"]),
            text.replace("1", HUGE).encode(),
            json.dumps(body, ensure_ascii=False).encode("utf-16"),
            re.sub(r"\d+", "1e999", text, count=chance.randint(1, 3)).encode(),
        ]
    )


class Fuzzed:
    """A service, and malformed requests to its routes.

    A subclass can `create` the objects that valid requests name, gives valid `bodies` by path and
    valid `places` of path parameters, restores objects `after` a request, and can `check` that
    valid requests are answered.
    """

    def __init__(self, url: str, app: Any, client: httpx.Client, seed: int) -> None:
        self.url, self.client, self.chance = url, client, random.Random(seed)
        *direct, mount = app.routes
        with warnings.catch_warnings():
            # A single handler refuses several methods.
            warnings.simplefilter("ignore", UserWarning)
            paths = mount.app.openapi()["paths"]
        self.routes = [(name.upper(), path) for path, names in paths.items() for name in names]
        for route in direct:
            self.routes += [(one, route.path) for one in sorted(route.methods or ["GET"])]
        assert len(self.routes) > 5
        self.create()

    def headers(self, path: str) -> dict[str, str | bytes]:
        return {"Content-Type": "application/json"}

    def encoded(self, path: str) -> bytes:
        """Return a body for a route that is wrong in some way."""
        return as_json(self.chance.choice(self.bodies().get(path, [{}])), self.chance)

    def post(self, path: str, **sent: Any) -> httpx.Response:
        """Send a valid request, again while its result is not there."""
        reply = httpx.Response(202)
        while reply.status_code in (202, 408):
            reply = self.client.post(self.url + path, **sent)
        assert reply.status_code == 200, reply.text
        return reply

    def send(self, method: str, path: str, full: str, body: bytes = b"", headers: Any = ()) -> int:
        """Send a request, check the response, and return its status."""
        # A request that hangs fails by the client's timeout.
        reply = self.client.request(method, self.url + full, content=body, headers=headers)
        about = (method, full[:300], body[:600], headers, reply.status_code, reply.text[:600])
        assert reply.status_code < 500, about
        if reply.status_code >= 400 and reply.status_code != 408:
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, about
            assert error["message"], about
        self.after(method, path, reply)
        return reply.status_code

    def send_malformed(self) -> None:
        bodies, places, chance = self.bodies(), self.places(), self.chance
        # Most often to the routes that read the most.
        weights = [6 if path in bodies and method == "POST" else 1 for method, path in self.routes]
        ((method, path),) = chance.choices(self.routes, weights)
        if chance.random() < 0.05:
            method = chance.choice(METHODS)

        def chosen(part: re.Match[str]) -> str:
            right = places.get(part[1], ())
            if right and chance.random() < 0.8:
                return urllib.parse.quote(chance.choice(right), safe=":")
            return chance.choice(PARTS)

        full = re.sub(r"\{(\w+)\}", chosen, path)
        if chance.random() < (0.5 if method == "GET" else 0.1):
            full += "?" + chance.choice(QUERIES)
        headers = self.headers(path) | (chance.choice(HEADERS) if chance.random() < 0.1 else {})
        self.send(method, path, full, b"" if method == "GET" else self.encoded(path), headers)

    def fuzz(self, count: int) -> None:
        """Send many malformed requests; none causes a fault of the service."""
        for _ in range(count):
            self.send_malformed()
        for method, path in self.routes:
            if method == "GET" and "{" not in path:
                assert self.send("GET", path, path) in (200, 400)
        self.check()


CHATS: dict[str, Any] = yaml.safe_load("""
schema: &schema {type: object, properties: {a: {enum: [1, x]}}, required: [a]}
plain: &plain
  {model: tiny, messages: [{role: user, content: hello you}], max_tokens: 2, logprobs: true,
   top_logprobs: 2, n: 1, temperature: 1.0, stop: [x], seed: 1, metadata: {a: b},
   return_token_ids: true}
formed:
  {model: bytes, messages: [{role: user, content: hello you}], max_tokens: 9, response_format:
   {type: json_schema, json_schema: {name: a, schema: *schema, strict: true}}}
calling:
  model: bytes
  messages:
    - {role: user, content: hello you}
    - {role: assistant, content: null, tool_calls:
       [{id: c, type: function, function: {name: f, arguments: "{}"}}]}
    - {role: tool, content: x, tool_call_id: c}
  max_tokens: 9
  tools: [{type: function, function: {name: f, parameters: *schema}}]
  tool_choice: {type: function, function: {name: f}}
  parallel_tool_calls: false
""")
TEXTS = """
/v1/completions: {model: tiny, prompt: [hello, good day], max_tokens: 0, echo: true, logprobs: 2}
/inference/v1/generate:
  {model: tiny, token_ids: [1, 2, 3],
   sampling_params: {max_tokens: 2, n: 1, seed: 3, stop_token_ids: [2]}}
/v1/fine_tuning/jobs:
  {model: tiny, training_file: $file, suffix: a, seed: 1, metadata: {a: b},
   method: {type: dpo, dpo: {hyperparameters: {n_epochs: 1, beta: 0.1}}}}
"""
TINKER = """
create_session: {tags: [a], user_metadata: {a: b}}
session_heartbeat: {session_id: $session}
create_model:
  {session_id: $session, model_seq_id: 0, base_model: policy, lora_config: {rank: 2, seed: 1},
   user_metadata: {a: b}}
get_info: {model_id: "$model"}
forward_backward: {}
optim_step:
  {model_id: "$model", seq_id: $number, adam_params: {learning_rate: 0.0001, beta1: 0.9,
   beta2: 0.95, eps: 1.0e-12, weight_decay: 0.0, grad_clip_norm: 1.0}}
save_weights:
  {model_id: "$model", seq_id: $number, path: a, overwrite: true, ttl_seconds: 900,
   user_metadata: {a: b}}
load_weights:
  {model_id: "$model", seq_id: $number, optimizer: true, path: "tinker://$model/weights/a"}
save_weights_for_sampler: {model_id: "$model", seq_id: $number, path: b, ttl_seconds: 900}
create_sampling_session: {session_id: $session, base_model: policy, sampling_session_seq_id: 0}
join_sampling_session: {sampling_session_id: "$sampler"}
asample:
  {prompt: {chunks: [{type: encoded_text, tokens: [1, 2, 3]}]}, num_samples: 2, base_model: policy,
   sampling_params: {max_tokens: 2, seed: 1, temperature: 1.0, stop: [1]}, prompt_logprobs: true,
   topk_prompt_logprobs: 2, prompt_alt_tokens_k: 1, topk_sample_logprobs: 1, seq_id: 1,
   target_prompt_logprobs: {data: [1, 2], dtype: int64, shape: [2, 1]},
   sampling_session_id: "$sampler"}
retrieve_future: {request_id: "$promised"}
weights_info: {tinker_path: "tinker://$model/weights/a"}
training_runs/{run_id}/checkpoints/{kind}/{name}/ttl: {ttl_seconds: 100}
"""


def filled(text: str, **values: str) -> dict[str, list[Any]]:
    """Return valid bodies by name, each as the only body."""
    rights = yaml.safe_load(Template(text).substitute(values))
    return {name: [body] for name, body in rights.items()}


class FuzzedTexts(Fuzzed):
    """`nip-astra serve`."""

    def create(self) -> None:
        # Preferences without an answer: a job that uses the file is refused at once.
        form = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "fine-tune"}}
        self.file = self.post("/v1/files", **form).json()["id"]

    def bodies(self) -> Mapping[str, Sequence[Any]]:
        chats = [CHATS[name] for name in ("plain", "formed", "plain", "calling")]
        return {**filled(TEXTS, file=self.file), "/v1/chat/completions": chats}

    def places(self) -> Mapping[str, Sequence[str]]:
        return {"identity": [self.file], "name": ["tiny"]}

    def headers(self, path: str) -> dict[str, str | bytes]:
        if path == "/v1/files" and self.chance.random() < 0.9:
            return {"Content-Type": "multipart/form-data; boundary=x"}
        return super().headers(path)

    def encoded(self, path: str) -> bytes:
        if path != "/v1/files":
            return super().encoded(path)
        name = self.chance.choice(["a", "../a", "\x00", "a" * 300, "é"])
        part = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n{{}}'
        end = '\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x--'
        return damaged((part + end).encode(), self.chance)

    def after(self, method: str, path: str, reply: httpx.Response) -> None:
        if method == "DELETE" and reply.status_code == 200:
            self.create()

    def check(self) -> None:
        self.post("/v1/chat/completions", json=CHATS["plain"])


class FuzzedTraining(Fuzzed):
    """`nip-astra serve --train`."""

    ROOT = "/training/v1/models"
    MODEL = yaml.safe_load("""
        {base_model: policy, seed: 0, optimizer: adamw, weight_decay: 0.1, role: policy,
        lora: {rank: 2, alpha: 32.0, target_modules: all-linear}}""")

    def create(self) -> None:
        headers = {KEY_HEADER: f"right {random.random()}"}
        reply = self.post(self.ROOT, json=self.MODEL, headers=headers)
        self.name, self.number = reply.json()["id"], 1

    def bodies(self) -> Mapping[str, Sequence[Any]]:
        """Including valid messages of operations, for each kind with an argument."""
        context, ids = torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])
        rows = [context, context > 0, ids, ids > 0]
        options = {"max_new_tokens": 2, "min_new_tokens": 0, "temperature": 1.0, "top_k": None}
        options |= {"top_p": 1.0, "end_ids": []}
        sample = {"contexts": [[1, 2]], "rows_per_context": 1, "uniforms": torch.rand(1, 2)}
        operations = [
            {"kind": "logprobs", "rows": rows},
            {"kind": "backward", "pieces": [{"rows": rows, "gradient": torch.ones(1, 3) * 0.1}]},
            {"kind": "optim_step", "lr": 1e-4, "max_grad_norm": 1.0},
            {"kind": "sample", **sample, "options": options},
            {"kind": "save_state"},
            {"kind": "load_state", "files": {"a/b": torch.zeros(3, dtype=torch.uint8)}},
        ]
        return {self.ROOT: [self.MODEL], self.ROOT + "/{name}/operations/{number}": operations}

    def places(self) -> Mapping[str, Sequence[str]]:
        return {"name": [self.name], "number": [str(self.number)]}

    def headers(self, path: str) -> dict[str, str | bytes]:
        return {**super().headers(path), KEY_HEADER: f"key {random.random()}"}

    def encoded(self, path: str) -> bytes:
        if not path.endswith("{number}"):
            return super().encoded(path)
        tensors = [
            *(torch.zeros(0), torch.zeros(2, 2), torch.tensor([[10**12]]), torch.ones(1, 3).bool()),
            *(torch.full((1, 3), math.nan), torch.tensor(1.0), torch.zeros(1, 3, dtype=torch.long)),
            *(torch.full((1, 2), -5), torch.rand(1, 2) + 3),
            torch.zeros(1, 2, 3, dtype=torch.uint8),
        ]
        message = self.chance.choice(self.bodies()[path])
        # Some are valid, so that steps have gradients.
        if self.chance.random() < 0.8:
            message = changed(message, self.chance, [*WRONG, *tensors])
        packed = pack_state(message)
        return damaged(packed, self.chance) if self.chance.random() < 0.1 else packed

    def after(self, method: str, path: str, reply: httpx.Response) -> None:
        if path.endswith("{number}") and method == "POST" and DONE_HEADER in reply.headers:
            self.number += 1
        if method == "DELETE" and reply.status_code == 200:
            self.create()

    def check(self) -> None:
        path = self.ROOT + "/{name}/operations/{number}"
        sent = {"content": pack_state(self.bodies()[path][0]), "headers": {KEY_HEADER: "right"}}
        reply = self.post(path.format(name=self.name, number=self.number), **sent)
        # No step has made the weights useless.
        assert bool(unpack_state(reply.content)["logprobs"].isfinite().all())
        self.create()


def base64_of(values: Sequence[float], dtype: torch.dtype) -> str:
    """Return numbers in the form that the JSON of a protocol buffer has for bytes."""
    return base64.b64encode(torch.tensor(values, dtype=dtype).numpy().tobytes()).decode()


class FuzzedTinker(Fuzzed):
    """`nip-astra serve --tinker`."""

    ROOT = "/api/v1"
    GRADIENTS = f"{ROOT}/forward_backward"
    WRONG: Sequence[Any] = [
        *(-5, 0, 3, 10**6, 10**12, math.nan, math.inf, -1.0, 1e308, "DTYPE_INT64", "DTYPE_FLOAT32"),
        *("ppo", "dro", "importance_sampling", "", "AAAA"),
        *([3, 1], [10**6, 10**6], [-3], [], [2, 2]),
        *(base64_of(ids, torch.int32) for ids in ([1], [-1, 2, 3], [2**31 - 1] * 3)),
        *(base64_of(ids, torch.int64) for ids in ([-5, 2, 3], [10**12, 1, 1], [0, 10**9, 3])),
        *(base64_of(values, torch.float32) for values in ([math.nan, 1, 1], [math.inf, 1, 1])),
    ]
    """Values of the types in `gradients`."""

    def bodies(self) -> Mapping[str, Sequence[Any]]:
        rights = filled(TINKER, **{name: str(value) for name, value in vars(self).items()})
        return {f"{self.ROOT}/{name}": body for name, body in rights.items()}

    def gradients(self) -> dict[str, Any]:
        """Return a valid gradient request, as the JSON of a protocol buffer."""
        values, kind = base64_of([1, 2, 3], torch.float32), "DTYPE_FLOAT32"
        numbers = {"dtype": kind, "dense": values, "shape": [3]}
        rows = {"values": values, "crow_indices": base64_of([0, 1, 2, 3], torch.int64)}
        rows["col_indices"] = base64_of([0, 0, 0], torch.int64)
        tokens = base64_of([2, 3, 4], torch.int64)
        inputs = {
            "target_tokens": {"dtype": "DTYPE_INT64", "dense": tokens, "shape": [3]},
            "weights": numbers,
            "logprobs": {"dtype": kind, "sparse_csr": rows, "shape": [3, 1]},
            "advantages": numbers,
        }
        text = {"encoded_text": {"tokens": base64_of([1, 2, 3], torch.int32)}}
        datum = {"model_input": [text], "loss_fn_inputs": inputs}
        config = {"beta": 0.1, "clip_low_threshold": 0.9, "x": 1.0}
        right = {"model_id": self.model, "seq_id": self.number, "loss_fn": "cross_entropy"}
        return {**right, "data": [datum], "loss_fn_config": config}

    def right(self, name: str, **more: Any) -> Any:
        path = f"{self.ROOT}/{name}"
        return self.post(path, json={**self.bodies()[path][0], **more}).json()

    def create(self) -> None:
        self.session = self.sampler = self.promised = self.model = ""
        self.number = 1
        self.session = self.right("create_session")["session_id"]
        self.result(self.right("create_model")["request_id"])
        self.model = f"{self.session}:train:0"
        self.result(self.right("save_weights")["request_id"])
        self.number = 2
        self.sampler = self.right("create_sampling_session")["sampling_session_id"]

    def result(self, promised: str) -> Any:
        """Return the result of a promise, which is no fault of the service."""
        reply = self.post(f"{self.ROOT}/retrieve_future", json={"request_id": promised})
        if not reply.headers["content-type"].startswith("application/json"):
            return reply.content
        result = reply.json()
        assert result.get("category") != "server", result
        return result

    def places(self) -> Mapping[str, Sequence[str]]:
        kinds, names = ["weights", "sampler_weights"], ["a", "b", self.session, self.sampler]
        return {"run_id": [self.model], "kind": kinds, "name": names}

    def encoded(self, path: str) -> bytes:
        if path != self.GRADIENTS:
            return super().encoded(path)
        from google.protobuf.json_format import ParseDict, ParseError
        from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

        sent = None
        while sent is None:
            with suppress(ParseError):
                wrong = changed(self.gradients(), self.chance, self.WRONG)
                wrong.pop(self.chance.choice(NAMES), None)
                sent = ParseDict(wrong, ForwardBackwardRequest()).SerializeToString()
        return damaged(sent, self.chance) if self.chance.random() < 0.1 else sent

    def after(self, method: str, path: str, reply: httpx.Response) -> None:
        if reply.status_code != 200 or "json" not in reply.headers.get("content-type", ""):
            if (method == "DELETE" and reply.status_code == 204) or path.endswith("/finish"):
                self.create()
            return
        answer = reply.json() if method == "POST" else None
        if not isinstance(answer, dict) or "request_id" not in answer:
            return
        promised = answer["request_id"]
        if promised == f"{self.model}:{self.number}":
            self.number += 1
        if promised.startswith((f"{self.model}:", "sample:", "create:")):
            # A request ahead of its turn waits for those between.
            place = promised.rpartition(":")[2]
            is_early = promised.startswith(self.model) and int(place) > self.number
            if not is_early and path.rpartition("/")[2] != "retrieve_future":
                self.promised = promised
                self.result(promised)

    def check(self) -> None:
        self.post(f"{self.ROOT}/telemetry", json={})
        promised = self.right("asample", sampling_session_id=self.sampler, seq_id=10**6)
        # An error would be JSON.
        assert isinstance(self.result(promised["request_id"]), bytes)
        self.create()


RIGHT = {name: CHATS["plain"][name] for name in ("model", "messages", "max_tokens")}


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("bytes")
    make_language_model(folder, window=512, tokenizer=make_byte_tokenizer())
    models = {"tiny": str(tiny_model_dir), "bytes": str(folder)}
    with running(models, max_answers=8, max_body_bytes=20_000) as service:
        yield service


BODY = json.dumps(RIGHT).encode()
LINE, LENGTH = b"POST /v1/chat/completions HTTP/1.1", f"Content-Length: {len(BODY)}".encode()
HTTP = LINE + b"\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + LENGTH + b"\r\n\r\n"
LINES = (b"", b"hello", b"POST", b"\x16\x03\x01\x02", b"GET / HTTP/9.9", b"GET  / HTTP/1.1")
LENGTHS = (b"-1", b"x", b"9" * 30, b"1, 2", b"")
BROKEN_HEADERS = (b"Content-Length: 3", b"no colon", b": x", b"\x00: y", b"X: " + b"a" * 200_000)
CHUNKS = (b"zz\r\n", b"5\r\nab", b"-1\r\n\r\n", BODY)
BROKEN = [
    *(HTTP.replace(LINE, line) + BODY for line in LINES),
    *(HTTP.replace(LENGTH, b"Content-Length: " + length) + BODY for length in LENGTHS),
    *(HTTP.replace(LENGTH, LENGTH + b"\r\n" + header) + BODY for header in BROKEN_HEADERS),
    *(HTTP.replace(LENGTH, b"Transfer-Encoding: chunked") + chunk for chunk in CHUNKS),
    *(HTTP.replace(LENGTH, b"Transfer-Encoding: " + kind) + BODY for kind in (b"gzip", b"x")),
]
"""Requests whose line, headers or framing are wrong."""


def exchange(service: Running, sent: bytes) -> bytes:
    """The service's complete response to some bytes."""
    host, _, port = service.root.removeprefix("http://").partition(":")
    response = b""
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        suppress(ConnectionError),
    ):
        connection.sendall(sent)
        with suppress(OSError):  # it may already have been refused and closed
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            response += part
    return response


@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_broken_http_ends_in_json_errors(
    service: Running, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    chance = random.Random(count)
    requests = [*BROKEN, *(damaged(HTTP + BODY, chance) for _ in range(count))]
    num_refused = 0
    for request in requests:
        response = exchange(service, request)
        # Half a request is answered by closing the connection, and two requests by two answers.
        while response:
            head, _, response = response.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body, response = response[:length], response[length:]
            if int(head.split(b" ", 2)[1]) >= 400:
                error = json.loads(body)["error"]
                assert set(error) == {"message", "type", "param", "code"}, (request, body)
                num_refused += 1
    assert num_refused > len(requests) / 3
    faults = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not faults, "no fault of the service"
    alive = httpx.post(service.root + "/v1/chat/completions", json=RIGHT)
    assert alive.status_code == 200


COUNTS = pytest.mark.parametrize(
    ("count", "seed"), [(100, 0), pytest.param(3400, 1, marks=pytest.mark.slow)]
)


@pytest.mark.parametrize(("kind", "fuzzed"), [("http", FuzzedTraining), ("tinker", FuzzedTinker)])
@COUNTS
def test_malformed_requests_for_training_end_in_json_errors(
    kind: Any, fuzzed: type[Fuzzed], count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tinker")
    monkeypatch.setattr(http_routes, "SECONDS_TO_WAIT", 1.0)
    monkeypatch.setattr(tinker_routes, "SECONDS_TO_WAIT", 1.0)
    limits: dict[str, Any] = {"max_training_models": 10**6, "max_message_bytes": 50_000_000}
    with httpx.Client(timeout=SECONDS) as client, training_server([kind], **limits) as server:
        fuzzed(server.url, server.app, client, seed).fuzz(count)


@COUNTS
def test_malformed_requests_end_in_json_errors(service: Running, count: int, seed: int) -> None:
    with httpx.Client(timeout=SECONDS) as client:
        FuzzedTexts(service.root, service.app, client, seed).fuzz(count)
    stored = sorted(path.name for path in (service.store.folder / "files").iterdir())
    assert stored == sorted(file["id"] for file in service.store.files())


def test_an_overflow_is_reported(service: Running, tiny_model_dir: Path, tmp_path: Path) -> None:
    module = load_causal_lm(str(tiny_model_dir), None)
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    module.save_pretrained(tmp_path)
    load_tokenizer(str(tiny_model_dir)).save_pretrained(tmp_path)
    service.served_models.add("broken", str(tmp_path))
    url = service.root + "/v1/chat/completions"
    for model, status in [("broken", 500), ("tiny", 200), ("broken", 500)]:
        reply = httpx.post(url, json=RIGHT | {"model": model})
        assert reply.status_code == status
    assert "logits are NaN" in reply.json()["error"]["message"]
    streamed = httpx.post(url, json=RIGHT | {"model": "broken", "stream": True})
    assert json.loads(streamed.text.splitlines()[-2].removeprefix("data: "))["error"]["message"]
