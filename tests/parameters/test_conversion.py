"""Files of other versions are converted in order, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from nip_astra.errors import ConfigurationError
from nip_astra.parameters import conversion
from nip_astra.parameters.conversion import convert, register_conversion
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.version import __version__
from tests.kit.messages import says

PLAIN = HyperParameters.with_sections({})
NAMES = {"trainer": "none", "scenario": "none"}


@pytest.fixture(autouse=True)
def _no_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_CONVERSIONS", {})


def append(mark: str) -> Any:
    return lambda values: values | {"marks": [*values.get("marks", []), mark]}


def test_the_conversions_from_a_file_s_version_on_are_applied_oldest_first() -> None:
    register_conversion("0.1", append("second"))
    register_conversion("0.0", append("first"))
    values = {"package_version": "0.0.3"}
    converted = {"package_version": __version__, "marks": ["first", "second"]}
    assert convert(values, source="a.yaml") == converted
    assert values == {"package_version": "0.0.3"}, "the given values stay"
    assert convert({"package_version": "0.1.0"}, source="a.yaml")["marks"] == ["second"]
    assert convert({"seed": 1}, source="a.yaml") == {"seed": 1}, "without a version: current"


@pytest.mark.parametrize("version", ["99.0", "new", 3, None])
def test_a_version_that_validation_refuses_is_left_to_it(version: object) -> None:
    values = {"package_version": version, "seed": 1}
    assert convert(values, source="a.yaml") == values


def test_a_file_that_cannot_be_converted_is_refused_with_the_reason() -> None:
    def refuse(values: dict[str, Any]) -> dict[str, Any]:
        raise ConfigurationError("its trees had another reward")

    for function, reason in ((refuse, "another reward"), (lambda v: v["gone"], "KeyError: 'gone'")):
        conversion._CONVERSIONS.clear()
        register_conversion("0.0", function)
        with pytest.raises(ConfigurationError) as caught:
            convert({"package_version": "0.0.3"}, source="a.yaml")
        assert says(caught.value, "a.yaml", "0.0.3", __version__, reason)


def test_a_version_has_one_conversion() -> None:
    register_conversion("0.0", append("first"))
    for version in ("0.0", "old"):
        with pytest.raises(ConfigurationError, match=f"'{version}'"):
            register_conversion(version, append("again"))


def test_parameters_are_read_from_an_older_file_with_other_names() -> None:
    register_conversion("0.0", lambda v: {name.removeprefix("old_"): v[name] for name in v})
    old = {"package_version": "0.0.9", "old_seed": 3, "old_training": {"lr": 0.5}}
    result = PLAIN.from_dict(NAMES | old)
    assert result == PLAIN.from_dict(NAMES | {"seed": 3, "training": {"lr": 0.5}})
    assert PLAIN.from_dict(result.to_dict()) == result
