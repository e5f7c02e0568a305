#!/usr/bin/python3
"""Write a GGUF with the real tensor shapes and Q4_K_M types of Qwen3.6-35B-A3B, but fewer layers and random weights.

    make_slice_gguf.py OUT.gguf [--layers 8] [--mtp] [--vocab 248320] [--seed 1]

Use: speed and memory measurements on a machine too small for the 21.7 GB file, side by side with any other engine
that reads GGUF. Every layer costs 0.50 GB, embedding + head 0.70 GB; 8 layers = 4.7 GB. The text it writes is noise.
Blocks are valid (finite scales, values centred near 0 with a spread near 0.02), so activations stay finite.
Only numpy is needed.
"""
import argparse
import os
import struct
import sys
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests", "reference"))
import ggufmini as g  # noqa: E402  (types table and value ids)

A = "qwen35moe"
D, V0, NH, NKV, HD, ROT = 2048, 248320, 16, 2, 256, 64
HK, HV, S, K = 16, 32, 128, 4
E, USED, F, FS = 256, 8, 512, 512


def more_bits(i, n):
    """The layers that a Q4_K_M file gives Q6_K to (attn_v, DeltaNet attn_qkv, ffn_down)."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def tensors(layers, mtp, vocab):
    n = layers + (1 if mtp else 0)
    yield "token_embd.weight", [D, vocab], "Q4_K"
    yield "output.weight", [D, vocab], "Q6_K"
    yield "output_norm.weight", [D], "F32"
    for i in range(n):
        p, hi = "blk.%d." % i, "Q6_K" if more_bits(i, n) else "Q4_K"
        yield p + "attn_norm.weight", [D], "F32"
        if i < layers and (i + 1) % 4:
            yield p + "attn_qkv.weight", [D, 2 * HK * S + HV * S], hi
            yield p + "attn_gate.weight", [D, HV * S], "Q4_K"
            yield p + "ssm_conv1d.weight", [K, 2 * HK * S + HV * S], "F32"
            yield p + "ssm_dt.bias", [HV], "F32"
            yield p + "ssm_a", [HV], "F32"
            yield p + "ssm_beta.weight", [D, HV], "Q4_K"
            yield p + "ssm_alpha.weight", [D, HV], "Q4_K"
            yield p + "ssm_norm.weight", [S], "F32"
            yield p + "ssm_out.weight", [HV * S, D], "Q4_K"
        else:
            yield p + "attn_q.weight", [D, NH * HD * 2], "Q4_K"
            yield p + "attn_k.weight", [D, NKV * HD], "Q4_K"
            yield p + "attn_v.weight", [D, NKV * HD], hi
            yield p + "attn_output.weight", [NH * HD, D], "Q4_K"
            yield p + "attn_q_norm.weight", [HD], "F32"
            yield p + "attn_k_norm.weight", [HD], "F32"
        yield p + "post_attention_norm.weight", [D], "F32"
        yield p + "ffn_gate_inp.weight", [D, E], "F32"
        yield p + "ffn_gate_exps.weight", [D, F, E], "Q4_K"
        yield p + "ffn_up_exps.weight", [D, F, E], "Q4_K"
        yield p + "ffn_down_exps.weight", [F, D, E], hi
        yield p + "ffn_gate_inp_shexp.weight", [D], "F32"
        yield p + "ffn_gate_shexp.weight", [D, FS], "Q4_K"
        yield p + "ffn_up_shexp.weight", [D, FS], "Q4_K"
        yield p + "ffn_down_shexp.weight", [FS, D], hi
        if i >= layers:
            yield p + "nextn.eh_proj.weight", [2 * D, D], "Q8_0"
            for t in ("enorm", "hnorm", "shared_head_norm"):
                yield p + "nextn.%s.weight" % t, [D], "F32"


def metadata(layers, mtp, vocab):
    import bpe
    tok = [bpe.B2U[b] for b in bpe.BYTE_ORDER]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
               "</tool_response>", "<think>", "</think>"]
    tok += ["[U%d]" % k for k in range(vocab - len(tok) - len(special))] + special
    types = [1] * 256 + [5] * (vocab - 256 - len(special)) + [3] * 3 + [4] * 6
    u, f, s = g.KV_U32, g.KV_F32, g.KV_STR
    kv = [("general.architecture", s, A), ("general.name", s, "Qwen3.6-35B-A3B slice, random"),
          ("general.quantization_version", u, 2), ("general.file_type", u, 15),
          (A + ".block_count", u, layers + (1 if mtp else 0)), (A + ".context_length", u, 262144),
          (A + ".embedding_length", u, D), (A + ".attention.head_count", u, NH), (A + ".attention.head_count_kv", u, NKV),
          (A + ".attention.key_length", u, HD), (A + ".attention.value_length", u, HD),
          (A + ".attention.layer_norm_rms_epsilon", f, 1e-6), (A + ".rope.freq_base", f, 1e7),
          (A + ".rope.dimension_count", u, ROT), (A + ".rope.dimension_sections", (g.KV_ARR, g.KV_I32), [11, 11, 10, 0]),
          (A + ".expert_count", u, E), (A + ".expert_used_count", u, USED), (A + ".expert_feed_forward_length", u, F),
          (A + ".expert_shared_feed_forward_length", u, FS), (A + ".ssm.conv_kernel", u, K), (A + ".ssm.state_size", u, S),
          (A + ".ssm.group_count", u, HK), (A + ".ssm.time_step_rank", u, HV), (A + ".ssm.inner_size", u, HV * S),
          (A + ".full_attention_interval", u, 4)]
    if mtp:
        kv.append((A + ".nextn_predict_layers", u, 1))
    im_end = tok.index("<|im_end|>")
    kv += [("tokenizer.ggml.model", s, "gpt2"), ("tokenizer.ggml.pre", s, "qwen35"),
           ("tokenizer.ggml.tokens", (g.KV_ARR, s), tok), ("tokenizer.ggml.token_type", (g.KV_ARR, g.KV_I32), types),
           ("tokenizer.ggml.merges", (g.KV_ARR, s), ["\u0120 \u0120"]), ("tokenizer.ggml.eos_token_id", u, im_end),
           ("tokenizer.ggml.padding_token_id", u, im_end - 2), ("tokenizer.ggml.add_bos_token", g.KV_BOOL, False)]
    return kv


def fill(rng, name, ty, nblocks):
    """Random valid blocks of one type, as uint8 [nblocks, bytes per block]."""
    bs = g.TYPES[ty if isinstance(ty, int) else g.TYPE_ID[ty]][2]
    b = rng.integers(0, 256, size=(nblocks, bs), dtype=np.uint8)
    d = (0.02 / 150 * (0.75 + 0.5 * rng.random(nblocks, dtype=np.float32))).astype(np.float32)
    if ty == "Q4_K":                      # d, dmin, 12 scale bytes, 128 nibble bytes
        b[:, 0:2] = d.astype("<f2").view(np.uint8).reshape(-1, 2)
        b[:, 2:4] = (d * 7.5).astype("<f2").view(np.uint8).reshape(-1, 2)
    elif ty == "Q6_K":                    # 128 low, 64 high, 16 int8 scales, d last
        b[:, 192:208] = (b[:, 192:208] & 31) + 16
        b[:, 208:210] = (d * 0.35).astype("<f2").view(np.uint8).reshape(-1, 2)
    elif ty == "Q8_0":
        b[:, 0:2] = (d * 2).astype("<f2").view(np.uint8).reshape(-1, 2)
    return b


def f32_tensor(rng, name, n):
    if name.endswith("ssm_a"):
        return -np.exp(rng.uniform(-4, 1, n))
    if name.endswith("ssm_dt.bias"):
        return rng.normal(-1, 1, n)
    if "norm" in name:
        return 1 + 0.1 * rng.normal(size=n)
    if "ssm_conv1d" in name:
        return 0.5 * rng.normal(size=n)
    return rng.normal(size=n) / np.sqrt(D) * 2


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("out")
    ap.add_argument("--layers", type=int, default=8)
    ap.add_argument("--mtp", action="store_true")
    ap.add_argument("--vocab", type=int, default=V0)
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    if a.layers < 4 or a.layers % 4:
        ap.error("--layers must be a multiple of 4")
    rng = np.random.default_rng(a.seed)
    infos, off = [], 0
    for name, ne, ty in tensors(a.layers, a.mtp, a.vocab):
        tid = g.TYPE_ID[ty]
        _, per, size = g.TYPES[tid]
        n = int(np.prod(ne))
        infos.append((name, ne, ty, tid, n, n // per * size, off))
        off += (n // per * size + 31) // 32 * 32

    def st(x):
        x = x.encode()
        return struct.pack("<Q", len(x)) + x

    def val(t, v):
        if isinstance(t, tuple):
            head = struct.pack("<IQ", t[1], len(v))
            if t[1] == g.KV_STR:
                return head + b"".join(st(x) for x in v)
            return head + np.asarray(v, dtype="<i4").tobytes()
        return st(v) if t == g.KV_STR else struct.pack({g.KV_U32: "<I", g.KV_F32: "<f", g.KV_BOOL: "<?"}[t], v)

    with open(a.out, "wb") as fo:
        kv = metadata(a.layers, a.mtp, a.vocab)
        fo.write(b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(kv)))
        for k, t, v in kv:
            fo.write(st(k) + struct.pack("<I", t[0] if isinstance(t, tuple) else t) + val(t, v))
        for name, ne, ty, tid, n, size, o in infos:
            fo.write(st(name) + struct.pack("<I", len(ne)) + struct.pack("<%dQ" % len(ne), *ne) + struct.pack("<IQ", tid, o))
        fo.write(b"\0" * (-fo.tell() % 32))
        base = fo.tell()
        for name, ne, ty, tid, n, size, o in infos:
            fo.write(b"\0" * (base + o - fo.tell()))
            if ty == "F32":
                fo.write(f32_tensor(rng, name, n).astype("<f4").tobytes())
                continue
            left, per = n // g.TYPES[tid][1], 1 << 17
            while left:
                k = min(left, per)
                fo.write(fill(rng, name, ty, k).tobytes())
                left -= k
    print("%s: %d layers%s, %d tensors, %.2f GB" % (a.out, a.layers, " + MTP" if a.mtp else "", len(infos), os.path.getsize(a.out) / 1e9))


if __name__ == "__main__":
    main()
