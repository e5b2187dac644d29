"""The command line: flags in, importable functions called. Nothing is computed here."""

import argparse
import json
import logging
import os
import pathlib
import runpy
import shlex
import signal
import sys
import warnings

from fedjax_flat import errors
from fedjax_flat.version import __version__

EXIT_USAGE, EXIT_DIVERGED = 2, 3


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args, rest = _parser().parse_known_args(argv)
    warnings.showwarning = _show_warning
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("fedjax_flat").setLevel(
        logging.WARNING if getattr(args, "quiet", False) else logging.INFO
    )
    try:
        return args.call(args, rest)
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on where it was.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, `head` perhaps, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except errors.DivergedError as e:
        print(f"fedjax-flat: {e}", file=sys.stderr)
        return EXIT_DIVERGED
    except errors.UsageError as e:
        print(f"fedjax-flat: {e}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedjax-flat",
        description="Flat minima in federated learning.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    train = commands.add_parser(
        "train",
        help="train an experiment, or go on with one",
        description="Trains the experiment of a config file in a run folder. The same command "
        "again resumes; a larger rounds continues.",
        epilog="examples: fedjax-flat train --config configs/digits_fedavg.py "
        "--config.rounds=50 --run runs/a; fedjax-flat train --run runs/a  (goes on)",
        allow_abbrev=False,
    )
    train.add_argument("--run", required=True, help="run folder; made if it does not exist")
    train.add_argument(
        "--config",
        metavar="FILE",
        help="config file (default: the one of the run folder); --config.NAME=VALUE overrides",
    )
    train.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="FILE",
        help="Python file that registers a source, partition, model, task or method; it is run. "
        "The run folder remembers it",
    )
    train.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA); `fedjax-flat "
                       "datasets` says what to put there")
    train.add_argument("--fresh", action="store_true", help="delete the run in the folder first")
    train.add_argument("--yes", action="store_true", help="with --fresh: do not ask, delete")
    train.add_argument("--coordinator", metavar="HOST:PORT", help="several processes: where they "
                       "meet, or auto (default: $JAX_COORDINATOR_ADDRESS)")
    train.add_argument("--processes", type=int, help="how many (default: $JAX_NUM_PROCESSES)")
    train.add_argument("--process", type=int, help="which one this is (default: $JAX_PROCESS_ID)")
    train.add_argument("--timeout", type=int, default=60, help="seconds to wait for the others")
    train.add_argument("--allow-other-kernels", action="store_true", help="go on with a run that "
                       "was begun with other convolutions; its bits will differ")
    train.add_argument("--quiet", action="store_true", help="no progress bar")
    train.set_defaults(call=_train)

    compare = commands.add_parser(
        "compare",
        help="accuracies of run folders, rounds and communication to the first one's",
    )
    compare.add_argument("runs", nargs="+", metavar="RUN")
    compare.add_argument("--split", default="test", help="test (default), or another that was "
                         "evaluated: validation, train; own for personal models")
    compare.add_argument("--figure", metavar="FILE", help="draw their curves")
    compare.add_argument("--target", type=float, metavar="PERCENT", help="score to reach (default: "
                         "the first run's over its last rounds)")
    compare.add_argument("--smooth", type=float, default=0.0, metavar="DECAY",
                         help="smooth the curves first: s = DECAY s + (1 - DECAY) a, e.g. 0.9")
    compare.set_defaults(call=_compare)

    data = commands.add_parser(
        "data",
        help="who owns what: classes, sizes and examples of every client",
        description="Prints and draws a data set's clients; --config.partition.NAME=VALUE says how "
        "it is split, --config FILE takes all from a config file.",
        epilog="example: fedjax-flat data cifar10 --config.partition.alpha=0.05 "
        "--config.partition.clients=100",
        allow_abbrev=False,
    )
    data.add_argument("name", nargs="?", metavar="NAME", help="of `fedjax-flat datasets`")
    data.add_argument("--config", metavar="FILE", help="config file; its data and its partition")
    data.add_argument("--import", dest="imports", action="append", default=[], metavar="FILE",
                      help="Python file that registers a source or a partition; it is run")
    data.add_argument("--data", help="folder of the data (default: $FEDJAX_FLAT_DATA)")
    data.add_argument("--out", help="folder for the figures (default: runs/data/NAME)")
    data.set_defaults(call=_data)

    clients = commands.add_parser(
        "clients", help="how a model does on each client's examples along the rounds"
    )
    clients.add_argument("run", metavar="RUN", help="trained with --config.eval.clients=True")
    clients.add_argument("--split", default="own", help="own (default: what clients train on) or "
                         "local_test")
    clients.add_argument("--model", default="global", help="global (default), swa, wima, personal")
    clients.set_defaults(call=_clients)

    curvature = commands.add_parser("curvature", help="Hessian eigenvalues of trained models")
    curvature.add_argument("runs", nargs="+", metavar="RUN")
    curvature.add_argument("--top", type=int, default=5, help="how many eigenvalues (default 5)")
    curvature.add_argument("--method", default="lanczos", help="lanczos (default) | power")
    curvature.add_argument("--trace", type=int, default=0, metavar="PROBES", help="trace as well")
    curvature.add_argument("--density", type=int, default=0, metavar="PROBES", help="density too")
    curvature.add_argument("--float64", action="store_true", help="in double precision")
    curvature.add_argument("--clients", type=int, default=0, metavar="N",
                           help="instead: lambda_1 of the first N clients' local models, on their "
                           "own and on all data; -1: all")
    curvature.set_defaults(call=_curvature)

    landscape = commands.add_parser("landscape", help="surfaces, planes and lines of the loss")
    landscape.add_argument("runs", nargs="+", metavar="RUN")
    kind = landscape.add_mutually_exclusive_group(required=True)
    kind.add_argument("--surface", action="store_true", help="around each model, same directions")
    kind.add_argument("--plane", action="store_true", help="through three models; more: projected")
    kind.add_argument("--line", action="store_true", help="between two models, with the barrier")
    landscape.add_argument("--points", type=int, default=21, help="per axis (default 21)")
    landscape.add_argument("--radius", type=float, default=1.0, help="of a surface (default 1)")
    landscape.set_defaults(call=_landscape)
    for parser_ in (curvature, landscape):
        parser_.add_argument("--split", default="train", help="train (default) or another split")
        parser_.add_argument("--examples", type=int, default=0, help="the first N (default: all)")
        parser_.add_argument("--model", default="global", help="global (default), swa or wima")
        parser_.add_argument("--client", type=int, metavar="K", help="the model that client K "
                             "makes of the global one; its own data are split own")
        parser_.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
        parser_.add_argument("--seed", type=int, default=0)

    robustness = commands.add_parser(
        "robustness", help="accuracy on the corrupted test images of CIFAR-10-C and CIFAR-100-C"
    )
    robustness.add_argument("runs", nargs="+", metavar="RUN")
    robustness.add_argument("--severity", type=int, default=5, help="1 to 5 (default 5)")
    robustness.add_argument("--corruption", dest="corruptions", action="append", metavar="NAME",
                            help="only this one, or these (default: all 19)")
    robustness.add_argument("--examples", type=int, default=0, help="the first N (default: all)")
    robustness.add_argument("--model", default="global", help="global (default), swa or wima")
    robustness.add_argument("--data", help="folder of the CIFAR files, and of CIFAR-10-C/ if it is "
                            "there; else its images are made")
    robustness.add_argument("--cache", metavar="FOLDER", help="where made images are kept "
                            "(default: in the data folder)")
    robustness.set_defaults(call=_robustness)

    algorithms = commands.add_parser(
        "algorithms", help="list every method: its paper, what it sends, keeps and computes"
    )
    algorithms.add_argument("name", nargs="?", metavar="NAME", help="all about one method: paper, "
                            "equations, settings with ranges, traffic and state")
    algorithms.add_argument("--import", dest="imports", action="append", default=[],
                            metavar="FILE", help="Python file that registers methods; it is run")
    algorithms.add_argument("--json", action="store_true", help="the same as data")
    algorithms.set_defaults(call=_algorithms)

    datasets = commands.add_parser(
        "datasets", help="list every data set: what it is, its licence, what to put where"
    )
    datasets.add_argument("--data", help="data folder to look into (default: $FEDJAX_FLAT_DATA)")
    datasets.add_argument("--import", dest="imports", action="append", default=[],
                          metavar="FILE", help="Python file that registers sources; it is run")
    datasets.add_argument("--json", action="store_true", help="the same as data")
    datasets.set_defaults(call=_datasets)

    prepare = commands.add_parser(
        "prepare", help="download and prepare a data set of tensorflow-datasets (needs TensorFlow)"
    )
    prepare.add_argument("name", metavar="tfds:NAME", help="as data.name: tfds:NAME[/CONFIG]")
    prepare.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA); files "
                         "downloaded by hand are taken from its folder NAME")
    prepare.set_defaults(call=_prepare)

    demo = commands.add_parser("demo", help="train on embedded data and show what comes out")
    demo.add_argument("--run", default="runs/demo", help="folder for the demo's runs")
    demo.add_argument("--rounds", type=int, default=300)
    demo.add_argument("--quiet", action="store_true", help="no progress bar")
    demo.set_defaults(call=_demo)
    return parser


def _train(args, rest: list[str]) -> int:
    from fedjax_flat.experiment import validate
    from fedjax_flat.run import distributed
    from fedjax_flat.run.loop import train
    from fedjax_flat.run.run_folder import RunFolder

    distributed.start(args.coordinator, args.processes, args.process, timeout=args.timeout)
    folder = RunFolder(args.run)
    config = load_config(args.config, rest, folder, args.imports)
    validate(config)
    if args.fresh and folder.path.exists() and distributed.is_primary():
        _confirm_deletion(folder, args.yes)
        folder.delete()
    result = train(
        config, args.run, data_dir=args.data, progress=not args.quiet,
        allow_other_kernels=args.allow_other_kernels,
    )
    if not distributed.is_primary():
        return 128 + result.stopped_by if result.stopped_by else 0
    done = int(result.state.round)
    if result.stopped_by:
        again = shlex.join(["fedjax-flat", "train", "--run", args.run])
        print(f"Stopped after round {done} of {config.rounds}, saved. To go on: {again}")
        return 128 + result.stopped_by
    _print_summary(args.run, config, result)
    return 0


def _print_summary(run: str, config, result) -> None:
    from fedjax_flat.report import figures, tables
    from fedjax_flat.run import metrics

    rows = []
    for model, split in metrics.evaluated(result.records):
        mean, deviation, count = result.score(config.eval.window, split=split, model=model)
        loss = result.score(config.eval.window, split=split, model=model, name="loss")[0]
        rows.append([model, split, tables.percent(mean, deviation), f"{loss:.4f}", str(count)])
    score = f"{metrics.score_name(result.records)} (%)"
    print(tables.table(["model", "split", score, "loss", "rounds averaged"], rows))
    if "test" in config.eval.splits:
        name = pathlib.Path(run).name
        path = pathlib.Path(run) / "figures" / "score.png"
        print(f"figure: {figures.score_curves({name: [result.records]}, path)}")
    if any("lambda_1" in r for r in result.records):
        path = pathlib.Path(run) / "figures" / "curvature.png"
        print(f"figure: {figures.curvature_curves(result.records, path)}")
    print(f"run:    {run}")


def _compare(args, rest: list[str]) -> int:
    from fedjax_flat.report.compare import compare

    _refuse_unknown(rest)
    target = None if args.target is None else args.target / 100
    print(compare(args.runs, args.figure, args.split, target=target, smooth=args.smooth))
    return 0


def _data(args, rest: list[str]) -> int:
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


def _clients(args, rest: list[str]) -> int:
    from fedjax_flat.report.clients import clients

    _refuse_unknown(rest)
    print(clients(args.run, args.split, args.model))
    return 0


def _curvature(args, rest: list[str]) -> int:
    from fedjax_flat.report import analysis, tables

    _refuse_unknown(rest)
    if args.clients:
        for run in args.runs:
            rows = analysis.local_curvature(
                run, args.clients, examples=args.examples, data_dir=args.data
            )
            print(tables.of_records(rows))
        return 0
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


def _landscape(args, rest: list[str]) -> int:
    from fedjax_flat.report import analysis

    _refuse_unknown(rest)
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
        print(f"figure: {path}")
    return 0


def _robustness(args, rest: list[str]) -> int:
    from fedjax_flat.data.corruptions import CORRUPTIONS
    from fedjax_flat.report.robustness import robustness, table

    _refuse_unknown(rest)
    result = robustness(
        args.runs, severity=args.severity, corruptions=args.corruptions or tuple(CORRUPTIONS),
        examples=args.examples, model=args.model, data_dir=args.data, cache=args.cache,
    )
    print(table(result))
    print(f"figure: {result['figure']}")
    return 0


def _algorithms(args, rest: list[str]) -> int:
    from fedjax_flat import plugins
    from fedjax_flat.algorithms import METHODS
    from fedjax_flat.report import methods

    _refuse_unknown(rest)
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


def _datasets(args, rest: list[str]) -> int:
    from fedjax_flat import plugins
    from fedjax_flat.data import data_folder
    from fedjax_flat.report import datasets

    _refuse_unknown(rest)
    for file in args.imports:
        plugins.load(file)
    folder = data_folder(args.data)
    if args.json:
        print(json.dumps([datasets.describe(name, folder) for name in datasets.names()], indent=2))
    else:
        print(datasets.overview(folder))
    return 0


def _prepare(args, rest: list[str]) -> int:
    from fedjax_flat.data import data_folder
    from fedjax_flat.data.sources import tfds_folder

    _refuse_unknown(rest)
    kind, _, argument = args.name.partition(":")
    if kind != "tfds":
        raise errors.UsageError(
            f"{args.name} is not prepared: expected tfds:NAME, e.g. tfds:mnist. `fedjax-flat "
            "datasets` says what the others need."
        )
    print(f"prepared: {tfds_folder.prepare(argument, data_folder(args.data))}")
    return 0


def _demo(args, rest: list[str]) -> int:
    from fedjax_flat.demo import demo

    _refuse_unknown(rest)
    stopped_by = demo(args.run, rounds=args.rounds, progress=not args.quiet)
    return 128 + stopped_by if stopped_by else 0


def load_config(path: str | None, overrides: list[str], folder, imports=()):
    """The config of a file, of the run folder or the default, with `--config.NAME=VALUE`."""
    from absl import flags
    from ml_collections import config_flags

    from fedjax_flat import plugins

    _refuse_unknown([a for a in overrides if a.startswith("-") and not a.startswith("--config.")])
    imported = [plugins.load(file) for file in imports]
    values, argv = flags.FlagValues(), ["fedjax-flat", *overrides]
    try:
        config = _first_config(path, folder)
        named = [plugins.load(file) for file in config.imports]
        config.imports = tuple(dict.fromkeys((*named, *imported)))
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        _refuse_unknown(values(argv)[1:])
        config = values["config"].value
    except errors.UsageError:
        raise
    except (AttributeError, KeyError) as e:
        raise errors.UsageError(_unknown_setting(overrides, e)) from e
    except (flags.Error, OSError, TypeError, ValueError) as e:
        raise errors.UsageError(str(e)) from e
    return config


def _first_config(path: str | None, folder):
    from fedjax_flat.experiment import default_config

    if path is not None:
        return _run_config_file(path)
    return default_config() if folder is None else folder.config()


def _run_config_file(path: str):
    """`get_config()` of FILE, or `get_config("OPTIONS")` of FILE:OPTIONS."""
    file, *options = path.split(":", 1)
    if not pathlib.Path(file).is_file():
        raise errors.UsageError(f"no config file {file}.")
    try:
        get_config = runpy.run_path(file).get("get_config")
        if get_config is None:
            raise errors.UsageError(f"config file {file} defines no get_config().")
        config = get_config(*options)
    except (errors.UsageError, AttributeError, KeyError):
        raise  # said by whoever knows the settings
    except SyntaxError as e:
        raise errors.UsageError(f"config file {file}, line {e.lineno}: {e.msg}.") from e
    except Exception as e:  # whatever a user's file does
        raise errors.UsageError(f"config file {file}: {type(e).__name__}: {e}") from e
    if not hasattr(config, "algorithm"):
        raise errors.UsageError(
            f"get_config() of {file} returns {type(config).__name__}: expected the config of "
            "fedjax_flat.default_config(), changed."
        )
    return config


def _unknown_setting(overrides: list[str], error: Exception) -> str:
    """Names the first override that is no setting; else whatever a config file did wrong."""
    from fedjax_flat.experiment import config as config_lib

    settings = config_lib.all_settings()
    for argument in overrides:
        name = argument.removeprefix("--config.").split("=")[0]
        if argument.startswith("--config.") and name not in settings:
            return config_lib.unknown(name)
    return str(error).strip("'\"").replace("\\n", " ")


def _refuse_unknown(arguments: list[str]) -> None:
    if arguments:
        raise errors.UsageError(
            f"unknown argument {arguments[0]!r}; see fedjax-flat --help."
        )


def _confirm_deletion(folder, yes: bool) -> None:
    what = f"--fresh would delete {folder.path}: {folder.contents()}."
    if yes:
        print(f"Deleting {folder.path}: {folder.contents()}.")
    elif not sys.stdin.isatty():
        raise errors.UsageError(f"{what} Nothing was deleted; add --yes to do it.")
    elif input(f"{what} Delete it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise errors.UsageError("nothing was deleted.")


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    del category, filename, lineno, file, line
    print(f"fedjax-flat: warning: {message}", file=sys.stderr)
