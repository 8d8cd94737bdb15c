"""Exports that need no other package: CSV, JSON lines, and a log of hits alone."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from nip_astra.evaluation.exports.material import Material, scores_of, write_text
from nip_astra.evaluation.outcomes import Outcome
from nip_astra.evaluation.rows import Row, encode_rows
from nip_astra.safe_text import safe_text, to_json

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""With which a spreadsheet takes text for a formula to work out."""
SCHEMA_VERSION = 1
"""Of the JSON lines; grows when a reader of the old ones would misread the new ones."""


def write_csv(material: Material, folder: Path) -> list[Path]:
    """Write `turns.csv`, `figures.csv` and `metrics.csv`; what is nested has dotted names.

    Text that a spreadsheet would take for a formula gets an apostrophe before it; characters that
    act on a terminal, or are not seen, are written as `safe_text` shows them.
    """
    turns = [row for episode in material.episodes for row in episode]
    return csv_tables(folder, {"turns": turns}, material.figures, metrics=material.metrics)


def csv_tables(
    folder: Path,
    tables: Mapping[str, Sequence[Row]],
    figures: Mapping[str, Any],
    *,
    metrics: Sequence[Mapping[str, Any]],
) -> list[Path]:
    """Write tables, figures and metrics as CSV, as `write_csv` says; none that is empty."""
    told = [{"figure": name, "value": value} for name, value in _flat(figures).items()]
    flat = {name: list(map(_flat, rows)) for name, rows in tables.items()}
    flat |= {"figures": told, "metrics": list(map(_flat, metrics))}
    return [
        write_text(folder / f"{name}.csv", _csv_text(rows)) for name, rows in flat.items() if rows
    ]


def write_jsonl(material: Material, folder: Path) -> list[Path]:
    """Write `turns.jsonl`: a line about the run, one a turn, and an end line that proves it whole.

    Texts are whole; a conversation is rebuilt from `parent`.
    """
    turns = [_node(row, material) for episode in material.episodes for row in episode]
    head = {
        "v": SCHEMA_VERSION,
        "type": "run",
        "run": material.run_id,
        "evaluation": material.name,
        "failure_threshold": material.threshold,
        "hyper_parameters": material.hyper_params,
        "environment": material.environment,
        "configuration": material.configuration,
    }
    end = {"v": SCHEMA_VERSION, "type": "end", "num_nodes": len(turns)}
    return [write_text(folder / "turns.jsonl", encode_rows([head, *turns, end]).decode())]


def write_hitlog(material: Material, folder: Path) -> list[Path]:
    """Write `hitlog.jsonl`: the failing turns alone, in the columns of garak's hit logs."""
    hits = []
    for episode in material.episodes:
        for place, row in enumerate(episode):
            if row["outcome"] == Outcome.FAILURE:
                said = [{"role": "assistant", "content": episode[0]["prompt"]}]
                for before in episode[:place]:
                    said.append({"role": "user", "content": before["probe"]})
                    said.append({"role": "assistant", "content": before["response"]})
                hits.append(_hit(row, said, material))
    return [write_text(folder / "hitlog.jsonl", encode_rows(hits).decode())]


def _hit(row: Row, said: Sequence[Mapping[str, Any]], material: Material) -> dict[str, Any]:
    return {
        "goal": "make the target fail",
        "prompt": {"turns": [*said, {"role": "user", "content": row["probe"]}]},
        "output": row["response"],
        "triggers": None,
        "score": row["response_score"],
        "run_id": material.run_id,
        "attempt_id": f"{material.name}.{_node_id(row, row['depth'])}",
        "attempt_seq": row["episode"],
        "attempt_idx": row["depth"],
        "generator": material.target,
        "probe": str(material.figures.get("attacker", material.run_id)),
        "detector": material.scorer,
        "generations_per_prompt": 1,
    }


def _node(row: Row, material: Material) -> dict[str, Any]:
    named = ("attacker", "probe_logprob"), ("reference", "reference_logprob")
    logprobs = {name: row.get(key) for name, key in (*named, ("target", "target_logprob"))}
    counts = {name: row.get(f"{name}_num_tokens") for name in ("probe", "response", "target")}
    depth, cards = int(row["depth"]), material.figures.get("cards", ())
    # Of several scorers, the first decides.
    digests = {c["role"]: f"sha256:{c['sha256']}" for c in reversed(cards) if c.get("sha256")}
    return {
        "v": SCHEMA_VERSION,
        "type": "node",
        "run": material.run_id,
        "seed_id": hashlib.sha256(str(row["prompt"]).encode("utf-8", "replace")).hexdigest()[:16],
        "rollout": row["episode"],
        "node": _node_id(row, depth),
        "parent": _node_id(row, depth - 1) if depth else None,
        "turn": depth + 1,
        "prompt": None if depth else row["prompt"],
        "probe": row["probe"],
        "reply": row["response"],
        "logp": logprobs,
        "num_tokens": counts,
        "scores": scores_of(row, material),
        "reward": row.get("reward"),
        "outcome": row["outcome"],
        "gen": {"seed": material.figures.get("seed", material.hyper_params.get("seed"))},
        "models": digests,
    }


def _node_id(row: Row, depth: int) -> str:
    return f"{row['episode']}.{depth}"


def _csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    stream = StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Quotes are put around text with a character of the line end, and a lone \r is read as one.
    writer = csv.DictWriter(stream, names, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: _harmless(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def _harmless(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return f"'{safe_text(value)}" if value.startswith(_FORMULA_STARTS) else safe_text(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name; a list of plain values is one leaf, of objects each its own."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _leaves(value, f"{prefix}{name}")
    return found


def _leaves(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return _flat(value, f"{name}.")
    if isinstance(value, list | tuple):
        if _are_plain(value):
            return {name: to_json(value)}
        return _flat({str(place): item for place, item in enumerate(value)}, f"{name}.")
    return {name: value}


def _are_plain(values: Iterable[Any]) -> bool:
    return not any(isinstance(value, Mapping) for value in values)
