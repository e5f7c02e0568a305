// How soon the answer to a second question about a record starts, as a share of the first one's cold time: from memory, and from disk after a restart.
//
// usage: node tests/bench/disk_hit.mjs MODEL.gguf [--build build] [--characters 2000] [--rounds 3] [--question "second question?"] [-- OPTIONS OF bedside serve]
// The slice file of tools/make_slice_gguf.py has byte tokens: a question has as many tokens there as characters.
// Everything is measured in one run, with records of random letters; the best of the rounds counts. Times are the server's own (queue + prefill) and the
// client's whole request of 4 tokens.
import { spawn } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";

const args = process.argv.slice(2);
const model = args.shift();
const opt = { build: "build", characters: 2000, rounds: 3, question: "second question?" };
while (args.length && args[0] !== "--") {
  const k = args.shift().replace(/^--/, "");
  opt[k] = typeof opt[k] === "number" ? Number(args.shift()) : args.shift();
}
const more = args.slice(1);
if (!model) {
  console.error("usage: disk_hit.mjs MODEL.gguf [--build DIR] [--characters N] [--rounds N] [-- OPTIONS]");
  process.exit(2);
}

const dir = fs.mkdtempSync(path.join(os.tmpdir(), "bedside-disk-hit-"));

async function start() {
  const child = spawn(path.join(opt.build, "bedside"), ["serve", "--model", model, "--port", "0", "--cache-dir", path.join(dir, "cache"), "--log-level", "error", ...more],
    { stdio: ["ignore", "pipe", "inherit"] });
  let text = "";
  for await (const piece of child.stdout.setEncoding("utf8")) {
    text += piece;
    const m = /^listening on (\S+)/m.exec(text);
    if (m) return { url: m[1], stop: () => new Promise((done) => { child.once("exit", done); child.kill("SIGTERM"); }) };
  }
  throw new Error("the server did not start");
}

async function ask(server, record, question, ns) {
  const began = performance.now();
  const reply = await fetch(server.url + "/v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      messages: [{ role: "system", content: record }, { role: "user", content: question }],
      temperature: 0, max_tokens: 4, cache_namespace: ns, chat_template_kwargs: { enable_thinking: false },
    }),
  });
  const r = await reply.json();
  if (!r.timings) throw new Error(JSON.stringify(r));
  return { first: r.timings.queue_ms + r.timings.prefill_ms, whole: performance.now() - began, computed: r.timings.prefill_tokens, source: r.timings.cache_source };
}

let seed = 1;
const letter = () => "abcdefghijklmnopqrstuvwxyz      "[((seed = (Math.imul(seed, 1103515245) + 12345) >>> 0) >>> 16) & 31];
const best = {};
const keep = (kind, r) => {
  console.log(`${kind.padEnd(7)} first token after ${r.first.toFixed(1)} ms, ${r.computed} prompt tokens computed, source ${r.source}`);
  const b = (best[kind] ??= { first: Infinity, whole: Infinity });
  for (const k of ["first", "whole"]) b[k] = Math.min(b[k], r[k]);
};

try {
  for (let round = 0; round < opt.rounds; round++) {
    const record = Array.from({ length: opt.characters }, letter).join(""), ns = `record-${round}`;
    let server = await start();
    keep("cold", await ask(server, record, "first question?", ns));
    keep("memory", await ask(server, record, [...opt.question].reverse().join(""), ns));
    await server.stop();
    server = await start();
    keep("disk", await ask(server, record, opt.question, ns));
    await server.stop();
  }
  for (const kind of ["memory", "disk"])
    console.log(`best: ${kind} / cold = ${(best[kind].first / best.cold.first).toFixed(3)} to the first token, ${(best[kind].whole / best.cold.whole).toFixed(3)} for the whole request`);
} finally {
  fs.rmSync(dir, { recursive: true, force: true });
}
