"""Load on the text service: many clients at once against one, and against one after another.

Measures one client, `--clients` at once, and the same on a service that answers one request after
the other (`max_rows` 1), by turns: `--repeats` rounds of all three, of which medians are told, and
of ratios the median of each round's, since what else runs on a machine slows all of a round. Every
answer is compared with that of the lone client with the same seed; one may differ where two tokens
are as likely as each other up to rounding.

    python benchmarks/serve.py --model scenario://pocket_chat/models/target --max-tokens 18

`--against-generate 1 8 32` measures instead, for each number of clients, the CPU time of the
service, of its empty route (GET /health) and of `generate` of transformers with a static batch of
that size; clients are not counted. `--with-tools 8` compares requests with two tools to those
without, on a copy of the model with a chat template that shows them.

    python benchmarks/serve.py --against-generate 1 8 32 --requests 64 --repeats 7 --temperature 0
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from measuring import in_turns, markdown_table, options_of, ratio, tell

from nip_astra.language_models.services.chat import render_chat
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer
from nip_astra.serve.local_service import LocalService, start_service
from nip_astra.serve.served_models import find_model
from nip_astra.serve.settings import ServiceSettings

QUESTIONS = (
    "hello",
    "do you think my aunt should sing at the park ?",
    "my cat always eats fish with my aunt on monday .",
    "do you really like the soup from the market on sunday ?",
    "what is nice about the garden ?",
)


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("eat", "sing")
]
TEMPLATE_WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
    "{{ m.role }} : {{ m.content }} {% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


@dataclass(frozen=True)
class Load:
    """What each request asks for."""

    model: str
    max_tokens: int
    num_requests: int
    temperature: float | None
    is_distinct: bool = False

    def question(self, number: int) -> str:
        """The message of a request: one of five, or words of its own."""
        if not self.is_distinct:
            return QUESTIONS[number % len(QUESTIONS)]
        draw = random.Random(number)
        return " ".join(draw.choices(" ".join(QUESTIONS).split(), k=draw.randint(4, 12)))

    def body(self, number: int, *, stream: bool = False, tools: bool = False) -> bytes:
        """The request of a number; odd ones are greedy where no temperature is set."""
        temperature = self.temperature
        if temperature is None:
            temperature = float(number % 2 == 0)
        content = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.question(number)}],
            "seed": number,
            "temperature": temperature,
            "max_tokens": self.max_tokens,
            "stream": stream,
        }
        if tools:
            content["tools"] = TOOLS
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

    async def send(self, body: bytes) -> None:
        """Send a request; an empty body goes to the empty route."""
        route = "POST /v1/chat/completions" if body else "GET /health"
        head = (
            f"{route} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def ask(self, body: bytes) -> dict[str, Any]:
        """The whole answer."""
        await self.send(body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None, head
        answer: dict[str, Any] = json.loads(await self.reader.readexactly(int(length[1])))
        assert " 200 " in head.splitlines()[0], answer
        return answer

    async def seconds_to_first_token(self, body: bytes) -> float:
        """How long a streamed answer takes to begin; read to its end."""
        started = time.perf_counter()
        await self.send(body)
        first = None
        while line := await self.reader.readline():
            is_text = b'"content": "' in line and b'"content": ""' not in line
            first = first or (time.perf_counter() if is_text else None)
            if line.startswith(b"data: [DONE]"):
                break
        await self.reader.readuntil(b"0\r\n\r\n")
        return (first or time.perf_counter()) - started


async def ask_all(
    base_url: str, bodies: Sequence[bytes], num_clients: int
) -> tuple[float, dict[int, dict[str, Any]]]:
    """Seconds for all requests by so many clients at once, and the answers by number."""
    waiting = list(range(len(bodies)))[::-1]
    answers: dict[int, dict[str, Any]] = {}

    async def work() -> None:
        async with Client(base_url) as client:
            while waiting:
                number = waiting.pop()
                answers[number] = await client.ask(bodies[number])

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(num_clients)))
    return time.perf_counter() - started, answers


def text_of(answer: dict[str, Any]) -> str:
    """The content of a chat completion."""
    return str(answer["choices"][0]["message"]["content"])


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
    # Linux's number of the CPU clock of another process, which counts in nanoseconds.
    return time.clock_gettime(~pid << 3 | 2)


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
        bodies = [load.body(number) for number in range(load.num_requests)]
        seconds, answers = asyncio.run(ask_all(self.service.base_url, bodies, self.num_clients))
        computed = cpu_seconds(self.service.pid) - before
        self.rates.append(load.num_requests / seconds)
        self.cpu_ms.append(1000 * computed / load.num_requests)
        self.answers.append({number: text_of(one) for number, one in answers.items()})
        self.first_tokens += asyncio.run(
            first_tokens(self.service.base_url, load, self.num_clients)
        )

    def forget(self) -> None:
        """Drop all figures."""
        for figures in (self.rates, self.cpu_ms, self.first_tokens, self.answers):
            figures.clear()

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
            way.play(load)
            way.forget()
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


# ---- beside generate


class Answered(NamedTuple):
    """A round of all requests."""

    cpu_seconds: float
    texts: list[str]
    num_tokens: int = 0
    """Tokens of all answers, of the service alone."""


def plain_generate(
    model: str, load: Load, batch_size: int, num_threads: int
) -> Callable[[], Answered]:
    """A function that answers all requests in static batches."""
    torch.set_num_threads(num_threads)
    path = find_model(model)
    module, tokenizer = load_causal_lm(path, None).eval(), load_tokenizer(path)
    tokenizer.padding_side = "left"
    prompts = [
        render_chat(
            tokenizer, [{"role": "user", "content": load.question(number)}], opens_answer=True
        )
        for number in range(load.num_requests)
    ]
    options: dict[str, Any] = {"max_new_tokens": load.max_tokens, "do_sample": False}
    if load.temperature:
        # Without the checkpoint's own cuts, which the service does not make either.
        cuts = {"top_k": 0, "top_p": 1.0}
        options |= {"do_sample": True, "temperature": load.temperature, **cuts}

    @torch.inference_mode()
    def run() -> Answered:
        started, texts = time.process_time(), []
        for first in range(0, len(prompts), batch_size):
            batch = tokenizer(
                prompts[first : first + batch_size],
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
            )
            ids = module.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
        return Answered(time.process_time() - started, texts)

    return run


def served(
    service: LocalService, bodies: Sequence[bytes], num_clients: int
) -> Callable[[], Answered]:
    """A function that sends all requests to a service."""

    def run() -> Answered:
        before = cpu_seconds(service.pid)
        _, answers = asyncio.run(ask_all(service.base_url, bodies, num_clients))
        spent = cpu_seconds(service.pid) - before
        if not bodies[0]:
            return Answered(spent, [])
        in_order = [answers[number] for number in sorted(answers)]
        num_tokens = sum(one["usage"]["completion_tokens"] for one in in_order)
        return Answered(spent, [text_of(one) for one in in_order], num_tokens)

    return run


def copy_with_tools(model: str, folder: Path) -> str:
    """A copy of a model whose chat template shows tools."""
    shutil.copytree(find_model(model), folder, dirs_exist_ok=True)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE_WITH_TOOLS
    tokenizer.save_pretrained(folder)
    return str(folder)


def measure_beside_generate(args: Any, load: Load) -> list[dict[str, float]]:
    """Milliseconds of CPU for an answer, and ratios, for each number of clients."""
    numbers = range(load.num_requests)
    bodies = [load.body(number) for number in numbers]
    rows: list[dict[str, float]] = []
    with ExitStack() as stack:
        service = stack.enter_context(start(args, 256))
        for count in args.against_generate:
            ways = {
                "service": served(service, bodies, count),
                "empty_route": served(service, [b""] * load.num_requests, count),
                "generate": plain_generate(args.model, load, count, args.threads),
            }
            found = rounds_of(ways, args.repeats)
            seconds = {name: [one.cpu_seconds for one in found[name]] for name in found}
            pairs = zip(found["service"][0].texts, found["generate"][0].texts, strict=True)
            row: dict[str, float] = {"clients": count}
            for name in ways:
                row[f"{name}_ms"] = 1000 * statistics.median(seconds[name]) / load.num_requests
            row["generate_to_service"] = ratio(seconds["generate"], seconds["service"])
            row["num_same"] = sum(one == other for one, other in pairs)
            rows.append(row)
    return rows


def measure_with_tools(args: Any, load: Load) -> list[dict[str, float]]:
    """Microseconds of CPU for a token of an answer without tools and with them, and the ratio."""
    rows: list[dict[str, float]] = []
    with TemporaryDirectory() as folder:
        args.model = copy_with_tools(args.model, Path(folder))
        with start(args, 256) as service:
            for count in args.with_tools:
                ways = {}
                for name in ("without", "with"):
                    bodies = [
                        load.body(number, tools=name == "with")
                        for number in range(load.num_requests)
                    ]
                    ways[name] = served(service, bodies, count)
                found = rounds_of(ways, args.repeats)
                each = {
                    name: [1e6 * one.cpu_seconds / one.num_tokens for one in found[name]]
                    for name in ways
                }
                rows.append(
                    {"clients": count}
                    | {f"{name}_tools_us": statistics.median(each[name]) for name in ways}
                    | {"ratio": ratio(each["with"], each["without"])}
                )
    return rows


def rounds_of(
    ways: Mapping[str, Callable[[], Answered]], num_rounds: int
) -> dict[str, list[Answered]]:
    """The rounds of each way, interleaved, after one that warms up."""
    for run in ways.values():
        run()
    return in_turns(ways, num_rounds)


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
        distinct={"action": "store_true", "help": "no two requests with one prompt"},
        against_generate={"type": int, "nargs": "+", "help": "numbers of clients"},
        with_tools={"type": int, "nargs": "+", "help": "numbers of clients"},
    ).parse_args()
    load = Load("model", args.max_tokens, args.requests, args.temperature, args.distinct)
    if args.against_generate or args.with_tools:
        rows = (measure_with_tools if args.with_tools else measure_beside_generate)(args, load)
        tell(rows, args.out, shown=markdown_table([*rows[0]], [[*one.values()] for one in rows]))
        return
    found = measure(args, load)
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
