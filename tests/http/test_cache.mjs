// The prefix cache as a client sees it: what is not read twice, that answers never change by it, whose text is whose, and what survives on disk.
import { test, after } from 'node:test';
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, renameSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Server, golden, endless, events, contentOf, until } from './server.mjs';
import * as c from './cached.mjs';

after(async () => {
    await Server.stopAll();
    c.removeFolders();
});

const PAGE = 64; // tokens
const kinds = ['dose', 'long-think-1', 'tool-call', 'multi-turn'];

// The same answer, whatever it was computed from: text and the 20 likeliest tokens at each place with their printed numbers.
function same(a, b) {
    assert.equal(a.text, b.text);
    assert.equal(a.logprobs, b.logprobs);
}

// Until nothing waits to be written.
const written = (server) => until('the files are written', async () => (await c.sendOk(server, 'GET', '/v1/cache')).disk.queued_bytes === 0);

// ---- cold, hit, hit after a restart ----

test('an answer is the same from nothing, from memory, from disk after SIGTERM, and after kill -9 in mid-answer', async () => {
    const dir = c.folder();
    let server = await c.cacheServer(dir);
    const cold = {};
    for (const name of kinds) {
        cold[name] = await c.ask(server, c.withLogprobs(name), { 'X-Cache-Namespace': name });
        assert.equal(cold[name].cached, 0);
        assert.equal(cold[name].timings.cache_source, 'none');
        assert.equal(cold[name].timings.cache_miss, 'empty');
        assert.ok(cold[name].logprobs.length > 1000);
    }
    const expectHit = (name, got, source) => {
        assert.ok(got.computed <= 8, `${name}: ${got.computed} of ${got.prompt} tokens were computed`);
        assert.equal(got.timings.cache_source, source);
        assert.equal(got.timings.cached_tokens, got.cached);
        assert.equal(got.timings.prefill_tokens, got.computed);
        same(got, cold[name]);
    };
    for (const name of kinds) expectHit(name, await c.ask(server, c.withLogprobs(name), { 'X-Cache-Namespace': name }), 'memory');
    assert.deepEqual(await server.terminate(), { code: 0, signal: null });

    server = await c.cacheServer(dir);
    for (const name of kinds) expectHit(name, await c.ask(server, c.withLogprobs(name), { 'X-Cache-Namespace': name }), 'disk');

    // Killed while it writes an answer, and perhaps the files of a prompt.
    const writing = await server.connect();
    writing.post(endless({ cache_namespace: 'killed', messages: [{ role: 'user', content: c.record(60, 5) }] }));
    await writing.has(/"(reasoning_)?content":"[^"]/);
    await server.stop();

    server = await c.cacheServer(dir);
    for (const name of kinds) same(await c.ask(server, c.withLogprobs(name), { 'X-Cache-Namespace': name }), cold[name]);
    await written(server);
    assert.deepEqual(c.files(dir, /./, /^tmp\./), [], 'what a killed writer left behind is gone');
    await server.stop();
});

test('after kill -9 the cut-off prompt is answered as ever, from whatever was stored of it', async () => {
    const dir = c.folder();
    const request = c.question(c.record(35, 6), 'Latest TSH?', { logprobs: true, top_logprobs: 20, max_tokens: 12 });
    let server = await c.cacheServer(dir);
    const cold = await c.ask(server, request, { 'X-Cache-Namespace': 'reference' });
    for (const moment of ['role', 'content']) {
        const writing = await server.connect();
        writing.post({ ...endless(), messages: request.messages, chat_template_kwargs: { enable_thinking: false } });
        await writing.has(moment === 'role' ? '"role":"assistant"' : /"content":"[^"]/);
        await server.stop();
        server = await c.cacheServer(dir);
        same(await c.ask(server, request), cold);
        await written(server);
        assert.deepEqual(c.files(dir, /./, /^tmp\./), []);
    }
    await server.stop();
});

// ---- what is read twice ----

const questions = ['Latest INR?', 'And the latest TSH?', 'What was the first ferritin?', 'Which line is that?', 'Read line 7.', 'Latest albumin as JSON, please.',
    'How old is the patient?', 'And sodium?', 'Is there a creatinine value?', 'Thank you. Latest glucose?'];
const tools = golden('tool-call').request.tools;

// The template opens an answer with a block of reasoning that it leaves out again when the next question has come: those tokens are not repeated.
const opening = { true: c.tokenize('<think>\n').length, false: c.tokenize('<think>\n\n</think>\n\n').length };

for (const [label, thinking, more] of [['thinking off', false, {}], ['thinking on', true, {}], ['tools', false, { tools }]]) {
    test(`in a ten-turn chat over a record, ${label}, every turn reads its new text and a page at most`, async () => {
        const server = await Server.start();
        const messages = [...golden('long-think-1').request.messages.slice(0, 1)];
        let before = null;
        for (const words of questions) {
            messages.push(c.user(words));
            const request = { ...more, messages, temperature: 0, max_tokens: 40, chat_template_kwargs: { enable_thinking: thinking } };
            const got = await c.ask(server, request);
            if (before === null) {
                assert.ok(got.prompt >= 1200);
            } else {
                // New: what follows the text that this prompt has in common with the one before; the old answer is part of it.
                const fresh = got.prompt - (before - opening[thinking]);
                assert.ok(fresh > 0 && fresh < 150);
                assert.ok(got.computed <= fresh + PAGE, `${got.computed} tokens were computed for ${fresh} new ones (prompt ${got.prompt}: ${JSON.stringify(got.timings)})`);
            }
            before = got.prompt;
            messages.push({ role: 'assistant', content: got.message.content, reasoning_content: got.message.reasoning_content ?? '' });
        }
        await server.stop();
    });
}

test('tool calls and their results are read once, and the turn after them reads no more than the turn itself', async () => {
    const server = await Server.start();
    const messages = [...golden('long-think-1').request.messages.slice(0, 1)];
    let before = null;
    for (const [k, words] of questions.slice(0, 4).entries()) {
        const request = { tools, messages, temperature: 0, max_tokens: 24, chat_template_kwargs: { enable_thinking: false } };
        messages.push(c.user(words));
        const asked = await c.ask(server, request);
        if (before !== null) {
            const fresh = asked.prompt - (before - opening.false); // since the last question: in between each answer had its block of reasoning
            assert.ok(asked.computed <= fresh + PAGE, `turn ${k}: ${asked.computed} computed, ${fresh} new`);
        }
        const call = { id: `call_${k}`, type: 'function', function: { name: 'get_labs', arguments: '{"name": "INR"}' } };
        messages.push({ role: 'assistant', content: '', tool_calls: [call] });
        messages.push({ role: 'tool', tool_call_id: call.id, content: `[{"test": "INR", "value": "2.${k}", "date": "2026-01-0${k + 1}"}]` });
        const told = await c.ask(server, request);
        assert.ok(told.computed <= told.prompt - asked.prompt + PAGE, `turn ${k}, with the result: ${told.computed} computed`);
        messages.push({ role: 'assistant', content: told.message.content });
        before = asked.prompt;
    }
    await server.stop();
});

test('the second question about a 2,000-token record on disk computes less than a tenth of it, after a restart; the times are printed', async () => {
    const dir = c.folder();
    const text = [c.record(76, 20), c.record(76, 21)];
    // The best of some tries: what this machine does beside is not measured.
    const best = { cold: [Infinity, Infinity], disk: [Infinity, Infinity] };
    const measure = async (server, kind, words) => {
        for (const [i, t] of text.entries()) {
            const got = await c.streamTimes(server, c.question(t, words, { cache_namespace: `patient-${i}`, max_tokens: 4 }));
            if (kind === 'cold') assert.ok(got.timings.cached_tokens === 0 && got.timings.prefill_tokens >= 1950, JSON.stringify(got.timings));
            else assert.ok(got.timings.cache_source === 'disk' && got.timings.prefill_tokens < 200, JSON.stringify(got.timings));
            best[kind] = [Math.min(best[kind][0], got.first), Math.min(best[kind][1], got.timings.queue_ms + got.timings.prefill_ms)];
        }
    };
    const ratios = () => best.disk.map((ms, i) => ms / best.cold[i]);
    let server = await c.cacheServer(dir);
    await measure(server, 'cold', 'What was the latest ferritin?');
    await server.terminate();
    for (const words of ['Is there a value of TSH in 2019?', 'How old is she?', 'Read line 9.', 'Which is the last line?', 'Latest INR as JSON.']) {
        server = await c.cacheServer(dir);
        await c.ask(server, golden('hello').request); // the program has been used, as for the cold ones but the first
        await measure(server, 'disk', words);
        await server.terminate();
        if (ratios().every((r) => r <= 0.15)) break;
    }
    const [client, own] = ratios();
    console.log(`# time to first token, from disk / cold: ${client.toFixed(3)} by the client's clock, ${own.toFixed(3)} by the server's`);
});

test('a warmed record is not read again, and the answer is the cold one', async () => {
    const server = await Server.start();
    const text = c.record(60, 9);
    const ask = c.question(text, 'Latest albumin?', { logprobs: true, top_logprobs: 20 });
    const cold = await c.ask(server, ask, { 'X-Cache-Namespace': 'cold' });
    const warmed = await c.sendOk(server, 'POST', '/v1/cache/warm', { messages: [c.system(text)], cache_namespace: 'warm' });
    assert.equal(warmed.object, 'cache.warm');
    assert.equal(warmed.namespace, 'warm');
    assert.equal(warmed.usage.completion_tokens, 0);
    assert.equal(warmed.timings.prefill_tokens, warmed.usage.prompt_tokens);
    const recordTokens = c.tokenize(`<|im_start|>system\n${c.system(text).content}<|im_end|>\n`).length;
    assert.ok(recordTokens > 1000);
    const got = await c.ask(server, ask, { 'X-Cache-Namespace': 'warm' });
    assert.equal(got.cached, recordTokens); // the question reads the question
    assert.equal(got.timings.cache_source, 'memory');
    same(got, cold);
    // Warming what is warm computes next to nothing; the stream option of a request that is sent as it will be asked changes nothing.
    const again = await c.sendOk(server, 'POST', '/v1/cache/warm', { messages: [c.system(text)], cache_namespace: 'warm', stream: true });
    assert.ok(again.timings.prefill_tokens <= PAGE);
    await server.stop();
});

// ---- whose text is whose ----

test('what one namespace has read never speeds up another, with or without names', async () => {
    const dir = c.folder();
    const server = await c.cacheServer(dir);
    const request = golden('interaction').request;
    const first = await c.ask(server, request, { 'X-Cache-Namespace': 'patient-1' });
    for (const ns of ['patient-2', 'Patient-1', 'patient-1.', undefined]) {
        const other = await c.ask(server, request, ns ? { 'X-Cache-Namespace': ns } : {});
        assert.equal(other.cached, 0, `${ns} got what patient-1 had read`);
        assert.equal(other.timings.cache_miss, 'empty');
        assert.equal(other.text, first.text);
    }
    const by = await c.ask(server, { ...request, cache_namespace: 'patient-1' }); // field and header mean the same
    assert.ok(by.cached > 0);
    const unnamed = await c.ask(server, request);
    assert.ok(unnamed.cached > 0);
    await server.stop();
});

test('with --share-system the system message is read once for all namespaces, and nothing behind it is shared', async () => {
    const server = await Server.start(['--share-system']);
    const text = c.record(24, 3), ask = (ns) => c.ask(server, c.question(text, `Read the lines 1 to 9. ${'Please read all of them. '.repeat(16)}`, { cache_namespace: ns }));
    const shared = c.tokenize(`<|im_start|>system\n${c.system(text).content}<|im_end|>\n`).length;
    const first = await ask('a');
    const other = await ask('b');
    assert.ok(first.prompt > shared + 2 * PAGE);
    assert.equal(first.cached, 0);
    assert.ok(other.cached > shared - PAGE && other.cached <= shared, `${other.cached} of ${shared}`);
    assert.equal(other.text, first.text);
    const own = await ask('a');
    assert.ok(own.cached > shared + PAGE, 'its own question is cached too');
    await server.stop();
});

test('with room for two snapshots older text makes room: that is said, and the answers stay', async () => {
    const server = await Server.start(['--cache-memory', '2']);
    const answer = async (name) => c.ask(server, { ...c.withLogprobs(name), max_tokens: 8 });
    const cold = {};
    for (const name of ['dose', 'tool-two-args', 'spanish-1', 'polish-1', 'tool-answer']) cold[name] = await answer(name);
    const reasons = [];
    for (const name of Object.keys(cold)) {
        const got = await answer(name);
        same(got, cold[name]);
        reasons.push(got.timings.cache_miss);
    }
    assert.ok(reasons.includes('evicted'), reasons.join());
    const { memory } = await c.sendOk(server, 'GET', '/v1/cache');
    assert.ok(memory.snapshots >= 1 && memory.snapshots <= 2 && memory.snapshot_bytes <= memory.snapshot_budget, JSON.stringify(memory));
    await server.stop();
});

test('header and field may agree; two different names, two headers or a bad name are a 400, and no name reaches the log', async () => {
    const server = await Server.start(['--log-level', 'debug']);
    const request = { ...golden('hello').request, max_tokens: 2 };
    const refused = async (body, headers, param) => {
        const response = await server.post(body, headers);
        const { error } = await response.json();
        assert.equal(response.status, 400, JSON.stringify(error));
        assert.equal(error.param, param);
        assert.ok(!JSON.stringify(error).includes('zebra'), 'the name is not echoed');
    };
    await c.ask(server, { ...request, cache_namespace: 'zebra-1' }, { 'X-Cache-Namespace': 'zebra-1' });
    await refused({ ...request, cache_namespace: 'zebra-1' }, { 'X-Cache-Namespace': 'zebra-2' }, 'cache_namespace');
    for (const bad of ['../zebra', 'zebra/1', 'zebra 1', '.zebra', '-zebra', 'zebra%31', 'zébra', 'zebra\u0000x', '', 'zebra'.repeat(40)])
        await refused({ ...request, cache_namespace: bad }, {}, 'cache_namespace');
    for (const bad of ['../zebra', 'zebra/1', 'zebra 1', '.zebra', 'zebra%31', 'zebra'.repeat(40)])
        await refused(request, { 'X-Cache-Namespace': bad }, 'X-Cache-Namespace');
    await refused({ ...request, cache_namespace: 7 }, {}, 'cache_namespace');

    const twice = await server.connect();
    twice.post(request, ['X-Cache-Namespace: zebra-1', 'X-Cache-Namespace: zebra-2']);
    await twice.has('"param":"X-Cache-Namespace"');
    assert.match(twice.text, /^HTTP\/1.1 400 /);
    twice.leave();

    const curl = spawnSync('curl', ['-s', '-H', 'X-Cache-Namespace: zebra-1', '-H', 'Content-Type: application/json', '-d', JSON.stringify({ ...request,
        messages: golden('dose').request.messages }), `${server.url}/v1/chat/completions`], { encoding: 'utf8' });
    if (!curl.error) assert.equal(c.told(curl.stdout).cached, 0);
    assert.equal((await c.listed(server, 'zebra-1')).namespace, 'zebra-1');
    await server.terminate();
    assert.doesNotMatch(server.log + server.out, /z.bra/);
    assert.match(server.log, /POST \/v1\/chat\/completions 400/);
});

test('the list tells of each namespace: pages, snapshots, bytes, hits and when it was used, in memory and on disk', async () => {
    const dir = c.folder();
    let server = await c.cacheServer(dir);
    assert.deepEqual((await c.sendOk(server, 'GET', '/v1/cache')).data, []);
    const request = golden('dose').request;
    await c.ask(server, request, { 'X-Cache-Namespace': 'a.b_C-1' });
    await c.ask(server, request, { 'X-Cache-Namespace': 'a.b_C-1' });
    await c.ask(server, request);
    const stored = await until('the files are written', async () => {
        const list = await c.sendOk(server, 'GET', '/v1/cache');
        return list.disk.queued_bytes === 0 && list.data.every((e) => e.disk_files > 0) && list;
    });
    assert.deepEqual(stored.data.map((e) => e.namespace), ['', 'a.b_C-1']);
    for (const e of stored.data) {
        assert.equal(e.object, 'cache.namespace');
        assert.ok(e.pages >= 2 && e.snapshots >= 1);
        assert.ok(e.memory_bytes > 0 && e.idle_seconds >= 0 && e.idle_seconds < 60);
        const onDisk = c.files(dir, new RegExp(`^ns=${e.namespace.replaceAll('.', '\\.')}$`));
        assert.equal(e.disk_files, onDisk.length);
        assert.equal(e.disk_bytes, onDisk.reduce((sum, f) => sum + statSync(f).size, 0));
    }
    assert.equal(stored.data[0].hits, 0);
    assert.equal(stored.data[1].hits, 1);
    assert.equal(stored.memory.hits, 1);
    assert.equal(stored.memory.lookups, 3);
    assert.equal(stored.disk.files, c.files(dir).length);
    for (const space of readdirSync(dir)) assert.equal(statSync(join(dir, space)).mode & 0o777, 0o700);
    for (const f of c.files(dir)) assert.equal(statSync(f).mode & 0o777, 0o600);
    await server.terminate();

    server = await c.cacheServer(dir);
    const after = await c.listed(server, 'a.b_C-1');
    assert.equal(after.pages, 0);
    assert.equal(after.memory_bytes, 0);
    assert.ok(after.disk_files > 0 && after.idle_seconds < 120);
    await c.ask(server, request, { 'X-Cache-Namespace': 'a.b_C-1' });
    assert.equal((await c.listed(server, 'a.b_C-1')).hits, 1);
    await server.stop();
});

test('DELETE removes a namespace from memory and disk, says what it removed, and touches no other', async () => {
    const dir = c.folder();
    const server = await c.cacheServer(dir);
    const request = golden('dose').request;
    const of = (ns) => (ns ? { 'X-Cache-Namespace': ns } : {});
    for (const ns of ['gone', 'kept', 'warm', '']) await c.ask(server, request, of(ns));
    await written(server);
    const before = await c.listed(server, 'gone');
    const removed = await c.sendOk(server, 'DELETE', '/v1/cache/gone');
    assert.deepEqual(removed, {
        object: 'cache.deleted', namespace: 'gone', deleted: true, pages: before.pages, snapshots: before.snapshots, memory_bytes: before.memory_bytes,
        disk_files: before.disk_files, disk_bytes: before.disk_bytes,
    });
    assert.ok(removed.pages > 0 && removed.snapshots > 0 && removed.disk_files > 0);
    assert.ok(!existsSync(join(dir, 'ns=gone')));
    assert.equal(await c.listed(server, 'gone'), undefined);
    assert.equal((await c.ask(server, request, of('gone'))).cached, 0);
    assert.ok((await c.ask(server, request, of('kept'))).cached > 0);

    const nothing = { object: 'cache.deleted', deleted: false, pages: 0, snapshots: 0, memory_bytes: 0, disk_files: 0, disk_bytes: 0 };
    assert.deepEqual(await c.sendOk(server, 'DELETE', '/v1/cache/never-seen'), { ...nothing, namespace: 'never-seen' });
    assert.ok(!existsSync(join(dir, 'ns=never-seen')));

    const unnamed = await c.sendOk(server, 'DELETE', '/v1/cache');
    assert.equal(unnamed.namespace, '');
    assert.ok(unnamed.pages > 0 && unnamed.disk_files > 0);
    assert.ok(!existsSync(join(dir, 'ns=')));
    assert.equal((await c.ask(server, request)).cached, 0);
    assert.equal((await c.sendOk(server, 'DELETE', '/v1/cache/warm')).namespace, 'warm', 'the name of a route may be a namespace');
    assert.ok((await c.ask(server, request, of('kept'))).cached > 0);

    for (const path of ['/v1/cache/..', '/v1/cache/..%2Fns=kept', '/v1/cache/a/b', '/v1/cache/%20', '/v1/cache/.x', '/v1/cache/kept%00x']) {
        const bad = await server.connect();
        bad.send(`DELETE ${path} HTTP/1.1\r\nHost: localhost\r\n\r\n`);
        await bad.has('"param":"namespace"');
        assert.match(bad.text, /^HTTP\/1.1 400 /);
        bad.leave();
    }
    // A name beside the path would not be looked at: that must not delete the unnamed namespace.
    assert.equal((await send400(server, '/v1/cache', { 'X-Cache-Namespace': 'kept' })).param, 'X-Cache-Namespace');
    assert.match((await send400(server, '/v1/cache?namespace=kept')).message, /path/);
    assert.ok((await c.ask(server, request)).cached > 0);
    await server.stop();
});

async function send400(server, path, headers = {}) {
    const response = await c.send(server, 'DELETE', path, undefined, headers);
    assert.equal(response.status, 400);
    return (await response.json()).error;
}

test('a namespace that is deleted while its answer is written leaves nothing behind, and the answer goes on', async () => {
    const dir = c.folder();
    const server = await c.cacheServer(dir);
    const { request, text } = golden('list-meds');
    const reference = await c.ask(server, { ...request, max_tokens: 60 }, { 'X-Cache-Namespace': 'other' });
    const writing = await server.connect();
    writing.post({ ...request, max_tokens: 60, stream: true, cache_namespace: 'gone' });
    await writing.has(/"content":"[^"]/);
    await c.sendOk(server, 'DELETE', '/v1/cache/gone');
    await writing.has('data: [DONE]\n\n');
    assert.equal(contentOf(events(writing.text)), reference.message.content);
    assert.ok(text.startsWith(reference.message.content.slice(0, 10)));
    await written(server);
    assert.equal(await c.listed(server, 'gone'), undefined);
    await server.terminate();
    assert.deepEqual(readdirSync(dir), ['ns=other']);
});

// ---- files that are not what they should be ----

const flip = (path, at) => {
    const bytes = readFileSync(path);
    bytes[at < 0 ? bytes.length + at : at] ^= 0x10;
    writeFileSync(path, bytes);
};

const swap = (a, b) => {
    renameSync(a, `${a}~`);
    renameSync(b, a);
    renameSync(`${a}~`, b);
};

// How files are damaged, by the namespace whose they are, and how many of them are found to be bad: each one that is tried.
const damages = {
    'page-bits': [1, (f) => flip(f.pages[0], 1000)],
    'last-page-bits': [1, (f) => flip(f.pages.at(-1), 1000)],
    'private-head-bits': [1, (f) => flip(f.pages[0], 130)],
    'checksum-bits': [1, (f) => flip(f.pages[0], -1)],
    truncated: [1, (f) => truncateSync(f.pages[0], 700)],
    empty: [1, (f) => truncateSync(f.pages[0], 0)],
    longer: [1, (f) => writeFileSync(f.pages[0], Buffer.concat([readFileSync(f.pages[0]), Buffer.alloc(1)]))],
    swapped: [1, (f) => swap(f.pages[0], f.pages[1])], // the first alone is looked at
    foreign: [1, (f, other) => writeFileSync(f.pages[0], readFileSync(other.pages[0]))],
    'state-bits': [1, (f) => flip(f.states.at(-1), 5000)],
    'state-foreign': [1, (f, other) => writeFileSync(f.states.at(-1), readFileSync(other.states.at(-1)))],
    'all-states': [Infinity, (f) => f.states.forEach((p) => truncateSync(p, 500))],
    'page-gone': [0, (f) => rmSync(f.pages[0])],
};

test('damaged, cut, exchanged or foreign files are a miss and one line in the log: the answers stay, and so does the server', async () => {
    const dir = c.folder();
    const request = { ...c.withLogprobs('tool-two-args'), max_tokens: 4 };
    const position = (p) => readFileSync(p).readInt32LE(160); // engine/cache_file.h
    const of = (ns) => {
        const all = c.files(dir, new RegExp(`^ns=${ns}$`)).sort((a, b) => position(a) - position(b));
        return { pages: all.filter((p) => p.endsWith('.page')), states: all.filter((p) => p.endsWith('.state')) };
    };
    let server = await c.cacheServer(dir);
    const cold = await c.ask(server, request, { 'X-Cache-Namespace': 'other' });
    for (const ns of Object.keys(damages)) same(await c.ask(server, request, { 'X-Cache-Namespace': ns }), cold);
    await server.terminate();
    const n = of('other');
    assert.ok(n.pages.length === 2 && n.states.length >= 1);
    for (const [ns, [, damage]] of Object.entries(damages)) damage(of(ns), of('other'));

    server = await c.cacheServer(dir);
    const whole = (await c.ask(server, request, { 'X-Cache-Namespace': 'other' })).cached;
    assert.ok(whole >= PAGE * n.pages.length);
    for (const [ns, [bad]] of Object.entries(damages)) {
        const mark = server.log.length;
        const got = await c.ask(server, request, { 'X-Cache-Namespace': ns });
        same(got, cold);
        assert.ok(got.cached < whole, `${ns}: ${got.cached}`); // what lies before the bad file may have been used
        const lines = server.log.slice(mark).split('\n').filter((l) => l.includes('prefix cache'));
        assert.equal(lines.length, Math.min(bad, n.states.length), `${ns}: ${lines.join('\n')}`);
        for (const line of lines) {
            assert.match(line, /file [0-9a-f]{32}\.(page|state): .*; it counts as missing and is removed/);
            assert.ok(!line.includes(ns), 'the line names no namespace');
        }
    }
    const metrics = await (await server.get('/metrics')).text();
    assert.ok(Number(/^bedside_cache_disk_bad_files_total (\d+)$/m.exec(metrics)[1]) >= Object.keys(damages).length - 1);
    await server.terminate();

    server = await c.cacheServer(dir); // what was bad has been written again
    for (const ns of Object.keys(damages)) {
        const got = await c.ask(server, request, { 'X-Cache-Namespace': ns });
        if (ns !== 'swapped') assert.deepEqual([got.timings.cache_source, got.cached], ['disk', whole], ns);
        same(got, cold);
    }
    await server.stop();
});

test('files of another kind of KV are not found, and are there again when it is', async () => {
    const dir = c.folder();
    const request = { ...c.withLogprobs('dose'), max_tokens: 8 };
    let cold = null;
    for (const [kv, source] of [['f16', 'none'], ['q8_0', 'none'], ['f16', 'disk'], ['q8_0', 'disk']]) {
        const server = await c.cacheServer(dir, ['--kv-type', kv]);
        const got = await c.ask(server, request);
        assert.equal(got.timings.cache_source, source);
        if (kv === 'f16' && cold) same(got, cold);
        cold ??= got;
        assert.doesNotMatch(server.log, /prefix cache/);
        await server.terminate();
    }
});

test('a cache folder that cannot be used is an error at the start that names it and what to do', () => {
    const dir = c.folder();
    writeFileSync(join(dir, 'file'), '');
    mkdirSync(join(dir, 'open'), { mode: 0o755 });
    for (const [path, cause] of [[join(dir, 'file'), /cache folder .*file/], [join(dir, 'file', 'in'), /cannot be made/], [join(dir, 'open'), /cache folder .*open.*0?700/],
        ['/proc/cache', /cannot be made/]]) {
        const { status, said } = c.serveRefused(['--cache-dir', path]);
        assert.equal(status, 1, said);
        assert.match(said, cause);
        assert.ok(said.includes(path), said);
    }
    const off = c.serveRefused(['--cache-dir', dir, '--cache-memory', '0']);
    assert.equal(off.status, 1);
    assert.match(off.said, /--cache-dir needs .*--cache-memory/);
});

test('two servers do not share a folder: the second is refused and the first goes on', async () => {
    const dir = c.folder();
    const server = await c.cacheServer(dir);
    const { status, said } = c.serveRefused(['--cache-dir', dir]);
    assert.equal(status, 1);
    assert.match(said, /another server is using it/);
    assert.equal((await c.ask(server, golden('hello').request)).message.content, golden('hello').text);
    await server.stop();
});

// ---- encryption ----

test('with a key file nothing in the files is readable, a restart hits, and another key or none only misses', async () => {
    const keys = c.folder();
    const good = c.keyFile(keys, 'good', 7), wrong = c.keyFile(keys, 'wrong', 8);
    const dir = c.folder(), clear = c.folder();
    const request = { ...c.withLogprobs('dose'), max_tokens: 8 };
    const headers = { 'X-Cache-Namespace': 'marta-wilk' };
    const ids = c.tokenize('[5] Medication: amiodarone 200 mg once daily').slice(1, 9);
    const needle = Buffer.alloc(4 * ids.length);
    ids.forEach((id, i) => needle.writeInt32LE(id, 4 * i));

    let server = await c.cacheServer(clear);
    const cold = await c.ask(server, request, headers);
    await server.terminate();
    assert.ok(c.anyHas(c.files(clear), needle), 'without a key the ids are there: the search can find them');

    server = await c.cacheServer(dir, ['--cache-key', good]);
    same(await c.ask(server, request, headers), cold);
    await server.terminate();
    const paths = c.files(dir);
    assert.ok(paths.length >= 3);
    assert.ok(!c.anyHas(paths, needle), 'token ids');
    for (const text of ['amiodarone', 'Medication', 'marta-wilk']) assert.ok(!c.anyHas(paths, Buffer.from(text)), text);
    assert.doesNotMatch(paths.join(' '), /marta|wilk/);

    for (const [options, hit] of [[['--cache-key', wrong], false], [[], false], [['--cache-key', good], true]]) {
        const copy = c.folder();
        cpSync(dir, copy, { recursive: true });
        server = await c.cacheServer(copy, options);
        const got = await c.ask(server, request, headers);
        same(got, cold);
        assert.equal(got.timings.cache_source, hit ? 'disk' : 'none');
        assert.equal(/1 namespaces in its folder were written with/.test(server.log), !hit, server.log);
        await server.stop();
    }
});

test('a key file that others may read, or that is too short, is an error at the start', () => {
    const keys = c.folder();
    writeFileSync(join(keys, 'open'), Buffer.alloc(32, 1), { mode: 0o644 });
    writeFileSync(join(keys, 'short'), Buffer.alloc(31, 1), { mode: 0o600 });
    for (const name of ['open', 'short', 'absent']) {
        const { status, said } = c.serveRefused(['--cache-dir', c.folder(), '--cache-key', join(keys, name)]);
        assert.equal(status, 1);
        assert.match(said, /key/);
        assert.ok(said.includes(join(keys, name)), said);
    }
});

// ---- why there was no hit ----

test('a miss says why: empty, diverged and where, short, off', async () => {
    const server = await Server.start();
    const text = golden('long-think-1').request.messages[0].content;
    const first = c.question('', 'Latest INR?', { messages: [{ role: 'system', content: text }, c.user('Latest INR?')], max_tokens: 2 });
    const empty = await c.ask(server, first);
    assert.deepEqual([empty.timings.cache_miss, empty.timings.cache_miss_at], ['empty', undefined]);

    const other = await c.ask(server, { ...first, messages: [{ role: 'system', content: text.replace('line', 'Line').replace('clinical', 'technical') }, c.user('INR?')] });
    assert.equal(other.cached, 0);
    assert.equal(other.timings.cache_miss, 'diverged');
    const ids = (t) => c.tokenize(`<|im_start|>system\n${t}`);
    const [a, b] = [ids(text), ids(text.replace('clinical', 'technical'))];
    assert.equal(other.timings.cache_miss_at, a.findIndex((id, i) => id !== b[i]), 'the first token that differs');

    // Behind a hit: the same record, then another question.
    const partly = await c.ask(server, { ...first, messages: [first.messages[0], c.user('What about the sodium of the patient, and its date, please?')] });
    assert.ok(partly.cached > 1000);
    assert.ok(partly.timings.cache_miss === 'diverged' || partly.timings.cache_miss === null, partly.timings.cache_miss);

    const short = await c.ask(server, golden('hello').request);
    assert.deepEqual([short.cached, short.timings.cache_miss, short.timings.cache_miss_at], [0, 'short', undefined]);
    await server.stop();

    const off = await Server.start(['--cache-memory', '0']);
    for (let i = 0; i < 2; i++) {
        const got = await c.ask(off, golden('dose').request);
        assert.deepEqual([got.cached, got.timings.cache_miss, got.timings.cache_source], [0, 'off', 'none']);
        assert.equal(got.message.content, golden('dose').text);
    }
    assert.deepEqual((await c.sendOk(off, 'GET', '/v1/cache')).data, []);
    assert.equal((await c.sendOk(off, 'DELETE', '/v1/cache/x')).pages, 0);
    await off.stop();
});
