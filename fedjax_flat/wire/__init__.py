"""What travels, and what it weighs."""

from fedjax_flat.registry import Entry, Registry, entry
from fedjax_flat.settings import Setting
from fedjax_flat.wire.codec import Codec, bits_sent, stateless
from fedjax_flat.wire.eight_bit import eight_bit
from fedjax_flat.wire.feedback import feedback
from fedjax_flat.wire.names import Model, Models, floating, models_in, replaced, shapes_of
from fedjax_flat.wire.packet import RULES, Kernels, Levels, Sparse, bits_of, survivors, weigh
from fedjax_flat.wire.qsgd import qsgd
from fedjax_flat.wire.rotation import rotation
from fedjax_flat.wire.sign import sign
from fedjax_flat.wire.sparse import mask, sbc, topk
from fedjax_flat.wire.sstc import VARIANTS, sstc
from fedjax_flat.wire.stc import layer_stc, rate_for, stc

_RATE = {"rate": Setting(0.01, "share of the weights that survive", above=0, at_most=1)}
_BIASES = {"biases": Setting(False, "compressed with the kernels; else they travel as they are")}
_RULE = {"accounting": Setting("index", "how bits are counted", choices=RULES)}

# make(**settings) -> Codec
CODECS: Registry[Entry] = Registry("codec")
CODECS.add("8bit", entry(eight_bit, _RULE))
CODECS.add("stc", entry(stc, {**_RATE, **_BIASES, **_RULE}))
CODECS.add("layer_stc", entry(layer_stc, {
    "rates": Setting("4", "of each kernel in turn, - for 8 bits; or 1 to 4, Mora's"), **_RULE,
}))
CODECS.add("sstc", entry(sstc, {
    **_RATE,
    "kfrac": Setting(0.125, "share of the convolutions' kernels that are sent", above=0, at_most=1),
    "variant": Setting("all", "weights that the rate is a share of", choices=VARIANTS),
    **_RULE,
}))
CODECS.add("topk", entry(topk, {**_RATE, **_BIASES, **_RULE}))
CODECS.add("sbc", entry(sbc, {
    **_RATE, "original": Setting(False, "largest against least, as Sattler et al. 2019"),
    **_BIASES, **_RULE,
}))
CODECS.add("mask", entry(mask, {
    **_RATE,
    "unbiased": Setting(True, "values multiplied by 1 / rate; error feedback needs False"),
    **_BIASES, **_RULE,
}))
CODECS.add("qsgd", entry(qsgd, {
    "levels": Setting(127, "of either sign", at_least=1, at_most=2**15 - 1), **_RULE,
}))
CODECS.add("sign", entry(sign, {
    "step": Setting(0.001, "what a sign stands for", above=0), **_RULE,
}))
CODECS.add("rotation", entry(rotation, {
    "bits": Setting(4, "per number", at_least=1, at_most=16), **_RULE,
}))

__all__ = [
    "CODECS", "RULES", "Codec", "Kernels", "Levels", "Model", "Models", "Sparse", "bits_of",
    "bits_sent", "eight_bit", "feedback", "floating", "layer_stc", "mask", "models_in", "qsgd",
    "rate_for", "replaced", "rotation", "sbc", "shapes_of", "sign", "sstc", "stateless", "stc",
    "survivors", "topk", "weigh",
]
