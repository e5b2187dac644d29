"""Any value of any setting, by hypothesis: it is taken, or refused in one clear sentence."""

import json
import warnings

import ml_collections
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedjax_flat as ff
from fedjax_flat.experiment import config as config_lib

NAMES = sorted(config_lib.all_settings())
ODD = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(-3, 3), st.floats(allow_nan=True), st.booleans(),
    st.text(max_size=8), st.just(()), st.tuples(st.integers(-2, 2)), st.tuples(st.text(max_size=3)),
    st.sampled_from(["fedavg+", "+", "none", "stc", "../x", "sgd(-1)", "constant(", "%s", "\x1b"]),
)
few = settings(
    max_examples=300, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def clear(call, *arguments) -> bool:
    """Whether the call went well, or was refused in a sentence."""
    try:
        call(*arguments)
    except ff.UsageError as e:
        text = str(e)
        return text.strip() != "" and "Traceback" not in text and text.count("\n") <= 1
    return True


def put(config: ml_collections.ConfigDict, name: str, value: object) -> bool:
    """Whether the config took the value; types are ml_collections' to refuse."""
    *path, last = name.split(".")
    for part in path:
        config = config[part]
    try:
        config[last] = value
    except (TypeError, ValueError):
        return False
    return True


@few
@given(name=st.sampled_from(NAMES), value=ODD)
def test_a_value_is_taken_or_refused(name, value):
    config = ff.default_config()
    assert not put(config, name, value) or clear(ff.validate, config)


def stored(config):
    """What is taken can be stored."""
    ff.validate(config)
    back = config_lib.from_json(config_lib.to_json(config))
    assert not config_lib.differences(config, back)


@few
@given(given=st.dictionaries(st.sampled_from(NAMES), ODD, min_size=2, max_size=4))
def test_some_together(given):
    config = ff.default_config()
    if not all([put(config, name, value) for name, value in given.items()]):
        return
    assert clear(stored, config)


@few
@given(name=st.text(max_size=12), value=st.integers())
def test_names_that_nobody_has(name, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name in NAMES:
            return
        with pytest.raises(ff.UsageError, match="config has no setting"):
            config_lib.from_flat({name: value})


@few
@given(st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
))
def test_any_json_for_a_config(tree):
    """What stands in a run folder's config.json, whatever it is."""
    assert clear(config_lib.from_json, json.dumps(tree))
