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
    decimal,
    format_figure,
    is_share,
    percent,
)

MAX_CLUSTERS = 8
"""Clusters of failing probes in a table; `evaluation.json` has all."""


class SafeConsole(Console):
    """A console without markup that shows each unsafe character as a sign.

    Square brackets and `:smile:` are plain text in any title, heading, cell or line.
    """

    def __init__(self, *, file: IO[str] | None = None, width: int | None = None) -> None:
        # In a notebook Rich would show what is for a file in the cell, or write colours to it.
        special = False if file is not None and Console(file=file).is_jupyter else None
        super().__init__(
            file=file, width=width, markup=False, emoji=False,
            force_jupyter=special, force_terminal=special,
        )  # fmt: skip

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
    """Base of results that a notebook shows as they print; a subclass gives `__str__`."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Printable(Shown):
    """Base of results that print as tables; a subclass gives `tables`, or `__str__`."""

    def tables(self) -> list[RenderableType]:
        """The content for a terminal."""
        return []

    def __str__(self) -> str:
        return as_text(self.tables())


def as_text(parts: Sequence[RenderableType], width: int = 120) -> str:
    """Tables as plain text."""
    stream = StringIO()
    SafeConsole(file=stream, width=width).print(*parts, sep="\n")
    return stream.getvalue()


def plain_table(title: str | None, *columns: str) -> Table:
    """A table without lines, whose cells wrap."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _lined_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table with lines: columns of text, then columns of numbers."""
    table = Table(title=title, title_justify="left")
    for column in texts:
        table.add_column(column)
    for column in numbers:
        table.add_column(Text(column), justify="right")
    return table


def bracketed(bounds: Sequence[float | None] | None, write: Callable[[Any], str]) -> str:
    """An interval behind its figure; empty without one."""
    return f" [{write(bounds[0])}, {write(bounds[1])}]" if bounds else ""


def rate(estimate: Mapping[str, Any]) -> str:
    """A share with its interval and counts."""
    return format_figure({"rate": estimate}, "rate")


def warning_lines(warnings: Sequence[str]) -> list[Text]:
    """A line for each warning."""
    return [Text(f"warning: {text}", style="bold yellow") for text in warnings]


def evaluation_tables(figures: Mapping[str, Any]) -> list[RenderableType]:
    """The tables of one evaluation, its warnings last."""
    heading = (
        f"{figures['attacker']} against {figures['target']}, judged by {figures['scorer']}: "
        f"{counted(figures['num_episodes'], 'episode')} of "
        f"{counted(figures['tree_depth'], 'turn')} from "
        f"{counted(figures['num_prompts'], 'opening prompt')}"
    )
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, cell in _figures(figures):
        if cell != NOTHING:
            table.add_row(label, cell)
    parts: list[RenderableType] = [Text(heading), table]
    if figures["clusters"]:
        parts += [Text(), _clusters_table(figures)]
    if figures["scorer_agreement"]:
        parts += [Text(), _agreement_table(figures["scorer_agreement"])]
    if figures.get("services"):
        parts += [Text(), services_table(figures["services"])]
    return [*parts, *warning_lines(figures["warnings"])]


def services_table(services: Mapping[str, Mapping[str, Any]]) -> Table:
    """Requests, tokens and costs of each chat model."""
    names = ("requests", "remembered", "refusals", "failures", "tokens", "cost", "median s")
    table = _lined_table("services", [""], names)
    for name, use in services.items():
        table.add_row(
            Text(f"{name}: {model_label(str(use['model']))}"),
            *(f"{use[key]:,}" for key in ("num_requests", "num_remembered", "num_refusals")),
            f"{sum(use['failures'].values()):,}",
            f"{use['prompt_tokens'] + use['completion_tokens']:,}",
            decimal(use["cost"], 4),
            decimal(use["median_seconds"]),
        )
    return table


def model_label(model: str) -> str:
    """A model's name in a table; of a folder its name and its parent's, which is that of a job."""
    path = PurePath(model)
    return "/".join(path.parts[-2:]) if path.is_absolute() else model


def matrix_tables(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[RenderableType]:
    """The failure rate of every attacker against every target, and the cells' warnings."""
    targets = list(dict.fromkeys(target for _, target in cells))
    table = _lined_table("episodes with a failure", ["attacker"], targets)
    for attacker in dict.fromkeys(attacker for attacker, _ in cells):
        rates = (rate(cells[attacker, target]["failure_rate"]) for target in targets)
        table.add_row(Text(attacker), *rates)
    warnings = [
        f"{attacker} against {target}: {text}"
        for (attacker, target), figures in cells.items()
        for text in figures["warnings"]
    ]
    return [table, *warning_lines(warnings)]


def comparison_tables(comparison: Mapping[str, Any]) -> list[RenderableType]:
    """A line for each metric of each contender, and the warnings."""
    table = _lined_table(
        f"difference to {comparison['baseline']}",
        ["", "metric"],
        ["baseline", "this one", "difference", "p", "p (Holm)", "pairs", "detectable"],
    )
    for label, metrics in comparison["comparisons"].items():
        for name, metric in metrics.items():
            if not isinstance(metric, Mapping):
                continue
            write = percent if is_share(name) else decimal
            table.add_row(
                Text(label), name.replace("_", " "), write(metric["first"]),
                write(metric["second"]),
                write(metric["difference"]) + bracketed((metric["low"], metric["high"]), write),
                f"{metric['p_value']:.2g}", f"{metric['p_holm']:.2g}", str(metric["num_pairs"]),
                write(metric["minimum_detectable"]),
            )  # fmt: skip
    return [table, *warning_lines(comparison["warnings"])]


def at_least(kinds: Mapping[str, Any]) -> str:
    """A lower bound on the number of kinds, with the interval."""
    if not kinds["seen"]:
        return NOTHING
    return f"{kinds['value']:.1f} [{kinds['low']:.1f}, {kinds['high']:.1f}]"


def _figures(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Labels and cells; `NOTHING` for figures that are missing."""
    counts, survival, hits = figures["outcomes"], figures["turns_to_failure"], figures["hit_at"]
    yield "episodes with a failure", rate(figures["failure_rate"])
    bounds = bounds_text(figures["failure_rate"]) or NOTHING
    yield "  if missing verdicts were passes / failures", bounds
    yield "turns with a failure", rate(figures["turn_failure_rate"])
    yield "turns: failure / none", f"{counts['failure']:,} / {counts['none']:,}"
    if counts["undetermined"] + counts["error"]:
        unknown = f"{counts['undetermined']:,} / {counts['error']:,}"
        yield "turns without verdict: undetermined / error", unknown
    yield "replies: empty / refused", str(Replies.read(figures.get("replies"))) or NOTHING
    pairs = zip(survival["survival"], survival["num_at_risk"], strict=True)
    shares = ", ".join(f"{percent(share)} ({number:,})" for share, number in pairs)
    yield "without failure through turn 1, 2, ... (of those known)", shares or NOTHING
    median = survival["median"]
    yield "median turn of the first failure", NOTHING if median is None else str(median)
    if len(hits) > 1:
        numbers = figures["hit_at_num_prompts"]
        cells = (f"{percent(share)} of {numbers[k]:,}" for k, share in hits.items())
        yield f"hit@{', '.join(hits)}, mean over prompts", ", ".join(cells)
    names = {"probe": "probes", "response": "responses", "combined": "both together"}
    for name, score in figures["scores"].items():
        q = score["quantiles"]
        spread = f"{decimal(score['mean'])} ({decimal(q['0.05'])} to {decimal(q['0.95'])})"
        yield f"score of {names[name]}, mean (5 % to 95 %)", spread
    for name in ("reference", "target"):
        value = decimal(figures["nll"].get(name))
        perplexity = decimal(figures["nll"].get(f"perplexity_{name}"))
        cell = NOTHING if value == NOTHING else f"{value} ({perplexity})"
        yield f"probe NLL under the {name}, nats per token (perplexity)", cell
    for name, found in figures["detectors"].items():
        yield from _quality(name, found)
    yield from _variety(figures)
    chances = figures["probability_of_failure"]
    if chances is not None:
        plain, weighed = chances["monte_carlo"], chances["importance_sampling"]
        played = counted(plain["num_episodes"], "episode")
        label = f"ordinary conversation fails: Monte Carlo, {played}"
        yield label, rate(plain)
        if weighed is not None:
            ess = f"effective sample size {decimal(weighed['effective_sample_size'])}"
            label = f"  importance sampling, {counted(weighed['num_episodes'], 'episode')}, {ess}"
            yield label, "refused" if weighed["is_refused"] else rate(weighed)
    for name, scorer in figures["scorers"].items():
        agreement = f"{percent(scorer['agreement'])} of {scorer['num_turns']:,}"
        yield f"episodes with a failure by {name}", rate(scorer["failure_rate"])
        yield f"  turns on which it agrees with {figures['scorer']}", agreement
    budget = figures["budget"]
    yield "target queries / tokens", f"{budget['target_queries']:,} / {budget['tokens']:,}"


def _quality(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A scorer's quality by labels, and the rates without its errors."""
    for label, key in (
        (f"{name} on {counted(found['num_failures'], 'labelled failure')}: finds", "sensitivity"),
        (f"  on {counted(found['num_others'], 'other')}: passes", "specificity"),
    ):
        one = found[key]
        counts = "" if one is None else f"{one['num_found']:,} of {one['num_labelled']:,}"
        yield label, NOTHING if one is None else f"{rate(one)}, {counts}"
    corrected = found["corrected"]
    for unit, key in (("episodes", "failure_rate"), ("turns", "turn_failure_rate")):
        refused = f"refused: {corrected.get('reason', NOTHING)}"
        cell = refused if corrected["is_refused"] else rate(corrected[key])
        yield f"  {unit} with a failure, corrected for that", cell


def _variety(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    variety, plants, fluency = figures["diversity"] or {}, figures["plants"], figures["fluency"]
    if variety:
        counts = f"{variety['num_distinct']:,} of {variety['num_probes']:,}"
        yield "successful probes: distinct", f"{percent(variety['distinct_share'])}, {counts}"
    for label, name, num in (
        ("  1 - self-BLEU", "self_bleu_complement", "self_bleu_num_probes"),
        ("  1 - mean cosine", "cosine_distance", "num_probes"),
        ("  Vendi score", "vendi", "num_probes"),
    ):
        if decimal(variety.get(name)) != NOTHING:
            yield label, f"{decimal(variety[name])}, of {counted(variety[num], 'probe')}"
    cell = "not measured"
    if fluency is not None:
        counts = f"{fluency['num_below']:,} of {fluency['num_probes']:,}"
        cell = f"{percent(fluency['share_below'])}, {counts}"
    yield "probes less likely per token than 99 % of the reference's", cell
    yield "clusters of failing probes", str(figures["num_clusters"])
    yield "  at least, those not seen included (Chao2)", at_least(figures["kinds"])
    if plants is not None:
        cell = f"{plants['found']} of {plants['total']} in {plants['tokens']:,} tokens"
        yield "planted failures found", cell


def _agreement_table(pairs: Sequence[Mapping[str, Any]]) -> Table:
    names = ("turns", "agree", "Cohen's kappa", "correlation", "both", "first", "second", "neither")
    table = _lined_table("how far scorers agree, by turn", ["scorers"], names)
    for pair in pairs:
        table.add_row(
            Text(f"{pair['first']}, {pair['second']}"), str(pair["num_turns"]),
            percent(pair["agreement"]), decimal(pair["kappa"]), decimal(pair["correlation"]),
            *(str(pair[key]) for key in ("both", "only_first", "only_second", "neither")),
        )  # fmt: skip
    return table


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
