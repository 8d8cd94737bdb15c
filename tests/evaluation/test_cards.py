"""Sources and licences of models, and identities of scorers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nip_astra import plugins
from nip_astra.evaluation.families.scorers import code_of, model_card, scorer_card
from nip_astra.evaluation.storage import weights_hash
from nip_astra.scorers.base import SCORERS, Scorer, build_scorer
from nip_astra.scorers.disclosure import DisclosureScorer
from nip_astra.scorers.profanity import ProfanityScorer


def parameters(model: str, **values: str) -> SimpleNamespace:
    return SimpleNamespace(type_name="huggingface", model=model, **values)


def test_a_card_has_size_digest_source_and_the_nearest_licence(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario"
    model = scenario / "models" / "target"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"12345")
    (scenario / "LICENSE").write_text("\nMIT License\n\nAll of it.\n")
    card = model_card("target", parameters("scenario://models/target"), scenario, num_parameters=5)
    assert card == {
        "role": "target", "name": "scenario://models/target", "kind": "huggingface",
        "source": "the scenario's own files", "licence": "MIT License", "num_parameters": 5,
        "size_bytes": 5, "sha256": weights_hash(model),
    }  # fmt: skip
    (model / "README.md").write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n# A model\n")
    card = model_card("target", parameters(str(model)), scenario)
    assert (card["licence"], card["source"]) == ("apache-2.0", "a folder")
    (model / "README.md").write_text("# A model\n---\nlicense: mine\n---\n")
    assert model_card("target", parameters(str(model)), None)["licence"] is None
    card = model_card("attacker", parameters(str(model)), None, trained="run one", sha256="abcd")
    trained = ("run one", "trained from a folder", "abcd")
    assert (card["name"], card["source"], card["sha256"]) == trained
    # Models that are not on this machine have their name alone.
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
    """A scorer of an installed package."""

    __module__ = "yaml"

    def _score(self, texts: Sequence[str]) -> list[float]:
        return [0.0 for _ in texts]


def test_scorers_of_packages_are_identified_by_their_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disclosure = DisclosureScorer.Parameters(secrets=["a word"])
    assert code_of(DisclosureScorer(disclosure, device=torch.device("cpu"))) is None
    installed = Installed(Scorer.Parameters(), device=torch.device("cpu"))
    # Without its required package.
    profanity = ProfanityScorer.__new__(ProfanityScorer)
    before = [code_of(installed), code_of(profanity)]
    monkeypatch.setattr(metadata, "version", lambda _: "0.0.1")
    assert None not in before
    assert not {code_of(installed), code_of(profanity)} & set(before)
