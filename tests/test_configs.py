"""The files in configs/: every one loads, and their options mean what the papers' tables say."""

import itertools
import pathlib
import runpy

import jax.numpy as jnp
import numpy as np
import pytest
import reference_released as released

import fedjax_flat as ff
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment.method import build_server_optimizer

FOLDER = pathlib.Path(__file__).parents[1] / "configs"
fedsam = runpy.run_path(str(FOLDER / "fedsam.py"))["get_config"]
fedgloss_file = runpy.run_path(str(FOLDER / "fedgloss.py"))
fedgloss = fedgloss_file["get_config"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.name)
def test_every_file_is_valid_as_it_is(path):
    module = runpy.run_path(str(path))
    ff.validate(module["get_config"]())
    assert "fedjax-flat train --config configs/" + path.name in module["__doc__"]


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.slow
def test_every_cell_of_the_fedsam_tables(data):
    alphas = (0, 0.05, 100) if data == "cifar10" else (0, 0.5, 1000)
    methods = ("fedavg", "fedavg,epochs=2", "fedsam", "fedasam")
    extras = ("", ",swa", ",mixup", ",cutout", ",mixup,swa", ",cutout,swa", ",released")
    seen = set()
    for alpha, cohort, name, extra in itertools.product(alphas, (5, 10, 20), methods, extras):
        c = fedsam(f"{data},alpha={alpha},cohort={cohort},method={name}{extra}")
        config_lib.validate(c)
        assert c.cohort.size == cohort
        assert c.partition.alpha == (0.5 if extra == ",released" else alpha), "or the default"
        assert c.client.epochs == (2 if "epochs" in name else 1)
        assert (c.server.average == "swa") == ("swa" in extra)
        assert (c.data.mixup, c.data.cutout > 0) == (float("mixup" in extra), "cutout" in extra)
        seen.add(config_lib.to_json(c))
    assert len(seen) == 3 * 3 * 4 * 7


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("cifar10,alpha=0.05,method=fedsam", {"client.sharpness": "sam", "client.rho": 0.1}),
        ("cifar10,alpha=100,method=fedasam", {"client.sharpness": "asam", "client.rho": 0.05}),
        ("cifar100,method=fedasam", {"client.rho": 0.5, "client.eta": 0.2, "rounds": 20_000}),
        ("cifar100,swa", {"server.swa.cycle": 20, "server.swa.start": 0.75}),
        ("cutout,swa", {"data.name": "cifar10", "data.cutout": 16, "server.swa.cycle": 10}),
        ("cifar100,cutout", {"data.cutout": 8}),
        ("released,alpha=0.05", {"partition.split": "cifar10_alpha_0.05"}),
    ],
)
def test_hyper_parameters_of_the_appendix(options, expected):
    flat = config_lib.flatten(fedsam(options))
    assert {name: flat[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("cifar", "data = 'cifar': expected one of cifar10, cifar100"),
        ("cifar10,alpa=0", "no option 'alpa'.*Did you mean 'alpha'"),
        ("cifar10,alpha=0.5", "alpha = 0.5: the tables have 0, 0.05, 100"),
        ("cifar10,cohort=five", "'cohort=five': expected int"),
        ("cifar10,swa=maybe", "'swa=maybe': expected bool"),
        ("cifar10,method=fedsma", "method = 'fedsma'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ff.UsageError, match=message):
        fedsam(options)


def test_a_table_without_that_alpha():
    with pytest.raises(ff.UsageError, match=r"alpha = 0: the tables have 0\.05"):
        fedgloss("model=resnet18")


def test_released_splits_are_the_papers(cifar_dir):
    c = fedsam("cifar10,alpha=0.05,cohort=10,released")
    built = ff.build(c, cifar_dir)
    assert built.data.num_clients == 100
    assert built.partition.sizes.tolist().count(500) == 99, "one released list misses an image"


@pytest.mark.parametrize("algorithm", ["fedavgm", "fedprox", "scaffold", "feddyn", "adabest"])
def test_table_4_8_combines_each_algorithm_with_sam_asam_and_swa(algorithm):
    for extra in ("", ",method=fedsam", ",method=fedasam,swa"):
        c = fedsam(f"cifar10,alpha=0.05,algorithm={algorithm}{extra}")
        config_lib.validate(c)
        assert c.algorithm.name == algorithm


@pytest.mark.parametrize("server", ["sgd", "adam", "adagrad"])
def test_table_4_2_of_server_optimisers(server):
    c = fedsam(f"cifar100,server={server},server_rate=0.1")
    config_lib.validate(c)
    used = c.server.learning_rate if server == "sgd" else c.server.adaptive.learning_rate
    assert used == 0.1


@pytest.mark.parametrize("server", ["adam", "adagrad"])
def test_table_4_2_takes_the_released_steps(server):
    step_of = {"adam": released.adam(0.1, 0.9, 0.99, 0.1), "adagrad": released.adagrad(0.1, 0.01)}
    ours = build_server_optimizer(fedsam(f"cifar100,server={server},server_rate=0.1"))
    state, memory = ours.init(jnp.zeros(3)), {}
    for delta in np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32):
        step, state = ours.update(jnp.asarray(delta), state)
        theirs = step_of[server](0.0, delta, memory)
        np.testing.assert_allclose(step, theirs, rtol=2e-5)


def test_released_adam_goes_further_than_reddis_at_first():
    """Small pseudo-gradients: 0.05 of the released step in round 1, 0.34 in round 10."""
    paper, theirs = ff.server.adaptive("adam", 0.1, tau=0.1), released.adam(0.1, 0.9, 0.99, 0.1)
    state, memory, shares = paper.init(jnp.zeros(1)), {}, []
    for _ in range(10):
        step, state = paper.update(jnp.full(1, 1e-3), state)
        shares.append(float(step[0] / theirs(0.0, np.float64(1e-3), memory)))
    assert shares[0] == pytest.approx(0.05, abs=0.002)
    assert shares[9] == pytest.approx(0.34, abs=0.01)


def test_centralised_is_one_client_with_everything():
    c = fedsam("cifar10,centralised,method=fedasam,swa,mixup")
    assert (c.partition.name, c.partition.clients, c.cohort.size) == ("iid", 1, 1)


@pytest.mark.parametrize("name", fedgloss_file["METHODS"])
@pytest.mark.parametrize(
    "data",
    ["cifar10,alpha=0.05", "cifar100,alpha=0.5", "cifar10,alpha=0.05,model=resnet18",
     "cifar100,alpha=0.5,model=resnet18"],
)
def test_every_row_of_the_fedgloss_tables(name, data):
    for extra in ("", ",no_duals", ",variant=released", ",released"):
        c = fedgloss(f"{data},method={name}{extra}")
        config_lib.validate(c)
        assert c.algorithm.name == fedgloss_file["METHODS"][name][0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("cifar10", {"data.std": (0.2470, 0.2434, 0.2616), "data.mean": (0.4914, 0.4822, 0.4465)}),
        ("cifar100", {"data.std": (0.2673, 0.2564, 0.2762), "data.mean": (0.5071, 0.4865, 0.4409)}),
        ("cifar10", {"client.rho": 0.15, "client.rho_warmup": 2000, "algorithm.fedgloss.rho": 0.15,
                     "algorithm.fedgloss.beta": 10.0}),
        ("cifar100", {"client.rho": 0.2, "client.rho_warmup": 15_000,
                      "algorithm.fedgloss.rho": 0.01, "algorithm.fedgloss.beta": 100.0}),
        ("cifar100,method=fedsmoo", {"client.rho": 0.1, "algorithm.fedsmoo.beta": 100.0}),
        ("method=fedsam", {"client.rho": 0.15, "client.rho_warmup": 0, "cohort.size": 5}),
        ("model=resnet18,alpha=0.05", {"client.rho": 0.01, "client.rho_warmup": 0,
                                       "client.momentum": 0.7, "client.weight_decay": 1e-5,
                                       "cohort.size": 10, "rounds": 10_000}),
        ("cifar100,model=resnet18,alpha=0.5,cohort=3", {"algorithm.fedgloss.beta": 100.0,
                                                        "cohort.size": 3}),
    ],
)
def test_hyper_parameters_of_table_a5(options, expected):
    flat = config_lib.flatten(fedgloss(options))
    assert {name: flat[name] for name in expected} == expected


mnist = runpy.run_path(str(FOLDER / "mnist.py"))
wima = runpy.run_path(str(FOLDER / "wima.py"))
hfd = runpy.run_path(str(FOLDER / "hfd.py"))


@pytest.mark.parametrize("method", mnist["METHODS"])
@pytest.mark.parametrize("alpha", mnist["ALPHAS"])
def test_every_cell_of_the_mnist_study(method, alpha):
    c = mnist["get_config"](f"{method},alpha={alpha}")
    config_lib.validate(c)
    assert c.cohort.size == c.partition.clients == (10 if alpha == 0 else 5)
    assert c.data.test_share == 0.2
    if method not in ("fedsgd", "scaffold"):
        assert (c.client.optimizer, c.client.learning_rate, c.rounds) == ("adam", 0.001, 3)


@pytest.mark.parametrize("data", wima["RECIPES"])
@pytest.mark.parametrize("method", wima["METHODS"])
def test_every_row_of_the_wima_tables(data, method):
    c = wima["get_config"](f"{data},method={method}")
    config_lib.validate(c)
    assert c.server.wima.window == (370 if data == "landmarks" else 100)
    assert c.cohort.size == (100 if data == "pam" else 10)


mora = runpy.run_path(str(FOLDER / "mora.py"))


@pytest.mark.parametrize("method", mora["METHODS"])
@pytest.mark.parametrize("alpha", mora["ALPHAS"])
def test_every_cell_of_mora_s_tables(method, alpha):
    c = mora["get_config"](f"{method},alpha={alpha}")
    config_lib.validate(c)
    assert c.algorithm.name == method
    assert (c.client.epochs * 500 // c.client.batch_size if alpha == 0.3 else c.client.steps) == 50
    assert c.algorithm.weighting == ("uniform" if "feddyn" in method else "examples")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("fedprox,alpha=0.1", {"algorithm.fedprox.mu": 0.001, "partition.name": "per_class"}),
        ("fedgkd,models=5", {"algorithm.fedgkd.gamma": 0.2, "algorithm.fedgkd.models": 5}),
        ("fedavgm+fedsam,alpha=0.1", {"server.momentum": 0.6, "client.rho": 0.05,
                                      "client.learning_rate": 0.1}),
        ("fedadam+fedsam", {"client.learning_rate": 0.1, "server.adaptive.learning_rate": 0.01}),
        ("fedadam+fedmlb", {"client.learning_rate": 0.01, "server.adaptive.beta2": 0.999}),
        ("feddyn+fedmlb", {"algorithm.feddyn.alpha": 0.1, "algorithm.feddyn.average_model": True,
                           "client.weight_decay": 0.001, "client.clip": 10.0}),
        ("moon,model=cnn", {"model.projection": 256, "client.learning_rate_decay": 0.998}),
    ],
)
def test_hyper_parameters_of_table_7_3(options, expected):
    flat = config_lib.flatten(mora["get_config"](options))
    assert {name: flat[name] for name in expected} == expected


compression = runpy.run_path(str(FOLDER / "compression.py"))


@pytest.mark.parametrize("table", compression["TABLES"])
@pytest.mark.parametrize("data", compression["DATA"])
def test_every_row_of_the_compression_tables(data, table):
    for method in ("fedavg", "stc", "sstc", *(f"layer_stc,rates={n}" for n in (1, 2, 3, 4))):
        c = compression["get_config"](f"{data},table={table},method={method}")
        config_lib.validate(c)
        assert (c.rounds, c.client.epochs) == ((1000 if table == "4.1" else 200), 5)
        assert c.client.nesterov == (table == "5.2")
        if method != "fedavg":
            assert c.wire.accounting == ("index" if table == "4.1" else "word")
        if "rates" in method:
            assert (c.wire.up, c.wire.rates) == ("layer_stc", method[-1])


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (compression, "cifar10", "data = 'cifar10': expected one of femnist"),
        (compression, "mnist,table=5.3", "table = '5.3': expected one of 4.1, 5.2"),
        (mnist, "fedavg,alpha=3", "alpha = 3: the document has 2, 0.8, 0.5, 0.1, 0"),
        (mnist, "fedadam", "method = 'fedadam': expected one of fedsgd"),
        (mora, "fedmlb,alpha=0.5", "alpha = 0.5: expected one of 0.3, 0.1"),
        (mora, "feddyn+fedsam", "method = feddyn.fedsam: expected one of fedavg"),
        (wima, "mnist", "data = 'mnist': expected one of cifar10"),
        (wima, "cifar10,method=fedsam", "method = 'fedsam': expected one of fedavg"),
        (hfd, "cifar10", "data = 'cifar10': expected one of femnist"),
        (hfd, "mnist,method=hdf", "method = 'hdf': expected one of fedavg"),
    ],
)
def test_wrong_options_of_the_new_files(make, options, sentence):
    with pytest.raises(ff.UsageError, match=sentence):
        make["get_config"](options)


@pytest.mark.parametrize("data", hfd["DATA"])
@pytest.mark.parametrize("method", hfd["METHODS"])
def test_every_row_of_the_hfd_tables(data, method):
    for extra in ("", ",coverage", ",units=ordered,coverage", ",units=adaptive"):
        c = hfd["get_config"](f"{data},method={method}{extra}")
        config_lib.validate(c)
        tiers = {"fedavg": (), "dropout": (0.75,)}.get(method, (0.8, 0.75, 0.7))
        assert c.submodel.tiers == tiers
        assert (c.wire.down, c.wire.up) == (("8bit",) * 2 if method == "cehfd" else ("none",) * 2)
        assert (c.client.learning_rate, c.client.momentum, c.client.nesterov) == (0.004, 0.9, True)
        assert (c.rounds, c.client.epochs, c.client.batch_size) == (200, 5, 10)


fed3r_file = runpy.run_path(str(FOLDER / "fed3r.py"))
fed3r = fed3r_file["get_config"]


@pytest.mark.parametrize(
    "data", ["cifar100", "landmarks", *(f"inaturalist,split={s}" for s in ("users_120k", "geo_3k"))]
)
def test_every_row_of_the_fed3r_tables(data):
    seen = set()
    methods = [*fed3r_file["CLOSED"], "fed3r_rf,D=10000"]
    methods += [f"{m},part={p}{i}" for m in fed3r_file["TRAINED"]
                for p, i in (("all", ""), ("head", ""), ("all", ",init"), ("features", ",init"),
                             ("head", ",init"))]
    for method, model in itertools.product(methods, fed3r_file["MODELS"]):
        c = fed3r(f"{data},method={method},model={model},weights=w.npz")
        config_lib.validate(c)
        assert c.data.features == ("all" not in method and "features" not in method)
        assert c.task.temperature == (0.1 if "init" in method else 1.0)
        assert c.client.frozen == ("head" if "features" in method else "none")
        assert c.model.random.features == (
            0 if "rf" not in method else 10_000 if "D" in method else 5000
        )
        seen.add(config_lib.to_json(c))
    assert len(seen) == 2 * len(methods)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"rounds": 10, "cohort.sampling": "once", "partition.alpha": 0.0}),
        ("landmarks", {"rounds": 127, "partition.name": "natural", "data.resized_crop": 224}),
        ("inaturalist", {"rounds": 928, "data.split": "users_120k"}),
        ("inaturalist,split=geo_1k", {"rounds": 37}),
        ("inaturalist,split=geo_3k", {"rounds": 14}),
        ("cifar100,again", {"rounds": 30, "cohort.sampling": "uniform"}),
        ("imbalance=B,raw", {"data.imbalance": "B", "algorithm.fed3r.normalised": False}),
        ("released,sync", {"algorithm.fed3r.variant": "released", "algorithm.fed3r.sync": True}),
        ("landmarks,method=scaffold", {"rounds": 3000, "client.epochs": 5, "data.features": False}),
        ("alpha=0.5,method=fedavg,part=head", {"rounds": 1500, "data.features": True,
                                               "client.batch_size": 50}),
        ("method=fedavg,init", {"client.learning_rate": 0.01}),
        ("method=fedavg", {"client.learning_rate": 0.1}),
        ("inaturalist,split=geo_100,delta=1.5,rdn,method=fedavg,init",
         {"data.shift.name": "rgb", "data.shift.delta": 1.5, "data.rdn": True,
          "data.rdn_groups": 3, "partition.min_size": 10, "data.features": False}),
        ("delta=2,method=fed3r", {"data.features": False, "data.shift.delta": 2.0}),
        ("rdn,method=fedavg,part=head", {"data.features": False, "client.frozen": "features"}),
    ],
)
def test_rounds_and_settings_of_the_fed3r_tables(options, expected):
    c = fed3r(options)
    config_lib.validate(c)
    flat = config_lib.flatten(c)
    assert {name: flat[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("phases=fed3r+fedavg(head)+fedavg(features)", {
            "fed3r": {"algorithm.name": "fed3r", "rounds": 10, "data.features": True},
            "fedavg(head)": {"task.temperature": 0.1, "client.learning_rate": 0.01,
                             "data.features": True, "rounds": 1500},
            "fedavg(features)": {"client.frozen": "head", "data.features": False,
                                 "task.temperature": 0.1},
        }),
        ("landmarks,phases=fedavg+scaffold(head)+fed3r", {
            "fedavg": {"client.learning_rate": 0.1, "task.temperature": 1.0, "rounds": 3000},
            "scaffold(head)": {"client.frozen": "features", "data.features": False,
                               "task.temperature": 1.0, "client.learning_rate": 0.1},
            "fed3r": {"data.features": False, "rounds": 127},
        }),
        ("phases=fed3r_rf+fedavg(head),D=700", {
            "fed3r_rf": {"model.random.features": 700},
            "fedavg(head)": {"model.random.features": 700, "data.features": True},
        }),
    ],
)
def test_phases_of_the_fed3r_tables(options, expected):
    found = {n: config_lib.flatten(c) for n, c in ff.phase_configs(fed3r(options)).items()}
    assert list(found) == list(expected)
    for name, settings in expected.items():
        assert {n: found[name][n] for n in settings} == settings, name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("phases=", "'' is no phase"),
        ("phases=fed3r+fedavgg", "unknown phase 'fedavgg'.*Did you mean 'fedavg"),
        ("phases=fed3r+fedavg(haed)", "part of the model 'haed'.*Did you mean 'head'"),
        ("phases=fed3r(head)", r"fed3r\(head\), but fed3r is of the head alone"),
        ("phases=fed3r,part=head", "with method, part or init: expected these in phases"),
        ("cifar10", "data = 'cifar10': expected one of cifar100"),
        ("alpha=0.3", r"alpha = 0.3: expected one of 0.0, 0.1"),
        ("method=fed3r-rf", "method = 'fed3r-rf': expected one of fed3r, fed3r_rf"),
        ("inaturalist,split=geo", "split = 'geo': expected one of users_120k"),
        ("D=many", "'D=many': expected int"),
        ("method=fed3r,init", "init with method = fed3r: expected one of fedavg"),
    ],
)
def test_wrong_options_of_fed3r(options, sentence):
    with pytest.raises(ff.UsageError, match=sentence):
        fed3r(options)


personal_file = runpy.run_path(str(FOLDER / "personal.py"))
personal = personal_file["get_config"]


PARTIAL = [f"+{m}({p})" for m in personal_file["PARTIAL"] for p in ("head", "features")]
FULL = [f"+fp({p})" for p in ("head", "features", "all")]


@pytest.mark.parametrize(
    ("data", "firsts", "thirds", "lasts"),
    [("cifar100", ["fed3r", "fed3r+fedavg"], ["", PARTIAL[1]], ["", FULL[0]]),
     *(pytest.param(
         data, ["fedavg", "fed3r", "fed3r+fedavg", "fed3r+fedavg(features)"], ["", *PARTIAL],
         ["", *FULL], marks=pytest.mark.slow, id=f"all of {data}",
     ) for data in personal_file["DATA"])],
)
def test_every_row_of_the_personalisation_tables(data, firsts, thirds, lasts):
    """Classifier, fine-tuning, partial and full personalisation, each with and without."""
    seen = set()
    for first, third, last in itertools.product(firsts, thirds, lasts):
        c = personal(f"{data},phases={first}{third}{last},weights=w.npz")
        configs = ff.phase_configs(c) if c.phases else {first: c}
        names = f"{first}{third}{last}".split("+")
        assert list(configs) == names
        for name, each in configs.items():
            assert each.data.local_test == 0.45
            if name != "fed3r":
                assert each.client.learning_rate == (0.01 if "fed3r" in names else 0.1)
                assert each.task.temperature == (0.1 if "fed3r" in names else 1.0)
            heads_so_far = all(n in ("fed3r", "fp(head)") for n in names[: names.index(name) + 1])
            assert each.data.features == heads_so_far
        if last:
            kept = configs[last[1:]].algorithm.fp.keep
            assert kept == (third.partition("(")[2].strip(")") or "none")
        seen.add(config_lib.to_json(c))
    assert len(seen) == len(firsts) * len(thirds) * len(lasts)


@pytest.mark.parametrize(
    ("options", "phase", "expected"),
    [
        ("phases=fed3r+fp(head),oll", "fp(head)",
         {"algorithm.name": "fp+oll", "client.learning_rate": pytest.approx(0.001),
          "client.epochs": 25, "cohort.sampling": "once", "rounds": 10, "data.closed": True}),
        ("phases=fedavg+fp(all),oll", "fp(all)", {"client.learning_rate": pytest.approx(0.01)}),
        ("phases=fedavg+fp(all),ditto=0.1,curve", "fp(all)",
         {"algorithm.fp.ditto": 0.1, "rounds": 250, "client.epochs": 1, "eval.absent": 4}),
        ("landmarks", "fed3r", {"rounds": 83, "partition.min_size": 50}),
        ("inaturalist,ft=1000", "fedavg",
         {"rounds": 1000, "client.epochs": 5, "client.batch_size": 64, "data.split": "geo_100"}),
        ("", "fedsim(head)", {"rounds": 1000, "algorithm.fedsim.own": "head"}),
    ],
)
def test_settings_of_the_personalisation_tables(options, phase, expected):
    flat = config_lib.flatten(ff.phase_configs(personal(options))[phase])
    assert {name: flat[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("cifar10", "data = 'cifar10': expected one of cifar100"),
        ("phases=fed3r+fedavg,oll", "expected fp among them"),
        ("phases=fed3r+fedsim", r"phase fedsim: expected what stays with clients, fedsim\(head\)"),
        ("phases=fed3r+fedsin(head)", "unknown phase 'fedsin'.*Did you mean 'fedsim'"),
    ],
)
def test_wrong_options_of_personalisation(options, sentence):
    with pytest.raises(ff.UsageError, match=sentence):
        personal(options)


fedseq_file = runpy.run_path(str(FOLDER / "fedseq.py"))


@pytest.mark.parametrize("method", fedseq_file["METHODS"][:4])
@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_cells_of_the_fedseq_tables(method, data):
    get_config = fedseq_file["get_config"]
    for alpha, estimator in itertools.product((0, 0.2, 0.5), ("clf", "conf", "task2vec")):
        text = f"{data},alpha={alpha},method={method},estimator={estimator}"
        for grouping in ("random", "greedy", "kmeans", "icg"):
            c = get_config(f"{text},grouping={grouping}")
            config_lib.validate(c)
            assert (c.partition.clients, c.client.learning_rate) == (500, 0.01)
    c = get_config(f"{data},alpha=100,swaps=0-2,LS=0.3,L=0.5,choice=random")
    config_lib.validate(c)
    assert (c.data.shift.of_groups, c.data.shift.share) == (0.3, 0.5)


@pytest.mark.parametrize("method", ["fedavg", "fedvc", "fedvc_drawn"])
def test_the_study_of_fixed_iterations(method):
    get_config = runpy.run_path(str(FOLDER / "fedvc.py"))["get_config"]
    for iterations in (5, 10, 20, 40):
        c = get_config(f"method={method},iterations={iterations}")
        config_lib.validate(c)
        steps = c.client.steps or c.partition.virtual / c.client.batch_size * c.client.epochs
        assert steps * c.rounds * c.cohort.size == 20_000
        assert (c.cohort.sampling == "sizes") == (method == "fedvc_drawn")
        assert (c.partition.virtual > 0) == (method == "fedvc")
    with pytest.raises(ff.UsageError, match="no multiple"):
        get_config("iterations=7")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"partition.name": "natural", "partition.resize_to": 12, "eval.statistics": "model",
              "task.hard": 0.25, "client.drop_last": True, "model.name": "bisenetv2"}),
        ("clients=uniform", {"partition.name": "stratified", "partition.clients": 12}),
        ("clients=class,number=6,method=silobn", {
            "partition.name": "rare_classes", "partition.natural_sizes": True,
            "algorithm.name": "silobn", "eval.statistics": "split"}),
        ("norm=layers,method=feddyn", {"model.statistics": "layers", "eval.statistics": "split"}),
        ("method=silobn,inference=batch,width=0.5", {"eval.statistics": "batch"}),
        ("cityscapes,lists=heterogeneous,server=momentum", {
            "data.lists": "heterogeneous", "server.momentum": 0.9, "eval.splits": ("unseen",)}),
        ("idda,unseen=bus,server=adam", {
            "data.setting": "bus", "server.optimizer": "adam", "client.learning_rate": 0.1}),
    ],
)
def test_cells_of_feddrive(options, expected):
    config = runpy.run_path(str(FOLDER / "feddrive.py"))["get_config"](options)
    config_lib.validate(config)
    flat = config_lib.flatten(config)
    assert {name: flat[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"source": {"data.trains": "server", "data.style.name": "fda", "client.steps": 100},
              "ladd": {"data.trains": "clients", "algorithm.ladd.own": "cls", "cohort.size": 5,
                       "algorithm.ladd.start": 200}}),
        ("method=self_training,loss=released", {
            "source": {"data.style.name": "fda"},
            "self_training": {"algorithm.self_training.rule": "released",
                              "algorithm.self_training.entropy": 0.0}}),
        ("method=ftda", {"source": {"data.style.name": "none"},
                         "ftda": {"algorithm.name": "fedavg"}}),
        ("method=oracle", {"": {"algorithm.name": "fedavg", "data.trains": "clients"}}),
        ("method=ladd,pretrain=0,own=all", {"": {"algorithm.ladd.own": "all"}}),
        ("method=mcd", {"": {"algorithm.name": "mcd", "algorithm.mcd.form": "federated",
                             "algorithm.mcd.n": 4, "data.labelled": "0016E5",
                             "data.trains": "clients", "cohort.size": 5}}),
        ("method=mcd_central,n=2", {"": {"algorithm.mcd.form": "central", "algorithm.mcd.n": 2,
                                         "partition.clients": 1, "cohort.size": 1}}),
    ],
)
def test_cells_of_ladd(options, expected):
    config = runpy.run_path(str(FOLDER / "ladd.py"))["get_config"](options)
    found = ff.phase_configs(config) if config.phases else {"": config}
    assert set(found) == set(expected)
    for phase, values in expected.items():
        flat = config_lib.flatten(found[phase])
        assert {name: flat[name] for name in values} == values


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"data.name": "mnist", "data.shift.name": "rotation", "algorithm.fedcg.domains": 4,
              "algorithm.fedcg.start": "identity", "model.name": "lenet"}),
        ("cifar10,shift=rgb,every=0,soft=false", {
            "data.shift.name": "rgb", "algorithm.fedcg.every": 0, "algorithm.fedcg.soft": False}),
        ("celeba,domains=32", {"partition.name": "natural", "algorithm.fedcg.domains": 32,
                               "algorithm.fedcg.mixing": "full"}),
        ("femnist,shift=none,rate=0.1", {"data.shift.name": "none", "client.learning_rate": 0.1}),
        ("digits,method=fedavg", {"algorithm.name": "fedavg", "model.name": "mlp"}),
    ],
)
def test_cells_of_fedcg(options, expected):
    config = runpy.run_path(str(FOLDER / "fedcg.py"))["get_config"](options)
    config_lib.validate(config)
    flat = config_lib.flatten(config)
    assert {name: flat[name] for name in expected} == expected


def test_options_of_fedcg_that_cannot_work():
    fedcg = runpy.run_path(str(FOLDER / "fedcg.py"))["get_config"]
    for options in ("celeba,shift=rotation", "mnst", "digits,shift=blur"):
        with pytest.raises(ff.UsageError, match="expected"):
            fedcg(options)


def test_options_of_feddrive_that_cannot_work():
    feddrive = runpy.run_path(str(FOLDER / "feddrive.py"))["get_config"]
    for options in ("clients=citys", "lists=uniform", "idda,lists=uniform,number=5"):
        with pytest.raises(ff.UsageError, match="expected"):
            feddrive(options)


@pytest.mark.parametrize("method", ["fedavg", "fedvc", "hierfavg"])
def test_streets_have_the_clients_that_a_round_takes(method):
    make = runpy.run_path(str(FOLDER / "fedvpr.py"))["get_config"]
    built = ff.build(make(f"streets,method={method},model=mlp"))
    assert built.config.cohort.size == {"hierfavg": 12}.get(method, 5)
