// Prefill and decode speed of bedside and of llama.cpp (npm node-llama-cpp, CPU), one after the other in one run, and their ratio.
//
// usage: node tests/bench/against_llama.mjs MODEL.gguf [--modules DIR] [--build build] [--prompt 512] [--decode 64] [--rounds 3]
// DIR is a folder with node-llama-cpp installed (npm install node-llama-cpp@3.21.1). Rounds alternate, the best of each side counts.
import { execFileSync } from "node:child_process";
import path from "node:path";
import os from "node:os";

const args = process.argv.slice(2);
const model = args.shift();
const opt = { modules: ".", build: "build", prompt: 512, decode: 64, rounds: 3, threads: os.cpus().length };
for (let i = 0; i + 1 < args.length; i += 2) {
  const k = args[i].replace(/^--/, "");
  opt[k] = typeof opt[k] === "number" ? Number(args[i + 1]) : args[i + 1];
}
if (!model) {
  console.error("usage: against_llama.mjs MODEL.gguf [--modules DIR] [--build DIR] [--prompt N] [--decode N] [--rounds N]");
  process.exit(2);
}

const { getLlama } = await import(path.resolve(opt.modules, "node_modules/node-llama-cpp/dist/index.js"));
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
const gguf = await llama.loadModel({ modelPath: path.resolve(model), gpuLayers: 0 });
const vocab = gguf.fileInfo?.metadata?.tokenizer?.ggml?.tokens?.length ?? 1000;
const ids = Array.from({ length: opt.prompt + opt.decode }, (_, i) => {
  let x = Math.imul(i + 1, 2654435761) >>> 0;
  x ^= x >>> 15;
  return (x >>> 0) % vocab;
});

async function llamaRound() {
  const context = await gguf.createContext({ contextSize: opt.prompt + opt.decode + 64, batchSize: 512, threads: opt.threads, flashAttention: true });
  const seq = context.getSequence();
  const t0 = performance.now();
  await seq.evaluateWithoutGeneratingNewTokens(ids.slice(0, opt.prompt));
  const t1 = performance.now();
  for (let i = 0; i < opt.decode; i++)
    await seq.controlledEvaluate([[ids[opt.prompt + i], { generateNext: { token: true, options: { temperature: 0 } } }]]);
  const t2 = performance.now();
  await context.dispose();
  return { prefill: opt.prompt / (t1 - t0) * 1e3, decode: opt.decode / (t2 - t1) * 1e3 };
}

function bedsideRound() {
  const out = execFileSync(path.join(opt.build, "tests/bench/bench_model"),
    [model, "--prompt", opt.prompt, "--decode", opt.decode, "--threads", opt.threads, "--repeat", 1].map(String), { encoding: "utf8" });
  const r = JSON.parse(out.trim().split("\n").pop());
  return { prefill: r.prefill_tok_s, decode: r.decode_tok_s };
}

const best = { llama: { prefill: 0, decode: 0 }, bedside: { prefill: 0, decode: 0 } };
for (let r = 0; r < opt.rounds; r++) {
  for (const [who, round] of [["llama", llamaRound], ["bedside", bedsideRound]]) {
    const t = await round();
    console.log(`round ${r + 1} ${who.padEnd(8)} prefill ${t.prefill.toFixed(1)} tok/s, decode ${t.decode.toFixed(2)} tok/s`);
    for (const k of ["prefill", "decode"]) best[who][k] = Math.max(best[who][k], t[k]);
  }
}
const ratio = (k) => (best.bedside[k] / best.llama[k]).toFixed(2);
console.log(`best: bedside / llama.cpp = ${ratio("prefill")} prefill, ${ratio("decode")} decode`);
process.exit(0);
