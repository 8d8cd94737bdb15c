"""Tables of evaluations for a terminal."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import PurePath
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nip_astra.errors import counted
from nip_astra.evaluation.outcomes import Replies
from nip_astra.safe_text import has_unsafe, safe_text
from nip_astra.utils.formatting import (
    NOTHING,
    bounds_text,
    count,
    counts_text,
    decimal,
    format_figure,
    is_share,
    items,
    mapping,
    number,
    percent,
    text,
)

TableRow = tuple[str, list[str]]
"""A label and one cell per heading, for terminals and pages."""
SERVICE_HEADINGS = (
    *("requests", "from cache", "refusals", "failures", "tokens read"),
    *("tokens generated", "cost", "seconds, median", "seconds, 95 %"),
)
QUALITY_HEADINGS = (
    *("episodes with a failure", "corrected", "turns, corrected", "failures found"),
    "others passed",
)
AGREEMENT_HEADINGS = (
    *("turns", "agree", "Cohen\N{RIGHT SINGLE QUOTATION MARK}s kappa", "correlation"),
    "both / first / second / neither",
)

MAX_CLUSTERS = 8
"""Maximum number of clusters of failing probes in a table; `evaluation.json` has all."""


class SafeConsole(Console):
    """A console without markup that replaces each unsafe character by a visible sign.

    Square brackets and `:smile:` are plain text in any title, heading, cell or line.
    """

    def __init__(self, *, file: IO[str] | None = None, width: int | None = None) -> None:
        # In a notebook Rich would show what is for a file in the cell, or write colours to it.
        special = False if file is not None and Console(file=file).is_jupyter else None
        super().__init__(
            file=file, width=width, markup=False, emoji=False,
            force_jupyter=special, force_terminal=special,
        )  # fmt: skip

    def on_broken_pipe(self) -> None:
        """Raise the error again; Rich would exit, as if the command had failed."""
        raise

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render a part, down to single cells, with safe texts."""
        if isinstance(renderable, str):
            renderable = safe_text(renderable)
        elif isinstance(renderable, Text) and has_unsafe(renderable.plain):
            renderable = renderable.copy()
            renderable.plain = safe_text(renderable.plain)
        return super().render(renderable, options)


class Shown:
    """Base of results that a notebook displays as they print; subclasses define `__str__`."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Printable(Shown):
    """Base of results that print as tables; subclasses define `tables` or `__str__`."""

    def tables(self) -> list[RenderableType]:
        """Return the content for a terminal."""
        return []

    def __str__(self) -> str:
        return as_text(self.tables())


def as_text(parts: Sequence[RenderableType], width: int = 120) -> str:
    """Return tables as plain text."""
    stream = StringIO()
    SafeConsole(file=stream, width=width).print(*parts, sep="\n")
    return stream.getvalue()


def plain_table(title: str | None, *columns: str) -> Table:
    """Create a table without lines, whose cells wrap."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def lined_table(
    title: str | None, corner: str, headings: Iterable[str], rows: Iterable[tuple[Any, ...]]
) -> Table:
    """Create a table with lines: a column of labels, then columns of numbers."""
    table = Table(title=title, title_justify="left")
    table.add_column(corner, overflow="fold")
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    for row in rows:
        table.add_row(Text(row[0]), *map(Text, row[1]))
    return table


def warning_lines(warnings: Sequence[str]) -> list[Text]:
    """Return one line per warning."""
    return [Text(f"warning: {text}", style="bold yellow") for text in warnings]


def evaluation_tables(figures: Mapping[str, Any]) -> list[RenderableType]:
    """Return the tables of an evaluation, its warnings last."""
    heading = (
        f"{figures['attacker']} against {figures['target']}, judged by {figures['scorer']}: "
        f"{counted(figures['num_episodes'], 'episode')} of "
        f"{counted(figures['tree_depth'], 'turn')} from "
        f"{counted(figures['num_prompts'], 'opening prompt')}"
    )
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, cell in figure_rows(figures):
        if cell != NOTHING:
            table.add_row(label, cell)
    parts: list[RenderableType] = [Text(heading), table]
    if figures["clusters"]:
        parts += [Text(), _clusters_table(figures)]
    for title, headings, rows in (
        ("accuracy of scorers", QUALITY_HEADINGS, quality_rows(figures)),
        ("how far scorers agree, by turn", AGREEMENT_HEADINGS, agreement_rows(figures)),
    ):
        parts += [Text(), lined_table(title, "", headings, rows)] if rows else []
    if figures.get("services"):
        parts += [Text(), services_table(figures["services"])]
    return [*parts, *warning_lines(figures["warnings"])]


def services_table(services: Mapping[str, Mapping[str, Any]]) -> Table:
    """Create a table of requests, tokens and costs of each chat model."""
    return lined_table("services", "", SERVICE_HEADINGS, service_rows(services))


def service_rows(services: Mapping[str, Any]) -> list[TableRow]:
    """Return one row per chat model."""
    rows = []
    for name, value in services.items():
        use = mapping(value)
        failures = mapping(use.get("failures"))
        cells = [
            *(count(use.get(key)) for key in ("num_requests", "num_cached", "num_refusals")),
            ", ".join(f"{count(n)} {reason}" for reason, n in failures.items()) or "0",
            *(count(use.get(key)) for key in ("prompt_tokens", "completion_tokens")),
            decimal(use.get("cost"), 4),
            *(decimal(use.get(key)) for key in ("median_seconds", "p95_seconds")),
        ]
        rows.append((f"{name}: {model_label(text(use.get('model')))}", cells))
    return rows


def model_label(model: str) -> str:
    """Return a model's name for tables; for a folder, its parent's name (the job) and its own."""
    path = PurePath(model)
    return "/".join(path.parts[-2:]) if path.is_absolute() else model


def matrix_rows(
    evaluations: Iterable[Mapping[str, Any]],
) -> tuple[list[str], list[TableRow]]:
    """Return targets, and every attacker's failure rate against each; first of a pair counts."""
    cells: dict[tuple[str, str], str] = {}
    for one in evaluations:
        pair = text(one.get("attacker")), text(one.get("target"))
        cells.setdefault(pair, format_figure(one, "failure_rate"))
    targets = list(dict.fromkeys(target for _, target in cells))
    return targets, [
        (attacker, [cells.get((attacker, target), NOTHING) for target in targets])
        for attacker in dict.fromkeys(attacker for attacker, _ in cells)
    ]


def matrix_tables(evaluations: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Return the transfer matrix, and the evaluations' warnings."""
    table = lined_table("episodes with a failure", "attacker", *matrix_rows(evaluations))
    warnings = [
        f"{one['attacker']} against {one['target']}: {line}"
        for one in evaluations
        for line in one["warnings"]
    ]
    return [table, *warning_lines(warnings)]


def comparison_tables(comparison: Mapping[str, Any]) -> list[RenderableType]:
    """Return one line per metric and compared run, and the warnings."""
    headings = ("baseline", "this one", "difference", "p", "p (Holm)", "pairs", "detectable")
    rows = []
    for label, metrics in comparison["comparisons"].items():
        for name, metric in metrics.items():
            if not isinstance(metric, Mapping):
                continue
            write = percent if is_share(name) else decimal
            ends = f" [{write(metric['low'])}, {write(metric['high'])}]"
            cells = [
                *(write(metric["first"]), write(metric["second"])),
                write(metric["difference"]) + ends,
                *(f"{metric[key]:.2g}" for key in ("p_value", "p_holm")),
                *(str(metric["num_pairs"]), write(metric["minimum_detectable"])),
            ]
            rows.append((f"{label}: {name.replace('_', ' ')}", cells))
    table = lined_table(f"difference to {comparison['baseline']}", "", headings, rows)
    return [table, *warning_lines(comparison["warnings"])]


def figure_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and cells of an evaluation, `NOTHING` for missing figures; none per agent."""
    flat = figures.get("figures")
    if flat is None:
        return list(_of_conversations(figures))
    names = [name for name in flat if "/" not in name and "std_" not in name]
    return [
        (name.replace("_", " "), format_figure(flat, name))
        for name in names
        if not name.endswith("_interval")
    ]


def _of_conversations(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def group(path: str) -> dict[str, Any]:
        found = dict(figures)
        for name in path.split("."):
            found = mapping(found.get(name))
        return found

    counts, survival, hits = (group(name) for name in ("outcomes", "turns_to_failure", "hit_at"))
    yield "episodes with a failure", format_figure(figures, "failure_rate")
    bounds = bounds_text(group("failure_rate")) or NOTHING
    yield "  if missing verdicts were passes / failures", bounds
    yield "turns with a failure", format_figure(figures, "turn_failure_rate")
    turns = [mapping(one) for one in items(figures.get("per_turn_failure_rate"))]
    by_turn = [f"{percent(one.get('value'))} ({counts_text(one, 'value')})" for one in turns]
    yield "  at turn 1, 2, ...", ", ".join(by_turn) or NOTHING
    yield "turns: failure / none", _both(counts, "failure", "none")
    if (number(counts.get("undetermined")) or 0) + (number(counts.get("error")) or 0):
        yield "turns without verdict: undetermined / error", _both(counts, "undetermined", "error")
    yield "replies: empty / refused", str(Replies.read(group("replies"))) or NOTHING
    at_risk = items(survival.get("num_at_risk"))
    shares = [
        percent(share) + (f" ({count(at_risk[place])})" if place < len(at_risk) else "")
        for place, share in enumerate(items(survival.get("survival")))
    ]
    yield "without failure through turn 1, 2, ... (of those known)", ", ".join(shares) or NOTHING
    yield "median turn of the first failure", decimal(survival.get("median"))
    if len(hits) > 1:
        numbers = group("hit_at_num_prompts")
        cells = (f"{percent(share)} of {count(numbers.get(k))}" for k, share in hits.items())
        yield f"hit@{', '.join(hits)}, mean over prompts", ", ".join(cells)
    for name, what in (("probe", "probes"), ("response", "responses"), ("combined", "both")):
        mean, q = decimal(group(f"scores.{name}").get("mean")), group(f"scores.{name}.quantiles")
        spread = f" ({decimal(q.get('0.05'))} to {decimal(q.get('0.95'))})" if len(q) > 1 else ""
        yield f"score of {what}, mean (5 % to 95 %)", mean + spread
    for name in ("reference", "target"):
        perplexity = decimal(group("nll").get(f"perplexity_{name}"))
        cell = decimal(group("nll").get(name))
        cell += "" if perplexity == NOTHING else f" ({perplexity})"
        yield f"probe NLL under the {name}, nats per token (perplexity)", cell
    yield from _variety(figures, group)
    chances = group("probability_of_failure")
    yield "ordinary conversation fails: Monte Carlo", format_figure(chances, "monte_carlo")
    weighed = mapping(chances.get("importance_sampling"))
    size = decimal(weighed.get("effective_sample_size"))
    cell = f"{format_figure({'rate': weighed}, 'rate')}, effective sample size {size}"
    if weighed.get("is_refused") or not weighed:
        cell = "refused" if weighed else NOTHING
    yield "  importance sampling", cell
    for name in group("scorers"):
        scorer = mapping(group("scorers")[name])
        agreement = f"{percent(scorer.get('agreement'))} of {count(scorer.get('num_turns'))}"
        yield f"episodes with a failure by {name}", format_figure(scorer, "failure_rate")
        yield f"  turns on which it agrees with {text(figures.get('scorer'))}", agreement
    yield "target queries / tokens", _both(group("budget"), "target_queries", "tokens")


def _variety(
    figures: Mapping[str, Any], group: Callable[[str], dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    variety, kinds, plants = group("diversity"), group("kinds"), group("plants")
    for label, name in (
        ("successful probes: distinct", "distinct_share"),
        ("  1 - self-BLEU", "self_bleu_complement"),
        ("  1 - mean cosine", "cosine_distance"),
        ("  Vendi score", "vendi"),
    ):
        yield label, format_figure(variety, name)
    fluency = format_figure(group("fluency"), "share_below")
    label = "probes less likely per token than 99 % of the reference's"
    yield label, "not measured" if fluency == NOTHING else fluency
    yield "clusters of failing probes", decimal(figures.get("num_clusters"))
    # Without an upper end there is no level either.
    has_ends = kinds.get("high") is not None
    ends = f" [{decimal(kinds.get('low'))}, {decimal(kinds.get('high'))}]" if has_ends else ""
    cell = decimal(kinds.get("value")) + ends if kinds.get("seen") else NOTHING
    yield "  at least, those not seen included (Chao2)", cell
    tokens = f" in {count(plants['tokens'])} tokens" if "tokens" in plants else ""
    yield "planted failures found", format_figure(plants, "recall") + tokens


def _both(values: Mapping[str, Any], *names: str) -> str:
    return " / ".join(count(values.get(name)) for name in names) if values else NOTHING


def quality_rows(figures: Mapping[str, Any]) -> list[TableRow]:
    """Return each scorer's failure rate, raw and corrected, and its accuracy on labels."""
    rows = []
    for name, value in mapping(figures.get("detectors")).items():
        found, is_first = mapping(value), name == figures.get("scorer")
        own = figures if is_first else mapping(mapping(figures.get("scorers")).get(name))
        corrected = mapping(found.get("corrected"))
        rates = [format_figure(corrected, rate) for rate in ("failure_rate", "turn_failure_rate")]
        if corrected.get("is_refused"):
            rates = [f"refused: {text(corrected.get('reason'))}", NOTHING]
        cells = [
            format_figure(own, "failure_rate"),
            *rates,
            *(_share_found(found, key) for key in ("sensitivity", "specificity")),
        ]
        rows.append((name, cells))
    return rows


def _share_found(found: Mapping[str, Any], name: str) -> str:
    one = mapping(found.get(name))
    counts = f", {count(one.get('num_found'))} of {count(one.get('num_labelled'))}"
    return format_figure(found, name) + (counts if "num_found" in one else "")


def agreement_rows(figures: Mapping[str, Any]) -> list[TableRow]:
    """Return the agreement of each pair of scorers."""
    return [
        (
            f"{text(pair.get('first'))}, {text(pair.get('second'))}",
            [
                count(pair.get("num_turns")),
                percent(pair.get("agreement")),
                *(decimal(pair.get(key)) for key in ("kappa", "correlation")),
                " / ".join(
                    count(pair.get(key)) for key in ("both", "only_first", "only_second", "neither")
                ),
            ],
        )
        for pair in map(mapping, items(figures.get("scorer_agreement")))
    ]


def _clusters_table(figures: Mapping[str, Any]) -> Table:
    table = Table(title="failures, grouped by probe", title_justify="left")
    table.add_column("turns", justify="right")
    table.add_column("distinct", justify="right")
    table.add_column("most likely probe")
    table.add_column("response")
    for cluster in figures["clusters"][:MAX_CLUSTERS]:
        example = cluster["most_likely"]
        table.add_row(
            str(cluster["size"]), str(cluster["num_distinct"]),
            Text(str(example["probe"])), Text(str(example["response"])),
        )  # fmt: skip
    return table
