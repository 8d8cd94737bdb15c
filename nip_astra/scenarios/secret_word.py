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
"""Words of the training data."""
TEST_WORDS = (
    *("mirror", "needle", "orange", "pepper", "planet", "pocket"),
    *("rabbit", "ribbon", "river", "silver", "spider", "window"),
)
"""Words of the test data, disjoint from the training words."""


@register_scenario(ScenarioType.SECRET_WORD)
class SecretWordScenario(PureTextScenario):
    """Provers know a secret word; the verifier knows a claim about it and decides if it is true.

    Columns of the data: `word`, shown to provers only, and `claim`, shown to the verifier only. The
    best strategy of a prover that argues for accept is to reveal the word, because it does not know
    the claim; of one that argues for reject, to state another word. The best verifier asks, and
    accepts if a prover that argues for accept states the claimed word: it is correct unless a lying
    prover hits the claim. Alone it is correct half of the time.
    """

    kind: ClassVar[str] = str(ScenarioType.SECRET_WORD)

    class Parameters(PureTextScenario.Parameters):
        """Number of datapoints."""

        num_train: int = Field(default=256, ge=2, le=100_000_000)
        """Training datapoints, half of them with a true claim."""
        num_test: int = Field(default=200, ge=2, le=100_000_000)
        """Test datapoints, with other words."""

    @classmethod
    def build_datasets(
        cls, parameters: Any, *, seed: int, scenario_dir: Path | None
    ) -> TextDatasets:
        train_seed = derive_seed(seed, "secret_word", "train")
        test_seed = derive_seed(seed, "secret_word", "test")
        return TextDatasets(
            _claims(TRAIN_WORDS, parameters.num_train, train_seed),
            _claims(TEST_WORDS, parameters.num_test, test_seed),
        )


def _claims(words: tuple[str, ...], count: int, seed: int) -> NestedArrayDict:
    """Return words with claims, alternately false and true."""
    generator = random.Random(seed)
    secrets, claims, labels = [], [], []
    for number in range(count):
        word, wrong_word = generator.sample(words, 2)
        is_true = number % 2 == 1
        secrets.append(word)
        labels.append(int(is_true))
        claims.append(word if is_true else wrong_word)
    return NestedArrayDict({"y": labels, "word": secrets, "claim": claims}, count)
