"""Load test of the text service: concurrent clients against one client and sequential requests.

Measures one client, `--clients` concurrent clients, and the same clients on a sequential service
(`max_rows` 1), in `--repeats` interleaved rounds. Reports medians and median ratios over rounds.
Every answer is compared with the single client's answer for the same seed; a rare difference is
possible where two tokens are equally likely up to rounding.

    python benchmarks/serve.py --model scenario://pocket_chat/models/target --max-tokens 18

`--against-generate 1 8 32` instead measures the CPU time, for each number of clients, of the
service, of its empty route (GET /health), and of transformers' `generate` with static batches of
that size; the clients' own CPU time is excluded. `--with-tools 8` compares requests with and
without two tools, on a copy of the model whose chat template renders them.

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
from measuring import build_parser, interleaved, markdown_table, ratio, report_figures

from nip_astra.language_models.services.chat import render_chat
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
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
    """Model, number and content of the requests."""

    model: str
    max_tokens: int
    num_requests: int
    temperature: float | None
    is_distinct: bool = False

    def question(self, number: int) -> str:
        """The message of a request: one of five, or distinct random words."""
        if not self.is_distinct:
            return QUESTIONS[number % len(QUESTIONS)]
        draw = random.Random(number)
        return " ".join(draw.choices(" ".join(QUESTIONS).split(), k=draw.randint(4, 12)))

    def body(self, number: int, *, stream: bool = False, tools: bool = False) -> bytes:
        """The body of a request; odd numbers are greedy if no temperature is set."""
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
    """A minimal client with a persistent connection; a library's overhead would be measured too."""

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

    async def complete(self, body: bytes) -> dict[str, Any]:
        """Send a request, and return the complete answer."""
        await self.send(body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None, head
        answer: dict[str, Any] = json.loads(await self.reader.readexactly(int(length[1])))
        assert " 200 " in head.splitlines()[0], answer
        return answer

    async def seconds_to_first_token(self, body: bytes) -> float:
        """Time to the first token of a streamed answer, which is read to its end."""
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


async def send_all(
    base_url: str, bodies: Sequence[bytes], num_clients: int
) -> tuple[float, dict[int, dict[str, Any]]]:
    """Send all requests with concurrent clients; return the seconds and the answers by number."""
    pending = list(range(len(bodies)))[::-1]
    answers: dict[int, dict[str, Any]] = {}

    async def work() -> None:
        async with Client(base_url) as client:
            while pending:
                number = pending.pop()
                answers[number] = await client.complete(bodies[number])

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(num_clients)))
    return time.perf_counter() - started, answers


def text_of(answer: dict[str, Any]) -> str:
    """The content of a chat completion."""
    return str(answer["choices"][0]["message"]["content"])


async def first_tokens(base_url: str, load: Load, num_clients: int) -> list[float]:
    """Seconds to the first token of one concurrent stream per client."""

    async def stream(number: int) -> float:
        async with Client(base_url) as client:
            return await client.seconds_to_first_token(load.body(number, stream=True))

    return list(await asyncio.gather(*(stream(number) for number in range(num_clients))))


def peak_mib(pid: int) -> float:
    """Peak resident memory of a process."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) / 1024 if match else float("nan")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, over all its threads."""
    # Linux's id of another process's CPU clock, which has nanosecond resolution.
    return time.clock_gettime(~pid << 3 | 2)


@dataclass
class LoadTest:
    """Measurements of a service with a number of concurrent clients.

    Attributes
    ----------
    rates : list of float
        Answers per second, by round.
    cpu_ms : list of float
        CPU milliseconds of the service per answer, by round.
    first_tokens : list of float
        Seconds to the first token of every stream.
    """

    service: LocalService
    num_clients: int
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    answers: list[dict[int, str]] = field(default_factory=list)

    def measure_round(self, load: Load) -> None:
        """Send all requests once."""
        before = cpu_seconds(self.service.pid)
        bodies = [load.body(number) for number in range(load.num_requests)]
        seconds, answers = asyncio.run(send_all(self.service.base_url, bodies, self.num_clients))
        cpu = cpu_seconds(self.service.pid) - before
        self.rates.append(load.num_requests / seconds)
        self.cpu_ms.append(1000 * cpu / load.num_requests)
        self.answers.append({number: text_of(answer) for number, answer in answers.items()})
        self.first_tokens += asyncio.run(
            first_tokens(self.service.base_url, load, self.num_clients)
        )

    def clear(self) -> None:
        """Drop all measurements."""
        for figures in (self.rates, self.cpu_ms, self.first_tokens, self.answers):
            figures.clear()

    @property
    def figures(self) -> dict[str, float]:
        """Medians over rounds."""
        return {
            "answers_per_second": statistics.median(self.rates),
            "cpu_ms_per_answer": statistics.median(self.cpu_ms),
            "first_token_ms": 1000 * statistics.median(self.first_tokens),
            "first_token_ms_worst": 1000 * max(self.first_tokens),
        }


def start(args: Any, max_rows: int) -> LocalService:
    """Start a service of the model with at most `max_rows` concurrent answers."""
    settings = ServiceSettings(port=0, max_rows=max_rows)
    return start_service({"model": args.model}, settings, num_threads=args.threads)


def measure(args: Any, load: Load) -> dict[str, Any]:
    """Figures of one client, concurrent clients and sequential requests, and their ratios."""
    with start(args, max(256, args.clients)) as service, start(args, 1) as one_row_service:
        single = LoadTest(service, 1)
        concurrent = LoadTest(service, args.clients)
        sequential = LoadTest(one_row_service, args.clients)
        for test in (concurrent, sequential):  # warm-up
            test.measure_round(load)
            test.clear()
        for _ in range(args.repeats):
            for test in (single, concurrent, sequential):
                test.measure_round(load)
        peak = peak_mib(service.pid)
    rounds = [*single.answers[1:], *concurrent.answers, *sequential.answers]
    pairs = [(single.answers[0][n], answers[n]) for answers in rounds for n in answers]
    return {
        "one_client": single.figures,
        "many_clients": concurrent.figures,
        "one_after_the_other": sequential.figures,
        "peak_mib": peak,
        "num_compared": len(pairs),
        "num_same": sum(expected == actual for expected, actual in pairs),
        "ratios": {
            "to_one_client": ratio(concurrent.rates, single.rates),
            "to_one_after_the_other": ratio(concurrent.rates, sequential.rates),
            "cpu_of_one_after_the_other": ratio(sequential.cpu_ms, concurrent.cpu_ms),
        },
    }


# ---- comparison with generate


class RoundResult(NamedTuple):
    """CPU time and answers of one round of all requests."""

    cpu_seconds: float
    texts: list[str]
    num_tokens: int = 0
    """Tokens of all answers; only for the service."""


def plain_generate(
    model: str, load: Load, batch_size: int, num_threads: int
) -> Callable[[], RoundResult]:
    """A function that answers all requests with `generate` in static batches."""
    torch.set_num_threads(num_threads)
    source = resolve_model(find_model(model), None)
    module, tokenizer = load_causal_lm(*source).eval(), load_tokenizer(*source)
    tokenizer.padding_side = "left"
    prompts = [
        render_chat(
            tokenizer, [{"role": "user", "content": load.question(number)}], opens_answer=True
        )
        for number in range(load.num_requests)
    ]
    options: dict[str, Any] = {"max_new_tokens": load.max_tokens, "do_sample": False}
    if load.temperature:
        # The service does not apply the checkpoint's top_k and top_p either.
        cuts = {"top_k": 0, "top_p": 1.0}
        options |= {"do_sample": True, "temperature": load.temperature, **cuts}

    @torch.inference_mode()
    def run() -> RoundResult:
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
        return RoundResult(time.process_time() - started, texts)

    return run


def service_rounds(
    service: LocalService, bodies: Sequence[bytes], num_clients: int
) -> Callable[[], RoundResult]:
    """A function that sends all requests to a service."""

    def run() -> RoundResult:
        before = cpu_seconds(service.pid)
        _, answers = asyncio.run(send_all(service.base_url, bodies, num_clients))
        cpu = cpu_seconds(service.pid) - before
        if not bodies[0]:
            return RoundResult(cpu, [])
        in_order = [answers[number] for number in sorted(answers)]
        num_tokens = sum(answer["usage"]["completion_tokens"] for answer in in_order)
        return RoundResult(cpu, [text_of(answer) for answer in in_order], num_tokens)

    return run


def copy_with_tools(model: str, folder: Path) -> str:
    """Copy a model, with a chat template that renders tools."""
    shutil.copytree(find_model(model), folder, dirs_exist_ok=True)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE_WITH_TOOLS
    tokenizer.save_pretrained(folder)
    return str(folder)


def measure_against_generate(args: Any, load: Load) -> list[dict[str, float]]:
    """CPU milliseconds per answer and ratios, for each number of clients."""
    numbers = range(load.num_requests)
    bodies = [load.body(number) for number in numbers]
    rows: list[dict[str, float]] = []
    with ExitStack() as stack:
        service = stack.enter_context(start(args, 256))
        for count in args.against_generate:
            variants = {
                "service": service_rounds(service, bodies, count),
                "empty_route": service_rounds(service, [b""] * load.num_requests, count),
                "generate": plain_generate(args.model, load, count, args.threads),
            }
            results = interleaved_rounds(variants, args.repeats)
            seconds = {name: [r.cpu_seconds for r in results[name]] for name in results}
            pairs = zip(results["service"][0].texts, results["generate"][0].texts, strict=True)
            row: dict[str, float] = {"clients": count}
            for name in variants:
                row[f"{name}_ms"] = 1000 * statistics.median(seconds[name]) / load.num_requests
            row["generate_to_service"] = ratio(seconds["generate"], seconds["service"])
            row["num_same"] = sum(ours == theirs for ours, theirs in pairs)
            rows.append(row)
    return rows


def measure_with_tools(args: Any, load: Load) -> list[dict[str, float]]:
    """CPU microseconds per generated token without and with tools, and their ratio."""
    rows: list[dict[str, float]] = []
    with TemporaryDirectory() as folder:
        args.model = copy_with_tools(args.model, Path(folder))
        with start(args, 256) as service:
            for count in args.with_tools:
                variants = {}
                for name in ("without", "with"):
                    bodies = [
                        load.body(number, tools=name == "with")
                        for number in range(load.num_requests)
                    ]
                    variants[name] = service_rounds(service, bodies, count)
                results = interleaved_rounds(variants, args.repeats)
                per_token = {
                    name: [1e6 * r.cpu_seconds / r.num_tokens for r in results[name]]
                    for name in variants
                }
                rows.append(
                    {"clients": count}
                    | {f"{name}_tools_us": statistics.median(per_token[name]) for name in variants}
                    | {"ratio": ratio(per_token["with"], per_token["without"])}
                )
    return rows


def interleaved_rounds(
    variants: Mapping[str, Callable[[], RoundResult]], num_rounds: int
) -> dict[str, list[RoundResult]]:
    """Interleaved rounds of each variant, after a warm-up round."""
    for run in variants.values():
        run()
    return interleaved(variants, num_rounds)


def main() -> None:
    """Measure, print a table and write JSON."""
    args = build_parser(
        __doc__,
        model="scenario://pocket_chat/models/target",
        clients=64,
        requests=128,
        max_tokens=18,
        temperature={"type": float, "help": "default: half of the requests greedy, half at 1"},
        repeats=3,
        threads=1,
        distinct={"action": "store_true", "help": "give each request a prompt of its own"},
        against_generate={"type": int, "nargs": "+", "help": "numbers of clients"},
        with_tools={"type": int, "nargs": "+", "help": "numbers of clients"},
    ).parse_args()
    load = Load("model", args.max_tokens, args.requests, args.temperature, args.distinct)
    if args.against_generate or args.with_tools:
        rows = (measure_with_tools if args.with_tools else measure_against_generate)(args, load)
        report_figures(
            rows, args.out, shown=markdown_table([*rows[0]], [[*row.values()] for row in rows])
        )
        return
    figures = measure(args, load)
    names = {
        "one_client": "1 client",
        "many_clients": f"{args.clients} clients",
        "one_after_the_other": f"{args.clients} clients, sequential",
    }
    header = ["", "answers/s", "service's CPU, ms per answer", "first token, ms: median", "worst"]
    table = [[name, *figures[key].values()] for key, name in names.items()]
    ratios = figures["ratios"]
    shown = (
        f"{args.model}, {args.requests} requests of up to {args.max_tokens} tokens\n\n"
        f"{markdown_table(header, table)}\n"
        f"throughput: {ratios['to_one_client']:.1f} times one client's, "
        f"{ratios['to_one_after_the_other']:.1f} times the sequential service's, which uses "
        f"{ratios['cpu_of_one_after_the_other']:.1f} times the CPU time; "
        f"peak memory {figures['peak_mib']:.0f} MiB; "
        f"{figures['num_same']} of {figures['num_compared']} answers equal the single client's"
    )
    report_figures(figures, args.out, shown=shown)


if __name__ == "__main__":
    main()
