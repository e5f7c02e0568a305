// What the tests of the prefix cache share: records, requests and what came of them, and folders for the cache's files.
import assert from 'node:assert/strict';
import { execFileSync, spawnSync } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Server, golden, root, demo } from './server.mjs';

const program = join(root, process.env.BEDSIDE ?? 'build/bedside');

// ---- records ----

const labs = ['INR', 'glucose', 'HbA1c', 'BNP', 'platelets', 'TSH', 'vitamin D', 'albumin', 'sodium', 'bilirubin', 'ferritin', 'creatinine'];
const units = ['', ' mg/dL', ' %', ' pg/mL', ' G/L', ' mIU/L', ' ng/mL', ' g/dL', ' mmol/L', ' mg/dL', ' ng/mL', ' mg/dL'];

// A record of n lines (about 20 tokens each) in the demo model's form; the same for the same seed.
export function record(n, seed = 1) {
    let state = seed;
    const random = (most) => {
        state = (Math.imul(state, 1103515245) + 12345) >>> 0;
        return (state >>> 8) % most;
    };
    const two = (x) => String(x).padStart(2, '0');
    const lines = [`[1] Patient: Marta Wilk, female, ${40 + random(50)} years`];
    for (let i = 2; i <= n; i++) {
        const k = random(labs.length);
        const date = `${2015 + Math.floor((10 * i) / n)}-${two(1 + random(12))}-${two(1 + random(28))}`;
        lines.push(`[${i}] Lab: ${labs[k]} ${random(300)}.${random(10)}${units[k]} (${date})`);
    }
    return lines.join('\n');
}

export const system = (text) => ({ role: 'system', content: `You are a clinical assistant. Cite the record.\n\nRecord:\n${text}` });
export const user = (content) => ({ role: 'user', content });

// A question to a record: greedy, brief, without thinking.
export function question(text, words, extra = {}) {
    return { messages: [system(text), user(words)], temperature: 0, max_tokens: 24, chat_template_kwargs: { enable_thinking: false }, ...extra };
}

// A golden conversation with the 20 likeliest tokens at each place.
export function withLogprobs(name) {
    return { ...golden(name).request, max_tokens: 48, logprobs: true, top_logprobs: 20 };
}

// ---- requests ----

// What a reply says, its logprobs as they were printed.
export function told(body) {
    const reply = JSON.parse(body);
    const message = reply.choices[0].message;
    const cached = reply.usage.prompt_tokens_details.cached_tokens;
    return {
        text: (message.reasoning_content ?? '') + '|' + message.content,
        message,
        logprobs: /"logprobs":(.*),"finish_reason"/s.exec(body)[1],
        prompt: reply.usage.prompt_tokens,
        cached,
        computed: reply.usage.prompt_tokens - cached,
        written: reply.usage.completion_tokens,
        timings: reply.timings,
    };
}

export async function ask(server, request, headers = {}) {
    const response = await server.post(request, headers);
    const body = await response.text();
    assert.equal(response.status, 200, body);
    return told(body);
}

export function send(server, method, path, body, headers = {}) {
    const request = { method, headers: { ...headers } };
    if (body !== undefined) {
        request.headers['Content-Type'] = 'application/json';
        request.body = JSON.stringify(body);
    }
    return fetch(server.url + path, request);
}

// The JSON of a reply with status 200.
export async function sendOk(...args) {
    const response = await send(...args);
    const body = await response.text();
    assert.equal(response.status, 200, body);
    return JSON.parse(body);
}

// The entry of a namespace in the list, or undefined.
export async function listed(server, name) {
    return (await sendOk(server, 'GET', '/v1/cache')).data.find((e) => e.namespace === name);
}

// Milliseconds to the first token, by the client's clock, and the timings of the stream's last chunk.
export async function streamTimes(server, request) {
    const c = await server.connect();
    const began = performance.now();
    let first = null;
    c.socket.on('data', () => {
        if (first === null && /"(reasoning_)?content":"[^"]/.test(c.text)) first = performance.now() - began;
    });
    c.post({ ...request, stream: true });
    await c.has('data: [DONE]\n\n', 120000);
    c.leave();
    const chunk = [...c.text.matchAll(/^data: (\{.*\})$/gm)].map((m) => JSON.parse(m[1])).find((e) => e.timings);
    return { first, timings: chunk.timings };
}

// ---- the program and its folders ----

// Token ids of a text, control tokens recognised.
export function tokenize(text) {
    const out = execFileSync(program, ['tokenize', '--model', demo, '--ids-only', '--special', '--no-nfc', '--', text], { cwd: root, encoding: 'utf8' });
    return out.trim().split(/\s+/).map(Number);
}

// A server that ends by itself: exit status and what it said.
export function serveRefused(options) {
    const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith('BEDSIDE_')));
    const run = spawnSync(program, ['serve', '--model', demo, '--port', '0', ...options], { cwd: root, env, encoding: 'utf8', timeout: 60000 });
    return { status: run.status, said: run.stderr };
}

const made = [];

// A folder of this test's own, and (by ending) none of it afterwards.
export function folder() {
    made.push(mkdtempSync(join(tmpdir(), 'bedside-cache-')));
    return made.at(-1);
}

export function removeFolders() {
    for (const f of made.splice(0)) rmSync(f, { recursive: true, force: true });
}

export function keyFile(dir, name, byte) {
    writeFileSync(join(dir, name), Buffer.alloc(32, byte), { mode: 0o600 });
    return join(dir, name);
}

// Paths of the files in a cache folder whose folder and name match.
export function files(dir, space = /./, name = /./) {
    return readdirSync(dir)
        .filter((s) => space.test(s))
        .flatMap((s) => readdirSync(join(dir, s)).filter((n) => name.test(n)).sort().map((n) => join(dir, s, n)));
}

// Whether the bytes are in any of the files.
export function anyHas(paths, bytes) {
    return paths.some((p) => readFileSync(p).includes(bytes));
}

export const cacheServer = (dir, options = []) => Server.start(['--cache-dir', dir, ...options]);
