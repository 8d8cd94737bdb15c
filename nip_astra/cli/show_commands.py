"""What the command `show` does; imported when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from nip_astra.cli.terminal import open_console, plain_table, say
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.loading import flatten
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.resolving.unread_parameters import never_read
from nip_astra.safe_text import to_json
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.tracking.run_directory import to_yaml


def show(
    experiment: dict[str, Any], *, as_yaml: bool, is_explained: bool, are_all_shown: bool
) -> None:
    """Print the resolved parameters.

    Parameters
    ----------
    is_explained : bool
        Whether what each means is printed beside it.
    are_all_shown : bool
        Whether those are printed as well that nothing in the experiment reads.
    """
    resolved = resolve_experiment(**experiment)
    hyper_params = resolved.hyper_params
    values = hyper_params.to_dict()
    if as_yaml:
        say(to_yaml(values).rstrip("\n"))
        return
    scenario_class = SCENARIOS.get(resolved.kind)
    paths = dict(flatten(values))
    hidden = (
        []
        if are_all_shown
        else never_read(paths, hyper_params, resolved.trainer_class, scenario_class, resolved.kind)
    )
    meanings = dict(meanings_of(hyper_params)) if is_explained else {}
    columns = ("parameter", "value", "from", *(["what it is"] if is_explained else []))
    table = plain_table(None, *columns)
    for path, value in paths.items():
        if path not in hidden:
            cells = [path, _short(value), resolved.sources.get(path, "")]
            cells += [meanings.get(path, "")] if is_explained else []
            table.add_row(*map(Text, cells))
    console = open_console()
    console.print(table)
    if hidden:
        text = "not shown, since this experiment does not read them (--all shows them): "
        text += ", ".join(_whole_groups(hidden, [path for path in paths if path not in hidden]))
        console.print("", Text(text), sep="\n")


def _whole_groups(hidden: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Hidden parameters by their groups; those of groups that are shown in part by themselves."""
    in_part = {path.rpartition(".")[0] for path in shown}
    groups = {path: path.rpartition(".")[0] or path for path in hidden}
    return list(dict.fromkeys(path if at in in_part else at for path, at in groups.items()))


def meanings_of(group: SubParameters, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What each parameter of a group means, and where it is read, by its dotted path."""
    for name, field in type(group).model_fields.items():
        path, value = f"{prefix}{name}", getattr(group, name)
        conditions = [one for one in field.metadata if isinstance(one, ReadWhere)]
        where = "".join(f" Read where {one.path} {one.words}." for one in conditions)
        yield path, " ".join((field.description or "").split()) + where
        parts = {path: value}
        if isinstance(value, Mapping):
            parts = {f"{path}.{key}": one for key, one in value.items()}
        for part, one in parts.items():
            if isinstance(one, SubParameters):
                yield from meanings_of(one, f"{part}.")
    if isinstance(group, PolymorphicParameters):
        yield f"{prefix}_type", _first_line(type(group).__doc__)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _short(value: Any) -> str:
    text = to_json(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
