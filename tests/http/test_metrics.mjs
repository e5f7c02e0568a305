// What the server says of itself: timings and cached tokens, progress while a prompt is read, /metrics, and answers that depend on nothing else.
import { test, after } from 'node:test';
import assert from 'node:assert/strict';
import http from 'node:http';
import { once } from 'node:events';
import { Server, golden, endless, longText, events, contentOf, until } from './server.mjs';
import * as c from './cached.mjs';

after(async () => {
    await Server.stopAll();
    c.removeFolders();
});

// ---- Prometheus' text format 0.0.4, strictly ----

function parseLabels(text) {
    const labels = {};
    let rest = text;
    while (rest) {
        const m = /^([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(,(?=.)|$)/.exec(rest);
        assert.ok(m, `labels: ${text}`);
        assert.ok(!(m[1] in labels), `label ${m[1]} twice`);
        labels[m[1]] = m[2];
        rest = rest.slice(m[0].length);
    }
    return labels;
}

const number = (text) => {
    assert.match(text, /^([+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]Inf|NaN)$/);
    return text.endsWith('Inf') ? Number(text.replace('Inf', 'Infinity')) : Number(text);
};

function checkHistogram(f) {
    const series = f.samples.filter((s) => s.name.endsWith('_bucket'));
    const count = f.samples.filter((s) => s.name === `${f.name}_count`), sum = f.samples.filter((s) => s.name === `${f.name}_sum`);
    assert.ok(series.length > 1 && count.length === 1 && sum.length === 1, f.name);
    let bound = -Infinity, below = 0;
    for (const s of series) {
        assert.deepEqual(Object.keys(s.labels), ['le']);
        const le = number(s.labels.le);
        assert.ok(le > bound && s.value >= below, `${f.name} ${s.labels.le}: bounds and counts rise`);
        [bound, below] = [le, s.value];
    }
    assert.equal(bound, Infinity);
    assert.equal(below, count[0].value);
    assert.ok(count[0].value === 0 ? sum[0].value === 0 : sum[0].value > 0);
}

// Families by name: {type, help, samples}. Any breach of the format fails.
function parseMetrics(text) {
    assert.ok(text.endsWith('\n'));
    const families = new Map(), seen = new Set();
    let f = null;
    for (const line of text.slice(0, -1).split('\n')) {
        const comment = /^# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)$/.exec(line);
        if (comment?.[1] === 'HELP') {
            assert.ok(!families.has(comment[2]), `${comment[2]} comes twice`);
            f = { name: comment[2], help: comment[3], type: null, samples: [] };
            families.set(f.name, f);
        } else if (comment) {
            assert.ok(f?.name === comment[2] && f.type === null && f.samples.length === 0, `TYPE of ${comment[2]} is out of place`);
            assert.match(comment[3], /^(counter|gauge|histogram)$/);
            f.type = comment[3];
        } else {
            const m = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
            assert.ok(m, `neither a comment nor a sample: ${line}`);
            const base = f.type === 'histogram' ? m[1].replace(/_(bucket|sum|count)$/, '') : m[1];
            assert.ok(f?.type && base === f.name, `${m[1]} stands outside its family`);
            assert.ok(!seen.has(m[1] + (m[2] ?? '')), `${line} comes twice`);
            seen.add(m[1] + (m[2] ?? ''));
            f.samples.push({ name: m[1], labels: parseLabels(m[2] ?? ''), value: number(m[3]) });
        }
    }
    for (const family of families.values()) {
        assert.ok(family.samples.length > 0, `${family.name} has no samples`);
        assert.match(family.name, /^bedside_[a-z_]+$/);
        assert.equal(family.type === 'counter', family.name.endsWith('_total'), `${family.name}: counters, and they alone, end in _total`);
        if (family.type === 'histogram') checkHistogram(family);
        else for (const s of family.samples) assert.ok(s.value >= 0 && Number.isFinite(s.value), s.name);
    }
    return families;
}

async function metrics(server) {
    const response = await server.get('/metrics');
    assert.equal(response.status, 200);
    assert.equal(response.headers.get('content-type'), 'text/plain; version=0.0.4; charset=utf-8');
    const text = await response.text();
    const families = parseMetrics(text);
    const samples = new Map();
    for (const f of families.values())
        for (const s of f.samples) samples.set(s.name.replace('bedside_', '') + Object.values(s.labels).map((v) => `/${v}`).join(''), s.value);
    return { text, families, at: (name) => (assert.ok(samples.has(name), `there is no ${name}`), samples.get(name)) };
}

const idle = (server) =>
    until('the server is idle', async () => {
        const m = await metrics(server);
        return ['requests_running', 'requests_queued', 'kv_pages_running', 'states_running'].every((name) => m.at(name) === 0) && m;
    });

test('/metrics is well formed, its counters move by what was done, and it names nobody', async () => {
    const server = await Server.start(['--cache-dir', c.folder(), '--max-running', '2', '--max-queue', '0', '--context', '2048', '--kv-memory', '16']);
    const before = await metrics(server);
    const { request } = golden('dose');
    const replies = [];
    for (let i = 0; i < 2; i++) replies.push(await c.ask(server, request, { 'X-Cache-Namespace': 'zebra-7' }));
    replies.push(await c.ask(server, golden('hello').request, { 'X-Cache-Namespace': 'zebra-7' }));
    const m = await idle(server);
    const moved = (name) => m.at(name) - before.at(name);
    const sum = (f) => replies.reduce((total, r) => total + f(r), 0);
    assert.equal(moved('requests_submitted_total'), 3);
    assert.equal(moved('requests_ended_total/completed'), 3);
    assert.equal(moved('requests_ended_total/cancelled'), 0);
    assert.equal(moved('prompt_tokens_computed_total'), sum((r) => r.computed));
    assert.equal(moved('prompt_tokens_cached_total'), sum((r) => r.cached));
    assert.ok(sum((r) => r.cached) > 0);
    assert.equal(moved('tokens_written_total'), sum((r) => r.written));
    assert.equal(moved('cache_hits_total/memory'), 1);
    assert.equal(moved('cache_hits_total/disk'), 0);
    assert.equal(moved('cache_misses_total/empty'), 1);
    assert.equal(moved('cache_misses_total/short'), 1);
    assert.equal(moved('queue_seconds_count'), 3);
    assert.equal(moved('first_token_seconds_count'), 3);
    assert.equal(moved('between_tokens_seconds_count'), sum((r) => r.written - 1));
    assert.equal(moved('step_seconds_count'), moved('steps_total'));
    assert.ok(moved('steps_total') >= sum((r) => r.written));
    assert.ok(moved('cache_snapshots_taken_total') >= m.at('cache_snapshots') && m.at('cache_snapshots') >= 1);
    assert.ok(m.at('cache_snapshot_bytes') > 0 && m.at('cache_snapshot_bytes') <= m.at('cache_snapshot_budget_bytes'));
    assert.ok(m.at('kv_pages_idle') >= 2 && m.at('kv_pages_idle') <= m.at('kv_pages'));
    const written = await until('the files are written', async () => {
        const now = await metrics(server);
        return now.at('cache_disk_queued_bytes') === 0 && now.at('cache_disk_written_total') >= 3 && now;
    });
    assert.equal(written.at('cache_disk_files'), written.at('cache_disk_written_total'));
    assert.equal(written.at('cache_disk_bad_files_total'), 0);

    // One that leaves, one that is too large for the memory, one for whom there is no place.
    const [leaves, stays] = [await server.connect(), await server.connect()];
    for (const one of [leaves, stays]) {
        one.post(endless({ max_tokens: 1000 }));
        await one.has(/"(reasoning_)?content":"[^"]/);
    }
    const working = await metrics(server);
    assert.equal(working.at('requests_running'), 2);
    assert.equal(working.at('requests_decoding') + working.at('requests_prefilling'), 2);
    assert.ok(working.at('kv_pages_running') >= 2 && working.at('states_running') === 2);
    assert.ok(working.at('connections') >= 3);
    const full = await server.post(endless());
    assert.equal(full.status, 429);
    assert.match(full.headers.get('retry-after'), /^[1-9]\d*$/);
    leaves.leave();
    stays.leave();
    const last = await idle(server);
    assert.equal(last.at('requests_refused_total/queue_full') - m.at('requests_refused_total/queue_full'), 1);
    assert.equal(last.at('requests_ended_total/cancelled') - m.at('requests_ended_total/cancelled'), 2);

    for (const word of ['zebra', 'warfarin', 'Marta', 'Wilk', 'patient']) assert.ok(!last.text.includes(word), word);
    await server.stop();
});

test('a request that can never fit is refused before it is counted as one', async () => {
    const server = await Server.start(['--kv-memory', '6', '--context', '2048', '--max-running', '1']);
    const response = await server.post({ messages: [c.user(longText(3000))], max_tokens: 10 });
    assert.equal(response.status, 400);
    assert.equal((await response.json()).error.code, 'context_length_exceeded');
    const m = await idle(server);
    for (const name of ['requests_submitted_total', 'requests_ended_total/failed', 'steps_total', 'prompt_tokens_computed_total']) assert.equal(m.at(name), 0);
    await server.stop();
});

test('/health and /metrics answer in less than 50 ms while a long prompt is read, and the list of the cache comes too', async () => {
    const server = await Server.start();
    const long = await server.connect();
    long.post({ ...endless(), messages: [c.user(longText(24000))] });
    await server.counts(1, 0);
    // A server that does nothing at all tells how much of the time is this machine's.
    const bare = http.createServer((_, response) => response.end('{}')).listen(0, '127.0.0.1');
    await once(bare, 'listening');
    const median = (list) => list.toSorted((x, y) => x - y)[list.length >> 1];
    const time = async (url) => {
        const began = performance.now();
        const response = await fetch(url);
        await response.text();
        assert.equal(response.status, 200);
        return performance.now() - began;
    };
    for (const path of ['/health', '/metrics']) {
        const own = [], idle = [];
        for (let i = 0; i < 20; i++) {
            own.push(await time(server.url + path));
            idle.push(await time(`http://127.0.0.1:${bare.address().port}/`));
        }
        console.log(`# ${path} while a prompt is read: median ${median(own).toFixed(1)} ms; a server that does nothing: ${median(idle).toFixed(1)} ms`);
        assert.ok(median(own) < 50 + 2 * median(idle), path);
    }
    bare.close();
    bare.closeAllConnections();
    const m = await metrics(server);
    assert.equal(m.at('requests_prefilling'), 1);
    assert.equal((await c.sendOk(server, 'GET', '/v1/cache')).object, 'list');
    assert.doesNotMatch(long.text, /"(reasoning_)?content":"[^"]/, 'the prompt is still being read');
    long.leave();
    await idle(server);
    await server.stop();
});

// ---- timings ----

test('timings and cached tokens are in the reply and in the last chunk of a stream, and they add up', async () => {
    const server = await Server.start();
    const { request } = golden('multi-turn');
    const began = performance.now();
    const whole = JSON.parse(await (await server.post(request)).text());
    const took = performance.now() - began;
    const c1 = await server.connect();
    c1.post({ ...request, stream: true, stream_options: { include_usage: true } });
    await c1.has('data: [DONE]\n\n');
    c1.leave();
    const list = events(c1.text);
    const finish = list.filter((e) => e.timings);
    assert.equal(finish.length, 1);
    assert.equal(finish[0].choices[0].finish_reason, 'stop');
    const usage = list.at(-1).usage;
    assert.equal(usage.prompt_tokens_details.cached_tokens, finish[0].timings.cached_tokens);
    assert.ok(finish[0].timings.cached_tokens > 0);
    for (const [t, u] of [[whole.timings, whole.usage], [finish[0].timings, usage]]) {
        assert.equal(t.prefill_tokens + t.cached_tokens, u.prompt_tokens);
        assert.equal(t.cached_tokens, u.prompt_tokens_details.cached_tokens);
        assert.equal(t.decode_tokens, u.completion_tokens - 1);
        assert.ok(t.queue_ms >= 0 && t.prefill_ms > 0 && t.decode_ms > 0);
        assert.ok(Math.abs(t.prefill_tokens_per_second - (t.prefill_tokens * 1000) / t.prefill_ms) < 0.01 + t.prefill_tokens_per_second / 1000);
        assert.ok(Math.abs(t.decode_tokens_per_second - (t.decode_tokens * 1000) / t.decode_ms) < 0.01 + t.decode_tokens_per_second / 1000);
        assert.equal(t.pauses, 0);
    }
    assert.ok(whole.timings.queue_ms + whole.timings.prefill_ms + whole.timings.decode_ms <= took + 1);
    assert.deepEqual([whole.timings.cache_source, whole.timings.cache_miss], ['none', 'empty']);
    assert.deepEqual([finish[0].timings.cache_source, finish[0].timings.cache_miss], ['memory', null]);

    // A stream without include_usage says it too; the openai package carries it through.
    const stream = await server.client.chat.completions.create({ ...request, stream: true });
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    assert.ok(chunks.at(-1).timings.cached_tokens > 0);
    await server.stop();
});

// ---- progress ----

// The events that tell of the prompt, after checking that they rise and agree with the stream they are in.
function progressOf(text, total) {
    const list = events(text), seen = list.filter((e) => e.prompt_progress);
    let last = { processed: -1, time_ms: 0 };
    for (const { prompt_progress: p, choices, object, id } of seen) {
        assert.deepEqual([choices, object, id], [[], 'chat.completion.chunk', list[0].id]);
        assert.equal(p.total, total);
        assert.ok(p.cached <= p.processed && p.processed > last.processed && p.processed <= total && p.time_ms > last.time_ms, JSON.stringify([last, p]));
        last = p;
    }
    assert.ok(text.includes(`: reading prompt 0/${total} tokens\n\n`));
    return seen.map((e) => e.prompt_progress);
}

test('with include_progress a stream tells how much of the prompt was read; comments come always, events only when asked for', async () => {
    const server = await Server.start(['--prefill-chunk', '64', '--threads', '1']);
    const text = longText(9000);
    const total = c.tokenize(`<|im_start|>user\n${text.trim()}<|im_end|>\n<|im_start|>assistant\n<think>\n`).length;
    assert.ok(total > 8000);
    const request = { ...endless({ max_tokens: 2 }), messages: [c.user(text)] };
    const [one, silent] = [await server.connect(), await server.connect()];
    one.post({ ...request, stream_options: { include_progress: true } });
    silent.post({ ...request, cache_namespace: 'other' }); // read beside it, without the option
    await one.has(/(prompt_progress[^\n]*\n\n[^]*){2}/);
    assert.ok([...one.text.matchAll(/^: reading prompt (\d+)\/\d+ tokens$/gm)].some((m) => Number(m[1]) > 0));
    assert.ok(silent.text.includes(`: reading prompt 0/${total} tokens\n\n`) && silent.text.includes('"role":"assistant"'));
    assert.ok(!silent.text.includes('prompt_progress'));
    silent.leave();
    one.leave();

    const whole = await server.connect(); // to its end: no event follows the first text
    whole.post({ ...request, messages: [c.user(longText(1500))], stream_options: { include_progress: true, include_usage: true } });
    await whole.has('data: [DONE]\n\n');
    progressOf(whole.text, events(whole.text).at(-1).usage.prompt_tokens);
    assert.ok(whole.text.lastIndexOf('prompt_progress') < whole.text.search(/"(reasoning_)?content":"[^"]/));
    whole.leave();
    await server.stop();
});

test('what was read for a client who left in mid-prompt is not read again', async () => {
    const server = await Server.start(['--threads', '1', '--prefill-chunk', '256']);
    const request = (n) => ({ ...endless({ max_tokens: 2 }), messages: [c.user(longText(n))], stream_options: { include_progress: true, include_usage: true } });
    const leaves = await server.connect();
    leaves.post(request(12000));
    const { total, processed } = await until('progress', () => events(leaves.text).map((e) => e.prompt_progress).find((p) => p?.processed > 0));
    leaves.leave();
    await idle(server);
    assert.ok(processed < total);
    const again = await server.connect();
    again.post(request(processed + 2000)); // somewhat further than it was read
    await again.has('data: [DONE]\n\n', 120000);
    const { usage } = events(again.text).at(-1), cached = usage.prompt_tokens_details.cached_tokens;
    assert.ok(cached >= processed, `${cached} of the ${processed} tokens that were read`);
    for (const p of progressOf(again.text, usage.prompt_tokens)) assert.equal(p.cached, cached);
    again.leave();
    await server.stop();
});

// ---- deterministic ----

test('with --deterministic a request without a seed gives the same bytes again, from the cache and among eight others; without it, it does not', async () => {
    const messages = [c.user(c.record(40, 7) + ' Hello')];
    const request = { ...endless({ messages, max_tokens: 40 }), stream: false, logprobs: true, top_logprobs: 20 };
    delete request.seed;
    // The text, and the logprobs as they were printed: what is drawn from 20 places of 40 differs with the last bit of any of them.
    const bytes = (a) => a.text + a.logprobs;
    const answer = async (server, more = {}) => c.ask(server, { ...request, ...more });
    const free = await Server.start();
    const answers = new Set();
    for (let i = 0; i < 4; i++) answers.add((await answer(free)).text);
    assert.ok(answers.size > 1, 'the answer leaves room for chance');
    await free.stop();

    const server = await Server.start(['--deterministic', '--max-running', '9']);
    const alone = await answer(server), again = await answer(server);
    assert.equal(alone.cached, 0);
    assert.ok(again.cached > 0);
    assert.equal(bytes(again), bytes(alone));
    const others = await Promise.all([...Array(8)].map(() => server.connect()));
    for (const [i, other] of others.entries())
        other.post(endless({ messages: i % 2 ? [c.user(c.record(20, i))] : messages, seed: 100 + i, max_tokens: 4000 }));
    await server.counts(8, 0);
    assert.equal(bytes(await answer(server)), bytes(alone));
    const cold = await answer(server, { cache_namespace: 'another' });
    assert.equal(cold.cached, 0);
    assert.equal(bytes(cold), bytes(alone));
    await server.counts(8, 0); // the others were there all the time
    const seeded = async (seed) => bytes(await answer(server, { seed }));
    assert.equal(await seeded(5), await seeded(5));
    assert.notEqual(await seeded(5), bytes(alone), 'a seed is still heeded');
    for (const other of others) other.leave();
    await server.stop();
});
