"""Reading of a run directory for its report; missing or broken parts become notes, not errors."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from nip_astra.errors import RunDirectoryError
from nip_astra.evaluation.outcomes import Outcome, outcome_of
from nip_astra.parameters.conversion import current_name, with_new_names
from nip_astra.tracking import run_directory as files
from nip_astra.tracking.figure_names import with_current_names
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import METRICS_FILE, TIMINGS_FILE
from nip_astra.utils.formatting import items as items
from nip_astra.utils.formatting import mapping as mapping
from nip_astra.utils.formatting import number as number
from nip_astra.utils.formatting import text as text
from nip_astra.utils.formatting import value_text

TRANSFER = "evaluations/transfer*.json"
"""Failure rates of attackers on targets."""
ANALYSES = "analyses/*/*.json"
"""Answers of a judge about rollouts."""
CONVERSATION, TASK, PROTOCOL = "conversation", "task", "interaction_proof"
"""Kinds of run, as `results.json` names them."""
OWN_LOOP = "own_loop"
"""Kind in the results of a trainer with a loop of its own; its figures have any names."""
MAX_ROWS = 200_000
"""Maximum rows read from one file; a report shows a sample of far fewer."""
REGRESSION = "message_regression"
TEST_PREFIX = "test_"
_BASELINE = "_baseline"
REASONING = "reasoning"
"""Role of what a model thought before its message, which is shown folded."""
_MAX_LOG_LINES = 12
_KNOWN = (files.HYPER_PARAMETERS, files.RESULTS, METRICS_FILE)
_REWARD_PREFIX = "reward/"


Key = tuple[int, int, str]
"""Identity of a conversation within its table: step, episode, opening."""


@dataclass(frozen=True)
class Node:
    """One row of a table of conversations: a probe and its response."""

    step: int  # iteration
    node: int | None  # index in the tree, of the turn and below of its parent
    parent: int | None
    depth: int
    episode: int
    prompt: str
    probe: str
    response: str
    response_score: float | None = None
    combined_score: float | None = None
    reward: float | None = None
    probe_nll: float | None = None  # nats per token
    reference_logprob: float | None = None  # of all its words, nats
    num_tokens: int | None = None
    is_error: bool = False
    reward_parts: dict[str, float] = field(default_factory=dict)
    transcript: list[tuple[str, str]] | None = None  # role and text, if a row has all turns
    reasonings: tuple[tuple[str, str], ...] = ()  # author and text, of the probe and the response
    problem: str = ""  # of a task: its number within the table
    problem_hash: str = ""  # the same in tables of other splits; its number where unknown
    run: int = 0
    solution: str = ""
    is_correct: bool | None = None
    threshold: float | None = None  # from which a score is a failure; unknown: none is

    @property
    def messages(self) -> list[tuple[str, str]]:
        """Role and text of each message."""
        if self.transcript is not None:
            return self.transcript
        return [("attacker", self.probe), ("target", self.response)]

    @property
    def messages_with_reasoning(self) -> list[tuple[str, str]]:
        """`messages`, each after its author's reasoning, whose role is `REASONING`."""
        by_author = dict(self.reasonings)
        messages: list[tuple[str, str]] = []
        for role, content in self.messages:
            if role in by_author:
                messages.append((REASONING, by_author[role]))
            messages.append((role, content))
        return messages

    @property
    def conversation(self) -> Key:
        """Identity of the conversation within its table."""
        # Some older tables count episodes from 0 again in each part.
        return self.step, self.episode, self.prompt

    @property
    def logprob(self) -> float | None:
        """The probe's log-probability in nats: under the reference, or from NLL and tokens."""
        if self.reference_logprob is not None:
            return self.reference_logprob
        if self.probe_nll is None or self.num_tokens is None:
            return None
        return -self.probe_nll * self.num_tokens

    @property
    def outcome(self) -> Outcome:
        """The outcome of the turn."""
        limit = math.inf if self.threshold is None else self.threshold
        return outcome_of(self.response_score, self.is_error, limit)

    @property
    def is_failure(self) -> bool:
        """Whether the response's score reaches the threshold."""
        return self.outcome is Outcome.FAILURE


class Columns:
    """Numbers by name and step, of rows with a step, with 16 bytes of memory per number."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.num_rows = 0
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        for row in rows:
            if number(row.get("step")) is None:
                continue
            self.num_rows += 1
            for name, value in row.items():
                if name != "step":
                    steps, values = self._columns.setdefault(name, (array("d"), array("d")))
                    figure = number(value)
                    steps.append(float(row["step"]))
                    values.append(math.nan if figure is None else figure)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def points(self, name: str) -> list[tuple[float, float | None]]:
        """Return steps and values of a name, None for non-numbers; empty for an unknown name."""
        steps, values = self._columns.get(name, ((), ()))
        return [(x, None if y != y else y) for x, y in zip(steps, values, strict=True)]

    def known(self, name: str) -> list[float]:
        """Return the values of a name that are numbers."""
        return [value for value in self._columns.get(name, ((), ()))[1] if value == value]


@dataclass
class RunRecord:
    """The content of a run directory; a part that could not be read is empty and has a note.

    `tables` and `episodes` of a protocol are by the name of their table, `outcomes` has all
    episodes of tests and evaluations whose `episodes` are a sample, and `evaluations` are by their
    folder; `transfer` has the cells of the newest transfer matrix, `analyses` a judge's answers.
    """

    path: Path
    results: dict[str, Any] = field(default_factory=dict)
    hyper_params: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: Columns = field(default_factory=Columns)
    timings: Columns = field(default_factory=Columns)
    tables: dict[str, list[Node]] = field(default_factory=dict)
    episodes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    outcomes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    transfer: list[dict[str, Any]] = field(default_factory=list)
    analyses: list[dict[str, Any]] = field(default_factory=list)
    log_lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.path.resolve().name

    @property
    def kind(self) -> str:
        """The kind of experiment: `CONVERSATION`, `TASK` or interaction `PROTOCOL`."""
        kind = text(self.results.get("kind"))
        # Conversations and tasks of older versions did not record it.
        has_protocol = bool(self.episodes or text(self.hyper_params.get("interaction_protocol")))
        if kind == PROTOCOL or (not kind and has_protocol):
            return PROTOCOL
        is_task = kind == TASK or "policy" in mapping(self.hyper_params.get("task"))
        return TASK if is_task else CONVERSATION

    @cached_property
    def agents(self) -> list[str]:
        """Names of the agents of a protocol, in its order if the results have it."""
        if self.kind != PROTOCOL:
            return []
        agents = [text(name) for name in items(self.results.get("agents"))]
        if agents:
            return agents
        rows = [row for rows in self.episodes.values() for row in rows[:1]]
        agents_of_rows = dict.fromkeys(
            agent for row in rows for agent in mapping(row.get("rewards"))
        )
        agents_of_rows |= dict.fromkeys(
            agent for name in self.metrics if (agent := split_name(name)[0])
        )
        return list(agents_of_rows)

    @property
    def threshold(self) -> float | None:
        """Minimum score of a failure; None if no file has it."""
        groups = [*self.hyper_params.values(), *self.evaluations.values()]
        thresholds = [number(mapping(group).get("failure_threshold")) for group in groups]
        return next((value for value in thresholds if value is not None), None)


def words(name: str) -> str:
    """Return a name as words."""
    return name.replace("_", " ")


def split_name(name: str) -> tuple[str, str]:
    """Return agent and figure of a metric's name; the agent is empty for a figure of all agents."""
    agent, _, figure = name.rpartition("/")
    if agent.partition("/")[0] in ("time", "memory"):
        return "", name
    if agent == REGRESSION:
        is_baseline = figure.endswith(_BASELINE)
        return figure.removesuffix(_BASELINE), REGRESSION + (_BASELINE if is_baseline else "")
    return agent.removeprefix(TEST_PREFIX), figure.removeprefix(TEST_PREFIX)


def is_run(path: Path) -> bool:
    """Return whether a directory has a file of a run."""
    return any((path / name).is_file() for name in _KNOWN)


def read_run(path: str | Path, *, has_tables: bool = True) -> RunRecord:
    """Read everything of a run that its report shows; without `has_tables`, no texts of models.

    Raises
    ------
    RunDirectoryError
        When there is no such directory, or it holds no file of a run.
    UntrustedRunError
        When it is not the user's own, and has links out of its folder.
    """
    directory = RunDirectory(Path(path))
    if not is_run(directory.path):
        raise RunDirectoryError(
            f"{path} is not a run directory: it has no {' or '.join(_KNOWN)}. Give the path of a "
            "run, for instance runs/<run id>."
        )
    directory.check_links()
    run = RunRecord(directory.path)
    reader = _Reader(run)
    stored = reader.document(files.HYPER_PARAMETERS)
    run.hyper_params = with_new_names(stored, source=str(directory.path / files.HYPER_PARAMETERS))
    run.settings = reader.document(files.SETTINGS)
    run.environment = reader.document(files.ENVIRONMENT)
    if (directory.path / files.RESULTS).exists():
        run.results = _with_new_names(reader.document(files.RESULTS))
        error = mapping(run.results.get("error"))
        if run.results.get("status") == files.FAILED:
            run.notes.append(
                f"The run failed: {text(error.get('message'))} Its latest checkpoint is kept; "
                "nip-astra resume continues from it."
            )
    else:
        run.notes.append("The run has not ended: there is no results.json yet.")
    if (directory.path / files.PARAMETER_SOURCES).exists():
        sources = reader.document(files.PARAMETER_SOURCES)
        run.sources = {current_name(n) or n: str(source) for n, source in sources.items()}
    run.metrics = Columns(reader.lines(METRICS_FILE))
    run.timings = Columns(reader.lines(TIMINGS_FILE, is_needed=False))
    if not has_tables:
        return run
    analyses = sorted(directory.path.glob(ANALYSES))
    analyses = [file for file in analyses if not file.name.endswith(".verdicts.json")]
    run.analyses = [reader.document(file) for file in analyses]
    evaluations = sorted(directory.path.glob("evaluations/*/evaluation.json"))
    run.evaluations = {file.parent.name: reader.document(file) for file in evaluations}
    for file in sorted(directory.rollouts_dir.glob("*.jsonl")):
        if file.stem == "analyses":
            # The same as in `analyses`, for trackers.
            continue
        rows = list(reader.lines(f"rollouts/{file.name}"))
        if file.stem.endswith(files.OUTCOMES):
            run.outcomes[file.stem.removesuffix(files.OUTCOMES)] = rows
            continue
        episodes = [row for row in rows if isinstance(row.get("rounds"), list)]
        if episodes:
            run.episodes[file.stem] = episodes
        if len(rows) > len(episodes) or not rows:
            node_rows = [row for row in rows if not isinstance(row.get("rounds"), list)]
            run.tables[file.stem] = nodes_of(node_rows, run.threshold)
    for stem, figures in run.evaluations.items():
        folder, threshold = f"evaluations/{stem}", number(figures.get("failure_threshold"))
        if (directory.path / folder / "episodes.jsonl").is_file():
            run.episodes[folder] = list(reader.lines(f"{folder}/episodes.jsonl"))
        outcomes = list(reader.lines(f"{folder}/episode_rows.jsonl", False))
        if outcomes:
            run.outcomes[folder] = outcomes
        for name in ("problems.jsonl", "rows.jsonl"):
            rows_of = reader.lines(f"{folder}/{name}", False)
            nodes = nodes_of(rows_of, run.threshold if threshold is None else threshold)
            if any(node.probe or node.response or node.transcript is not None for node in nodes):
                run.tables[folder] = nodes
    matrices = sorted(directory.path.glob(TRANSFER), key=lambda file: file.stat().st_mtime_ns)
    if matrices:
        run.transfer = [mapping(cell) for cell in items(reader.document(matrices[-1]).get("cells"))]
    run.log_lines = _log_lines(directory.path / files.LOG)
    return run


def _with_new_names(results: dict[str, Any]) -> dict[str, Any]:
    """Return results with the current keys, also if written by an older version."""
    training = mapping(results.get("training"))
    for name in ("iterations", "optimizer_steps"):
        old = training.get(name, results.get(f"num_{name}"))
        if old is not None:
            training.setdefault(f"num_{name}", old)
    return results | {"training": training} if training else results


class _Reader:
    """Reads the files of one run and notes their faults."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run

    def document(self, file: str | Path) -> dict[str, Any]:
        """Read a JSON or YAML file with a mapping, given by its name or path in the run."""
        name = (self.run.path / file).relative_to(self.run.path).as_posix()
        directory = RunDirectory(self.run.path)
        read = directory.read_yaml if name.endswith(".yaml") else directory.read_json
        try:
            value = read(name)
        except RunDirectoryError as error:
            cause = str(error.__cause__ or error).splitlines()[0]
            self.run.notes.append(f"{name} could not be read ({cause}); its part is left out.")
            return {}
        return {str(key): item for key, item in value.items()}

    def lines(self, name: str, is_needed: bool = True) -> Iterator[dict[str, Any]]:
        """Yield the objects of a JSONL file; invalid lines are counted in a note."""
        num_broken = num_rows = 0
        try:
            with (self.run.path / name).open(encoding="utf-8", errors="replace") as file:
                for line in islice(file, MAX_ROWS):
                    num_rows += 1
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError):
                        row = None
                    if isinstance(row, dict):
                        yield with_current_names(row)
                    else:
                        num_broken += 1
                is_cut = num_rows == MAX_ROWS and bool(file.readline())
        except FileNotFoundError:
            if is_needed:
                self.run.notes.append(f"{name} is missing; its part is left out.")
            return
        except OSError as error:
            self.run.notes.append(f"{name} could not be read ({error.strerror}).")
            return
        if num_broken:
            self.run.notes.append(f"{name} has {num_broken:,} broken lines; they are left out.")
        if is_cut:
            self.run.notes.append(f"Of {name} the first {MAX_ROWS:,} lines were read.")


def nodes_of(rows: Iterable[Mapping[str, Any]], threshold: float | None) -> list[Node]:
    """Convert rows to nodes; one that is a whole conversation is a separate episode."""
    nodes: list[Node] = []
    for row in rows:
        node = node_of(row, threshold)
        is_whole = node.transcript is not None
        nodes.append(replace(node, episode=len(nodes)) if is_whole else node)
    return nodes


def node_of(row: Mapping[str, Any], threshold: float | None = None) -> Node:
    """Convert a row to a node; missing columns or wrong types become None or empty."""
    indices = {name: _integer(row.get(name)) for name in ("node", "parent", "depth", "episode")}
    parts = {
        name.removeprefix(_REWARD_PREFIX): number(value)
        for name, value in row.items()
        if name.startswith(_REWARD_PREFIX)
    }
    messages = [pair for message in items(row.get("messages")) for pair in _messages_of(message)]
    reasonings = {"attacker": row.get("probe_reasoning"), "target": row.get("response_reasoning")}
    opening = next((content for role, content in messages if role == "user"), "")
    details = mapping(mapping(row.get("details")).get("rewards"))
    parts |= {name: number(value) for name, value in details.items()}
    is_correct, solution = row.get("is_correct"), row.get("solution")
    return Node(
        step=_integer(row.get("step")) or 0,
        node=indices["node"],
        parent=indices["parent"],
        depth=indices["depth"] or 0,
        episode=indices["episode"] or 0,
        prompt=text(row.get("prompt")) or opening,
        probe=text(row.get("probe")),
        response=_with_calls(row.get("response"), row.get("response_calls")),
        response_score=number(row.get("response_score")),
        combined_score=number(row.get("combined_score")),
        reward=number(row.get("reward")),
        probe_nll=number(row.get("probe_nll")),
        reference_logprob=number(row.get("reference_logprob")),
        num_tokens=_integer(row.get("probe_num_tokens")),
        is_error=row.get("is_error") is True,
        reward_parts={name: value for name, value in parts.items() if value is not None},
        reasonings=tuple(
            (role, text(thought)) for role, thought in reasonings.items() if text(thought)
        ),
        transcript=messages if isinstance(row.get("messages"), list) else None,
        problem=str(row.get("problem")),
        problem_hash=text(row.get("problem_hash")) or str(row.get("problem")),
        run=_integer(row.get("run")) or 0,
        solution="" if solution is None else value_text(solution),
        is_correct=is_correct if isinstance(is_correct, bool) else None,
        threshold=threshold,
    )


def _messages_of(message: Any) -> Iterator[tuple[str, str]]:
    """Yield role and text of a stored message, after its reasoning if it has one."""
    if not isinstance(message, list) or len(message) not in (2, 3):
        return
    role, content, *details = message
    reasoning = text(mapping(details[0]).get("reasoning")) if details else ""
    if reasoning:
        yield REASONING, reasoning
    yield text(role), _with_calls(content, mapping(details[0]).get("calls") if details else None)


def _with_calls(content: Any, calls: Any) -> str:
    """Return the text of a message, followed by a line for each of its calls of tools."""
    pairs = map(_call_of, items(calls))
    lines = [f"{text(name)}({json.dumps(arguments)})" for name, arguments in pairs]
    return "\n".join(filter(None, [text(content), *lines]))


def _call_of(call: Any) -> tuple[Any, Any]:
    return (call[0], call[1]) if isinstance(call, list) and len(call) == 2 else ("", None)


def _integer(value: Any) -> int | None:
    as_float = number(value)
    return None if as_float is None else int(as_float)


def _log_lines(path: Path) -> list[str]:
    """Return distinct warnings and errors of the log, without their times, in order."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    faults = [
        line.partition(level)[2]
        for line in lines
        for level in (" WARNING ", " ERROR ")
        if level in line[:40] and not line.startswith(" ")
    ]
    return list(dict.fromkeys(faults))[:_MAX_LOG_LINES]
