"""The command line: flags in, importable functions called. Nothing is computed here.

Whatever goes wrong ends in one sentence and an exit code; a mistake of ours as well, with its
traceback in a file.
"""

import argparse
import contextlib
import datetime
import logging
import os
import pathlib
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence

from fedjax_flat import commands as run
from fedjax_flat import disk, errors, runtime
from fedjax_flat.examples import EXAMPLES, FIRST
from fedjax_flat.run import interrupt
from fedjax_flat.version import __version__

EXIT_BUG, EXIT_USAGE, EXIT_DIVERGED = 1, 2, 3


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code."""
    with interrupt.leaving_at_once():  # before anything heavy is imported
        if argv is None:  # the whole process is ours
            argv, sys.unraisablehook = sys.argv[1:], _unraisable
            with contextlib.suppress(AttributeError):  # closed
                sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        args, rest = parser().parse_known_args(argv)
        runtime.keep_compiled()
        warnings.showwarning = _show_warning
        handler = logging.StreamHandler()
        handler.setFormatter(_Printable("%(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler])
        logging.getLogger("fedjax_flat").setLevel(
            logging.WARNING if getattr(args, "quiet", False) else logging.INFO
        )
        return _call(args, rest)


def _call(args: argparse.Namespace, rest: list[str]) -> int:
    try:
        return args.call(args, rest)
    except KeyboardInterrupt:
        print(f"\n{interrupt.STOPPED}", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, `head` perhaps, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except errors.DivergedError as e:
        _say(str(e))
        return EXIT_DIVERGED
    except errors.UsageError as e:
        _say(str(e))
        return EXIT_USAGE
    except Exception as e:  # the last resort
        said = _of_the_machine(e)
        if said:
            _say(said)
            return EXIT_USAGE
        _say(f"{type(e).__name__}: {_first_line(e)}. This is a mistake of the program; the "
             f"traceback is in {_keep_traceback(args)}.")
        return EXIT_BUG


def _of_the_machine(error: Exception) -> str | None:
    """What to say of a disk or a memory that does not suffice."""
    said = disk.refusal(error)
    if said:
        where = f" {error.filename}" if isinstance(error, OSError) and error.filename else ""
        return (f"cannot write{where}: {said}. What was finished before is kept. Free some space "
                "or make the folder writable; then the same command goes on.")
    if isinstance(error, MemoryError) or "Out of memory" in str(error):
        return (f"there is not enough memory ({_first_line(error)}). Ask for less: fewer points, "
                "probes or examples, a smaller batch.")
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200].rstrip(".")


def _keep_traceback(args: argparse.Namespace) -> pathlib.Path | str:
    """Writes the traceback into the run folder, or else where temporary files go."""
    run = getattr(args, "run", None) or next(iter(getattr(args, "runs", ())), None)
    now = datetime.datetime.now(datetime.UTC)
    name = f"traceback-{now:%Y%m%d-%H%M%S}.txt"
    text = f"fedjax_flat {__version__}: {sys.argv}\n{traceback.format_exc()}"
    if run and pathlib.Path(run).is_dir():
        with contextlib.suppress(OSError):
            disk.write_atomically(pathlib.Path(run) / name, text)
            return pathlib.Path(run) / name
    with contextlib.suppress(OSError):
        path = pathlib.Path(tempfile.mkdtemp(prefix="fedjax_flat-")) / name
        disk.write_atomically(path, text)
        return path
    return "no file, as none could be written"


def parser() -> argparse.ArgumentParser:
    """Of every command."""
    top = argparse.ArgumentParser(
        prog="fedjax-flat",
        description="Flat minima in federated learning.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="command")
    for add in (_add_train, _add_runs, _add_analyses, _add_files, _add_plan, _add_lists):
        add(commands)
    for name, command in commands.choices.items():
        command.formatter_class = _Help
        command.epilog = _examples(EXAMPLES.get(name, ()))
    top.epilog = _examples(FIRST) + "\n\n`fedjax-flat COMMAND --help` has more of each."
    return top


def _examples(lines: Sequence[str]) -> str:
    return "\n  ".join(["examples:" if len(lines) > 1 else "example:", *lines]) if lines else ""


class _Help(argparse.HelpFormatter):
    """Text of several lines stays as it is."""

    def _fill_text(self, text, width, indent):
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _add_train(commands) -> None:
    train = commands.add_parser(
        "train",
        help="train an experiment, or go on with one",
        description="Trains the experiment of a config file in a run folder. The same command "
        "again resumes; a larger rounds continues.",
        allow_abbrev=False,
    )
    train.add_argument("--run", required=True, help="run folder; made if it does not exist")
    train.add_argument(
        "--config",
        metavar="FILE",
        help="config file, or the name of one of `fedjax-flat configs`, or the folder of a run "
        "with these settings (default: those of the run folder); --config.NAME=VALUE overrides",
    )
    train.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="FILE",
        help="Python file that registers a source, partition, model, task or method; it is run. "
        "The run folder remembers it",
    )
    train.add_argument(
        "--from", dest="start_from", metavar="RUN[@ROUND]",
        help="a new run begins with a checkpoint of another (default: its newest), up to which it "
        "would have been trained alike; its config, unless --config names one",
    )
    train.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA); `fedjax-flat "
                       "datasets` says what to put there")
    train.add_argument("--init", metavar="RUN|FILE", help="start from the global model of another "
                       "run, of one on features from its classifier; or from a file of weights: "
                       ".safetensors, .npz, .msgpack, torch's")
    train.add_argument("--oll", action="store_true", help="prune each client's head to its own "
                       "labels (algorithm.name + oll; of phases, in the last)")
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
    train.set_defaults(call=run.train)
    demo = commands.add_parser("demo", help="train on embedded data and show what comes out")
    demo.add_argument("--run", default="runs/demo", help="folder for the demo's runs")
    demo.add_argument("--rounds", type=int, default=300)
    demo.add_argument("--quiet", action="store_true", help="no progress bar")
    demo.set_defaults(call=run.demo)


def _add_runs(commands) -> None:
    compare = commands.add_parser(
        "compare",
        help="accuracies of run folders, rounds and communication to the first one's",
    )
    compare.add_argument("runs", nargs="+", metavar="RUN")
    compare.add_argument("--split", default="test", help="test (default), or another that was "
                         "evaluated: validation, train; own for personal models")
    compare.add_argument("--figure", metavar="FILE", help="draw their curves")
    compare.add_argument("--alike", type=int, default=1, metavar="N", help="N runs after one "
                         "another share a colour in the figure, e.g. a method's settings")
    compare.add_argument("--target", type=float, metavar="PERCENT", help="score to reach (default: "
                         "the first run's over its last rounds)")
    compare.add_argument("--smooth", type=float, default=0.0, metavar="DECAY",
                         help="smooth the curves first: s = DECAY s + (1 - DECAY) a, e.g. 0.9")
    compare.set_defaults(call=run.compare)

    report = commands.add_parser(
        "report", help="one page of runs to open in a browser: tables, curves, clients, landscapes",
    )
    report.add_argument("runs", nargs="+", metavar="RUN")
    report.add_argument("--out", required=True, metavar="FILE", help="the page, FILE.html")
    report.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA), for the classes "
                        "that clients have")
    report.set_defaults(call=run.report)

    sweep = commands.add_parser(
        "sweep", help="runs of many methods, settings and seeds from a Python file; goes on",
        description="Runs the cells of a sweep; the file is run, as a config file is.",
    )
    sweep.add_argument("file", metavar="FILE", help="with get_sweep(), or the name of one of "
                       "`fedjax-flat configs`; FILE:OPTIONS calls it so")
    sweep.add_argument("--run", required=True, metavar="FOLDER")
    sweep.add_argument("--engine", default="local", help="local (default), ray[=ADDRESS], slurm")
    sweep.add_argument("--workers", type=int, default=0, metavar="N",
                       help="cells at once (default: one per two cores)")
    sweep.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    sweep.add_argument("--quiet", action="store_true", help="no live table")
    sweep.set_defaults(call=run.sweep)

    table = commands.add_parser("table", help="the table of a sweep, as papers print it")
    table.add_argument("sweep", metavar="FOLDER")
    table.add_argument("--form", default="text", help="text (default), markdown, latex, csv")
    table.add_argument("--split", default="test", help="on which scores are reported (test)")
    table.set_defaults(call=run.table)

    weigh = commands.add_parser(
        "weigh", help="what a client's update weighs by every codec: three rules, and real bytes"
    )
    weigh.add_argument("run", metavar="RUN")
    weigh.add_argument("--codec", dest="codecs", action="append", default=[], metavar="NAME",
                       help="only this one, or these (default: all)")
    weigh.add_argument("--client", type=int, default=0, metavar="K", help="whose (default 0)")
    weigh.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    weigh.set_defaults(call=run.weigh)

    costs = commands.add_parser(
        "costs", help="bytes and FLOPs that runs needed to reach a score, and in all"
    )
    costs.add_argument("runs", nargs="+", metavar="RUN")
    costs.add_argument("--target", type=float, default=70.0, metavar="PERCENT",
                       help="score to reach (default 70)")
    costs.add_argument("--split", default="test", help="test (default); local_test for personal "
                       "models")
    costs.add_argument("--model", default="global", help="global (default), swa, wima, personal")
    costs.set_defaults(call=run.costs)

    clients = commands.add_parser(
        "clients", help="how a model does on each client's examples along the rounds"
    )
    clients.add_argument("run", metavar="RUN", help="trained with --config.eval.clients=True")
    clients.add_argument("--split", default="own", help="own (default: what clients train on) or "
                         "local_test")
    clients.add_argument("--model", default="global", help="global (default), swa, wima, personal")
    clients.set_defaults(call=run.clients)

    groups = commands.add_parser(
        "groups", help="who trains in sequence with whom: how balanced groups are, and figures"
    )
    groups.add_argument("run", metavar="RUN", help="of fedseq, fedseq2par, fedasyncseq, hierfavg")
    groups.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    groups.set_defaults(call=run.groups)

    reach = commands.add_parser(
        "reach", help="rounds and messages to 70 %% and 90 %% of a centralised score"
    )
    reach.add_argument("runs", nargs="+", metavar="RUN")
    reach.add_argument("--centralised", type=float, required=True, metavar="PERCENT",
                       help="the score of training with all data in one place")
    reach.add_argument("--split", default="test", help="test (default), or another")
    reach.add_argument("--figure", metavar="FILE", help="draw the rounds")
    reach.set_defaults(call=run.reach)


def _add_analyses(commands) -> None:
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
    curvature.set_defaults(call=run.curvature)

    landscape = commands.add_parser("landscape", help="surfaces, planes and lines of the loss")
    landscape.add_argument("runs", nargs="+", metavar="RUN")
    kind = landscape.add_mutually_exclusive_group(required=True)
    kind.add_argument("--surface", action="store_true", help="around each model, same directions")
    kind.add_argument("--plane", action="store_true", help="through three models; more: projected")
    kind.add_argument("--line", action="store_true", help="between two models, with the barrier")
    landscape.add_argument("--points", type=int, default=21, help="per axis (default 21)")
    landscape.add_argument("--radius", type=float, default=1.0, help="of a surface (default 1)")
    landscape.set_defaults(call=run.landscape)
    for parser_ in (curvature, landscape):
        parser_.add_argument("--split", default="train", help="train (default) or another split")
        parser_.add_argument("--examples", type=int, default=0, help="the first N (default: all)")
        parser_.add_argument("--model", default="global", help="global (default), swa or wima")
        parser_.add_argument("--client", type=int, metavar="K", help="the model that client K "
                             "makes of the global one; its own data are split own")
        parser_.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
        parser_.add_argument("--seed", type=int, default=0)
        parser_.set_defaults(default_of=parser_.get_default)

    probe = commands.add_parser(
        "probe", help="what a run's features are worth: ridge regression on them, in closed form"
    )
    probe.add_argument("runs", nargs="+", metavar="RUN")
    probe.add_argument("--ridge", type=float, default=0.01, help="lambda (default 0.01)")
    probe.add_argument("--random", type=int, action="append", default=[], metavar="D",
                       help="on D random features too; several times for several")
    probe.add_argument("--sigma", type=float, default=1000.0, help="of random features")
    probe.add_argument("--model", default="global", help="global (default), swa or wima")
    probe.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    probe.set_defaults(call=run.probe)

    temperature = commands.add_parser(
        "temperature", help="the loss of a run's classifier on train examples, by temperature"
    )
    temperature.add_argument("run", metavar="RUN")
    temperature.add_argument("--tau", type=float, action="append", metavar="TAU",
                             help="only this one, or these (default: 0.01 to 2)")
    temperature.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    temperature.set_defaults(call=run.temperature)

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
    robustness.set_defaults(call=run.robustness)

    recover = commands.add_parser(
        "recover", help="what a client could make of the others' images by a GAN: Frechet distance"
    )
    recover.add_argument("runs", nargs="+", metavar="RUN")
    recover.add_argument("--by", required=True, metavar="RUN",
                         help="run whose network's features compare images; best of all data")
    recover.add_argument("--client", type=int, default=0, metavar="K",
                         help="the attacker (default 0)")
    recover.add_argument("--steps", type=int, default=2000, help="of the generator (default 2000)")
    recover.add_argument("--count", type=int, default=1000, help="images compared (default 1000)")
    recover.add_argument("--guided", type=float, default=1.0,
                         help="weight of the class that the model should see (default 1; 0: none)")
    recover.add_argument("--train", default="layer",
                         help="layer (default): of the discriminator only its last; or all of it")
    recover.add_argument("--model", default="global", help="global (default), swa or wima")
    recover.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    recover.set_defaults(call=run.recover)


    masks = commands.add_parser(
        "masks", help="predicted labels of pixels beside the truth, and every class's IoU"
    )
    masks.add_argument("run", metavar="RUN")
    masks.add_argument("--split", default="", help="whose images are drawn (default: the last that "
                       "the run evaluates)")
    masks.add_argument("--examples", type=int, default=6, help="how many (default 6)")
    masks.add_argument("--model", default="global",
                       help="global (default), swa, wima, or clusters of ladd")
    masks.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    masks.set_defaults(call=run.masks)

    retrieve = commands.add_parser(
        "retrieve", help="queries with the nearest images that a model finds, and recall@n"
    )
    retrieve.add_argument("runs", nargs="+", metavar="RUN", help="pictures are of the first")
    retrieve.add_argument("--queries", type=int, default=5, help="how many are drawn (default 5)")
    retrieve.add_argument("--model", default="global", help="global (default), swa or wima")
    retrieve.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    retrieve.set_defaults(call=run.retrieve)


def _add_files(commands) -> None:
    export = commands.add_parser(
        "export", help="write a trained model as a file of arrays, for other programs and --init"
    )
    export.add_argument("run", metavar="RUN")
    export.add_argument("--to", default="", metavar="FORM", help="safetensors (default), msgpack "
                        "(flax's), npz; or the suffix of --out says it")
    export.add_argument("--out", metavar="FILE", help="(default: in the run's folder export)")
    export.add_argument("--model", default="global", help="global (default), swa or wima")
    export.add_argument("--round", type=int, metavar="N", help="of that checkpoint (default: the "
                        "newest)")
    export.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    export.set_defaults(call=run.export)


    verify = commands.add_parser(
        "verify", help="run rounds again from a checkpoint: do the bits agree? (exit code 1: no)"
    )
    verify.add_argument("run", metavar="RUN")
    verify.add_argument("--from", dest="start", type=int, metavar="ROUND", help="the checkpoint to "
                        "start from, or 0 (default: the last but one)")
    verify.add_argument("--rounds", type=int, default=0, metavar="N", help="at most so many "
                        "(default: up to the next checkpoint)")
    verify.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    verify.add_argument("--quiet", action="store_true", help="no progress bar")
    verify.set_defaults(call=run.verify)


def _add_plan(commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="compile an experiment's round for a TPU slice that is not here: memory, collectives",
        allow_abbrev=False,
    )
    plan.add_argument("--config", metavar="FILE", required=True,
                      help="config file, or a name of `fedjax-flat configs`; --config.NAME=VALUE "
                      "overrides")
    plan.add_argument("--target", default="tpu:v5e:2x2", help="tpu:KIND:TOPOLOGY, e.g. "
                      "tpu:v5e:4x4, tpu:v5p:2x2x1 (default: tpu:v5e:2x2)")
    plan.add_argument("--import", dest="imports", action="append", default=[], metavar="FILE",
                      help="Python file that registers what the config names; it is run")
    plan.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    plan.set_defaults(call=run.plan)


def _add_lists(commands) -> None:
    data = commands.add_parser(
        "data",
        help="who owns what: classes, sizes and examples of every client",
        description="Prints and draws a data set's clients; --config.partition.NAME=VALUE says how "
        "it is split, --config FILE takes all from a config file.",
        allow_abbrev=False,
    )
    data.add_argument("name", nargs="?", metavar="NAME", help="of `fedjax-flat datasets`")
    data.add_argument("--config", metavar="FILE", help="config file, or a name of `fedjax-flat "
                      "configs`; its data and its partition")
    data.add_argument("--import", dest="imports", action="append", default=[], metavar="FILE",
                      help="Python file that registers a source or a partition; it is run")
    data.add_argument("--data", help="folder of the data (default: $FEDJAX_FLAT_DATA)")
    data.add_argument("--out", help="folder for the figures (default: runs/data/NAME)")
    data.set_defaults(call=run.data)

    configs = commands.add_parser(
        "configs", help="list the config files that come with the package, for --config NAME"
    )
    configs.add_argument("name", nargs="?", metavar="NAME", help="all about one: its options, what "
                         "the paper reports, where it is")
    configs.set_defaults(call=run.configs)

    algorithms = commands.add_parser(
        "algorithms", help="list every method: its paper, what it sends, keeps and computes"
    )
    algorithms.add_argument("name", nargs="?", metavar="NAME", help="all about one method: paper, "
                            "equations, settings with ranges, traffic and state")
    algorithms.add_argument("--import", dest="imports", action="append", default=[],
                            metavar="FILE", help="Python file that registers methods; it is run")
    algorithms.add_argument("--json", action="store_true", help="the same as data")
    algorithms.set_defaults(call=run.algorithms)

    datasets = commands.add_parser(
        "datasets", help="list every data set: what it is, its licence, what to put where"
    )
    datasets.add_argument("--data", help="data folder to look into (default: $FEDJAX_FLAT_DATA)")
    datasets.add_argument("--import", dest="imports", action="append", default=[],
                          metavar="FILE", help="Python file that registers sources; it is run")
    datasets.add_argument("--json", action="store_true", help="the same as data")
    datasets.set_defaults(call=run.datasets)

    completion = commands.add_parser(
        "completion", help="a script with which a shell completes commands, flags and names"
    )
    completion.add_argument("shell", metavar="SHELL", help="bash or zsh")
    completion.set_defaults(call=lambda args, rest: run.completion(args, rest, parser()))

    prepare = commands.add_parser(
        "prepare", help="download and prepare a data set of tensorflow-datasets (needs TensorFlow)"
    )
    prepare.add_argument("name", metavar="tfds:NAME", help="as data.name: tfds:NAME[/CONFIG]")
    prepare.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA); files "
                         "downloaded by hand are taken from its folder NAME")
    prepare.set_defaults(call=run.prepare)


def _say(text: str) -> None:
    """To stderr, line by line, without what a terminal would obey."""
    print("fedjax-flat: " + "\n".join(map(errors.printable, text.split("\n"))), file=sys.stderr)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    del category, filename, lineno, file, line
    if runtime.forget_damaged(str(message)):
        message = "a compiled program that was kept is damaged; it is compiled again"
    _say(f"warning: {message}")


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(errors.printable, super().format(record).split("\n")))


def _unraisable(found) -> None:
    """Leaves out what tensorstore's pending reads and writes say once nobody waits for them."""
    if str(found.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(found)
