"""Where models come from and under which licence."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nip_astra import plugins
from nip_astra.evaluation.families import scorers as cards
from nip_astra.evaluation.families.scorers import code_of, model_card, scorer_card
from nip_astra.evaluation.storage import weights_hash
from nip_astra.scorers.base import SCORERS, Scorer, build_scorer
from nip_astra.scorers.disclosure import DisclosureScorer
from nip_astra.scorers.profanity import ProfanityScorer


def parameters(model: str | None = None, **values: str) -> SimpleNamespace:
    return SimpleNamespace(type_name="huggingface", model=model, **values)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "scenario" / "models" / "target"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345")
    return folder


def test_a_model_of_the_scenario_has_size_digest_and_the_scenarios_licence(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "scenario" / "LICENSE").write_text("\nMIT License\n\nAll of it.\n")
    card = model_card(
        "target", parameters("scenario://models/target"), tmp_path / "scenario", num_parameters=5
    )
    assert card == {
        "role": "target", "name": "scenario://models/target", "kind": "huggingface",
        "source": "the scenario's own files", "licence": "MIT License", "num_parameters": 5,
        "size_bytes": 5, "sha256": weights_hash(model),
    }  # fmt: skip


def test_the_models_own_card_comes_before_other_licences(tmp_path: Path, model: Path) -> None:
    (tmp_path / "scenario" / "LICENSE").write_text("MIT License")
    (model / "README.md").write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n# A model\n")
    card = model_card("target", parameters(str(model)), tmp_path / "scenario")
    assert (card["licence"], card["source"]) == ("apache-2.0", "a folder")
    (model / "README.md").write_text("# A model\n---\nlicense: mine\n---\n")
    assert model_card("target", parameters(str(model)), None)["licence"] is None


def test_trained_weights_have_the_digest_of_the_run(model: Path) -> None:
    card = model_card("attacker", parameters(str(model)), None, trained="run one", sha256="abcd")
    assert (card["name"], card["source"], card["sha256"]) == (
        "run one", "trained from a folder", "abcd",
    )  # fmt: skip


def test_what_is_not_on_this_machine_is_named_and_no_more() -> None:
    for reference in ("some/model-of-nobody", "package://no_such_package/x"):
        card = model_card("target", parameters(reference), None)
        assert card["name"] == reference
        assert card["sha256"] is card["size_bytes"] is card["licence"] is None
    service = model_card("target", parameters("m", base_url="http://localhost:1/v1"), None)
    assert service["source"] == "service at http://localhost:1/v1"


def test_a_scorer_names_the_package_of_its_weights() -> None:
    pytest.importorskip("profanity_check")
    card = scorer_card("mine", SimpleNamespace(type_name="profanity"), None)
    assert (card["name"], card["kind"]) == ("mine", "profanity")
    assert card["source"].startswith("package alt-profanity-check ")
    assert "MIT" in card["licence"]


FUNCTION = "def rude(completions):\n    return float('rude' in completions)\n"


def built(**parameters: object) -> Scorer:
    kind = str(parameters.pop("_type"))
    given = SCORERS.get(kind).Parameters.from_dict(parameters)
    return build_scorer(given, device=torch.device("cpu"), scenario_dir=None)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_function_with_other_code_is_another_scorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_part: bool
) -> None:
    codes = []
    for folder, text in (("a", FUNCTION), ("b", FUNCTION), ("c", FUNCTION.replace("in", "not in"))):
        monkeypatch.setattr(plugins, "_LOADED", {})
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text(text)
        own = {"_type": "python", "function": f"{path}:rude"}
        mean = {"_type": "weighted", "parts": {"one": {"scorer": own}}}
        codes.append(code_of(built(**(mean if is_part else own))))
    assert codes[0] == codes[1] != codes[2]
    assert None not in codes


class Installed(Scorer):
    """One of an installed package."""

    __module__ = "yaml"

    def _score(self, texts: Sequence[str]) -> list[float]:
        return [0.0 for _ in texts]


def test_a_scorer_of_an_installed_package_is_known_by_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer = Installed(Scorer.Parameters(), device=torch.device("cpu"))
    first = code_of(scorer)
    monkeypatch.setattr(metadata, "version", lambda _: "0.0.1")
    assert code_of(scorer) != first


def test_what_ships_has_no_code_of_its_own_but_the_packages_that_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = DisclosureScorer.Parameters(secrets=["a word"])
    assert code_of(DisclosureScorer(parameters, device=torch.device("cpu"))) is None
    # Without the package that it needs.
    scorer = ProfanityScorer.__new__(ProfanityScorer)
    first = code_of(scorer)
    monkeypatch.setattr(cards.metadata, "version", lambda _: "0.0.1")
    assert code_of(scorer) != first
