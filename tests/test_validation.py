"""A validation part: held out of training, the same for every seed, evaluated by its name."""

import numpy as np
import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat.data.partition import hold_out
from fedjax_flat.testing import partition_of


@pytest.mark.parametrize("source", ["clients", "server"])
def test_nothing_is_in_both(source):
    partition = partition_of((10, 25, 0, 40))
    kept, held = hold_out(partition, 0.2, source=source)
    assert len(held) == 15
    together = np.sort(np.concatenate([kept.indices, held]))
    np.testing.assert_array_equal(together, np.arange(75))
    assert kept.num_clients == 4
    if source == "clients":
        np.testing.assert_array_equal(kept.sizes, [8, 20, 0, 32])
    again, _ = hold_out(partition, 0.2, source=source)
    assert again.content_hash == kept.content_hash


def test_a_run_with_a_validation_part(tmp_path):
    config = small_config(data__validation=0.2, eval__splits=("validation", "test"), rounds=2)
    built = ff.build(config)
    counts = {name: ff.data.count_of(x) for name, x in built.splits.items()}
    train = int(built.data.sizes.sum())
    assert counts["test"] == 355
    assert train + counts["validation"] == 1442
    assert ff.data.count_of(built.train_examples) == train
    assert built.partition.sizes.sum() == 1442, "the run folder has who owned what before"
    held = {x.tobytes() for x in np.asarray(built.splits["validation"].inputs)}
    index = np.asarray(built.data.indices)
    trained = {x.tobytes() for x in np.asarray(built.data.examples.inputs)[index]}
    assert not held & trained
    result = ff.train(config, tmp_path, progress=False)
    assert {r["split"] for r in result.records} == {"cohort", "validation", "test"}
    other = ff.build(small_config(data__validation=0.2, seed=5))
    np.testing.assert_array_equal(other.data.indices, built.data.indices)
