"""The report page, and the names and numbers that it shares with `compare` and the figures."""

import html
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
import run_folders

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.config_files import load_config
from fedjax_flat.landscape import Grid
from fedjax_flat.report import charts, client_groups, curves, groups, pictures
from fedjax_flat.report.page import report
from fedjax_flat.run import metrics

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), "")
EVIL = "<script>alert(1)<"  # and then /script>


def grouped(*paths):
    return groups.grouped([groups.read(path) for path in paths])


class TestGroups:
    def test_seeds_are_one_and_called_by_what_their_folders_share(self, tmp_path):
        runs = [
            run_folders.write(tmp_path / name, settings={"seed": seed, "client__epochs": epochs})
            for epochs, names in ((1, ("avg/seed0", "avg/seed1")), (2, ("two_10", "two_11")))
            for seed, name in enumerate(names)
        ]
        found = grouped(*runs)
        assert [g.label for g in found] == ["avg", "two"]
        assert [[r.path for r in g.runs] for g in found] == [runs[:2], runs[2:]]

    def test_the_mean_is_over_seeds_and_so_is_the_deviation(self, tmp_path):
        runs = [run_folders.write(tmp_path / f"a{s}", settings={"seed": s}) for s in (0, 1)]
        (group,) = grouped(*runs)
        own = [metrics.window_mean(metrics.read(f"{run}/metrics.jsonl"), 2)[0] for run in runs]
        mean, deviation, count = group.window_mean()
        assert mean == pytest.approx(sum(own) / 2)
        assert deviation == pytest.approx(abs(own[0] - own[1]) / 2)
        assert count == 2

    def test_one_name_twice_is_told_by_its_path_and_one_seed_twice_is_two_runs(self, tmp_path):
        a, b = (run_folders.write(tmp_path / x / "seed0") for x in "ab")
        assert [g.label for g in grouped(a, b, a)] == ["a/seed0", "b/seed0"]

    def test_other_lengths_are_other_runs_but_not_what_only_looks(self, tmp_path):
        settings = [{"seed": 0}, {"seed": 1, "checkpoint__every": 5}, {"seed": 2}]
        runs = [run_folders.write(tmp_path / f"r{i}", rounds=12 if i < 2 else 15, settings=s)
                for i, s in enumerate(settings)]
        assert [len(g.runs) for g in grouped(*runs)] == [2, 1]

    def test_names_that_would_be_the_same_say_what_differs(self, tmp_path):
        runs = [
            run_folders.write(tmp_path / part / f"x_{seed}", settings={
                "seed": seed, "client__learning_rate": rate})
            for part, rate in (("p", 0.1), ("q", 0.2)) for seed in (0, 1)
        ]
        assert [g.label for g in grouped(*runs)] == ["learning_rate 0.1", "learning_rate 0.2"]

    def test_defaults_are_in_no_name(self, tmp_path):
        """FedASAM has a radius, an eta and a warm-up that FedAvg has not."""
        runs = [
            run_folders.write(tmp_path / part / f"x_{seed}", settings={
                "seed": seed, "algorithm__name": name, **more})
            for part, name, more in (
                ("p", "fedavg", {}), ("q", "fedasam", {}), ("r", "fedasam", {"client__rho": 0.7}))
            for seed in (0, 1)
        ]
        assert [g.label for g in grouped(*runs)] == ["fedavg", "fedasam", "fedasam, rho 0.7"]


class TestNumbers:
    def test_the_untrained_model_is_in_no_mean(self):
        found = [{"round": t, "split": "test", "model": "global", "loss": 1.0, "accuracy": a}
                 for t, a in enumerate((0.0, 0.3, 0.5, 0.4))]
        mean, _, count = metrics.window_mean(found, 20)
        assert (mean, count) == (pytest.approx(0.4), 3)

    def test_what_was_spent_up_to_a_round(self):
        found = [{"round": t, "split": "cohort", "model": "local", "bytes_down": 3, "bytes_up": 4,
                  "examples": 10, "examples_per_s": 5.0} for t in (1, 2)]
        assert metrics.running(found, "bytes") == {0: 0, 1: 7, 2: 14}
        assert metrics.running(found, "wall") == {0: 0, 1: 2, 2: 4}
        assert metrics.running(found, "seconds") == {}

    @pytest.mark.parametrize(("rounds", "ends", "kept"), [
        ([0, 5, 10, 15, 16, 17, 18], [], [0, 5, 10, 15, 18]),
        ([0, 1, 2, 3], [], [0, 1, 2, 3]),
        ([0, 1, 2, 3, 13, 23, 24, 25], [3, 25], [0, 1, 2, 3, 13, 23, 25]),  # two phases
        ([7], [], [7]),
        ([], [], []),
    ])
    def test_curves_have_one_density(self, rounds, ends, kept):
        rounds = np.array(rounds, int)
        assert rounds[curves.even(rounds, ends)].tolist() == kept

    def test_a_model_that_begins_late_has_the_density_of_the_others(self):
        record = lambda t, model: {"round": t, "split": "test", "model": model, "loss": 1.0,
                                   "accuracy": 0.5}
        found = [record(t, "global") for t in (0, 5, 10, 15, 16, 17, 18)]
        found += [record(t, "swa") for t in (15, 16, 17, 18)]
        rounds, _, _ = curves.mean_curve([found], split="test", model="swa")
        assert rounds.tolist() == [15, 18]

    def test_thinned_curves_keep_their_ends_and_extremes(self):
        values = np.sin(np.arange(10_000) / 300)
        values[4321], values[8765] = 9, -9
        values[:3], values[-3:] = (0.1, 1, -1), (1, -1, 0.1)  # the ends are no extremes
        chosen = curves.thin(values)
        assert len(chosen) <= curves.MOST
        assert {0, 9999, 4321, 8765} <= set(chosen.tolist())
        assert (np.diff(chosen) > 0).all()

    def test_compare_has_a_row_for_all_seeds(self, tmp_path, capsys):
        runs = [run_folders.write(tmp_path / f"a/seed{s}", settings={"seed": s}) for s in (0, 1)]
        one = run_folders.write(tmp_path / "b", settings={"client__epochs": 2})
        assert cli.main(["compare", *runs, one, "--figure", str(tmp_path / "c.pdf")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:3] for line in lines[2:4]] == [["a", "global", "2"],
                                                            ["b", "global", "1"]]
        assert "± over seeds" in lines[4]
        assert (tmp_path / "c.pdf").read_bytes().startswith(b"%PDF")

    def test_reach_tells_runs_of_one_name_apart_and_has_a_row_for_all_seeds(self, tmp_path):
        seeds = [run_folders.write(tmp_path / f"x/seed{s}", settings={"seed": s}) for s in (0, 1)]
        other = run_folders.write(tmp_path / "y/seed0", settings={"client__epochs": 2}, level=0.4)
        text = client_groups.reach([*seeds, other], 80, str(tmp_path / "r.svg"))
        first, second = (line.split() for line in text.splitlines()[2:4])
        own = [metrics.rounds_to(metrics.read(f"{run}/metrics.jsonl"), 0.7 * 0.8) for run in seeds]
        assert first[:2] == ["x", f"{np.mean(own):.0f}"]
        assert second == ["y/seed0", "-", "-", "-", "-"]
        picture = (tmp_path / "r.svg").read_text()
        assert ">x<" in picture
        assert ">y/seed0<" in picture

    def test_figures_as_functions_and_in_other_formats(self, tmp_path, monkeypatch):
        run = run_folders.write(tmp_path / "a", clock=3.0)
        monkeypatch.setenv("FEDJAX_FLAT_FIGURES", "pdf, png")
        made = ff.plot.compare([run], tmp_path / "curves.svg")
        text = made.read_text()
        assert "simulated seconds" in text, "text stays text"
        assert {p.suffix for p in tmp_path.glob("curves.*")} == {".svg", ".pdf", ".png"}
        monkeypatch.setenv("FEDJAX_FLAT_FIGURES", "pfd")
        with pytest.raises(ff.UsageError, match=r"FEDJAX_FLAT_FIGURES=pfd: .pfd is no format"):
            ff.plot.compare([run], tmp_path / "again.svg")

    def test_surfaces_have_one_scale_and_say_what_is_cut_off(self, tmp_path):
        x = np.linspace(-1, 1, 5)
        low, high = (height * (x[:, None] ** 2 + x**2) for height in (1, 3))
        assert pictures.scale_of([low, high]) == (0, 6, "")
        walls = low.copy()
        walls[0, 0] = 90
        assert pictures.scale_of([low, walls]).said.endswith("the highest is 90.")
        made = ff.plot.surface({"a": Grid(x, x, low, low), "b": Grid(x, x, walls, walls)},
                               tmp_path / "s.svg")
        assert made.read_text().count("Cut off at a loss of") == 1

    def test_numbers_of_charts(self):
        assert charts.numbers([1 / 3, np.nan, np.inf]) == [0.33333, None, None]
        assert charts.numbers(np.array([123456789])) == [123456789]
        assert len({charts.color(i) for i in range(20)}) == 20


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two seeds of one run, a run of a hostile name with analyses, and one of another task."""
    folder = tmp_path_factory.mktemp("page")
    seeds = [run_folders.write(folder / f"avg_{s}", settings={"seed": s}) for s in (0, 1)]
    evil = run_folders.write(folder / EVIL / "script>", clock=2.5,
                             settings={"client__epochs": 2, "clock__speed": "constant(1)"})
    twin = run_folders.write(folder / "twin" / "script>", settings={"client__epochs": 3})
    run_folders.write_analyses(evil, others=(seeds[0], twin))
    other = run_folders.write(folder / "masks", score="miou", more=("iou.road", "iou.sky"))
    (pathlib.Path(other) / "masks").mkdir()
    (pathlib.Path(other) / "masks" / "test.png").write_bytes(b"\x89PNG....")
    return report([*seeds, evil, twin, other], folder / "report.html")


class TestPage:
    def test_everything_is_in_the_file(self, page):
        text = page.read_text()
        assert page.stat().st_size < 8e6
        ours = re.sub(r"<script>/\*\*\n\* plotly.js.*?</script>", "", text, flags=re.DOTALL)
        assert len(ours) < 1e6
        assert not re.search(r"""(src|href)\s*=\s*["'](?!data:|\#)""", ours)
        assert "http" not in ours.replace("http-equiv", "")
        assert "default-src 'none'" in ours

    def test_names_are_text(self, page):
        text = page.read_text()
        assert "<script>alert(1)" not in text
        assert html.escape(f"{EVIL}/script>") in text, "the label of one of two folders 'script>'"
        drawn = re.search(r'id="drawn">(.*?)</script>', text, re.DOTALL)[1]
        assert "<" not in drawn
        assert any(trace.get("name") == html.escape(f"{EVIL}/script>", quote=False)
                   for chart in json.loads(drawn) for trace in chart["data"])

    def test_what_is_there_is_shown(self, page):
        text = html.unescape(page.read_text())
        for said in (
            "2 seeds", "cannot be compared", "Accuracy by simulated time", "The worst client",
            "Client drift", "Who owns what", "Largest Hessian eigenvalues", "Spectral density",
            "Loss on the plane through", "Cut off at a loss of", "IoU by class", "masks/test.png",
            "fedjax-flat train --config", "fedjax-flat train --run X", "never with the untrained",
            "mIoU, test examples",
        ):
            assert said in text, said

    def test_a_band_is_over_seeds(self, page):
        drawn = re.search(r'id="drawn">(.*?)</script>', page.read_text(), re.DOTALL)[1]
        first = json.loads(drawn)[0]["data"]
        assert [trace.get("fill") for trace in first[:3]] == ["toself", None, None]
        band, mean = first[0]["y"], first[1]["y"]
        assert all(low < m < high for high, m, low in zip(band, mean, band[::-1], strict=False))

    @pytest.mark.parametrize(("arguments", "message"), [
        ("nowhere --out r.html", "nowhere is not a run folder: it has no config.json"),
        ("RUN --out r.pdf", "--out r.pdf: expected a name that ends in .html"),
        ("RUN --out FOLDER.html", "is a folder: expected the name of a file"),
        ("RUN --outt r.html", "the following arguments are required: --out"),
    ])
    def test_wrong_inputs(self, tmp_path, capsys, monkeypatch, arguments, message):
        monkeypatch.chdir(tmp_path)
        run_folders.write("RUN")
        (tmp_path / "FOLDER.html").mkdir()
        try:
            code = cli.main(["report", *arguments.split()])
        except SystemExit as e:  # argparse
            code = e.code
        assert code == cli.EXIT_USAGE
        assert message in capsys.readouterr().err

    def test_a_run_without_rounds_and_one_without_a_record(self, tmp_path):
        untrained = run_folders.write(tmp_path / "untrained", rounds=0, clients=False)
        empty = run_folders.write(tmp_path / "empty", settings={"client__epochs": 2})
        (pathlib.Path(empty) / "metrics.jsonl").unlink()
        text = report([untrained, empty], tmp_path / "r.html").read_text()
        assert "No run here has a trained round" in text


def test_a_run_is_repeated_by_its_folder(tmp_path):
    run = run_folders.write(tmp_path / "a", settings={"client__learning_rate": 0.03, "seed": 4})
    config = load_config(run, ["--config.rounds=5"], None)
    assert (config.client.learning_rate, config.seed, config.rounds) == (0.03, 4, 5)


def browse(page, *flags):
    if not BROWSER:
        pytest.skip("there is no browser here: install chromium")
    command = [BROWSER, "--headless", "--no-sandbox", f"--user-data-dir={page.parent / 'profile'}",
               *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=True).stdout


def test_in_a_browser(page):
    """Charts are drawn, nothing that was named runs, and nothing is asked of a network."""
    shown = browse(page, "--window-size=1200,16000", "--virtual-time-budget=20000")
    charts_there = shown.count('class="chart')
    assert charts_there > 20
    assert shown.count("js-plotly-plot") >= charts_there
    assert re.search(r'data-ready="\d+"', shown)
    assert "<script>alert(1)" not in shown
    assert shown.count("main-svg") >= charts_there


@pytest.mark.slow
def test_twenty_long_runs(tmp_path):
    """Thinned, the page stays small, and a browser opens it."""
    runs = [run_folders.write(tmp_path / f"run{i}x", rounds=10_000, every=10, clients=i < 3,
                              settings={"client__learning_rate": 0.01 * (i + 1)})
            for i in range(20)]
    page = report(runs, tmp_path / "report.html")
    assert page.stat().st_size < 8e6
    shown = browse(page, "--window-size=1200,900")
    print("milliseconds until it is drawn:", re.search(r'data-ready="(\d+)"', shown)[1])
