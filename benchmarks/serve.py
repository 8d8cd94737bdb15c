"""Load on the text service: many clients at once against one, and against one after another.

Measures one client, `--clients` at once, and the same on a service that answers one request after
the other (`max_rows` 1), by turns: `--repeats` rounds of all three, of which medians are told, and
of ratios the median of each round's, since what else runs on a machine slows all of a round. Every
answer is compared with that of the lone client with the same seed; one may differ where two tokens
are as likely as each other up to rounding.

    python benchmarks/serve.py --model scenario://pocket_chat/models/target --max-tokens 18
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from measuring import markdown_table, options_of, ratio, tell

from nip_astra.serve.local_service import LocalService, start_service
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


def cpu_seconds(pid: int) -> float:
    """What a process has computed for so far, all its threads together."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Way:
    """One way to be asked, round by round.

    Attributes
    ----------
    rates : list of float
        Answers a second of each round.
    cpu_ms : list of float
        Milliseconds that the service computed for an answer, of each round.
    first_tokens : list of float
        Seconds to the first token of every stream.
    """

    service: LocalService
    num_clients: int
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    answers: list[dict[int, str]] = field(default_factory=list)

    def play(self, load: Load) -> None:
        """Ask for everything once."""
        before = cpu_seconds(self.service.pid)
        seconds, answers = asyncio.run(ask_all(self.service.base_url, load, self.num_clients))
        computed = cpu_seconds(self.service.pid) - before
        self.rates.append(load.num_requests / seconds)
        self.cpu_ms.append(1000 * computed / load.num_requests)
        self.answers.append(answers)
        self.first_tokens += asyncio.run(
            first_tokens(self.service.base_url, load, self.num_clients)
        )

    @property
    def figures(self) -> dict[str, float]:
        """Medians of the rounds."""
        return {
            "answers_per_second": statistics.median(self.rates),
            "cpu_ms_per_answer": statistics.median(self.cpu_ms),
            "first_token_ms": 1000 * statistics.median(self.first_tokens),
            "first_token_ms_worst": 1000 * max(self.first_tokens),
        }


def start(args: Any, max_rows: int) -> LocalService:
    """A service of the model with at most so many answers at once."""
    settings = ServiceSettings(port=0, max_rows=max_rows)
    return start_service({"model": args.model}, settings, num_threads=args.threads)


def measure(args: Any, load: Load) -> dict[str, Any]:
    """Figures of each way to be asked, and what they are to each other, round by round."""
    with start(args, max(256, args.clients)) as service, start(args, 1) as in_turn:
        lone = Way(service, 1)
        many = Way(service, args.clients)
        queue = Way(in_turn, args.clients)
        for way in (many, queue):  # warms up
            asyncio.run(ask_all(way.service.base_url, load, args.clients))
        for _ in range(args.repeats):
            for way in (lone, many, queue):
                way.play(load)
        peak = peak_mib(service.pid)
    others = [*lone.answers[1:], *many.answers, *queue.answers]
    pairs = [(lone.answers[0][number], one[number]) for one in others for number in one]
    return {
        "one_client": lone.figures,
        "many_clients": many.figures,
        "one_after_the_other": queue.figures,
        "peak_mib": peak,
        "num_compared": len(pairs),
        "num_same": sum(one == other for one, other in pairs),
        "ratios": {
            "to_one_client": ratio(many.rates, lone.rates),
            "to_one_after_the_other": ratio(many.rates, queue.rates),
            "cpu_of_one_after_the_other": ratio(queue.cpu_ms, many.cpu_ms),
        },
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    args = options_of(
        __doc__,
        model="scenario://pocket_chat/models/target",
        clients=64,
        requests=128,
        max_tokens=18,
        temperature={"type": float, "help": "without it, half are greedy"},
        repeats=3,
        threads=1,
    ).parse_args()
    found = measure(args, Load("model", args.max_tokens, args.requests, args.temperature))
    names = {
        "one_client": "1 client",
        "many_clients": f"{args.clients} clients",
        "one_after_the_other": f"{args.clients} clients, one request after the other",
    }
    header = ["", "answers/s", "service's CPU, ms an answer", "first token, ms: median", "worst"]
    rows = [[name, *found[key].values()] for key, name in names.items()]
    ratios = found["ratios"]
    shown = (
        f"{args.model}, {args.requests} requests of up to {args.max_tokens} tokens\n\n"
        f"{markdown_table(header, rows)}\n"
        f"{ratios['to_one_client']:.1f} times one client's throughput, "
        f"{ratios['to_one_after_the_other']:.1f} times that of one request after the other, which "
        f"computes for {ratios['cpu_of_one_after_the_other']:.1f} times as long; "
        f"peak memory {found['peak_mib']:.0f} MiB; "
        f"{found['num_same']} of {found['num_compared']} answers are the lone client's"
    )
    tell(found, args.out, shown=shown)


if __name__ == "__main__":
    main()
