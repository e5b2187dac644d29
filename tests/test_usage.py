"""Settings: those without an effect are refused, and names of methods mean their settings."""

import json

import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.settings import Setting


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"client__rho": 0.3}, "client.rho = 0.3 would change nothing: there is no ascent"),
        ({"client__rho_warmup": 5}, "there is no ascent"),
        ({"client__sharpness": "sam", "client__rho_start": 0.3}, "client.rho_warmup is 0"),
        ({"client__sharpness": "sam", "client__eta": 0.3}, "it is ASAM's"),
        ({"algorithm__fedprox__mu": 0.5}, "it is of fedprox, and algorithm.name is fedavg"),
        ({"algorithm__fedgloss__rho": 0.5}, "it is of fedgloss and naivefedgloss"),
        ({"server__optimizer": "adam", "server__learning_rate": 0.5},
         "it is of sgd; adam has server.adaptive.learning_rate"),
        ({"algorithm__name": "fedyogi", "server__learning_rate": 0.5}, "of sgd; yogi has"),
        ({"server__adaptive__tau": 0.5}, "of adam, adagrad and yogi, and the server optimiser is"),
        ({"server__optimizer": "adagrad", "server__adaptive__beta2": 0.5}, "adagrad has no beta2"),
        ({"algorithm__name": "adabest", "algorithm__adabest__variant": "released",
          "algorithm__weighting": "uniform"}, "counts every client once"),
        ({"server__optimizer": "adam", "server__adaptive__bias_correction": True,
          "server__adaptive__initial": "zero"}, "starts v at 0"),
        ({"server__swa__cycle": 3}, "server.average has no swa"),
        ({"server__wima__window": 3}, "server.average has no wima"),
        ({"algorithm__name": "fedsgd", "client__epochs": 2}, "no local steps under fedsgd"),
        ({"algorithm__name": "fedsgd", "client__learning_rate": 0.5}, "no local steps"),
        ({"algorithm__name": "feddyn", "server__learning_rate": 0.5}, "is part of feddyn"),
        ({"client__steps": 3, "client__epochs": 2}, "client.steps is the number"),
        ({"client__optimizer": "adam", "client__momentum": 0.5}, "it is of sgd"),
        ({"client__options": "b1=0.5"}, "sgd has client.momentum"),
        ({"client__nesterov": True}, "client.momentum is 0"),
        ({"cohort__strategy": "map", "cohort__chunk": 3}, "cohort.strategy is neither chunked"),
        ({"curvature__examples": 3}, "curvature.every is 0"),
        ({"partition__name": "iid", "partition__alpha": 0.1}, "partition iid has no alpha"),
        ({"model__name": "cnn", "model__hidden": (3,)}, "model cnn has no hidden"),
        ({"data__validation_from": "server"}, "data.validation is 0"),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(settings, message):
    config = small_config(**settings)
    with pytest.raises(ff.UsageError, match=message):
        ff.validate(config)
    ff.validate(ff.only_used(config))


def test_from_the_command_line_too(tmp_path, capsys):
    path = tmp_path / "c.py"
    path.write_text("from fedjax_flat import default_config as get_config\n")
    code = cli.main(["train", "--config", str(path), "--run", str(tmp_path / "r"),
                     "--config.server.swa.cycle=3"])
    assert code == 2
    assert "config.server.swa.cycle = 3 would change nothing" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_config_json_holds_what_the_run_uses():
    stored = json.loads(config_lib.to_json(small_config()))
    assert "rho" not in stored["client"]
    assert set(stored["server"]) == {
        "aggregate", "average", "learning_rate", "momentum", "optimizer"
    }
    assert set(stored["algorithm"]) == {"name", "weighting"}
    assert set(stored["partition"]) == {
            "name", "clients", "alpha", "counts", "size_sigma", "size_alpha", "seed", "virtual"
    }
    sam = json.loads(config_lib.to_json(small_config(algorithm__name="fedsam+swa")))
    assert sam["client"]["rho"] == 0.1
    assert "eta" not in sam["client"]
    assert "swa" in sam["server"]
    assert "wima" not in sam["server"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedsam", {"client__sharpness": "sam"}),
        pytest.param("fedasam", {"client__sharpness": "asam"}, marks=pytest.mark.slow),
        pytest.param("fedavg+swa", {"server__average": "swa"}, marks=pytest.mark.slow),
        ("fedavg+fedntd", {"algorithm__name": "fedntd"}),
        ("fedasam+wima", {"client__sharpness": "asam", "server__average": "wima"}),
        pytest.param(
            "fedavgm+fedsam", {"algorithm__name": "fedavgm", "client__sharpness": "sam"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_names_that_people_type(tmp_path, name, settings):
    common = {"rounds": 4}
    if "swa" in name:
        common["server__swa__cycle"] = 1
    by_name = ff.train(
        small_config(algorithm__name=name, **common), tmp_path / "a", progress=False
    )
    by_settings = ff.train(small_config(**settings, **common), tmp_path / "b", progress=False)
    assert_same_bits(by_name.models, by_settings.models)
    assert set(by_name.models) == {"global", *({"swa", "wima"} & set(name.split("+")))}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm__name": "fedsam", "client__sharpness": "asam"}, "the name means sam"),
        ({"algorithm__name": "fedsam+fedasam"}, "fedasam: the name means asam"),
        ({"algorithm__name": "fedspeed+fedsam"}, "an ascent of its own"),
        ({"algorithm__name": "fedavg+scaffold"}, "fedavg and scaffold do not go together"),
        ({"algorithm__name": "fedntd+fedntd"}, "has fedntd twice"),
        ({"algorithm__name": "fedavg+sva"}, "unknown algorithm 'sva'.*Did you mean 'swa'"),
        ({"algorithm__name": "scaffold", "client__optimizer": "adam"}, "counts? on the steps of"),
        ({"client__learning_rate": float("nan")}, "learning_rate = nan: expected a number"),
        ({"client__optimizer": "adm"}, "unknown client optimizer 'adm'.*Did you mean 'adam'"),
        ({"client__optimizer": "adam", "client__options": "b3=1"}, "has no option 'b3'"),
        ({"client__optimizer": "adam", "client__options": "b1=x"}, "expected NAME=NUMBER"),
        ({"task__name": "clasification"}, "Did you mean 'classification'"),
        ({"data__validation": 1.0}, "less than 1"),
        ({"eval__splits": ("validation",)}, "there is none. Hold a share"),
        ({"data__validation": 0.001}, "holds out no example"),
        ({"imports": ("nowhere.py",)}, "no such file"),
        ({"client__optimizer": "lbfgs"}, "unknown client optimizer 'lbfgs'"),
        ({"model__name": "resnet20", "model__norm": "batch", "model__groups": 4},
         "model.groups = 4 would change nothing: it is of GroupNorm"),
        ({"seed": 2**40}, "seed = 1099511627776: expected less than"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.build(small_config(**settings))


def test_settings_of_one_name_with_other_defaults():
    """config.model.width is None until it is set, and stands for the chosen model's own."""
    import flax.linen as nn

    class Wide(nn.Module):
        num_classes: int
        width: int

        @nn.compact
        def __call__(self, x, *, train=False):
            del train
            x = ff.models.layers.Dense(self.width)(x.reshape(x.shape[0], -1))
            return ff.models.layers.Dense(self.num_classes, name="classifier")(x)

    ff.register.model("wide_a", Wide, width=3)
    ff.register.model("wide_b", Wide, width=7)
    try:
        assert ff.default_config().model.width is None
        config = small_config(model__name="wide_b")
        assert ff.build(config).init().server.model.params["Dense_0"]["bias"].shape == (7,)
        assert json.loads(config_lib.to_json(config))["model"]["width"] == 7
        config = small_config(model__name="wide_a", model__width=5)
        assert ff.build(config).init().server.model.params["Dense_0"]["bias"].shape == (5,)
        ff.validate(small_config())
    finally:
        ff.models.MODELS.remove("wide_a")
        ff.models.MODELS.remove("wide_b")


def test_every_default_is_in_its_own_range_and_says_so():
    for name, setting in config_lib.all_settings().items():
        setting.check(name, setting.default)
        assert setting.range
    assert Setting(0.5, at_least=0, below=1).range == "0 <= x < 1"
    assert Setting(1, choices=(1, 2)).range == "1 | 2"
    assert Setting(True).range == "bool"


def test_a_method_named_for_momentum_records_it():
    config = small_config(algorithm__name="fedavgm")
    assert json.loads(config_lib.to_json(config))["server"]["momentum"] == 0.9
    again = config_lib.from_json(config_lib.to_json(config))
    assert config_lib.differences(config, again) == []


def test_the_cosine_is_part_of_the_state(tmp_path):
    """It may not begin later: the run says so, and calls no checkpoint damaged."""
    ff.train(small_config(rounds=1), tmp_path, progress=False)
    with pytest.raises(ff.UsageError, match=r"metrics\.cosine: False -> True"):
        ff.train(small_config(rounds=2, metrics__cosine=True), tmp_path, progress=False)


def test_shared_settings_are_the_same():
    method = ff.algorithms.METHODS["scaffold"]
    other = method._replace(name="mine", group="scaffold", settings={"option": Setting(1)})
    with pytest.raises(ff.UsageError, match="shares the settings of 'scaffold'"):
        ff.register.method(other)
