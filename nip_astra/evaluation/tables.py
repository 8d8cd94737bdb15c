"""What a person sees of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import PurePath
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from nip_astra.evaluation.measured import Replies
from nip_astra.safe_console import SafeConsole
from nip_astra.utils.formatting import NOTHING, bounds_text, decimal, format_figure, percent

MAX_CLUSTERS = 8
"""Clusters of failing probes in a table; `evaluation.json` has all."""


def evaluation_tables(figures: Mapping[str, Any]) -> list[RenderableType]:
    """The tables of one evaluation, its warnings last."""
    heading = (
        f"{figures['attacker']} against {figures['target']}, judged by {figures['scorer']}: "
        f"{figures['num_episodes']} episodes of {figures['tree_depth']} turns from "
        f"{figures['num_prompts']} opening prompts"
    )
    parts: list[RenderableType] = [Text(heading), _figures_table(figures)]
    if figures["clusters"]:
        parts += [Text(), _clusters_table(figures)]
    if len(figures["scorer_agreement"]) > 0:
        parts += [Text(), _agreement_table(figures["scorer_agreement"])]
    if figures.get("services"):
        parts += [Text(), services_table(figures["services"])]
    return [*parts, *warning_lines(figures["warnings"])]


def services_table(services: Mapping[str, Mapping[str, Any]]) -> Table:
    """What each chat model took."""
    table = Table(title="services", title_justify="left")
    table.add_column("")
    for name in ("requests", "remembered", "refusals", "failures", "tokens", "cost", "median s"):
        table.add_column(name, justify="right")
    for name, use in services.items():
        cost, seconds = use["cost"], use["median_seconds"]
        table.add_row(
            Text(f"{name}: {model_label(str(use['model']))}"),
            *(f"{use[key]:,}" for key in ("num_requests", "num_remembered", "num_refusals")),
            f"{sum(use['failures'].values()):,}",
            f"{use['prompt_tokens'] + use['completion_tokens']:,}",
            decimal(cost, 4),
            decimal(seconds),
        )
    return table


def model_label(model: str) -> str:
    """What a table calls a model: of a folder its name and the one above, which names the job."""
    path = PurePath(model)
    return "/".join(path.parts[-2:]) if path.is_absolute() else model


def warning_lines(warnings: Sequence[str]) -> list[Text]:
    """A line for each warning."""
    return [Text(f"warning: {text}", style="bold yellow") for text in warnings]


def matrix_tables(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[RenderableType]:
    """The failure rate of every attacker against every target, and the cells' warnings."""
    warnings = [
        f"{attacker} against {target}: {text}"
        for (attacker, target), figures in cells.items()
        for text in figures["warnings"]
    ]
    return [_matrix_table(cells), *warning_lines(warnings)]


def _matrix_table(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    table = Table(title="episodes with a failure", title_justify="left")
    table.add_column("attacker")
    targets = list(dict.fromkeys(target for _, target in cells))
    for target in targets:
        table.add_column(Text(target), justify="right")
    for attacker in dict.fromkeys(attacker for attacker, _ in cells):
        row = [rate(cells[attacker, target]["failure_rate"]) for target in targets]
        table.add_row(Text(attacker), *row)
    return table


def comparison_tables(comparison: Mapping[str, Any]) -> list[RenderableType]:
    """A line for each metric of each contender, and the warnings."""
    return [_comparison_table(comparison), *warning_lines(comparison["warnings"])]


def _comparison_table(comparison: Mapping[str, Any]) -> Table:
    table = Table(title=f"difference to {comparison['baseline']}", title_justify="left")
    for name in ("", "metric", "baseline", "this one"):
        table.add_column(name, justify="left" if name in ("", "metric") else "right")
    for name in ("difference", "p", "p (Holm)", "pairs", "detectable"):
        table.add_column(name, justify="right")
    for label, found in comparison["comparisons"].items():
        for name, metric in found.items():
            if not isinstance(metric, Mapping):
                continue
            write = percent if name == "failure_rate" else decimal
            low, high = write(metric["low"]), write(metric["high"])
            table.add_row(
                Text(label), name.replace("_", " "), write(metric["first"]),
                write(metric["second"]), f"{write(metric['difference'])} [{low}, {high}]",
                f"{metric['p_value']:.2g}", f"{metric['p_holm']:.2g}", str(metric["num_pairs"]),
                write(metric["minimum_detectable"]),
            )  # fmt: skip
    return table


def as_text(parts: Sequence[RenderableType], width: int = 120) -> str:
    """Tables as plain text."""
    stream = StringIO()
    SafeConsole(file=stream, width=width).print(*parts, sep="\n")
    return stream.getvalue()


def rate(estimate: Mapping[str, Any]) -> str:
    """A share with its interval, and of how many it is."""
    return format_figure({"rate": estimate}, "rate")


def at_least(kinds: Mapping[str, Any]) -> str:
    """How many kinds there are at least, with the interval."""
    if not kinds["seen"]:
        return NOTHING
    return f"{kinds['value']:.1f} [{kinds['low']:.1f}, {kinds['high']:.1f}]"


def _figures_table(figures: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, cell in _figures(figures):
        if cell != NOTHING:
            table.add_row(label, cell)
    return table


def _figures(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    counts, nll = figures["outcomes"], figures["nll"]
    survival, hits = figures["turns_to_failure"], figures["hit_at"]
    lines = [
        ("episodes with a failure", rate(figures["failure_rate"])),
        (
            "  if missing verdicts were passes / failures",
            bounds_text(figures["failure_rate"]) or NOTHING,
        ),
        ("turns with a failure", rate(figures["turn_failure_rate"])),
        ("turns: failure / none", f"{counts['failure']:,} / {counts['none']:,}"),
        ("turns without verdict: undetermined / error", _unknown(counts)),
        ("replies: empty / refused", str(Replies.read(figures.get("replies"))) or NOTHING),
        ("without failure through turn 1, 2, ... (of those known)", _survival(survival)),
        ("median turn of the first failure", _or_nothing(survival["median"])),
    ]
    if len(hits) > 1:
        numbers = figures["hit_at_num_prompts"]
        cells = [f"{percent(share)} of {numbers[k]:,}" for k, share in hits.items()]
        lines.append((f"hit@{', '.join(hits)}, mean over prompts", ", ".join(cells)))
    for name, score in figures["scores"].items():
        q = score["quantiles"]
        spread = f"{decimal(score['mean'])} ({decimal(q['0.05'])} to {decimal(q['0.95'])})"
        lines.append((f"score of {_NAMES[name]}, mean (5 % to 95 %)", spread))
    for name in ("reference", "target"):
        value = decimal(nll.get(name))
        perplexity = decimal(nll.get(f"perplexity_{name}"))
        cell = NOTHING if value == NOTHING else f"{value} ({perplexity})"
        lines.append((f"probe NLL under the {name}, nats per token (perplexity)", cell))
    quality = [line for name in figures["detectors"] for line in _quality(figures, name)]
    return [*lines, *quality, *_variety(figures), *_probabilities(figures), *_others(figures)]


_NAMES = {"probe": "probes", "response": "responses", "combined": "both together"}


def _variety(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    variety, plants = figures["diversity"] or {}, figures["plants"]
    fluency = figures["fluency"]
    lines = [
        ("successful probes: distinct", _distinct(variety)),
        ("  1 - self-BLEU", _among(variety, "self_bleu_complement", "self_bleu_num_probes")),
        ("  1 - mean cosine", _among(variety, "cosine_distance")),
        ("  Vendi score", _among(variety, "vendi")),
        (
            "probes less likely per token than 99 % of the reference's",
            "not measured" if fluency is None else _below(fluency),
        ),
        ("clusters of failing probes", str(figures["num_clusters"])),
        ("  at least, those not seen included (Chao2)", at_least(figures["kinds"])),
    ]
    if plants is not None:
        cell = f"{plants['found']} of {plants['total']} in {plants['tokens']:,} tokens"
        lines.append(("planted failures found", cell))
    return lines


def _distinct(variety: Mapping[str, Any]) -> str:
    if not variety:
        return NOTHING
    return (
        f"{percent(variety['distinct_share'])}, {variety['num_distinct']:,} of "
        f"{variety['num_probes']:,}"
    )


def _among(variety: Mapping[str, Any], name: str, counted: str = "num_probes") -> str:
    written = decimal(variety.get(name))
    return NOTHING if written == NOTHING else f"{written}, of {variety[counted]:,} probes"


def _below(fluency: Mapping[str, Any]) -> str:
    return (
        f"{percent(fluency['share_below'])}, {fluency['num_below']:,} of {fluency['num_probes']:,}"
    )


def _survival(survival: Mapping[str, Any]) -> str:
    pairs = zip(survival["survival"], survival["num_at_risk"], strict=True)
    return ", ".join(f"{percent(share)} ({number:,})" for share, number in pairs) or NOTHING


def _probabilities(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = figures["probability_of_failure"]
    if found is None:
        return []
    plain_one, weighed = found["monte_carlo"], found["importance_sampling"]
    name = "ordinary conversation fails"
    lines = [(f"{name}: Monte Carlo, {plain_one['num_episodes']} episodes", rate(plain_one))]
    if weighed is not None:
        cell = "refused" if weighed["is_refused"] else rate(weighed)
        ess = f"effective sample size {decimal(weighed['effective_sample_size'])}"
        label = f"  importance sampling, {weighed['num_episodes']} episodes, {ess}"
        lines.append((label, cell))
    return lines


def _others(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, scorer in figures["scorers"].items():
        agreement = f"{percent(scorer['agreement'])} of {scorer['num_turns']:,}"
        lines.append((f"episodes with a failure by {name}", rate(scorer["failure_rate"])))
        lines.append((f"  turns on which it agrees with {figures['scorer']}", agreement))
    budget = figures["budget"]
    cell = f"{budget['target_queries']:,} / {budget['tokens']:,}"
    return [*lines, ("target queries / tokens", cell)]


def _quality(figures: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    """What labels say of a scorer, and the rates without its errors."""
    found = figures["detectors"][name]
    corrected = found["corrected"]
    missing = corrected.get("reason", NOTHING)
    lines = [
        (
            f"{name} on {found['num_failures']} labelled failures: finds",
            _found(found["sensitivity"]),
        ),
        (f"  on {found['num_others']} others: passes", _found(found["specificity"])),
    ]
    for what, key in (("episodes", "failure_rate"), ("turns", "turn_failure_rate")):
        cell = f"refused: {missing}" if corrected["is_refused"] else rate(corrected[key])
        lines.append((f"  {what} with a failure, corrected for that", cell))
    return lines


def _found(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return NOTHING
    return f"{rate(estimate)}, {estimate['num_found']:,} of {estimate['num_labelled']:,}"


def _agreement_table(pairs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="how far scorers agree, by turn", title_justify="left")
    table.add_column("scorers")
    names = ("turns", "agree", "Cohen's kappa", "correlation", "both", "first", "second", "neither")
    for name in names:
        table.add_column(name, justify="right")
    for pair in pairs:
        counts = [str(pair[key]) for key in ("both", "only_first", "only_second", "neither")]
        table.add_row(
            Text(f"{pair['first']}, {pair['second']}"), str(pair["num_turns"]),
            percent(pair["agreement"]), decimal(pair["kappa"]), decimal(pair["correlation"]),
            *counts,
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


def _unknown(counts: Mapping[str, int]) -> str:
    total = counts["undetermined"] + counts["error"]
    return f"{counts['undetermined']:,} / {counts['error']:,}" if total else NOTHING


def _join(values: Any, write: Any) -> str:
    return ", ".join(write(value) for value in values) or NOTHING


def _or_nothing(value: int | None) -> str:
    return NOTHING if value is None else str(value)
