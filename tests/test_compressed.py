"""Whole runs with codecs: against NumPy, their contracts, their traffic, and wrong settings."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import reference_codecs as ref
import reference_methods
from conftest import assert_same_bits, small_config
from methods import algorithm_of, clients, problem
from test_packets import femnist

import fedjax_flat as ff
from fedjax_flat import cli, testing, wire
from fedjax_flat.engine.round import traffic
from fedjax_flat.testing import SIZES
from fedjax_flat.wire.cache import catch_up_bits

STC = {"wire__up": "stc", "wire__rate": 0.2}
BOTH = {**STC, "wire__down": "stc", "wire__rate_down": 0.1, "wire__feedback": True}
RUNS = {
    "stc": ("fedavg", STC, lambda c: ref.fedavg_stc(c, 0.2)),
    "stc with feedback": (
        "fedavg", {**STC, "wire__feedback": True}, lambda c: ref.fedavg_stc(c, 0.2, feedback=True)
    ),
    "by layer, with feedback": (
        "fedavg", {"wire__up": "layer_stc", "wire__rates": ".2,-", "wire__feedback": True},
        lambda c: ref.fedavg_per_layer(c, (0.2, None), feedback=True),
    ),
    "both ways": (
        "fedavg", BOTH, lambda c: ref.bidirectional_stc(c, 0.2, 0.1, weighted=True, kernels=True)
    ),
    "both ways, as printed": (
        "fedavg", {**BOTH, "wire__biases": True, "weighting": "uniform"},
        lambda c: ref.bidirectional_stc(c, 0.2, 0.1),
    ),
}


SLOW = {"stc"}  # the one with feedback is the harder one


@functools.cache
def run_of(name, settings=()):
    case = RUNS.get(name)
    method, settings = case[:2] if case else (name, dict(settings))
    p = problem()
    return testing.Run(algorithm_of(method, data=p.data, **settings), p)


def flat(params):
    return reference_methods.Clients.flat(reference.unpack(params))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RUNS
])
def test_a_run_against_numpy(name):
    run, c = run_of(name), clients()
    w, own, *server = RUNS[name][2](c)
    largest_ = np.abs(w).max()
    assert np.abs(flat(run.model.params) - w).max() < 2e-5 * largest_
    kept = run.states[-1].clients.codecs[0]
    if "feedback" in name or "both" in name:
        residual = {n.removeprefix("params/"): np.asarray(x, float) for n, x in
                    kept["mean"][1].items()}
        for k in range(len(SIZES)):
            ours = c.flat([(residual[f"{m}/kernel"][k], residual[f"{m}/bias"][k])
                           for m in ("Dense_0", "classifier")])
            assert np.abs(-ours - own[k]).max() < 2e-5 * largest_  # we send w - w_k
    else:
        assert kept == ()
    if server:
        residual = {n.removeprefix("params/"): np.asarray(x, float) for n, x in
                    run.states[-1].server.codecs[0]["mean"][1].items()}
        ours = c.flat([(residual[f"{m}/kernel"], residual[f"{m}/bias"])
                       for m in ("Dense_0", "classifier")])
        assert np.abs(-ours - server[0]).max() < 2e-5 * largest_
        assert np.abs(server[0]).max() > 1e-3


def test_contracts_of_a_run_with_residuals():
    run = run_of("both ways")
    testing.check_resume(run)
    testing.check_members(run)


@pytest.mark.slow
def test_padding_changes_nothing():
    testing.check_padding(run_of("both ways"))


@pytest.mark.slow
def test_without_loss_it_is_the_method_itself():
    p = problem()
    plain, coded = (
        testing.Run(algorithm_of("fedavg", **s), p, rounds=2).model
        for s in ({}, {"wire__up": "topk", "wire__rate": 1.0})
    )
    assert_same_bits(coded, plain)


def stc_bits(rate):
    """Of the MLP: 95 weights in its two kernels, 8 biases."""
    return round(rate * 95) * ((95).bit_length() + 1) + 32 + 32 * 8


@pytest.mark.parametrize("name", ["scaffold", pytest.param("feddyn", marks=pytest.mark.slow)])
def test_methods_with_state_of_their_own(name):
    """Each model of an upload has its residual; the server's step is what travels down."""
    run = run_of(name, tuple(BOTH.items()))
    testing.check_members(run)
    assert bool(run.infos[-1].finite)
    kept = run.states[-1].clients.codecs[0]
    assert set(kept) == ({"mean", "sum"} if name == "scaffold" else {"mean"})
    sent = traffic(run.algorithm, run.states[0], run.data)
    assert sent.up == stc_bits(0.2) * len(kept)
    assert sent.down == stc_bits(0.1) * 2  # both steps by the mean and by the sum


def test_downloads_of_clients_that_come_back():
    """bytes_down is the reference's, client by client, from the round of its last turn."""
    run = run_of("fedavg", tuple({**BOTH, "wire__cache": 1}.items()))
    last, lengths = dict.fromkeys(range(len(SIZES)), 0), set()
    for t, (members, info) in enumerate(zip(clients().rounds, run.infos, strict=True)):
        expected = 0
        for k in (k for k in members if SIZES[k]):
            missed = t - last[k]
            bits = ref.catch_up_bits(missed, 1, stc_bits(0.1), 32 * 103, round(0.1 * 95), 95)
            expected += -(-bits // 8)
            last[k] = t
            lengths.add(min(missed, 2))
        high, low = np.asarray(info.metrics["bytes_down"])
        assert high * 65536 + low == expected
    assert lengths == {0, 1, 2}
    np.testing.assert_array_equal(run.states[-1].clients.last, [last[k] for k in last])


def test_sums_of_many_updates_are_as_dense_as_the_model():
    costs = [catch_up_bits(s, 100, 10, 45) for s in range(8)]
    assert costs == [ref.catch_up_bits(s, 7, 100, 3200, 10, 45) for s in range(8)]


def test_signs_both_ways_are_a_vote():
    """w <- w - rate sign(sum of signs), in NumPy; both ways five signs to a byte."""
    settings = {"wire__up": "sign", "wire__down": "sign", "wire__step": 0.01,
                "weighting": "uniform", "server__learning_rate": 1.0}
    run, c = run_of("fedsgd", tuple(settings.items())), clients()
    w = c.w0
    for t in range(len(c.rounds)):
        w = w - 0.01 * ref.sign_majority([c.full_grad(w, k) for k in c.cohort(t)])
    assert np.abs(flat(run.model.params) - w).max() < 1e-5
    sent = traffic(run.algorithm, run.states[0], run.data)
    assert sent == (8 * (1 + 16 + 1 + 3), 8 * (1 + 16 + 1 + 3))


def test_bytes_that_depend_on_values_are_counted():
    run = run_of("fedavg", (("wire__up", "sbc"), ("wire__rate", 0.2), ("wire__down", "sbc")))
    most = 4 * (round(0.2 * 95) * 7 + 32 + 32 * 8) // 8
    for info in run.infos:
        for name in ("bytes_up", "bytes_down"):
            high, low = np.asarray(info.metrics[name])
            assert 0 < high * 65536 + low < most


@pytest.mark.slow
def test_eight_bits_down_with_feedback():
    """What rounding took from one message is in the next: the mean over rounds is the model."""
    settings = {"wire__down": "8bit", "wire__feedback": True, "client__learning_rate": 0.0}
    run = run_of("fedavg", tuple(settings.items()))
    exchange = run.algorithm.exchanges[0]
    sent = [exchange.broadcast(s.server, s.round).params["Dense_0"]["kernel"] for s in run.states]
    w = np.asarray(run.model.params["Dense_0"]["kernel"])
    assert_same_bits(w, np.asarray(problem().params["Dense_0"]["kernel"]))
    residual = run.states[-1].server.codecs[0][""][1]["params/Dense_0/kernel"]
    total = sum(np.asarray(x) for x in sent[:-1]) + residual
    np.testing.assert_allclose(total, (len(sent) - 1) * w, rtol=0, atol=1e-6)
    assert not np.array_equal(sent[0], sent[1])


def test_a_part_that_stays_is_not_sent():
    p = problem()
    head = lambda name: "classifier" in name
    worker = ff.client.local_training(p.task, ff.client.sgd(0.1), batch_size=4)
    inner = ff.algorithms.personal(ff.algorithms.fedavg(worker, optax.sgd(1.0)), head)
    algorithm = ff.algorithms.compressed(inner, up=wire.feedback(wire.stc(0.1)),
                                         down=wire.stc(0.1))
    run = testing.Run(algorithm, p, rounds=2)
    bits = 8 * ((80).bit_length() + 1) + 32 + 32 * 5
    assert traffic(algorithm, run.states[0], run.data) == (bits, bits)
    residual = run.states[-1].clients.codecs[0]["mean"][1]
    assert set(residual) == {"params/Dense_0/kernel", "params/Dense_0/bias"}
    assert_same_bits(run.model.params["classifier"], p.params["classifier"])


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wire__up": "stc", "wire__rate": 0.0}, "config.wire.rate = 0.0: expected more than 0"),
        ({"wire__up": "stc", "wire__rate": 1.5}, "config.wire.rate = 1.5: expected at most 1"),
        ({"wire__up": "sstc", "wire__kfrac": 2.0}, "wire.kfrac = 2.0: expected at most 1"),
        ({"wire__up": "sstc"}, "sstc needs a model with convolutions: this one has only params/D"),
        ({"wire__up": "layer_stc"}, "'4' has 4 rates and the model 2 kernels: expected one for ea"),
        ({"wire__up": "layer_stc", "wire__rates": ".1,x"}, "has 'x': expected a rate above 0"),
        ({"wire__up": "layer_stc", "wire__rates": ".1,2"}, "has '2': expected a rate above 0"),
        ({"wire__rate": 0.1}, "it is of stc, sstc, topk, sbc, mask, and wire.up is none"),
        ({"wire__up": "8bit", "wire__rate": 0.1}, "wire.rate = 0.1 would change nothing"),
        ({"wire__up": "stc", "wire__rate_down": 0.1}, "wire.down has no rate"),
        ({"wire__feedback": True}, "nothing is encoded"),
        ({"wire__up": "stc", "wire__cache": 3}, "clients receive the model itself"),
        ({"wire__down": "8bit", "wire__cache": 3}, "cache = 3 does not go with wire.down = 8bit"),
        ({"wire__up": "mask", "wire__feedback": True}, "Set wire.unbiased = False"),
        ({"wire__up": "stc", "wire__accounting": "words"}, "expected one of index, word, packed."),
        ({"wire__down": "stc", "algorithm__name": "fedgh"}, "looks at every client's upload"),
    ],
)
def test_what_cannot_be(settings, message):
    with pytest.raises(ff.UsageError, match=re.escape(message)):
        ff.build(small_config(**settings))


def test_several_sides_are_refused():
    shapes = femnist() | {"params/Conv_2/kernel": jax.ShapeDtypeStruct((3, 3, 2, 2), jnp.float32)}
    with pytest.raises(ff.UsageError, match="one side: this model has 3 x 3 and 5 x 5"):
        wire.sstc().init(shapes)
    with pytest.raises(ff.UsageError, match="would need the rate"):
        wire.rate_for(1000, 1_690_046, [800, 51_200, 1_605_632, 31_744], 670)


def test_uploads_of_other_shapes_need_data():
    run = lambda: testing.Run(
        algorithm_of("scaffold", wire__up="stc", wire__feedback=True), problem(), rounds=1
    )
    with pytest.raises(ff.UsageError, match="shaped like the model, but sum is sent too"):
        run()


def test_a_codec_of_ones_own():
    def make(share):
        """A part of every number."""
        return wire.stateless(lambda tree, key: jax.tree.map(lambda x: share * x, tree),
                              lambda packet: packet, "index")

    ff.register.codec("part", make, share=ff.Setting(0.5, at_most=1))
    try:
        with pytest.raises(ff.UsageError, match=r"share = 2\.0: expected at most 1"):
            ff.validate(small_config(wire__up="part", wire__share=2.0))
        built = ff.build(small_config(wire__up="part", wire__share=0.25))
        assert built.config.wire.share == 0.25
    finally:
        wire.CODECS.remove("part")


@pytest.mark.slow
def test_metrics_of_a_run(tmp_path, capsys):
    """From the command line's settings to bytes: STC up, and what comes back after a stop."""
    config = small_config(rounds=4, wire__up="stc", wire__rate=0.01, wire__feedback=True)
    whole = ff.train(config, tmp_path / "a", progress=False)
    half = small_config(rounds=2, wire__up="stc", wire__rate=0.01, wire__feedback=True)
    ff.train(half, tmp_path / "b", progress=False)
    again = ff.train(config, tmp_path / "b", progress=False)
    assert_same_bits(again.state, whole.state)
    asked = [word for name in ("8bit", "sstc", "stc") for word in ("--codec", name)]
    assert cli.main(["weigh", str(tmp_path / "a"), *asked]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[4:]}
    assert set(lines) == {"8bit", "stc", "sstc:"}
    assert 3.9 < float(lines["8bit"][-2].strip("x")) < 4
    assert float(lines["8bit"][-1]) < 0.02 < float(lines["stc"][-1]) < 1
    record = next(r for r in whole.records if r["split"] == "cohort")
    sizes = [x.shape for x in jax.tree.leaves(whole.models["global"].params)]
    kernels = sum(int(np.prod(s)) for s in sizes if len(s) > 1)
    biases = sum(s[0] for s in sizes if len(s) == 1)
    bits = round(0.01 * kernels) * (kernels.bit_length() + 1) + 32 + 32 * biases
    assert record["bytes_up"] == record["clients"] * bits // 8
    assert record["bytes_down"] == record["clients"] * 4 * (kernels + biases)
