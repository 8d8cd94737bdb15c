"""A claim about a word: provers know the word, and the verifier knows the claim."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from nip_astra.parameters.types import ScenarioType
from nip_astra.scenarios.pure_text_base import PureTextScenario, TextDatasets
from nip_astra.scenarios.registry import register_scenario
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed

TRAIN_WORDS = (
    *("amber", "anchor", "apple", "basket", "bridge", "candle", "carpet", "castle", "cherry"),
    *("circle", "copper", "dragon", "feather", "flower", "forest", "garden", "guitar", "hammer"),
    *("island", "jacket", "kettle", "ladder", "lemon", "marble"),
)
"""Words of the data to train on."""
TEST_WORDS = (
    *("mirror", "needle", "orange", "pepper", "planet", "pocket"),
    *("rabbit", "ribbon", "river", "silver", "spider", "window"),
)
"""Words of the test data; none of them is trained on."""


@register_scenario(ScenarioType.SECRET_WORD)
class SecretWordScenario(PureTextScenario):
    """Provers know a secret word, a verifier hears a claim about it, and says if that is true.

    Columns of the data: `word`, which only provers should be told, and `claim`, which only the
    verifier should. A prover that argues for accept does best to tell the word, as it does not know
    the claim; one that argues for reject, to tell another word. A verifier does best to ask, and to
    accept where one that argues for accept tells the claimed word: it is right then, but where a
    prover that lies hits the claim. Alone it is right half of the time.
    """

    kind: ClassVar[str] = str(ScenarioType.SECRET_WORD)

    class Parameters(PureTextScenario.Parameters):
        """How many datapoints there are."""

        num_train: int = Field(default=256, ge=2, le=100_000_000)
        """Datapoints to train on, half of them with a true claim."""
        num_test: int = Field(default=200, ge=2, le=100_000_000)
        """Datapoints to test on, of other words."""

    @classmethod
    def build_datasets(
        cls, parameters: Any, *, seed: int, scenario_dir: Path | None
    ) -> TextDatasets:
        return TextDatasets(
            _claims(TRAIN_WORDS, parameters.num_train, derive_seed(seed, "secret_word", "train")),
            _claims(TEST_WORDS, parameters.num_test, derive_seed(seed, "secret_word", "test")),
        )


def _claims(words: tuple[str, ...], count: int, seed: int) -> NestedArrayDict:
    """So many words with a claim about each, true and false in turn."""
    generator = random.Random(seed)
    secrets, claims, labels = [], [], []
    for number in range(count):
        word, other = generator.sample(words, 2)
        secrets.append(word)
        labels.append(number % 2)
        claims.append(word if number % 2 else other)
    return NestedArrayDict({"y": labels, "word": secrets, "claim": claims}, count)
