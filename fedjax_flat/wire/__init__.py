"""What travels, and what it weighs."""

from fedjax_flat.registry import Entry, Registry, entry
from fedjax_flat.wire.codec import Codec, bits_of, eight_bit

# make(**settings) -> Codec
CODECS: Registry[Entry] = Registry("codec")
CODECS.add("8bit", entry(eight_bit))

__all__ = ["CODECS", "Codec", "bits_of", "eight_bit"]
