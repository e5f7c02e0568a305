// Starts a bedside on a free port for the tests, and talks to it through the openai package, fetch and plain sockets.
import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import net from 'node:net';
import { once } from 'node:events';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import OpenAI from 'openai';

export const root = join(dirname(fileURLToPath(import.meta.url)), '..', '..');
const program = join(root, process.env.BEDSIDE ?? 'build/bedside');
export const demo = 'tests/demo-model/demo-q8_0.gguf';

const goldens = JSON.parse(readFileSync(join(root, 'tests/demo-model/goldens.json'), 'utf8'));
export const endOfTurn = goldens.eos;

// One golden conversation of the demo model, as a request.
export function golden(name) {
    const found = goldens.cases.find((c) => c.name === name);
    if (!found) throw new Error(`no golden conversation named ${name}`);
    const request = {
        messages: found.messages,
        temperature: 0,
        max_tokens: 200,
        chat_template_kwargs: { enable_thinking: found.enable_thinking },
    };
    if (found.tools) request.tools = found.tools;
    const greedy = found.greedy['llama.cpp_q8_0'];
    return { request, checks: found.checks, promptTokens: found.prompt_tokens.length, tokens: greedy.tokens, text: greedy.text.replace('<|im_end|>', '') };
}

// A request that goes on until it is stopped: the tokens that end an answer are banned.
export function endless(extra = {}) {
    return {
        messages: [{ role: 'user', content: 'Hello' }],
        stream: true,
        temperature: 1,
        seed: 1,
        max_tokens: 20000,
        logit_bias: { [endOfTurn]: -100, [endOfTurn - 2]: -100 },
        ...extra,
    };
}

// A user message of about n tokens (the demo model's vocabulary).
export function longText(n) {
    return '[4] Medication: warfarin 5 mg once daily\n'.repeat(Math.ceil(n / 13));
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Asks again until the condition holds; a promise that is not kept fails the test.
export async function until(what, condition, limit = 30000) {
    const end = Date.now() + limit;
    for (;;) {
        const value = await condition();
        if (value) return value;
        if (Date.now() > end) throw new Error(`not within ${limit} ms: ${what}`);
        await sleep(10);
    }
}

export class Server {
    static #started = new Set();

    // For after(): also ends what a failed test left running, or node would wait for it for ever.
    static stopAll() {
        return Promise.all([...Server.#started].map((s) => s.stop()));
    }

    // Options are command line words; env is added to the environment.
    static async start(options = [], env = {}) {
        const s = new Server();
        const clean = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith('BEDSIDE_')));
        s.child = spawn(program, ['serve', '--model', demo, '--port', '0', ...options], { cwd: root, env: { ...clean, ...env } });
        Server.#started.add(s);
        s.out = '';
        s.log = '';
        s.child.stdout.on('data', (d) => (s.out += d));
        s.child.stderr.on('data', (d) => (s.log += d));
        s.exited = new Promise((resolve) => s.child.on('close', (code, signal) => resolve({ code, signal })));
        let gone = null;
        s.exited.then((e) => {
            gone = e;
            Server.#started.delete(s);
        });
        await until('the server listens', () => {
            if (gone) throw new Error(`the server ended (${JSON.stringify(gone)}): ${s.out}${s.log}`);
            return /^listening on /m.test(s.out);
        }, 60000);
        s.url = /^listening on (\S+)/m.exec(s.out)[1];
        s.port = Number(new URL(s.url).port);
        s.client = new OpenAI({ baseURL: `${s.url}/v1`, apiKey: 'none', maxRetries: 0, timeout: 120000 });
        return s;
    }

    async stop() {
        this.child.kill('SIGKILL');
        await this.exited;
    }

    // SIGTERM, and how it ended.
    async terminate() {
        this.child.kill('SIGTERM');
        return this.exited;
    }

    get(path, headers = {}) {
        return fetch(this.url + path, { headers });
    }

    async health() {
        return (await this.get('/health')).json();
    }

    post(body, headers = {}, signal = undefined) {
        return fetch(`${this.url}/v1/chat/completions`, {
            method: 'POST',
            headers: { 'Content-Type': 'application/json', ...headers },
            body: typeof body === 'string' || body instanceof Uint8Array ? body : JSON.stringify(body),
            signal,
        });
    }

    // Until /health counts so many.
    counts(running, queued) {
        return until(`${running} running, ${queued} queued`, async () => {
            const h = await this.health();
            return h.running === running && h.queued === queued;
        });
    }

    // Processor seconds used so far.
    cpuSeconds() {
        const fields = readFileSync(`/proc/${this.child.pid}/stat`, 'utf8').split(') ')[1].split(' ');
        return (Number(fields[11]) + Number(fields[12])) / 100;
    }

    // A connection of one's own.
    async connect(options = {}) {
        const c = new Connection();
        c.socket = net.connect({ port: this.port, host: '127.0.0.1', ...options });
        c.socket.setNoDelay(true);
        c.text = '';
        c.closed = false;
        c.socket.setEncoding('utf8');
        c.socket.on('data', (d) => {
            c.text += d;
            c.chunks.push({ at: Date.now(), text: d });
        });
        c.socket.on('close', () => (c.closed = true));
        c.socket.on('error', () => {});
        await once(c.socket, 'connect');
        return c;
    }
}

export class Connection {
    chunks = [];

    send(text) {
        this.socket.write(text);
    }

    // A request with its body; `headers` are lines.
    post(body, headers = []) {
        const text = typeof body === 'string' ? body : JSON.stringify(body);
        this.send(
            ['POST /v1/chat/completions HTTP/1.1', 'Host: localhost', 'Content-Type: application/json', `Content-Length: ${Buffer.byteLength(text)}`,
                ...headers, '', text].join('\r\n'));
    }

    get(path, headers = ['Host: localhost']) {
        this.send([`GET ${path} HTTP/1.1`, ...headers, '', ''].join('\r\n'));
    }

    has(pattern, limit) {
        return until(`the connection received ${pattern}`, () => (typeof pattern === 'string' ? this.text.includes(pattern) : pattern.test(this.text)), limit);
    }

    end(limit) {
        return until('the server closes the connection', () => this.closed, limit);
    }

    // As a client that is killed or whose user presses stop.
    leave() {
        this.socket.destroy();
    }
}

// The events of a finished stream, parsed; comments and [DONE] are left out.
export function events(text) {
    return [...text.matchAll(/^data: (\{.*\})$/gm)].map((m) => JSON.parse(m[1]));
}

export function contentOf(list) {
    return list.map((e) => e.choices?.[0]?.delta?.content ?? '').join('');
}
