"""LADD beside its baselines on CamVid: from one labelled drive to the unlabelled others.

    python benchmarks/ladd.py --data FOLDER --out FOLDER [--model bisenetv2] [--pretrain 150]
        [--rounds 300]

mIoU on the test pictures of the unlabelled drives, mean of the last ten rounds: of the server's
model, without and with the clients' styles, then of what clients make of the latter. `small` is a
network of five convolutions, which is all that two slow cores can train in minutes: it shows
whether an order shows, not what the method can reach. Stop and repeat the command as you like: it
goes on.
"""

import argparse
import pathlib
import runpy
import statistics
import time

import flax.linen as nn
import jax

import fedjax_flat as ff
from fedjax_flat.models.layers import BatchNorm, Conv
from fedjax_flat.report import tables

LAST = 10  # rounds
CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "ladd.py"
ADAPTED = {
    "FedAvg + self-training": "method=self_training",
    "LADD (cls)": "method=ladd,own=cls,kd=20",
    "LADD (all)": "method=ladd,own=all,kd=20",
}


class Small(nn.Module):
    """Five convolutions, at an eighth of the image's sides, and logits of every pixel."""

    num_classes: int

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        shape = x.shape
        for features, stride in ((16, 2), (32, 2), (48, 2), (48, 1)):
            conv = Conv(features, (3, 3), (stride, stride), "SAME", use_bias=False)
            x = nn.relu(BatchNorm()(conv(x), train=train, mask=mask))
        x = Conv(self.num_classes, (1, 1), name="classifier")(x)
        return jax.image.resize(x, (*shape[:3], x.shape[-1]), "bilinear")


def main() -> None:
    """Trains all and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="small")
    parser.add_argument("--pretrain", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--loss", default="released")
    o = parser.parse_args()
    ff.register.model("small", Small)
    out, get_config = pathlib.Path(o.out), runpy.run_path(str(CONFIG))["get_config"]
    rows = []

    def train(name, options, init=None):
        config = get_config(f"camvid,loss={o.loss},rounds={o.rounds},{options}")
        with config.unlocked():
            config.model.name = o.model
            if o.model == "small":
                config.model.auxiliary = True  # which it has not, as bisenetv2 has by default
                config.data.crop, config.client.batch_size = (96, 128), 8
            config.eval.window, config.eval.every = LAST, max(1, config.rounds // 5)
        config = ff.only_used(config)
        began = time.time()
        result = ff.train(config, out / name.replace(" ", "_"), data_dir=o.data, init=init)
        if result.stopped_by or result.asked_to_stop:
            raise SystemExit("stopped; the same command goes on")
        records = [r for r in result.records if r["split"] == "target"]
        for model in dict.fromkeys(r["model"] for r in records):
            last = [r for r in records if r["model"] == model][-LAST:]
            cells = [
                f"{statistics.mean(values):.2f} ± {statistics.pstdev(values):.2f}"
                for values in ([100 * r[n] for r in last] for n in ("miou", "accuracy"))
            ]
            rows.append([name, model, *cells, f"{time.time() - began:.0f}"])
        print(rows[-1], flush=True)

    train("server, clients' styles", f"method=fda,pretrain={o.pretrain}")
    for name, options in ADAPTED.items():
        train(name, f"{options},pretrain=0", init=out / "server,_clients'_styles")
    train("source only", f"method=source,pretrain={o.pretrain}")
    print(tables.table(["CamVid, unlabelled drives", "model", "mIoU %", "pixels %", "s"], rows))


if __name__ == "__main__":
    main()
