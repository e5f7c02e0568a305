#!/usr/bin/env python3
"""Writes tests/fuzz/seeds/gguf: small valid model files to start fuzzing from. Run from the repository root; needs numpy."""
import sys

import numpy as np

sys.path.insert(0, "tests/reference")
from ggufmini import *  # noqa: F403

FOLDER = "tests/fuzz/seeds/gguf/"
values = [
    ("general.architecture", KV_STR, "qwen3"), ("general.alignment", KV_U32, 32), ("a", KV_U8, 1), ("b", KV_I8, -1), ("c", KV_U16, 2),
    ("d", KV_I16, -2), ("e", KV_I32, -3), ("f", KV_F32, 1.5), ("g", KV_BOOL, True), ("h", KV_U64, 5), ("i", KV_I64, -5), ("j", KV_F64, 2.5),
    ("tokenizer.ggml.tokens", (KV_ARR, KV_STR), ["x", "", "yz"]), ("n", (KV_ARR, KV_I32), [1, 2, 3]), ("r", (KV_ARR, KV_F32), [0.5]),
    ("q", (KV_ARR, KV_BOOL), [True, False]),
]
x = np.random.default_rng(1).standard_normal(256)
tensors = [(name, [256], TYPE_ID[name], quantize(x, TYPE_ID[name])) for name in ("Q4_K", "Q8_0", "Q4_0")]
write_gguf(FOLDER + "every-kind.gguf", values, tensors + [("F32", [2, 2], 0, quantize(x[:4], 0))])
write_gguf(FOLDER + "split.gguf",
           [("split.no", KV_U16, 0), ("split.count", KV_U16, 1), ("split.tensors.count", KV_I32, 1), ("general.alignment", KV_U32, 8)],
           [("w", [1, 1, 1, 2], 0, quantize(x[:2], 0))], 8)
write_gguf(FOLDER + "empty.gguf", [], [])
