"""Malformed requests to every route of a service, drawn from the application's own route table."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import re
import urllib.parse
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import torch
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.language_models.services.http_training import DONE_HEADER, KEY_HEADER

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
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                del data[place : place + chance.randint(1, 9)]
            case 1:
                data[place:place] = bytes([chance.randrange(256)])
            case 2:
                data[place:place] = data[: chance.randint(0, 40)]
            case _:
                data = data[:place]
    return bytes(data)


def changed(body: Any, chance: random.Random, wrong: Sequence[Any] = WRONG) -> Any:
    """A value with some of its parts, however deep, replaced, removed or added."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 2))):
        places: list[tuple[Any, Any]] = []
        todo = [body]
        while todo:
            one = todo.pop()
            keys = (
                one if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
            )
            for key in list(keys)[:20]:
                places.append((one, key))
                todo.append(one[key])
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
            # Of the right type, so that it is refused late if at all.
            is_text = isinstance(holder[key], str)
            kinds = [one for one in wrong if isinstance(one, int | float | str)]
            holder[key] = chance.choice([one for one in kinds if isinstance(one, str) == is_text])
        else:
            holder[key] = value
    return body


def as_json(body: Any, chance: random.Random) -> bytes:
    """A body as JSON, or what is nearly that."""
    match chance.randrange(20):
        case 0:
            return damaged(json.dumps(body).encode(), chance)
        case 1:
            return json.dumps(chance.choice(WRONG)).encode()
        case 2:
            return chance.choice(
                [b"", b"[" * 5000, b'{"a":' * 900 + b"1" + b"}" * 900, b"\xff\xfe"]
            )
        case 3:
            return json.dumps(body).replace("1", HUGE).encode()
        case 4:
            return json.dumps(body, ensure_ascii=False).encode("utf-16")
        case 5:
            return re.sub(r"\d+", "1e999", json.dumps(body), count=chance.randint(1, 3)).encode()
        case 6 | 7 | 8:
            return json.dumps(body).encode()
    return json.dumps(changed(body, chance)).encode()


class Fuzzed:
    """A service, and what a right request to each of its routes looks like.

    Attributes
    ----------
    bodies : Mapping
        By path of a route, what makes a right body.
    places : Mapping
        Right values of the parameters of paths.
    """

    def __init__(self, url: str, app: Starlette, client: httpx.Client) -> None:
        self.url, self.client = url, client
        *direct, mount = app.routes
        assert isinstance(mount, Mount)
        assert isinstance(mount.app, FastAPI)
        with warnings.catch_warnings():
            # One handler refuses several methods.
            warnings.simplefilter("ignore", UserWarning)
            paths = mount.app.openapi()["paths"]
        self.routes = [
            (method.upper(), path) for path, methods in paths.items() for method in methods
        ]
        for route in direct:
            assert isinstance(route, Route)
            self.routes += [(one, route.path) for one in sorted(route.methods or ["GET"])]
        assert len(self.routes) > 5
        self.statuses: dict[int, int] = {}
        self.bodies: Mapping[str, Callable[[], Any]] = {}

    def places(self) -> Mapping[str, Sequence[str]]:
        """Right values of the parameters of paths."""
        return {}

    def headers(self) -> dict[str, str | bytes]:
        """What every right request brings."""
        return {"Content-Type": "application/json"}

    def encoded(self, path: str, chance: random.Random) -> bytes:
        """A body for a route that is wrong in some way."""
        make = self.bodies.get(path)
        return as_json({} if make is None else make(), chance)

    def after(self, method: str, path: str, reply: httpx.Response) -> None:
        """Look at an answer, and replace what the request took away."""

    def request(self, chance: random.Random) -> tuple[str, str, str, bytes, dict[str, Any]]:
        """Method, path of the route, path, body and headers of a request."""
        # Most often those that read much.
        weights = [
            6 if path in self.bodies and method == "POST" else 1 for method, path in self.routes
        ]
        ((method, path),) = chance.choices(self.routes, weights)
        if chance.random() < 0.05:
            method = chance.choice(METHODS)
        places = self.places()

        def filled(found: re.Match[str]) -> str:
            right = places.get(found[1], ())
            if right and chance.random() < 0.8:
                return urllib.parse.quote(chance.choice(right), safe=":")
            return chance.choice(PARTS)

        full = re.sub(r"\{(\w+)\}", filled, path)
        if chance.random() < (0.5 if method == "GET" else 0.1):
            full += "?" + chance.choice(QUERIES)
        headers = self.headers()
        if chance.random() < 0.1:
            headers |= chance.choice(HEADERS)
        body = b"" if method == "GET" else self.encoded(path, chance)
        return method, path, full, body, headers

    def ask(self, method: str, path: str, full: str, body: bytes, headers: Any) -> httpx.Response:
        """Send a request, and check what comes."""
        about = (method, full[:300], body[:600], headers)
        try:
            reply = self.client.request(method, self.url + full, content=body, headers=headers)
        except httpx.TimeoutException as error:
            raise AssertionError(("hangs", *about)) from error
        about = (*about, reply.status_code, reply.text[:600])
        self.statuses[reply.status_code] = self.statuses.get(reply.status_code, 0) + 1
        assert reply.status_code < 500, about
        if reply.status_code >= 400 and reply.status_code != 408:
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, about
            assert error["message"], about
        self.after(method, path, reply)
        return reply

    def fuzz(self, count: int, seed: int) -> None:
        """Send many malformed requests; each ends in an answer that is no fault of the service."""
        chance = random.Random(seed)
        for _ in range(count):
            self.ask(*self.request(chance))
        # Nothing that was sent keeps right requests from being answered.
        for method, path in self.routes:
            if method == "GET" and "{" not in path:
                assert self.ask("GET", path, path, b"", {}).status_code in (200, 400)
        self.check()

    def check(self) -> None:
        """Make right requests."""


MESSAGES = [{"role": "user", "content": "hello you"}]
PLAIN = {
    "model": "tiny",
    "messages": MESSAGES,
    "max_tokens": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 1,
    "temperature": 1.0,
    "stop": ["x"],
    "seed": 1,
    "metadata": {"a": "b"},
    "return_token_ids": True,
}
FORM_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMED = {
    "model": "bytes",
    "messages": MESSAGES,
    "max_tokens": 9,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": FORM_SCHEMA, "strict": True},
    },
}
CALLING = {
    "model": "bytes",
    "messages": [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ],
    "max_tokens": 9,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": FORM_SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
}


class FuzzedTexts(Fuzzed):
    """`nip-astra serve`."""

    def __init__(self, url: str, app: Starlette, client: httpx.Client) -> None:
        super().__init__(url, app, client)
        chats = itertools.cycle([PLAIN, FORMED, PLAIN, CALLING])
        self.bodies = {
            "/v1/chat/completions": lambda: next(chats),
            "/v1/completions": lambda: {
                "model": "tiny",
                "prompt": ["hello", "good day"],
                "max_tokens": 0,
                "echo": True,
                "logprobs": 2,
            },
            "/inference/v1/generate": lambda: {
                "model": "tiny",
                "token_ids": [1, 2, 3],
                "sampling_params": {"max_tokens": 2, "n": 1, "seed": 3, "stop_token_ids": [2]},
            },
            "/v1/fine_tuning/jobs": lambda: {
                "model": "tiny",
                "training_file": self.file,
                "suffix": "a",
                "seed": 1,
                "method": {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 1, "beta": 0.1}}},
                "metadata": {"a": "b"},
            },
        }
        self.upload()

    def upload(self) -> None:
        # Preferences without an answer: a job that takes the file is refused at once.
        form = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "fine-tune"}}
        reply = self.client.post(self.url + "/v1/files", **form)  # type: ignore[arg-type]
        self.file = reply.json()["id"]

    def places(self) -> Mapping[str, Sequence[str]]:
        return {"identity": [self.file], "name": ["tiny"]}

    def encoded(self, path: str, chance: random.Random) -> bytes:
        if path != "/v1/files":
            return super().encoded(path, chance)
        name = chance.choice(["a", "../a", "\x00", "a" * 300, "é"])
        part = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n{{}}'
        end = '\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x--'
        return damaged((part + end).encode(), chance)

    def request(self, chance: random.Random) -> tuple[str, str, str, bytes, dict[str, Any]]:
        method, path, full, body, headers = super().request(chance)
        if path == "/v1/files" and method == "POST" and chance.random() < 0.9:
            headers["Content-Type"] = "multipart/form-data; boundary=x"
        return method, path, full, body, headers

    def after(self, method: str, path: str, reply: httpx.Response) -> None:
        if method == "DELETE" and reply.status_code == 200:
            self.upload()

    def check(self) -> None:
        reply = self.client.post(self.url + "/v1/chat/completions", json=PLAIN)
        assert reply.status_code == 200, reply.text


class FuzzedTraining(Fuzzed):
    """`nip-astra serve --train`."""

    ROOT = "/training/v1/models"

    def __init__(self, url: str, app: Starlette, client: httpx.Client) -> None:
        super().__init__(url, app, client)
        operation = self.ROOT + "/{name}/operations/{number}"
        self.bodies = {self.ROOT: self.model, operation: lambda: self.operations()[0]}
        self.create()

    def model(self) -> dict[str, Any]:
        lora = {"rank": 2, "alpha": 32.0, "target_modules": "all-linear"}
        body = {"base_model": "policy", "lora": lora, "seed": 0, "optimizer": "adamw"}
        return {**body, "weight_decay": 0.1, "role": "policy"}

    def create(self) -> None:
        headers = {KEY_HEADER: f"right {random.random()}"}
        reply = httpx.Response(202)
        while reply.status_code == 202:
            reply = self.client.post(self.url + self.ROOT, json=self.model(), headers=headers)
        assert reply.status_code == 200, reply.text
        self.name, self.number = reply.json()["id"], 1

    def places(self) -> Mapping[str, Sequence[str]]:
        return {"name": [self.name], "number": [str(self.number)]}

    def headers(self) -> dict[str, str | bytes]:
        return {"Content-Type": "application/json", KEY_HEADER: f"key {random.random()}"}

    def operations(self) -> list[dict[str, Any]]:
        """A right message of each kind that takes something."""
        context, ids = torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])
        rows = [context, torch.ones_like(context).bool(), ids, torch.ones_like(ids).bool()]
        options = {"max_new_tokens": 2, "min_new_tokens": 0, "temperature": 1.0, "top_k": None}
        options |= {"top_p": 1.0, "end_ids": []}
        piece = {"rows": rows, "gradient": torch.ones(1, 3) * 0.1}
        sample = {"contexts": [[1, 2]], "rows_per_context": 1, "uniforms": torch.rand(1, 2)}
        return [
            {"kind": "logprobs", "rows": rows},
            {"kind": "backward", "pieces": [piece]},
            {"kind": "optim_step", "lr": 1e-4, "max_grad_norm": 1.0},
            {"kind": "sample", **sample, "options": options},
            {"kind": "save_state"},
            {"kind": "load_state", "files": {"a/b": torch.zeros(3, dtype=torch.uint8)}},
        ]

    def encoded(self, path: str, chance: random.Random) -> bytes:
        if not path.endswith("{number}"):
            return super().encoded(path, chance)
        tensors = [
            *(torch.zeros(0), torch.zeros(2, 2), torch.tensor([[10**12]]), torch.ones(1, 3).bool()),
            *(torch.full((1, 3), math.nan), torch.tensor(1.0), torch.zeros(1, 3, dtype=torch.long)),
            *(
                torch.full((1, 2), -5),
                torch.zeros(1, 2, 3, dtype=torch.uint8),
                torch.rand(1, 2) + 3,
            ),
        ]
        message = chance.choice(self.operations())
        # Some are right, so that steps have gradients to go along.
        if chance.random() < 0.8:
            message = changed(message, chance, [*WRONG, *tensors])
        packed = pack_state(message)
        return damaged(packed, chance) if chance.random() < 0.1 else packed

    def after(self, method: str, path: str, reply: httpx.Response) -> None:
        is_done = DONE_HEADER in reply.headers
        if path.endswith("{number}") and method == "POST" and is_done:
            self.number += 1
        if method == "DELETE" and reply.status_code == 200:
            self.create()

    def check(self) -> None:
        message = pack_state(self.operations()[0])
        path = f"{self.ROOT}/{self.name}/operations/{self.number}"
        reply = self.client.post(
            self.url + path, content=message, headers={KEY_HEADER: "right", "Content-Type": "x"}
        )
        assert reply.status_code == 200, reply.text
        # No number that a step took has made the weights useless.
        assert bool(unpack_state(reply.content)["logprobs"].isfinite().all())
        self.create()


class FuzzedTinker(Fuzzed):
    """`nip-astra serve --tinker`."""

    ROOT = "/api/v1"

    def __init__(self, url: str, app: Starlette, client: httpx.Client) -> None:
        super().__init__(url, app, client)
        ids = [{"type": "encoded_text", "tokens": [1, 2, 3]}]
        self.sampler = ""
        rights: dict[str, Callable[[], dict[str, Any]]] = {
            "create_session": lambda: {"tags": ["a"], "user_metadata": {"a": "b"}},
            "session_heartbeat": lambda: {"session_id": self.session},
            "create_model": lambda: {
                "session_id": self.session,
                "model_seq_id": 0,
                "base_model": "policy",
                "lora_config": {"rank": 2, "seed": 1},
                "user_metadata": {"a": "b"},
            },
            "get_info": lambda: {"model_id": self.model},
            "optim_step": lambda: {
                "model_id": self.model,
                "seq_id": self.number,
                "adam_params": {
                    "learning_rate": 1e-4,
                    "beta1": 0.9,
                    "beta2": 0.95,
                    "eps": 1e-12,
                    "weight_decay": 0.0,
                    "grad_clip_norm": 1.0,
                },
            },
            "save_weights": lambda: {
                "model_id": self.model,
                "seq_id": self.number,
                "path": "a",
                "overwrite": True,
                "ttl_seconds": 900,
                "user_metadata": {"a": "b"},
            },
            "load_weights": lambda: {
                "model_id": self.model,
                "seq_id": self.number,
                "optimizer": True,
                "path": f"tinker://{self.model}/weights/a",
            },
            "save_weights_for_sampler": lambda: {
                "model_id": self.model,
                "seq_id": self.number,
                "path": "b",
                "ttl_seconds": 900,
            },
            "create_sampling_session": lambda: {
                "session_id": self.session,
                "base_model": "policy",
                "sampling_session_seq_id": 0,
            },
            "join_sampling_session": lambda: {"sampling_session_id": self.sampler},
            "asample": lambda: {
                "prompt": {"chunks": ids},
                "num_samples": 2,
                "base_model": "policy",
                "sampling_params": {"max_tokens": 2, "seed": 1, "temperature": 1.0, "stop": [1]},
                "prompt_logprobs": True,
                "topk_prompt_logprobs": 2,
                "prompt_alt_tokens_k": 1,
                "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
                "topk_sample_logprobs": 1,
                "sampling_session_id": self.sampler,
                "seq_id": 1,
            },
            "retrieve_future": lambda: {"request_id": self.promised},
            "weights_info": lambda: {"tinker_path": f"tinker://{self.model}/weights/a"},
        }
        self.bodies = {f"{self.ROOT}/{name}": make for name, make in rights.items()}
        self.bodies["/api/v1/forward_backward"] = dict
        ttl = "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl"
        self.bodies[self.ROOT + ttl] = lambda: {"ttl_seconds": 100}
        self.promised = ""
        self.create()

    def right(self, name: str, **more: Any) -> Any:
        body = {**self.bodies[f"{self.ROOT}/{name}"](), **more}
        reply = self.client.post(f"{self.url}{self.ROOT}/{name}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def create(self) -> None:
        self.session = self.right("create_session")["session_id"]
        promised = self.right("create_model")
        self.result(promised["request_id"])
        self.model, self.number = f"{self.session}:train:0", 1
        self.result(self.right("save_weights")["request_id"])
        self.number = 2
        self.sampler = self.right("create_sampling_session")["sampling_session_id"]

    def result(self, promised: str) -> Any:
        """What became of something that was promised; no fault of the service."""
        while True:
            body = {"request_id": promised}
            reply = self.client.post(f"{self.url}{self.ROOT}/retrieve_future", json=body)
            if reply.status_code != 408:
                break
        assert reply.status_code == 200, reply.text
        if not reply.headers["content-type"].startswith("application/json"):
            return reply.content
        found = reply.json()
        assert found.get("category") != "server", found
        return found

    def places(self) -> Mapping[str, Sequence[str]]:
        return {
            "run_id": [self.model],
            "kind": ["weights", "sampler_weights"],
            "name": ["a", "b", self.session, self.sampler],
        }

    def encoded(self, path: str, chance: random.Random) -> bytes:
        if not path.endswith("/forward_backward"):
            return super().encoded(path, chance)
        from tinker.proto import tinker_public_pb2 as pb

        message = pb.ForwardBackwardRequest(model_id=self.model, seq_id=self.number)
        message.loss_fn = chance.choice(["cross_entropy", "ppo", "dro", "importance_sampling", ""])
        ids = torch.tensor(chance.choice([[1, 2, 3], [1], [], [-1, 2, 3], [2**31 - 1] * 3]))
        datum = message.data.add()
        raw = ids.to(torch.int32).numpy().tobytes()
        cut = chance.choice([None, None, None, -1, 5])
        datum.model_input.add().encoded_text.tokens = raw[:cut]
        names = ["target_tokens", "weights", "logprobs", "advantages", "mask"]
        for name in names[:1] + chance.sample(names[1:], chance.randint(0, 3)):
            tensor = datum.loss_fn_inputs[name]
            is_whole = name == "target_tokens"
            tensor.dtype = pb.DTYPE_INT64 if is_whole else pb.DTYPE_FLOAT32
            if chance.random() < 0.1:
                tensor.dtype = chance.choice([0, pb.DTYPE_FLOAT32, pb.DTYPE_INT64])
            values = [chance.choice([1, 2, 3, 4]) for _ in range(3)]
            if chance.random() < 0.3:
                values[0] = chance.choice([-5, 10**12, 0])
            kind = torch.int64 if is_whole else torch.float32
            found = torch.tensor(values, dtype=kind)
            if not is_whole and chance.random() < 0.2:
                found[0] = chance.choice([math.nan, math.inf, 1e38])
            tensor.shape.extend(chance.choice([[3], [3, 1], [10**6, 10**6], [-3], [], [2, 2]]))
            if chance.random() < 0.3:
                csr = tensor.sparse_csr
                csr.values = found.numpy().tobytes()
                rows = chance.choice([[0, 1, 2, 3], [0], [], [3, 0], [0, 10**9, 3]])
                csr.crow_indices = torch.tensor(rows, dtype=torch.int64).numpy().tobytes()
                columns = chance.choice([[0, 0, 0], [-1, 0, 0], [10**9, 0, 0], []])
                csr.col_indices = torch.tensor(columns, dtype=torch.int64).numpy().tobytes()
            else:
                tensor.dense = found.numpy().tobytes()[: chance.choice([None, None, None, -3])]
        if chance.random() < 0.3:
            value = chance.choice([math.nan, math.inf, -1.0, 1e308])
            message.loss_fn_config[chance.choice(["beta", "clip_low_threshold", "x"])] = value
        sent: bytes = message.SerializeToString()
        return damaged(sent, chance) if chance.random() < 0.1 else sent

    def after(self, method: str, path: str, reply: httpx.Response) -> None:
        if reply.status_code != 200 or "json" not in reply.headers.get("content-type", ""):
            if (method == "DELETE" and reply.status_code == 204) or path.endswith("/finish"):
                self.create()
            return
        found = reply.json()
        if method == "POST" and isinstance(found, dict) and "request_id" in found:
            promised = found["request_id"]
            if promised == f"{self.model}:{self.number}":
                self.number += 1
            if promised.startswith((f"{self.model}:", "sample:", "create:")):
                place = promised.rpartition(":")[2]
                # One that came before its turn waits for those between.
                is_early = promised.startswith(self.model) and int(place) > self.number
                if not is_early and path.rpartition("/")[2] != "retrieve_future":
                    self.promised = promised
                    self.result(promised)

    def check(self) -> None:
        asked = self.right("asample", sampling_session_id=self.sampler, seq_id=10**6)
        # An error would be JSON.
        assert isinstance(self.result(asked["request_id"]), bytes)
        self.create()
