"""Export of rows, figures and curves of any family, one writer per format of another tool."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.evaluation.storage import Row, encode_rows
from nip_astra.lazy import import_extra
from nip_astra.registry import Registry
from nip_astra.safe_text import safe_text, to_json

SCHEMA_VERSION = 1
"""Version of the JSON lines; changed if readers of the previous version would misread them."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Characters that begin a formula in a spreadsheet."""


class Sample(NamedTuple):
    """A unit as shown by Inspect.

    Attributes
    ----------
    messages : sequence of (role, text)
        Roles are "user" and "assistant"; the first message is the input.
    output : str
        The last answer.
    scores : dict
        By scorer, the score and its answer.
    """

    messages: Sequence[tuple[str, str]]
    output: str
    scores: Mapping[str, tuple[float, str]]
    metadata: Mapping[str, Any] = {}
    target: str = ""


@dataclass(frozen=True)
class Material:
    """The exportable content of a run or evaluation.

    Attributes
    ----------
    name, created : str
        Name of the evaluation or run; time in ISO 8601 with its zone.
    unit : str
        Kind of a row: "node", "rollout", "answer".
    rows, tables : Sequence, Mapping
        Whole rows for JSON lines and Parquet, and tables for CSV by the name of their file.
    figures, metrics : Mapping, Sequence
        Measured figures, and the rows of `metrics.jsonl`.
    head : Mapping
        Further entries of the first JSON line.
    rates, scores : Mapping
        Measured figures for TensorBoard by tag, and for Inspect.
    sample : Callable, optional
        From one of `units` (the rows by default) to its `Sample`; None without texts.
    hits : Callable, optional
        Gives failing turns in the columns of garak's hit logs; None without failures.
    """

    run_id: str
    name: str
    created: str
    unit: str = "row"
    rows: Sequence[Row] = ()
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Row] = ()
    head: Mapping[str, Any] = field(default_factory=dict)
    hyper_params: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    scorer: str = "accuracy"
    model: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sample: Callable[[Any], Sample] | None = None
    units: Sequence[Any] | None = None
    hits: Callable[[], Sequence[Row]] | None = None


Writer = Callable[[Material, Path], list[Path]]

EXPORT_FORMATS: Registry[Writer] = Registry("export_format")
"""Writers of export formats. Each takes material and a folder, and returns the written files."""

register_export_format = EXPORT_FORMATS.register


def export_material(material: Material, form: str, folder: Path) -> list[Path]:
    """Write material in a given format.

    Raises
    ------
    UnknownNameError
        When no format has that name.
    ConfigurationError
        When the run has nothing for it.
    MissingDependencyError
        When the format's package is not installed.
    RunDirectoryError
        When the folder cannot be written.
    """
    write = EXPORT_FORMATS.get(form)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return write(material, folder)
    except OSError as error:
        raise RunDirectoryError(
            f"{folder} cannot be written: {error.strerror or error}. Give another --output."
        ) from error


@register_export_format("csv")
def write_csv(material: Material, folder: Path) -> list[Path]:
    """Write tables, `figures.csv` and `metrics.csv`; nested values have dotted names.

    Text that begins like a formula gets an apostrophe; unsafe characters are those of `safe_text`.
    """
    figures = [{"figure": name, "value": value} for name, value in _flat(material.figures).items()]
    flat = {name: list(map(_flat, rows)) for name, rows in material.tables.items()}
    flat |= {"figures": figures, "metrics": list(map(_flat, material.metrics))}
    return [
        _write_text(folder / f"{name}.csv", _csv_text(rows)) for name, rows in flat.items() if rows
    ]


@register_export_format("jsonl")
def write_jsonl(material: Material, folder: Path) -> list[Path]:
    """Write a line about the run, one per row with full texts, and one with their number."""
    _require(material, "jsonl", has=material.rows)
    head = {
        "v": SCHEMA_VERSION,
        "type": "run",
        "run": material.run_id,
        **material.head,
        "hyper_parameters": material.hyper_params,
        "environment": material.environment,
    }
    rows = [{"v": SCHEMA_VERSION, "type": material.unit, **row} for row in material.rows]
    end = {"v": SCHEMA_VERSION, "type": "end", f"num_{material.unit}s": len(rows)}
    path = folder / f"{next(iter(material.tables), material.unit)}.jsonl"
    return [_write_text(path, encode_rows([head, *rows, end]).decode())]


@register_export_format("parquet")
def write_parquet(material: Material, folder: Path) -> list[Path]:
    """Write one row per unit, readable by `datasets.load_dataset`."""
    _require(material, "parquet", has=material.rows)
    path = folder / f"{next(iter(material.tables), material.unit)}.parquet"
    write_parquet_file(material.rows, path)
    return [path]


def write_parquet_file(rows: Sequence[Row], path: Path) -> None:
    """Write rows as a Parquet file; columns missing in a row are null.

    A column that Parquet has no type for, such as numbers and texts in turn, is written as JSON.

    Raises
    ------
    MissingDependencyError
        When pyarrow is not installed.
    """
    pyarrow, parquet = (
        import_extra(name, "a Parquet file", "sweep") for name in ("pyarrow", "pyarrow.parquet")
    )

    def column(values: list[Any]) -> Any:
        try:
            found = pyarrow.array(values)
        except (pyarrow.ArrowException, UnicodeError, OverflowError):
            found = None
        # Parquet has no objects without a name.
        if found is None or "struct<>" in str(found.type):
            found = pyarrow.array([None if one is None else to_json(one) for one in values])
        return found

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: column([row.get(name) for row in rows]) for name in names}
    parquet.write_table(pyarrow.table(columns), path)


@register_export_format("hitlog")
def write_hitlog(material: Material, folder: Path) -> list[Path]:
    """Write `hitlog.jsonl`: failing turns, in the columns of garak's hit logs."""
    _require(material, "hitlog", has=material.hits)
    assert material.hits is not None
    return [_write_text(folder / "hitlog.jsonl", encode_rows(material.hits()).decode())]


@register_export_format("tensorboard")
def write_tensorboard(material: Material, folder: Path) -> list[Path]:
    """Write an event file of learning curves, with the evaluation's figures at the last step."""
    tensorboard = import_extra("torch.utils.tensorboard", "the format tensorboard", "tensorboard")
    logs = folder / "tensorboard" / material.run_id
    for old in logs.glob("events.out.tfevents.*"):
        # TensorBoard would draw both, one over the other.
        old.unlink()
    step = 0
    with tensorboard.SummaryWriter(str(logs)) as writer:
        for row in material.metrics:
            step = int(row["step"])
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    writer.add_scalar(name, value, step)
        for name, value in material.rates.items():
            writer.add_scalar(name, value, step)
    return sorted(logs.glob("events.out.tfevents.*"))


@register_export_format("inspect")
def write_inspect(material: Material, folder: Path) -> list[Path]:
    """Write `<name>.eval`, an Inspect log with one sample per unit."""
    _require(material, "inspect", has=material.sample and (material.units or material.rows))
    assert material.sample is not None
    log = import_extra("inspect_ai.log", "the format inspect", "inspect")
    units = material.rows if material.units is None else material.units
    samples = [_inspect_sample(material.sample(unit), n) for n, unit in enumerate(units, 1)]
    metrics = {
        name: log.EvalMetric(name=name, value=value) for name, value in material.scores.items()
    }
    packages = material.environment.get("packages") or {}
    written = log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            created=material.created,
            task=f"{material.run_id}/{material.name}",
            dataset=log.EvalDataset(name=material.name, samples=len(samples)),
            model=f"nip_astra/{material.model or material.run_id}",
            config=log.EvalConfig(),
            packages={name: one for name, one in packages.items() if one is not None},
            metadata=dict(material.metadata),
        ),
        results=log.EvalResults(
            total_samples=len(samples),
            completed_samples=len(samples),
            scores=[log.EvalScore(name=material.scorer, scorer=material.scorer, metrics=metrics)],
        ),
        samples=samples,
    )
    path = folder / f"{material.name}.eval"
    log.write_eval_log(written, str(path), format="eval")
    return [path]


def _inspect_sample(sample: Sample, number: int) -> Any:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score

    kinds = {"assistant": ChatMessageAssistant, "user": ChatMessageUser}
    messages: list[Any] = [kinds[role](content=text) for role, text in sample.messages]
    return EvalSample(
        id=number,
        epoch=1,
        input=messages[:1],
        target=sample.target,
        messages=messages,
        output=ModelOutput.from_content("nip_astra", sample.output),
        scores={
            name: Score(value=value, answer=answer)
            for name, (value, answer) in sample.scores.items()
        },
        metadata=dict(sample.metadata),
    )


def _require(material: Material, form: str, *, has: Any) -> None:
    if not has:
        raise ConfigurationError(
            f"{material.run_id} has nothing to export as {form!r}. Take csv or tensorboard for its "
            "curves, or evaluate the run first."
        )


def _write_text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="replace", newline="")
    return path


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
    """Return leaves by dotted name; a list is one leaf unless it has objects."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        elif not isinstance(value, list | tuple):
            flat[name] = value
        elif any(isinstance(item, Mapping) for item in value):
            flat |= _flat({str(place): item for place, item in enumerate(value)}, f"{name}.")
        else:
            flat[name] = to_json(value)
    return flat
