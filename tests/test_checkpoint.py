"""Checkpoints hold the whole state and survive damage."""

import pathlib
import random
import shutil
import warnings

import jax
import jax.numpy as jnp
import pytest
from conftest import Problem, assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat.run.checkpoint import Checkpoints
from fedjax_flat.run.loop import train


@pytest.fixture
def state():
    problem = Problem((5, 5))
    state = ff.init_state(problem.fedavg(), problem.variables, 2, jax.random.key(7))
    # Large enough that the largest file of a checkpoint holds arrays and not their description.
    return state._replace(clients={"dual": jax.random.normal(jax.random.key(0), (2, 2000))})


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield checkpoints
    checkpoints.close()


def damage(folder: pathlib.Path, how: str) -> None:
    """Truncates, flips a bit of, or removes the largest file of a checkpoint."""
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    if how == "truncate":
        largest.write_bytes(content[: len(content) // 2])
    elif how == "flip":
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    else:
        largest.unlink()


def test_round_trip_keeps_every_bit(checkpoints, state):
    checkpoints.save(3, state)
    round, restored = checkpoints.restore(jax.eval_shape(lambda: state))
    assert round == 3
    assert_same_bits(state, restored)
    assert type(restored) is type(state)


def test_keeps_the_newest(checkpoints, state):
    for round in (1, 2, 3):
        checkpoints.save(round, state)
    assert checkpoints.rounds == [2, 3]


def test_nothing_to_restore(checkpoints, state):
    assert checkpoints.restore(state) is None


@pytest.mark.parametrize("how", ["truncate", "flip", "remove"])
def test_damaged_newest_falls_back_to_the_one_before(checkpoints, state, tmp_path, how):
    checkpoints.save(1, state)
    later = state._replace(round=state.round + 1)
    checkpoints.save(2, later)
    damage(tmp_path / "checkpoints" / "2", how)
    with pytest.warns(UserWarning, match="checkpoint of round 2 is damaged"):
        round, restored = checkpoints.restore(state)
    assert round == 1
    assert_same_bits(state, restored)
    checkpoints.save(2, later)  # the round is run again and takes the damaged one's place
    round, restored = checkpoints.restore(state)
    assert round == 2
    assert_same_bits(restored, later)


def test_all_damaged(checkpoints, state, tmp_path):
    checkpoints.save(1, state)
    damage(tmp_path / "checkpoints" / "1", "truncate")
    damaged = pytest.warns(UserWarning, match="damaged")
    with damaged, pytest.raises(ff.UsageError, match="can be read: all are damaged"):
        checkpoints.restore(state)


@pytest.mark.parametrize(("clients", "message"), [
    ({"dual": (2, 1000)}, r"clients/dual is float32\[2, 2000\], expected float32\[2, 1000\]\."),
    ({}, "clients/dual is float32.*, expected nothing of that name"),
    ({"dual": (2, 2000), "own": (2, 3)}, r"clients/own is not there, expected float32\[2, 3\]"),
])
def test_another_config_or_model_is_not_called_damaged(checkpoints, state, clients, message):
    checkpoints.save(1, state)
    other = state._replace(clients={name: jnp.zeros(shape) for name, shape in clients.items()})
    with pytest.raises(ff.UsageError, match=f"round 1 in .* is of another config.*{message}"):
        checkpoints.restore(other)
    assert checkpoints.rounds == [1]
    checkpoints.save(2, other)
    assert checkpoints.restore(other)[0] == 2
    with pytest.warns(UserWarning, match="round 2 .* another config or model.*passed over"):
        assert checkpoints.restore(state)[0] == 1


def test_no_file_of_a_checkpoint_can_be_spoilt_unnoticed(checkpoints, state, tmp_path):
    """Empty, garbled or gone: the same bits, or the checkpoint before it."""
    checkpoints.save(1, state)
    later = state._replace(round=state.round + 1)
    checkpoints.save(2, later)
    whole = tmp_path / "whole"
    newest = tmp_path / "checkpoints" / "2"
    shutil.copytree(newest, whole)
    rng, fallen_back = random.Random(0), 0
    for path in sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file()):
        for spoil in (lambda p: p.write_bytes(b""), pathlib.Path.unlink,
                      lambda p: p.write_bytes(rng.randbytes(p.stat().st_size))):
            spoil(newest / path)
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                round, restored = checkpoints.restore(state)
            assert_same_bits(restored, later if round == 2 else state)
            fallen_back += round == 1
            shutil.copyfile(whole / path, newest / path)
    assert fallen_back >= 10


def test_a_run_at_an_earlier_round(tmp_path):
    config = small_config(rounds=3, checkpoint__every=1, checkpoint__keep=2)
    train(config, tmp_path / "a", progress=False)
    train(small_config(rounds=2), tmp_path / "b", progress=False)
    earlier = ff.load_run(tmp_path / "a", round=2)
    assert_same_bits(earlier.state, ff.load_run(tmp_path / "b").state)
    last = earlier.at(3)
    assert_same_bits(last[2:], ff.load_run(tmp_path / "a")[2:])
    assert last.experiment is earlier.experiment
    with pytest.raises(ff.UsageError, match="no checkpoint of round 1; it has 2, 3"):
        ff.load_run(tmp_path / "a", round=1)
