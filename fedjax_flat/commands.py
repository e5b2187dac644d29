"""What each command of the command line calls: flags in, importable functions called, text out.

Everything is imported when a command needs it, so that `fedjax-flat --help` need not wait for jax.
"""

import json
import logging
import os
import pathlib
import shlex
import sys
import textwrap

from fedjax_flat import disk, errors
from fedjax_flat.config_files import about, load_config, refuse_unknown, shipped, summary


def train(args, rest: list[str]) -> int:
    """Trains in a run folder, or goes on there."""
    from fedjax_flat.experiment import phase_configs, validate
    from fedjax_flat.run import distributed
    from fedjax_flat.run.branch import named
    from fedjax_flat.run.phases import train
    from fedjax_flat.run.run_folder import RunFolder

    distributed.start(args.coordinator, args.processes, args.process, timeout=args.timeout)
    if not distributed.is_primary():  # each line once
        logging.getLogger("fedjax_flat").setLevel(logging.WARNING)
    folder = RunFolder(args.run)
    begun = args.start_from is None or folder.config_file.exists()
    config = load_config(
        args.config, rest, folder if begun else named(args.start_from)[0], args.imports
    )
    if args.oll:
        _add_oll(config)
    validate(config)
    if args.fresh and distributed.is_primary() and folder.can_be_deleted():
        _confirm_deletion(folder, args.yes)
    result = train(
        config, args.run, data_dir=args.data, start_from=args.start_from, init=args.init,
        progress=not args.quiet, allow_other_kernels=args.allow_other_kernels, fresh=args.fresh,
    )
    if not distributed.is_primary():
        return 128 + result.stopped_by if result.stopped_by else 0
    done = int(result.state.round)
    if result.stopped_by:
        data = ["--data", args.data] if args.data else []
        again = errors.printable(shlex.join(["fedjax-flat", "train", "--run", args.run, *data]))
        each = phase_configs(config)[result.phase] if result.phase else config
        where = f" in phase {result.phase}" if result.phase else ""
        print(f"Stopped{where} after round {done} of {each.rounds}, saved. To go on: {again}")
        return 128 + result.stopped_by
    _print_summary(args.run, config, result)
    return 0


def _add_oll(config) -> None:
    with_oll = lambda name: name if "oll" in name.split("+") else f"{name}+oll"
    if config.phases:
        *first, last = config.phases
        name = with_oll(last.get("algorithm.name", config.algorithm.name))
        config.phases = (*first, {**last, "algorithm.name": name})
    else:
        config.algorithm.name = with_oll(config.algorithm.name)


def _print_summary(run: str, config, result) -> None:
    from fedjax_flat.experiment import phase_configs
    from fedjax_flat.report import figures, masks, pictures, tables
    from fedjax_flat.report.costs import by_phase
    from fedjax_flat.run import metrics

    if result.phase:
        config = phase_configs(config)[result.phase]
        for split in config.eval.splits:
            print(f"{by_phase([run], split)}\n")
        if any(r["split"] == "local_test" for r in result.records):
            print(f"{by_phase([run], 'local_test', 'personal')}\n")
    rows = []
    for model, split in metrics.evaluated(result.records):
        mean, deviation, count = result.score(config.eval.window, split=split, model=model)
        loss = result.score(config.eval.window, split=split, model=model, name="loss")[0]
        rows.append([model, split, tables.percent(mean, deviation), f"{loss:.4f}", str(count)])
    score = f"{metrics.written(metrics.score_name(result.records))} (%)"
    print(tables.table(["model", "split", score, "loss", "rounds averaged"], rows))
    if by_class := masks.of_records(result.records):
        print(by_class)
    if "test" in config.eval.splits:
        path = pathlib.Path(run) / "figures" / "score.png"
        curves = {pictures.label(run): [result.records]}
        print(tables.named("figure", figures.score_curves(curves, path)))
    if any("lambda_1" in r for r in result.records):
        path = pathlib.Path(run) / "figures" / "curvature.png"
        print(tables.named("figure", figures.curvature_curves(result.records, path)))
    print(tables.named("run", run))


def compare(args, rest: list[str]) -> int:
    """Runs side by side."""
    from fedjax_flat.report.compare import compare

    refuse_unknown(rest)
    target = None if args.target is None else args.target / 100
    print(compare(args.runs, args.figure, args.split, target=target, smooth=args.smooth,
                  alike=args.alike))
    return 0


def report(args, rest: list[str]) -> int:
    """A page of runs."""
    from fedjax_flat.report import tables
    from fedjax_flat.report.page import report

    refuse_unknown(rest)
    print(tables.named("report", report(args.runs, args.out, data_dir=args.data)))
    return 0


def weigh(args, rest: list[str]) -> int:
    """What an update weighs by every codec."""
    from fedjax_flat.report.weight import weigh

    refuse_unknown(rest)
    print(weigh(args.run, args.client, args.codecs, args.data))
    return 0


def costs(args, rest: list[str]) -> int:
    """What runs needed."""
    from fedjax_flat.report.costs import costs

    refuse_unknown(rest)
    print(costs(args.runs, args.target / 100, split=args.split, model=args.model))
    return 0


def data(args, rest: list[str]) -> int:
    """Who owns what."""
    from fedjax_flat.report.ownership import ownership

    if args.name:
        rest = [f"--config.data.name={args.name}", *rest]
    elif args.config is None:
        raise errors.UsageError("fedjax-flat data needs a NAME, or a config file with --config.")
    config = load_config(args.config, rest, None, args.imports)
    out = args.out or os.path.join("runs", "data", config.data.name.replace("/", "_"))
    split = args.config or any(a.startswith("--config.partition.") for a in rest)
    print(ownership(config, out, args.data, natural=not split))
    return 0


def groups(args, rest: list[str]) -> int:
    """Who trains with whom."""
    from fedjax_flat.report.client_groups import groups

    refuse_unknown(rest)
    print(groups(args.run, args.data))
    return 0


def reach(args, rest: list[str]) -> int:
    """How soon runs come near centralised training."""
    from fedjax_flat.report.client_groups import reach

    refuse_unknown(rest)
    print(reach(args.runs, args.centralised, args.figure, args.split))
    return 0


def clients(args, rest: list[str]) -> int:
    """How a model does on each client's examples."""
    from fedjax_flat.report.clients import clients

    refuse_unknown(rest)
    print(clients(args.run, args.split, args.model))
    return 0


def curvature(args, rest: list[str]) -> int:
    """Hessian eigenvalues of runs."""
    from fedjax_flat.report import analysis, tables

    refuse_unknown(rest)
    if args.clients:
        idle = ("top", "method", "trace", "density", "float64", "split", "model", "client", "seed")
        _refuse_unused(args, idle, "--clients measures lambda_1 of local models")
        for run in args.runs:
            rows = analysis.local_curvature(
                run, args.clients, examples=args.examples, data_dir=args.data
            )
            print(tables.of_records(rows))
        return 0
    _refuse_model_of_client(args)
    found = [
        analysis.spectrum(
            run, top=args.top, split=args.split, examples=args.examples, model=args.model,
            client=args.client, method=args.method,
            precision="float64" if args.float64 else "float32", trace_probes=args.trace,
            density_probes=args.density, data_dir=args.data, seed=args.seed,
        )
        for run in args.runs
    ]
    if len(found) == 1:
        print(tables.of_records([{"": k, "value": v} for k, v in found[0].items()], left=(0, 1)))
    else:
        names = ("run", "model", "round", "loss", "lambda_1", "lambda_5", "lambda_1/lambda_5",
                 "converged", "trace")
        print(tables.of_records([{k: s[k] for k in names if k in s} for s in found]))
    return 0


def landscape(args, rest: list[str]) -> int:
    """Surfaces, planes and lines of the loss."""
    from fedjax_flat.report import analysis, tables

    refuse_unknown(rest)
    if not args.surface:
        kind = "--plane" if args.plane else "--line"
        _refuse_unused(args, ("radius", "seed", "client"), f"it is of --surface, not of {kind}")
    _refuse_model_of_client(args)
    common = {
        "points": args.points, "split": args.split, "examples": args.examples,
        "model": args.model, "data_dir": args.data,
    }
    if args.surface:
        made = analysis.surfaces(
            args.runs, radius=args.radius, seed=args.seed, client=args.client, **common
        )
    elif args.plane:
        made = analysis.plane(args.runs, **common)
    else:
        barrier, made = analysis.line(args.runs, **common)
        print(f"barrier: {barrier:.6g}")
    for path in made:
        print(tables.named("figure", path))
    return 0


def probe(args, rest: list[str]) -> int:
    """What features are worth."""
    from fedjax_flat.report import tables
    from fedjax_flat.report.probe import probe

    refuse_unknown(rest)
    rows = [
        probe(run, ridge=args.ridge, random=args.random, sigma=args.sigma, model=args.model,
              data_dir=args.data)
        for run in args.runs
    ]
    print(tables.of_records(rows))
    return 0


def temperature(args, rest: list[str]) -> int:
    """The temperature of a classifier."""
    from fedjax_flat.report import tables
    from fedjax_flat.report.temperature import GRID, temperature

    refuse_unknown(rest)
    losses, figure = temperature(args.run, args.tau or GRID, data_dir=args.data)
    print(tables.of_records([{"temperature": t, "train loss": x} for t, x in losses.items()]))
    best = min(losses, key=lambda tau: losses[tau])
    print(f"lowest: --config.task.temperature={best:g}")
    print(f"figure: {figure}")
    return 0


def sweep(args, rest: list[str]) -> int:
    """Runs the cells of a sweep, and shows its table."""
    from fedjax_flat.sweep import book, driver, plan, results
    from fedjax_flat.sweep.engines import ENGINES

    refuse_unknown(rest)
    name, _, address = args.engine.partition("=")
    make = errors.lookup("engine", name, ENGINES)
    errors.at_least("--workers", args.workers, 0)
    asked = plan.load(args.file)
    results.check_choice(plan.cells(asked), asked.choose_by, bool(asked.tune))
    kept = book.Book(disk.folder("folder of a sweep", args.run))
    outcome = driver.run(
        asked, kept, lambda: make(kept, args.data, args.workers, address),
        show=None if args.quiet else driver.Screen(),
    )
    for cell, why in outcome.failed.items():
        print(f"failed: {cell}: {errors.printable(why)}; all it said is in "
              f"{kept.path(cell, 'log')}", file=sys.stderr)
    print(results.table(results.results(kept)))
    return 1 if outcome.failed else 0


def table(args, rest: list[str]) -> int:
    """The table of a sweep."""
    from fedjax_flat.sweep import book, results

    refuse_unknown(rest)
    found = results.results(book.Book(disk.folder("folder of a sweep", args.sweep)), args.split)
    print(results.table(found, args.form))
    return 0


def recover(args, rest: list[str]) -> int:
    """What a client could recover of the others' images."""
    from fedjax_flat.report import tables
    from fedjax_flat.report.recovery import recovery

    refuse_unknown(rest)
    found = [
        recovery(run, by=args.by, client=args.client, steps=args.steps, count=args.count,
                 guided=args.guided, train=args.train, model=args.model, data_dir=args.data)
        for run in args.runs
    ]
    names = ("run", "model", "round", "client", "frechet", "frechet_of_others", "network")
    print(tables.of_records([{name: one[name] for name in names} for one in found]))
    for one in found:
        print(tables.named("figure", one["figure"]))
    return 0


def robustness(args, rest: list[str]) -> int:
    """Accuracy under corruptions."""
    from fedjax_flat.data.corruptions import CORRUPTIONS
    from fedjax_flat.report import tables
    from fedjax_flat.report.robustness import robustness, table

    refuse_unknown(rest)
    result = robustness(
        args.runs, severity=args.severity, corruptions=args.corruptions or tuple(CORRUPTIONS),
        examples=args.examples, model=args.model, data_dir=args.data, cache=args.cache,
    )
    print(table(result))
    print(tables.named("figure", result["figure"]))
    return 0


def masks(args, rest: list[str]) -> int:
    """What a segmentation model sees."""
    from fedjax_flat.report import tables
    from fedjax_flat.report.masks import masks, table

    refuse_unknown(rest)
    result = masks(args.run, split=args.split, model=args.model, examples=args.examples,
                   data_dir=args.data)
    print(table(result))
    for path in result["figures"]:
        print(tables.named("figure", path))
    return 0


def retrieve(args, rest: list[str]) -> int:
    """What a search finds."""
    from fedjax_flat.report import tables
    from fedjax_flat.report.retrieval import retrieve, table

    refuse_unknown(rest)
    result = retrieve(args.runs, queries=args.queries, model=args.model, data_dir=args.data)
    print(table(result))
    for path in result["figures"]:
        print(tables.named("figure", path))
    return 0


def export(args, rest: list[str]) -> int:
    """A model as a file."""
    from fedjax_flat.report import tables
    from fedjax_flat.run.export import export

    refuse_unknown(rest)
    path = export(args.run, args.to, args.out, model=args.model, round=args.round,
                  data_dir=args.data)
    print(tables.named("weights", path))
    return 0


def verify(args, rest: list[str]) -> int:
    """Rounds again, and whether the bits agree."""
    from fedjax_flat.run.verify import verify

    refuse_unknown(rest)
    found = verify(args.run, start=args.start, rounds=args.rounds, data_dir=args.data,
                   show=not args.quiet)
    print("\n".join(map(errors.printable, found.lines())))
    return 0 if found.same else 1


def plan(args, rest: list[str]) -> int:
    """What an experiment's round needs on TPUs that are not here."""
    from fedjax_flat import runtime

    runtime.compile_for_absent_tpus()
    from fedjax_flat.report import plan

    config = load_config(args.config, rest, None, args.imports)
    print(plan.page(plan.plan(config, args.target, args.data)))
    return 0


def configs(args, rest: list[str]) -> int:
    """The config files of the package, or all about one."""
    from fedjax_flat.report import tables

    refuse_unknown(rest)
    kinds = {"": shipped(), "sweeps": shipped("sweeps")}
    if args.name:
        every = {f"{kind}/{name}".strip("/"): path
                 for kind, found in kinds.items() for name, path in found.items()}
        path = errors.lookup("config", args.name, every)
        print(f"{about(path)}\n\n{tables.named('file', path)}")
        return 0
    for kind, found in kinds.items():
        rows = [[name, textwrap.shorten(summary(path), 70, placeholder=" ...")]
                for name, path in found.items()]
        header = ["fedjax-flat sweep NAME" if kind else "--config NAME[:OPTIONS]", "what it is"]
        print(tables.table(header, rows, left=(0, 1)) + "\n")
    print("`fedjax-flat configs NAME` (sweeps/NAME) says what options each has.")
    return 0


def completion(args, rest: list[str], parser) -> int:
    """What a shell needs to complete our commands."""
    from fedjax_flat.completion import script

    refuse_unknown(rest)
    print(script(parser, args.shell))
    return 0


def algorithms(args, rest: list[str]) -> int:
    """Every method, or all about one."""
    from fedjax_flat import plugins
    from fedjax_flat.algorithms import METHODS
    from fedjax_flat.report import methods

    refuse_unknown(rest)
    for file in args.imports:
        plugins.load(file)
    if args.name:
        METHODS.find(args.name)
    if args.json:
        names = [args.name] if args.name else METHODS
        print(json.dumps([methods.describe(name) for name in names], indent=2))
    else:
        print(methods.page(args.name) if args.name else methods.overview())
    return 0


def datasets(args, rest: list[str]) -> int:
    """Every data set there is."""
    from fedjax_flat import plugins
    from fedjax_flat.data import data_folder
    from fedjax_flat.report import datasets

    refuse_unknown(rest)
    for file in args.imports:
        plugins.load(file)
    folder = data_folder(args.data)
    if args.json:
        print(json.dumps([datasets.describe(name, folder) for name in datasets.names()], indent=2))
    else:
        print(datasets.overview(folder))
    return 0


def prepare(args, rest: list[str]) -> int:
    """A data set of tensorflow-datasets, made ready to be read."""
    from fedjax_flat.data import data_folder
    from fedjax_flat.data.sources import tfds_folder
    from fedjax_flat.report import tables

    refuse_unknown(rest)
    kind, _, argument = args.name.partition(":")
    if kind != "tfds":
        raise errors.UsageError(
            f"{args.name} is not prepared: expected tfds:NAME, e.g. tfds:mnist. `fedjax-flat "
            "datasets` says what the others need."
        )
    print(tables.named("prepared", tfds_folder.prepare(argument, data_folder(args.data))))
    return 0


def demo(args, rest: list[str]) -> int:
    """Trains on embedded data and shows what comes out."""
    from fedjax_flat.demo import demo

    refuse_unknown(rest)
    stopped_by = demo(args.run, rounds=args.rounds, progress=not args.quiet)
    return 128 + stopped_by if stopped_by else 0


def _refuse_unused(args, names, why: str) -> None:
    """Raises for the first flag that was given and has no effect."""
    for name in names:
        value = getattr(args, name)
        if value != args.default_of(name):
            shown = "" if value is True else f" {value}"
            raise errors.UsageError(f"--{name}{shown} would change nothing: {why}. Leave it out.")


def _refuse_model_of_client(args) -> None:
    if args.client is not None:
        _refuse_unused(args, ("model",), "a client makes its model of the global one")


def _confirm_deletion(folder, yes: bool) -> None:
    what = f"--fresh would delete {folder.path}: {folder.contents()}."
    if yes:
        print(f"Deleting {errors.printable(str(folder.path))}: {folder.contents()}.")
    elif not sys.stdin.isatty():
        raise errors.UsageError(f"{what} Nothing was deleted; add --yes to do it.")
    elif input(f"{errors.printable(what)} Delete it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise errors.UsageError("nothing was deleted.")
