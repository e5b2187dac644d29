"""Faults, injected at random into programs that run: nothing is lost, hangs or ends in a traceback.

    python tests/faults.py [--injections 200] [--seed N] [--only KIND ...] [--keep FOLDER]

`make test-faults` runs it. Every injection starts a command, does harm at a random moment, and
gives the command again until it ends well; then the result must be that of a command nobody
disturbed, bit for bit. The table at the end counts, by kind of fault,

    lost         rounds missing or twice in metrics.jsonl, or an output that is not there
    differs      a state that is not bit for bit the undisturbed one's
    hung         no end within two minutes
    traceback    where a sentence is expected

and the exit code is 0 only if all of these are 0. A failure prints its seed: --seed N --injections
1 repeats it. Two injections are under way at once. Commands run in children forked from a process
that has imported everything and touched no device, so they start in no time; `starting` uses new
interpreters, since it is about their start, and so do the workers of sweeps.
"""

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("FEDJAX_FLAT_KERNELS", "jax")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil

import fedjax_flat as ff  # noqa: F401 (for the children)
from fedjax_flat import cli

PATIENCE = 120  # seconds
ROUNDS = 6
QUICK = [
    f"--config.rounds={ROUNDS}", "--config.checkpoint.every=2", "--config.eval.every=2",
    "--config.eval.window=1", "--config.rounds_per_dispatch=1", "--config.partition.clients=40",
    "--config.model.hidden=(8,)",
]
CONFIG = str(pathlib.Path(__file__).parents[1] / "configs" / "digits_fedavg.py")
TRAININGS: dict[str, list[str]] = {
    "stateless": [],
    "stateful": ["--config.algorithm.name=scaffold"],
    "swa": ["--config.algorithm.name=fedavg+swa", "--config.server.swa.start=2",
            "--config.server.swa.cycle=2"],
    "wima": ["--config.server.average=wima", "--config.server.wima.window=3"],
    "host placement": ["--config.data.placement=host"],
    "a clock": ["--config.algorithm.name=fedbuff", "--config.clock.speed=lognormal(0.01, 1)"],
    "codec": ["--config.wire.up=stc", "--config.wire.feedback=True"],
    "personal": ["--config.algorithm.name=fedsim", "--config.data.local_test=0.3"],
    "groups": ["--config.algorithm.name=fedseq", "--config.groups.count=10",
               "--config.cohort.size=4"],
    "growing groups": ["--config.algorithm.name=fedseq2par"],
    "phases": ["--config.phases.second.client.learning_rate=0.05"],
}
HALF = {"phases": ["--config.phases.second.rounds=1"]}  # where rounds of begun phases cannot change
ANALYSES: dict[str, list[str]] = {
    "curvature": ["curvature", "RUN", "--top", "2", "--trace", "2", "--examples", "200"],
    "landscape": ["landscape", "RUN", "--surface", "--points", "3", "--examples", "200"],
    "report": ["report", "RUN", "--out", "RUN/report/page.html"],
}
PHASES = """
import fedjax_flat as ff

def get_config():
    c = ff.default_config()
    c.phases = ({"name": "first"}, {"name": "second"})
    return c
"""
SWEEP = """
import fedjax_flat as ff

def get_sweep():
    return ff.Sweep(
        rows={"FedAvg": {}, "FedProx": {"algorithm.name": "fedprox"}}, seeds=1, attempts=3,
        config={
            "rounds": 4, "rounds_per_dispatch": 1, "checkpoint.every": 1, "eval.every": 2,
            "eval.window": 2, "partition.clients": 40, "model.hidden": (8,),
        },
    )
"""


@dataclasses.dataclass
class Child:
    """A command in a process of its own."""

    pid: int
    output: pathlib.Path
    code: int | None = None

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """The exit code, negative for a signal; None if it has not ended."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                return None
            else:
                time.sleep(0.005)
        return self.code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal, if it still runs."""
        if self.wait(0) is None:
            os.kill(self.pid, number)

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def begin(argv: list[str], output: pathlib.Path) -> Child:
    """The command line's main in a fork."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Child(pid, output)
    code = 99
    try:
        os.setsid()
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(handle, stream)
        sys.argv = ["fedjax-flat", *argv]
        code = cli.main()  # as a process of its own does
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def parts_of(run: pathlib.Path) -> list[pathlib.Path]:
    """The run folders in it: itself, its phases or its cells."""
    return sorted(path.parent for path in run.rglob("checkpoints"))


def digest(run: pathlib.Path) -> str:
    """The rounds of the last checkpoints and the SHA-256 of their arrays, which they carry."""
    found = []
    for part in parts_of(run):
        last = max((int(p.name) for p in (part / "checkpoints").iterdir() if p.name.isdigit()),
                   default=0)
        check = json.loads((part / "checkpoints" / str(last) / "check/metadata").read_text())
        found.append(f"{part.name} {last} {check['sha256']}" if part != run
                     else f"{last} {check['sha256']}")
    return "\n".join(found)


def rounds_of(run: pathlib.Path) -> list[list[int]]:
    """The rounds that metrics.jsonl tells of, in its order, part by part."""
    found = []
    for part in parts_of(run):
        records = [json.loads(x) for x in (part / "metrics.jsonl").read_text().splitlines()]
        found.append([r["round"] for r in records if r["split"] == "cohort"])
    return found


def outputs(run: pathlib.Path, kind: str) -> str:
    """Of the numbers that an analysis wrote: names of folders are not among them."""
    if kind == "report":  # the page names the folder and the hour
        page = (run / kind / "page.html").read_text()
        return f"{len(page) // 10_000} {page.rstrip().endswith('</html>')}"
    found = hashlib.sha256()
    for path in sorted((run / kind).glob("*.npz")):
        with np.load(path) as arrays:
            for name in sorted(arrays):
                if arrays[name].dtype.kind in "fiu":
                    found.update(arrays[name].tobytes())
    for path in sorted((run / kind).glob("*.json")):
        try:
            values = json.loads(path.read_text())
        except ValueError:
            return f"{path.name} is damaged"
        kept = {k: v for k, v in values.items() if not isinstance(v, str) and "second" not in k}
        found.update(json.dumps(kept, sort_keys=True).encode())
    return found.hexdigest()


def damage(path: pathlib.Path, rng: random.Random) -> str:
    """Cuts, garbles, empties or deletes a file; says which."""
    content = bytearray(path.read_bytes())
    how = rng.choice(("cut", "garbled", "emptied", "gone"))
    if how == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif how == "garbled" and content:
        for _ in range(rng.choice((1, 1, 5))):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
    return f"{path.parent.name}/{path.name} {how}"


class Harness:
    """What nobody disturbed, made once, and the counts."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.wanted: dict[str, str] = {}
        self.counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.problems: list[str] = []
        for name, text in (("phases.py", PHASES), ("sweep.py", SWEEP)):
            (folder / name).write_text(text)

    def train(self, run: pathlib.Path, kind: str) -> list[str]:
        """The command that trains it, and goes on with it."""
        config = str(self.folder / "phases.py") if kind == "phases" else CONFIG
        return ["train", "--quiet", "--config", config, "--run", str(run), *QUICK,
                *TRAININGS[kind]]

    def command(self, run: pathlib.Path, kind: str) -> list[str]:
        """Of a training, an analysis or a sweep."""
        if kind in TRAININGS:
            return self.train(run, kind)
        if kind == "sweep":
            return ["sweep", str(self.folder / "sweep.py"), "--run", str(run), "--quiet",
                    "--workers", "2"]
        return [word.replace("RUN", str(run)) for word in ANALYSES[kind]]

    def result(self, run: pathlib.Path, kind: str) -> str:
        """What must come out the same."""
        return outputs(run, kind) if kind in ANALYSES else digest(run)

    def reference(self, kind: str) -> pathlib.Path:
        """An undisturbed run, or a run with undisturbed analyses; made by whoever comes first."""
        run = self.folder / "reference" / kind.replace(" ", "_")
        if kind in self.wanted:
            return run
        run.parent.mkdir(exist_ok=True)
        known = run.with_suffix(".json")
        if kind in ANALYSES:
            self.reference("stateless")
        with open(run.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not known.exists():
                if kind in ANALYSES:
                    shutil.copytree(self.reference("stateless"), run)
                started = time.monotonic()
                child = begin(self.command(run, kind), self.folder / f"{run.name}.log")
                if child.wait() != 0:
                    sys.exit(f"undisturbed, {kind} does not end well:\n{child.text}")
                known.write_text(json.dumps([time.monotonic() - started, self.result(run, kind)]))
        self.seconds[kind], self.wanted[kind] = json.loads(known.read_text())
        return run

    def note(self, fault: str, seed: int, what: str, text: str = "") -> None:
        """Counts something that must not happen."""
        self.counts[fault][what] += 1
        tail = "\n    ".join(text.strip().splitlines()[-12:])
        self.problems.append(f"seed {seed}: {fault}: {what}\n    {tail}")

    def finish(self, fault, seed, argv, child, check, *, sentences=False) -> None:
        """Gives the command again until it ends well, at most three times, and compares."""
        output = child.output
        for _ in range(3):
            child = begin(argv, output)
            if child.wait() is None:
                child.kill()
                child.wait()
                return self.note(fault, seed, "hung", child.text)
            if child.code == 0 or (sentences and child.code == 2):
                break
        if "Traceback (most recent call last)" in child.text:
            return self.note(fault, seed, "traceback", child.text)
        if child.code == 2 and sentences:  # refused in a sentence: allowed, if nothing is lost
            return None
        if child.code != 0:
            return self.note(fault, seed, "lost", child.text)
        wrong = check()
        if wrong:
            self.note(fault, seed, wrong, child.text)
        return None

    def checked(self, run: pathlib.Path, kind: str):
        """Whether something is lost or differs."""

        def check():
            if self.result(run, kind) != self.wanted[kind]:
                return "differs"
            if kind in ANALYSES:
                return None
            whole = rounds_of(self.reference(kind))
            return None if rounds_of(run) == whole else "lost"

        return check

    # ---- the faults ----------------------------------------------------------------------------

    def killed(self, seed, rng, number=signal.SIGKILL, fault="killed"):
        """At any moment, up to three times in a row."""
        kind = rng.choice(list(TRAININGS))
        self.reference(kind)
        run = self.folder / f"{seed}"
        argv = self.train(run, kind)
        for _ in range(rng.choice((1, 1, 2, 3))):
            child = begin(argv, self.folder / f"{seed}.log")
            child.wait(rng.uniform(0, 1.1 * self.seconds[kind]))
            child.kill(number)
            if child.wait() is None:
                child.kill()
                child.wait()
                return self.note(fault, seed, "hung", child.text)
        return self.finish(fault, seed, argv, child, self.checked(run, kind))

    def stopped(self, seed, rng):
        """SIGTERM or SIGINT."""
        number = rng.choice((signal.SIGTERM, signal.SIGINT))
        return self.killed(seed, rng, number, "stopped")

    def analysed(self, seed, rng):
        """An analysis killed at any moment."""
        kind, run, argv, child = self.half_analysed(seed, rng)
        page = run / "report" / "page.html"
        if page.exists() and not page.read_text().rstrip().endswith("</html>"):
            return self.note("analysed", seed, "lost", "half a page")
        return self.finish("analysed", seed, argv, child, self.checked(run, kind))

    def half_analysed(self, seed, rng):
        kind = rng.choice(list(ANALYSES))
        self.reference(kind)
        run = self.folder / f"{seed}"
        shutil.copytree(self.reference("stateless"), run)
        argv = self.command(run, kind)
        child = begin(argv, self.folder / f"{seed}.log")
        child.wait(rng.uniform(0, 1.1 * self.seconds[kind]))
        child.kill()
        child.wait()
        return kind, run, argv, child

    def journals(self, seed, rng):
        """What an analysis keeps to go on with, damaged; it is made again."""
        kind, run, argv, child = self.half_analysed(seed, rng)
        files = sorted(p for p in (run / kind).rglob("*") if p.is_file())
        how = damage(rng.choice(files), rng) if files else "nothing there yet"
        before = len(self.problems)
        self.finish("journals", seed, argv, child, self.checked(run, kind), sentences=True)
        if len(self.problems) > before:
            self.problems[-1] += f"\n    ({how}, {kind})"

    def swept(self, seed, rng):
        """The driver of a sweep, or one of its workers, killed at any moment."""
        self.reference("sweep")
        run = self.folder / f"{seed}"
        argv = self.command(run, "sweep")
        child = begin(argv, self.folder / f"{seed}.log")
        child.wait(rng.uniform(0, 1.1 * self.seconds["sweep"]))
        workers = psutil.Process(child.pid).children(recursive=True) if child.code is None else []
        victim = rng.choice([None, *workers])
        if victim is None:
            child.kill()
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        if child.wait() is None:
            child.kill()
            child.wait()
            return self.note("swept", seed, "hung", child.text)
        if victim is None or child.code:
            return self.finish("swept", seed, argv, child, self.checked(run, "sweep"))
        wrong = self.checked(run, "sweep")()
        return self.note("swept", seed, wrong, child.text) if wrong else None

    def damaged(self, seed, rng):
        """A file of a run that was cut half-way: cut, garbled, emptied or gone; then it goes on."""
        kind = rng.choice(list(TRAININGS))
        reference = self.reference(kind)
        run = self.folder / f"{seed}"
        argv = self.train(run, kind)
        half = [*argv, *HALF.get(kind, ["--config.rounds=3"])]
        kept = self.folder / "half" / reference.name
        kept.parent.mkdir(exist_ok=True)
        with open(kept.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                child = begin([w.replace(str(run), str(kept)) for w in half],
                              kept.with_suffix(".log"))
                if child.wait() != 0:
                    sys.exit(f"half of {kind} does not end well:\n{child.text}")
        shutil.copytree(kept, run)
        path = rng.choice(sorted(p for p in run.rglob("*") if p.is_file()))
        how = damage(path, rng)
        before = len(self.problems)
        child = Child(0, self.folder / f"{seed}.log", 0)
        gap = path.name == "metrics.jsonl"  # a gap in the record is said, not filled

        def check():
            wrong = self.checked(run, kind)()
            said = "round" in child.output.read_text()
            return None if wrong == "lost" and gap and said else wrong

        self.finish("damaged", seed, argv, child, check, sentences=True)
        if len(self.problems) > before:
            self.problems[-1] += f"\n    ({how}, {kind})"

    def twice(self, seed, rng):
        """Two processes on one folder: one trains, the other is refused in a sentence."""
        kind = rng.choice(list(TRAININGS))
        self.reference(kind)
        run = self.folder / f"{seed}"
        argv = self.train(run, kind)
        children = [begin(argv, self.folder / f"{seed}.{i}.log") for i in range(2)]
        codes = [child.wait() for child in children]
        text = "".join(child.text for child in children)
        for child in children:
            child.kill()
            child.wait()
        if None in codes:
            return self.note("twice", seed, "hung", text)
        if "Traceback" in text:
            return self.note("twice", seed, "traceback", text)
        if 0 not in codes:
            return self.note("twice", seed, "lost", text)
        return self.finish(
            "twice", seed, argv, children[0], self.checked(run, kind)
        )

    def full(self, seed, rng):
        """A disk that is full after so many bytes; then it is not any more."""
        kind = rng.choice(list(TRAININGS))
        self.reference(kind)
        disk = self.folder / f"disk{seed}"
        disk.mkdir()
        size = rng.randrange(16, 400)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)], check=False,
            capture_output=True,
        )
        if mounted.returncode:
            self.counts["full"]["skipped: mount is not allowed"] += 1
            return None
        try:
            run = disk / "run"
            argv = self.train(run, kind)
            child = begin(argv, self.folder / f"{seed}.log")
            if child.wait() is None:
                child.kill()
                child.wait()
                return self.note("full", seed, "hung", child.text)
            if "Traceback" in child.text:
                return self.note("full", seed, "traceback", child.text)
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            return self.finish("full", seed, argv, child, self.checked(run, kind))
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=False, capture_output=True)

    def starting(self, seed, rng):
        """Ctrl-C while a new interpreter imports, reads settings, compiles."""
        kind = "stateless"
        self.reference(kind)
        run = self.folder / f"{seed}"
        argv = self.train(run, kind)
        output = self.folder / f"{seed}.log"
        with open(output, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedjax_flat", *argv], stdout=log, stderr=log
            )
            time.sleep(rng.uniform(0.2, 6))  # before the first bytecode it is Python's own
            process.send_signal(signal.SIGINT)
            try:
                code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                return self.note("starting", seed, "hung", output.read_text())
        text = output.read_text()
        if "Traceback" in text and "fedjax_flat" in text:
            return self.note("starting", seed, "traceback", text)
        if code not in (0, 130, -signal.SIGINT):
            return self.note("starting", seed, "lost", f"exit code {code}\n{text}")
        child = Child(0, output, code)
        return self.finish("starting", seed, argv, child, self.checked(run, kind))


FAULTS = {  # how often, and in words
    "killed": (60, "kill -9"),
    "stopped": (35, "SIGTERM, SIGINT"),
    "damaged": (60, "files damaged"),
    "analysed": (20, "analyses killed"),
    "journals": (15, "analyses damaged"),
    "swept": (6, "sweeps killed"),
    "twice": (10, "two processes"),
    "full": (10, "disk full"),
    "starting": (5, "Ctrl-C while starting"),
}


def main() -> int:
    """Injects, prints the table, says whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--injections", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seed", type=int, help="the first (default: of the time)")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--keep", type=pathlib.Path, help="where the folders stay")
    args = parser.parse_args()
    first = args.seed if args.seed is not None else int(time.time())
    folder = args.keep or pathlib.Path(tempfile.mkdtemp(prefix="fedjax_flat_faults_"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    print(f"seeds {first} to {first + args.injections - 1}, in {folder}", flush=True)
    started = time.monotonic()
    seeds = range(first, first + args.injections)
    turns = [seeds[i :: args.at_once] for i in range(min(args.at_once, len(seeds)))]
    pids = []
    for i, turn in enumerate(turns):
        pid = os.fork()
        if not pid:
            inject(Harness(folder), turn, args.only, folder / f"told{i}.json", bool(args.keep))
            sys.stdout.flush()
            os._exit(0)
        pids.append(pid)
    ended = [os.waitpid(pid, 0)[1] == 0 for pid in pids]
    harness = Harness(folder)
    for told in folder.glob("told*.json"):
        counts, problems = json.loads(told.read_text())
        harness.problems += problems
        for name, counted in counts.items():
            harness.counts[name] += collections.Counter(counted)
    failed = tell(harness, time.monotonic() - started, None if args.keep else folder)
    return int(failed or not all(ended))


def inject(harness, seeds, only, told: pathlib.Path, keep: bool) -> None:
    """One injection after the other; what came of them is in `told` after each."""
    weights = [FAULTS[name][0] for name in only]
    for seed in seeds:
        rng = random.Random(seed)
        name = rng.choices(only, weights)[0]
        getattr(harness, name)(seed, rng)
        harness.counts[name]["injections"] += 1
        if not keep:
            shutil.rmtree(harness.folder / str(seed), ignore_errors=True)
        told.write_text(json.dumps([harness.counts, harness.problems]))
        print(f"seed {seed}: {name}", flush=True)


def tell(harness: Harness, seconds: float, folder: pathlib.Path | None) -> int:
    """The table and what went wrong."""
    for problem in harness.problems:
        print(problem)
    total: collections.Counter = collections.Counter()
    for counted in harness.counts.values():
        total += counted
    bad = ("lost", "differs", "hung", "traceback")
    print(f"{'fault':24}" + "".join(f"{name:>12}" for name in ("injections", *bad)))
    for name, counted in {**harness.counts, "all": total}.items():
        words = FAULTS[name][1] if name in FAULTS else name
        print(f"{words:24}" + "".join(f"{counted[n]:>12}" for n in ("injections", *bad)))
    skipped = {n: c for n, c in total.items() if n.startswith("skipped")}
    print(*(f"{c} {n}" for n, c in skipped.items()), f"{seconds:.0f} s", sep="\n")
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return int(any(total[name] for name in bad))


if __name__ == "__main__":
    sys.exit(main())
