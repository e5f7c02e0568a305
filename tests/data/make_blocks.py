#!/usr/bin/env python3
"""Writes tests/data/blocks.bin: random valid blocks of every GGUF type, and the f32 values that tests/reference/ggufmini.py reads from them.

Records, little-endian: type u32, values u32, the blocks, the values f32. Run from the repository root; needs numpy.
"""
import struct
import sys

import numpy as np

sys.path.insert(0, "tests/reference")
import ggufmini

# Where the f16 scales of a block lie: random bytes there could be infinite or NaN.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}

rng = np.random.default_rng(20240607)
with open("tests/data/blocks.bin", "wb") as f:
    for type_id, (name, values, size) in sorted(ggufmini.TYPES.items()):
        n = 4 if values > 1 else 64
        blocks = rng.integers(0, 256, (n, size), np.uint8)
        for at in SCALES.get(name, []):
            scale = (rng.standard_normal(n) * 0.05).astype("<f2")
            scale[0] = np.float16(3e-6)  # a subnormal half
            blocks[:, at:at + 2] = scale.reshape(n, 1).view(np.uint8)
        if name in ("F32", "F16", "BF16"):
            x = rng.standard_normal(n).astype("<f4")
            x[:4] = [0, -0.0, 6e-8, -65504]
            blocks = np.frombuffer(ggufmini.quantize(x, type_id), np.uint8).reshape(n, size)
        if name == "MXFP4":
            blocks[:3, 0] = [0, 1, 254]  # the exponents at which the scale or the value leaves the normal range
        with np.errstate(over="ignore"):
            x = ggufmini.dequant(blocks.reshape(-1), type_id).astype("<f4")
        assert len(x) == n * values and not np.isnan(x).any(), name
        f.write(struct.pack("<II", type_id, len(x)) + blocks.tobytes() + x.tobytes())
