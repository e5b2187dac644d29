"""Examples of every command, one per line, for `--help`."""

FIRST = (
    "fedjax-flat demo",
    "fedjax-flat train --config digits_fedavg --config.rounds=50 --run runs/a",
    "fedjax-flat report runs/* --out report.html",
)
EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "fedjax-flat train --config digits_fedavg --config.rounds=50 --run runs/a",
        "fedjax-flat train --run runs/a                       # goes on",
        "fedjax-flat train --config fedsam:cifar10,alpha=0 --run runs/b --data FOLDER",
        "fedjax-flat train --config digits_fedavg --init runs/a --run runs/c",
        "fedjax-flat train --config digits_fedavg --init weights.safetensors --run runs/d",
    ),
    "demo": ("fedjax-flat demo", "fedjax-flat demo --rounds 50 --run runs/short"),
    "compare": (
        "fedjax-flat compare runs/a runs/b --figure curves.pdf",
        "fedjax-flat compare runs/a runs/b --smooth 0.9 --target 45",
    ),
    "report": ("fedjax-flat report runs/fedavg_* runs/fedsam_* --out report.html",),
    "sweep": (
        "fedjax-flat sweep digits --run runs/sweep",
        "fedjax-flat sweep mysweep.py:seeds=5 --run runs/mine --workers 4",
    ),
    "table": ("fedjax-flat table runs/sweep", "fedjax-flat table runs/sweep --form latex"),
    "weigh": ("fedjax-flat weigh runs/a", "fedjax-flat weigh runs/a --codec stc --codec qsgd"),
    "costs": ("fedjax-flat costs runs/a runs/b --target 70",),
    "clients": ("fedjax-flat clients runs/a --split local_test",),
    "groups": ("fedjax-flat groups runs/fedseq",),
    "reach": ("fedjax-flat reach runs/fedavg_* runs/fedseq_* --centralised 86.5",),
    "curvature": (
        "fedjax-flat curvature runs/a runs/b --top 10",
        "fedjax-flat curvature runs/a --density 4 --examples 1000",
        "fedjax-flat curvature runs/a --clients 5",
    ),
    "landscape": (
        "fedjax-flat landscape runs/a runs/b --surface --examples 1000",
        "fedjax-flat landscape runs/a runs/b runs/c --plane",
        "fedjax-flat landscape runs/a runs/b --line",
    ),
    "probe": ("fedjax-flat probe runs/a --random 5000",),
    "temperature": ("fedjax-flat temperature runs/a --tau 0.05 --tau 0.1",),
    "robustness": ("fedjax-flat robustness runs/a --severity 5 --data FOLDER",),
    "recover": ("fedjax-flat recover runs/a --by runs/centralised --client 3",),
    "masks": ("fedjax-flat masks runs/camvid --examples 4",),
    "retrieve": ("fedjax-flat retrieve runs/landmarks --queries 3 --data FOLDER",),
    "export": (
        "fedjax-flat export runs/a --to safetensors",
        "fedjax-flat export runs/a --model swa --out swa.npz",
    ),
    "verify": (
        "fedjax-flat verify runs/a",
        "fedjax-flat verify runs/a --from 0 --rounds 20",
    ),
    "plan": ("fedjax-flat plan --config fedsam:cifar100 --target tpu:v5e:2x2",),
    "data": (
        "fedjax-flat data cifar10 --config.partition.alpha=0.05 --config.partition.clients=100",
        "fedjax-flat data --config fedsam:cifar100,alpha=0 --out figures",
    ),
    "configs": ("fedjax-flat configs", "fedjax-flat configs fedsam"),
    "algorithms": ("fedjax-flat algorithms", "fedjax-flat algorithms fedgloss"),
    "datasets": ("fedjax-flat datasets --data FOLDER",),
    "completion": (
        'eval "$(fedjax-flat completion bash)"                # in ~/.bashrc',
        "fedjax-flat completion zsh > ~/.zfunc/_fedjax-flat   # with ~/.zfunc in fpath",
    ),
    "prepare": ("fedjax-flat prepare tfds:mnist --data FOLDER",),
}
