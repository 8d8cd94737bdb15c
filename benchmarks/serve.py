"""Load on the text service: many clients at once against one, and against one after another.

Measures one client, `--clients` at once, and the same on a service that answers one request after
the other (`max_rows` 1); each several times, of which the median is told. Every answer is compared
with that of the lone client with the same seed.

    python benchmarks/serve.py --model scenario://pocket_chat/models/target --max-tokens 18
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nip_astra.serve.local_service import start_service
from nip_astra.serve.settings import ServiceSettings

QUESTIONS = (
    "hello",
    "do you think my aunt should sing at the park ?",
    "my cat always eats fish with my aunt on monday .",
    "do you really like the soup from the market on sunday ?",
    "what is nice about the garden ?",
)


@dataclass(frozen=True)
class Load:
    """What each request asks for."""

    model: str
    max_tokens: int
    num_requests: int
    temperature: float | None

    def body(self, number: int, *, stream: bool = False) -> bytes:
        """The request of a number; odd ones are greedy where no temperature is set."""
        temperature = self.temperature
        if temperature is None:
            temperature = float(number % 2 == 0)
        content = {
            "model": self.model,
            "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            "seed": number,
            "temperature": temperature,
            "max_tokens": self.max_tokens,
            "stream": stream,
        }
        return json.dumps(content).encode()


class Client:
    """One connection that is kept open; clients of a library would be measured themselves."""

    def __init__(self, base_url: str) -> None:
        self.host, self.port = urlsplit(base_url).hostname, urlsplit(base_url).port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def post(self, body: bytes) -> None:
        """Send a request."""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def ask(self, body: bytes) -> str:
        """The whole text of an answer."""
        await self.post(body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None, head
        answer = json.loads(await self.reader.readexactly(int(length[1])))
        assert " 200 " in head.splitlines()[0], answer
        return str(answer["choices"][0]["message"]["content"])

    async def seconds_to_first_token(self, body: bytes) -> float:
        """How long a streamed answer takes to begin; read to its end."""
        started = time.perf_counter()
        await self.post(body)
        first = None
        while line := await self.reader.readline():
            is_text = b'"content": "' in line and b'"content": ""' not in line
            first = first or (time.perf_counter() if is_text else None)
            if line.startswith(b"data: [DONE]"):
                break
        await self.reader.readuntil(b"0\r\n\r\n")
        return (first or time.perf_counter()) - started


async def ask_all(base_url: str, load: Load, num_clients: int) -> tuple[float, dict[int, str]]:
    """Seconds for all requests by so many clients at once, and the answers by number."""
    waiting = list(range(load.num_requests))[::-1]
    answers: dict[int, str] = {}

    async def work() -> None:
        async with Client(base_url) as client:
            while waiting:
                number = waiting.pop()
                answers[number] = await client.ask(load.body(number))

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(num_clients)))
    return time.perf_counter() - started, answers


async def first_tokens(base_url: str, load: Load, num_clients: int) -> list[float]:
    """Seconds to the first token of as many streams at once as there are clients."""

    async def one(number: int) -> float:
        async with Client(base_url) as client:
            return await client.seconds_to_first_token(load.body(number, stream=True))

    return list(await asyncio.gather(*(one(number) for number in range(num_clients))))


def peak_mib(pid: int) -> float:
    """Most memory that a process has held."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def measure(model: str, load: Load, clients: Sequence[int], args: Any) -> dict[str, Any]:
    """Figures of one service, by number of clients."""
    figures: dict[str, Any] = {}
    settings = ServiceSettings(port=0, max_rows=args.rows)
    with start_service({"model": model}, settings, num_threads=args.threads) as service:
        asyncio.run(ask_all(service.base_url, load, max(clients)))  # warms up
        for number in clients:
            times, told = [], []
            for _ in range(args.repeats):
                seconds, answers = asyncio.run(ask_all(service.base_url, load, number))
                times.append(seconds)
                told += asyncio.run(first_tokens(service.base_url, load, number))
                figures.setdefault("answers", answers)
                assert answers == figures["answers"], "an answer hangs on what else runs"
            figures[str(number)] = {
                "answers_per_second": load.num_requests / statistics.median(times),
                "first_token_ms": 1000 * statistics.median(told),
                "first_token_ms_worst": 1000 * max(told),
            }
        figures["peak_mib"] = peak_mib(service.pid)
    return figures


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="scenario://pocket_chat/models/target")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=18)
    parser.add_argument("--temperature", type=float, help="without it, half are greedy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = Load("model", args.max_tokens, args.requests, args.temperature)
    args.rows = max(256, args.clients)
    together = measure(args.model, load, [1, args.clients], args)
    args.rows = 1
    in_turn = measure(args.model, load, [args.clients], args)
    assert together.pop("answers") == in_turn.pop("answers")
    many = str(args.clients)
    rows = {
        "1 client": together["1"],
        f"{many} clients": together[many],
        f"{many} clients, one request after the other": in_turn[many],
    }
    print(f"{args.model}, {args.requests} requests of up to {args.max_tokens} tokens\n")
    print("| | answers/s | first token, ms: median | worst |")
    print("|---|---|---|---|")
    for name, row in rows.items():
        first, worst = row["first_token_ms"], row["first_token_ms_worst"]
        print(f"| {name} | {row['answers_per_second']:.1f} | {first:.0f} | {worst:.0f} |")
    rate = together[many]["answers_per_second"]
    ratios = {
        "to_one_client": rate / together["1"]["answers_per_second"],
        "to_one_after_the_other": rate / in_turn[many]["answers_per_second"],
    }
    print(f"\n{ratios['to_one_client']:.1f} times one client's throughput, ", end="")
    print(
        f"{ratios['to_one_after_the_other']:.1f} times that of one request after the other; ",
        end="",
    )
    print(f"peak memory {together['peak_mib']:.0f} MiB; every answer as of a lone client")
    if args.out is not None:
        figures = {"together": together, "in_turn": in_turn, "ratios": ratios}
        args.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
