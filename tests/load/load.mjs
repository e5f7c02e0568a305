// Many clients on few places: random questions, warming, deletion and cancels at every stage, and a server that is killed and started again over
// the same cache folder. Whatever happens, an answer that completes is the answer of an undisturbed server, and nothing is left when all is quiet.
//
// usage: node tests/load/load.mjs [SECONDS] [--seed N] [--clients N]      BEDSIDE names the program
import http from 'node:http';
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Server, golden, longText, endOfTurn, sleep, until } from '../http/server.mjs';
import { answerOf, exchange, metrics, randomness } from './client.mjs';
import { measureGaps, tellGaps } from './gaps.mjs';

const namespaces = [null, 'patient-1', 'patient-2', 'patient-3', 'ward_4.b'];
const goldens = ['hello', 'dose', 'allergy-yes', 'latest-inr-think', 'list-meds', 'multi-turn-3', 'multi-turn-think', 'tool-call', 'tool-answer',
    'spanish-2', 'polish-1', 'long-1'];

// Five places, and beside their states some 23 pages (43 of q8_0): growing answers are paused, and the cache's idle pages are taken away all the time.
const places = ['--max-running', '5', '--max-queue', '40', '--context', '1408', '--kv-memory', '9', '--cache-memory', '24', '--log-level', 'warn'];

// ---- requests and their undisturbed answers ----

function makeRequests() {
    const list = goldens.map((name) => ({ name, body: { ...golden(name).request, max_tokens: 40 } }));
    const thinking = { chat_template_kwargs: { enable_thinking: false } };
    const user = (content) => [{ role: 'user', content }];
    list.push({ name: 'record', body: { messages: user(`${longText(900)}What is the dose of warfarin?`), temperature: 0, max_tokens: 20, ...thinking } });
    list.push({ name: 'same record', body: { messages: user(`${longText(900)}Which drugs?`), temperature: 0, max_tokens: 20, ...thinking } });
    const bias = { [endOfTurn]: -100, [endOfTurn - 2]: -100 }; // these go on to the limit
    for (const name of ['hello', 'dose', 'list-meds'])
        list.push({ name: `${name}, long`, body: { ...golden(name).request, max_tokens: 240, logit_bias: bias } });
    list.push({ name: 'drawn answer', body: { messages: user('Hello again'), temperature: 1, seed: 7, max_tokens: 120, logit_bias: bias } });
    return list;
}

const post = (body, ns, more) => ({
    method: 'POST',
    path: '/v1/chat/completions',
    body: ns ? { ...body, cache_namespace: ns } : body,
    ...more,
});

// The next turn of a conversation: the answer, and one more question.
function continued(entry) {
    const { reasoning, content } = entry.expected;
    const answer = { role: 'assistant', content, ...(reasoning && { reasoning_content: reasoning }) };
    return { name: `${entry.name}, continued`, body: { ...entry.body, messages: [...entry.body.messages, answer, { role: 'user', content: 'Are you sure?' }] } };
}

// Asks each alone, without a cache.
async function undisturbed(options) {
    const server = await Server.start([...places, ...options, '--cache-memory', '0']);
    const requests = makeRequests();
    for (const entry of requests) {
        const { status, text } = await exchange(server.url, post(entry.body, null));
        if (status !== 200) throw new Error(`${entry.name}: status ${status}: ${text}`);
        entry.expected = answerOf(text, false);
        if (['dose', 'multi-turn-3', 'latest-inr-think'].includes(entry.name)) requests.push(continued(entry)); // the loop comes to it too
    }
    await server.stop();
    return requests;
}

// ---- the run ----

class Load {
    constructor(options) {
        this.random = randomness(options.seed);
        this.options = options;
        this.end = Date.now() + options.seconds * 1000;
        this.failures = [];
        this.counts = { completed: 0, hits: 0, cancelled: 0, refused: 0, 'cut by kill -9': 0, warmed: 0, deleted: 0, listed: 0, kills: 0, quiet: 0, 'left temporary': 0 };
        this.active = 0;
        this.gate = null; // a promise while clients must hold back
        this.agents = new Set();
        this.pauses = 0;
    }

    count(what) {
        this.counts[what]++;
    }

    fail(what) {
        if (this.failures.length < 20) this.failures.push(what);
    }

    get stopped() {
        return Date.now() >= this.end || this.failures.length >= 20;
    }

    temporaries() {
        return readdirSync(this.dir, { recursive: true }).filter((name) => /(^|\/)tmp\.[^/]*$/.test(name));
    }

    async start() {
        this.server = await Server.start([...places, ...this.serverOptions, '--cache-dir', this.dir]);
        const { server } = this;
        server.exited.then((how) => {
            if (!server.killed && !server.ending) this.fail(`the server ended by itself (${JSON.stringify(how)}): ${server.log.slice(-2000)}`);
        });
        const left = this.temporaries();
        if (left.length) this.fail(`temporary files are there after opening: ${left}`);
    }

    // In the middle of whatever it does.
    async killAndRestart() {
        this.hold();
        const { server } = this;
        const m = await metrics(server.url);
        this.checkErrors(m);
        this.pauses += m.bedside_pauses_total;
        server.killed = true;
        await server.stop();
        this.count('kills');
        this.counts['left temporary'] += this.temporaries().length;
        await this.start();
    }

    hold() {
        let open;
        this.gate = new Promise((resolve) => (open = resolve));
        this.resume = () => {
            this.gate = null;
            open();
        };
    }

    // ---- what a client does ----

    check(entry, answer) {
        const { cached, ...got } = answer;
        const { cached: _, ...expected } = entry.expected;
        if (JSON.stringify(got) !== JSON.stringify(expected))
            this.fail(`${entry.name}: ${JSON.stringify(got)} instead of ${JSON.stringify(expected)} (${cached} cached)`);
        this.count('completed');
        this.counts.hits += cached > 0;
    }

    leaving(stream) {
        const { random } = this;
        const ways = [{ afterMs: random.below(4) }, { afterMs: random.below(60) }, { afterMs: random.below(600) }, { halfBody: true }];
        if (stream) {
            const texts = 1 + random.below(12);
            ways.push({ headers: true }, { onText: (t) => t.includes(': reading prompt') });
            ways.push({ onText: (t) => (t.match(/"(reasoning_)?content":"[^"]/g)?.length ?? 0) >= texts });
        }
        return random.among(ways);
    }

    async chat(url, agent) {
        const { random } = this;
        const entry = random.chance(0.15) ? random.among(this.growing) : random.among(this.requests);
        const stream = random.chance(0.6);
        const leave = random.chance(0.4) ? this.leaving(stream) : undefined;
        const ns = random.among(namespaces);
        const body = { ...entry.body, stream, ...(stream && { stream_options: { include_usage: true, include_progress: random.chance(0.3) } }) };
        const options = random.chance(0.5) ? post(body, ns, { agent, leave }) : post(body, null, { agent, leave, headers: ns ? { 'X-Cache-Namespace': ns } : {} });
        const reply = await exchange(url, options);
        if (reply.left) this.count('cancelled');
        else if (reply.status === 429) {
            this.count('refused');
            if (!(Number(reply.headers['retry-after']) >= 1)) this.fail('a 429 without Retry-After');
            await sleep(100 + random.below(900));
        } else if (reply.status !== 200) this.fail(`${entry.name}: status ${reply.status}: ${reply.text.slice(0, 300)}`);
        else this.check(entry, answerOf(reply.text, stream));
    }

    async warm(url, agent) {
        const { random } = this;
        const entry = random.among(this.requests);
        const ns = random.among(namespaces);
        const { messages, tools } = entry.body;
        const body = { messages, ...(tools && { tools }), ...(ns && { cache_namespace: ns }) };
        const leave = random.chance(0.3) ? { afterMs: random.below(80) } : undefined;
        const reply = await exchange(url, { method: 'POST', path: '/v1/cache/warm', body, agent, leave });
        if (reply.left) this.count('cancelled');
        else if (reply.status === 429) this.count('refused');
        else if (reply.status !== 200) this.fail(`warming: status ${reply.status}: ${reply.text.slice(0, 300)}`);
        else this.count('warmed');
    }

    async delete(url, ns, agent) {
        const reply = await exchange(url, { method: 'DELETE', path: ns ? `/v1/cache/${ns}` : '/v1/cache', agent });
        if (reply.status !== 200 || JSON.parse(reply.text).object !== 'cache.deleted') this.fail(`deletion: status ${reply.status}: ${reply.text.slice(0, 300)}`);
        else this.count('deleted');
    }

    async list(url, agent) {
        const path = this.random.among(['/v1/cache', '/metrics', '/health', '/v1/models']);
        const reply = await exchange(url, { path, agent });
        if (reply.status !== 200) this.fail(`${path}: status ${reply.status}: ${reply.text.slice(0, 300)}`);
        else this.count('listed');
    }

    async client() {
        const { random } = this;
        let agent = new http.Agent({ keepAlive: true, maxSockets: 1 }); // one connection for many requests
        this.agents.add(agent);
        while (!this.stopped) {
            if (this.gate) await this.gate;
            const { server } = this;
            const use = random.chance(0.5) ? agent : false;
            const what = random.unit();
            this.active++;
            try {
                if (what < 0.02) await this.delete(server.url, random.among(namespaces), use);
                else if (what < 0.08) await this.list(server.url, use);
                else if (what < 0.16) await this.warm(server.url, use);
                else await this.chat(server.url, use);
            } catch (e) {
                if (server.killed) this.count('cut by kill -9');
                else this.fail(`a connection broke: ${e.stack}`);
            }
            this.active--;
        }
    }

    // ---- what must hold ----

    checkErrors(m) {
        for (const name of ['requests_ended_total{how="failed"}', 'cache_disk_bad_files_total', 'cache_disk_write_errors_total', 'cache_disk_read_errors_total'])
            if (m[`bedside_${name}`] !== 0) this.fail(`${name} is ${m[`bedside_${name}`]}`);
    }

    // All clients finish what they have begun; then every count is back at rest.
    async quiet() {
        this.hold();
        const { url } = this.server;
        await until('the clients have finished', () => this.active === 0, 240000);
        for (const agent of this.agents) agent.destroy();
        const rest = { requests_running: 0, requests_queued: 0, requests_paused: 0, kv_pages_running: 0, states_running: 0, cache_disk_queued_bytes: 0, connections: 1 };
        let m;
        const wrong = () => Object.keys(rest).filter((name) => m[`bedside_${name}`] !== rest[name]);
        const ended = () => Object.keys(m).filter((name) => name.startsWith('bedside_requests_ended_total')).reduce((sum, name) => sum + m[name], 0);
        try {
            await until('counters at rest', async () => {
                m = await metrics(url);
                return wrong().length === 0 && ended() === m.bedside_requests_submitted_total;
            }, 60000);
        } catch {
            const said = wrong().map((name) => `${name} ${m[`bedside_${name}`]}`);
            this.fail(`not at rest a minute after the last request: ${said}; ${ended()} of ${m.bedside_requests_submitted_total} requests ended`);
        }
        this.checkErrors(m);
        if (m.bedside_kv_pages_idle > m.bedside_kv_pages) this.fail(`${m.bedside_kv_pages_idle} idle pages of ${m.bedside_kv_pages}`);
        this.count('quiet');
        return m;
    }

    // Every question once more, one after the other, and how many began from the cache.
    async askAll() {
        const before = this.counts.hits;
        for (const entry of this.requests) {
            const { status, text } = await exchange(this.server.url, post(entry.body, namespaces[1]));
            if (status !== 200) this.fail(`${entry.name}: status ${status}: ${text.slice(0, 300)}`);
            else this.check(entry, answerOf(text, false));
        }
        return this.counts.hits - before;
    }

    async last() {
        const m = await this.quiet();
        this.pauses += m.bedside_pauses_total;
        if ((await this.askAll()) === 0) this.fail('no hit in a cache that is full of these questions');
        this.server.ending = true;
        const how = await this.server.terminate();
        if (how.code !== 0) this.fail(`SIGTERM: ${JSON.stringify(how)} ${this.server.log.slice(-2000)}`);
        const left = this.temporaries();
        if (left.length) this.fail(`temporary files are there after SIGTERM: ${left}`);

        await this.start();
        if ((await this.askAll()) === 0) this.fail('no hit after a restart');
        this.diskHits = (await metrics(this.server.url))['bedside_cache_hits_total{source="disk"}'];
        for (const ns of namespaces) await this.delete(this.server.url, ns);
        const empty = await this.quiet();
        for (const name of ['kv_pages_idle', 'cache_snapshots', 'cache_snapshot_bytes', 'cache_disk_files', 'cache_disk_bytes'])
            if (empty[`bedside_${name}`] !== 0) this.fail(`${name} is ${empty[`bedside_${name}`]} after everything was deleted`);
        const list = JSON.parse((await exchange(this.server.url, { path: '/v1/cache' })).text);
        if (list.data.length) this.fail(`namespaces after everything was deleted: ${JSON.stringify(list.data)}`);
        this.server.ending = true;
        const second = await this.server.terminate();
        if (second.code !== 0) this.fail(`SIGTERM: ${JSON.stringify(second)} ${this.server.log.slice(-2000)}`);
    }

    async run() {
        const { random, options } = this;
        const root = mkdtempSync(join(tmpdir(), 'bedside-load-'));
        this.dir = join(root, 'cache');
        this.serverOptions = ['--kv-type', options.seed % 3 === 0 ? 'q8_0' : 'f16'];
        try {
            this.requests = await undisturbed(this.serverOptions);
            this.growing = this.requests.filter((entry) => entry.body.logit_bias);
            if (options.seed % 2) {
                writeFileSync(join(root, 'key'), Buffer.alloc(32, options.seed), { mode: 0o600 });
                this.serverOptions.push('--cache-key', join(root, 'key'));
            }
            await this.start();
            this.end = Date.now() + options.seconds * 1000;
            const clients = [...Array(options.clients)].map(() => this.client());
            for (let i = 0; !this.stopped; i++) {
                await sleep(Math.min(options.between / 2 + random.below(options.between), Math.max(0, this.end - Date.now())));
                if (this.stopped) break;
                if (i % 3 === 2) await this.quiet();
                else await this.killAndRestart();
                this.resume();
            }
            await Promise.all(clients);
            if (this.failures.length === 0) await this.last();
        } finally {
            await Server.stopAll();
            rmSync(root, { recursive: true, force: true });
        }
        return this;
    }

    tell() {
        const counts = Object.entries(this.counts).map(([what, n]) => `${what} ${n}`);
        return `${counts.join(', ')}, pauses ${this.pauses}, begun from disk after the last restart ${this.diskHits}`;
    }
}

// Runs it; the result has failures (none is good), counts and tell().
export function load(options) {
    return new Load({ seconds: 10, seed: 1, clients: 64, between: 4000, ...options }).run();
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
    const words = process.argv.slice(2);
    const options = { seconds: 600, seed: Date.now() % 1000000 };
    for (let i = 0; i < words.length; i++) {
        const name = /^--(seed|clients)$/.exec(words[i])?.[1];
        const value = Number(name ? words[++i] : words[i]);
        if (!(value > 0)) {
            console.error('usage: load.mjs [SECONDS] [--seed N] [--clients N]');
            process.exit(2);
        }
        options[name ?? 'seconds'] = value;
    }
    for (const maxGap of [100, 250]) console.log(tellGaps(await measureGaps({ maxGap })));
    console.log(`seed ${options.seed}, ${options.seconds} s`);
    const result = await load(options);
    console.log(result.tell());
    for (const failure of result.failures) console.log(`FAILED ${failure}`);
    process.exitCode = result.failures.length ? 1 : 0;
}
