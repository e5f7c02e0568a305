// Clients that come in numbers, leave, sleep, or do not read; and a server that is asked to end. Plain sockets.
import { test, before, after } from 'node:test';
import assert from 'node:assert/strict';
import { Server, golden, endless, longText, events, contentOf, until, sleep } from './server.mjs';

let server; // two places, two may wait
before(async () => {
    server = await Server.start(['--max-running', '2', '--max-queue', '2', '--max-connections', '100']);
});
after(() => Server.stopAll());

// A stream that is being written; its connection.
async function writing(extra = {}, on = server) {
    const c = await on.connect();
    c.post(endless(extra));
    await c.has(/"(reasoning_)?content":"[^"]/);
    return c;
}

// The log line of a request that began after `mark`.
const logged = (s, mark, pattern) => until(`the log says ${pattern}`, () => pattern.exec(s.log.slice(mark)));

test('64 simultaneous streams all finish with the same text, and none starves', async () => {
    const many = await Server.start(['--max-running', '64']);
    const { request, text } = golden('dose');
    const connections = await Promise.all([...Array(64)].map(() => many.connect()));
    for (const c of connections) c.post({ ...request, stream: true });
    await Promise.all(connections.map((c) => c.has('data: [DONE]\n\n', 300000)));
    for (const c of connections) {
        assert.equal(contentOf(events(c.text)), text);
        c.leave();
    }
    await many.counts(0, 0);
    await many.stop();
});

test('64 streams through two places all finish: those that wait are served in turn', async () => {
    const few = await Server.start(['--max-running', '2', '--max-queue', '62']);
    const { request, text } = golden('hello');
    const connections = await Promise.all([...Array(64)].map(() => few.connect()));
    for (const c of connections) c.post({ ...request, stream: true });
    await Promise.all(connections.map((c) => c.has('data: [DONE]\n\n', 300000)));
    for (const c of connections) {
        assert.equal(contentOf(events(c.text)), text);
        c.leave();
    }
    await few.stop();
});

test('a short question is answered while a long prompt is read', async () => {
    const long = await server.connect();
    long.post({ ...endless(), messages: [{ role: 'user', content: longText(20000) }] });
    await server.counts(1, 0);
    const { request, text } = golden('dose');
    const reply = await (await server.post(request)).json();
    assert.equal(reply.choices[0].message.content, text);
    assert.doesNotMatch(long.text, /"(reasoning_)?content":"[^"]/, 'the long prompt is still being read');
    long.leave();
    await server.counts(0, 0);
});

test('a client that leaves while its answer is written frees its place', async () => {
    const mark = server.log.length;
    const c = await writing();
    await server.counts(1, 0);
    c.leave();
    await server.counts(0, 0);
    await logged(server, mark, /completions \d+, prompt \d+ tokens, answer \d+ tokens, [\d.]+ s, the client left/);
});

test('a client that leaves while its prompt is read frees its place, and no token was written', async () => {
    const mark = server.log.length;
    const c = await server.connect();
    c.post({ ...endless(), messages: [{ role: 'user', content: longText(20000) }] });
    await c.has(': reading prompt 0/');
    await server.counts(1, 0);
    c.leave();
    await server.counts(0, 0);
    await logged(server, mark, /answer 0 tokens, [\d.]+ s, the client left/);
});

test('a client that leaves while it waits for a reply in one piece frees its place', async () => {
    const mark = server.log.length;
    const stop = new AbortController();
    const waiting = server.post(endless({ stream: false }), {}, stop.signal);
    await server.counts(1, 0);
    stop.abort();
    await assert.rejects(waiting);
    await server.counts(0, 0);
    await logged(server, mark, /completions 499, .* the client left/);
});

test('a client that leaves the queue frees its place there, whoever it is, and the next one moves up', async () => {
    const running = [await writing(), await writing()];
    const first = await server.connect();
    const second = await server.connect();
    first.post(endless());
    await server.counts(2, 1);
    second.post({ ...golden('hello').request, stream: true });
    await server.counts(2, 2);
    first.leave();
    await server.counts(2, 1);
    running[0].leave();
    await second.has('data: [DONE]\n\n');
    assert.equal(contentOf(events(second.text)), golden('hello').text);
    running[1].leave();
    second.leave();
    await server.counts(0, 0);
});

test('a client that only closes its sending half counts as gone', async () => {
    const c = await writing();
    c.socket.end();
    await server.counts(0, 0);
    c.leave();
});

test('a full queue is a 429 with Retry-After, before any stream header, and later there is room again', async () => {
    const running = [await writing(), await writing()];
    const waiting = [await server.connect(), await server.connect()];
    for (const c of waiting) c.post(endless());
    await server.counts(2, 2);
    for (const stream of [false, true]) {
        const response = await server.post({ ...golden('hello').request, stream });
        assert.equal(response.status, 429);
        assert.ok(Number(response.headers.get('retry-after')) >= 1);
        const { error } = await response.json();
        assert.equal(error.type, 'rate_limit_error');
        assert.match(error.message, /--max-queue/);
    }
    for (const c of [...running, ...waiting]) c.leave();
    await server.counts(0, 0);
    assert.equal((await server.post(golden('hello').request)).status, 200);
});

test('requests wait for KV memory too, and get it when others end', async () => {
    // Four states take 6 MiB; 5 MiB are for text, that is 5120 tokens.
    const tight = await Server.start(['--context', '4096', '--kv-memory', '11', '--max-running', '4', '--cache-memory', '0']);
    const first = await writing({ messages: [{ role: 'user', content: longText(3000) }], max_tokens: 500 }, tight);
    const second = await tight.connect();
    second.post({ ...golden('hello').request, messages: [{ role: 'user', content: longText(3000) }], max_tokens: 1, stream: true });
    await tight.counts(1, 1);
    first.leave();
    await second.has('data: [DONE]\n\n');
    second.leave();
    await tight.stop();
});

test('an answer that gives its memory to an older one goes on later, with the same text as alone', async () => {
    // Two states take 3 MiB; a little less than 1 MiB is for text: 960 tokens, of which each answer wants 660.
    const tight = await Server.start(['--context', '960', '--kv-memory', '4', '--max-running', '2']);
    const request = (seed) => endless({ seed, max_tokens: 650 });
    const whole = async (c) => {
        await c.has('data: [DONE]\n\n', 300000);
        c.leave();
        return contentOf(events(c.text));
    };
    const alone = await tight.connect();
    alone.post(request(2));
    const expected = await whole(alone);
    const older = await writing({ seed: 1, max_tokens: 650 }, tight);
    const younger = await writing({ seed: 2, max_tokens: 650 }, tight);
    await until('the younger one is paused', async () => (await tight.health()).queued === 1);
    await whole(older);
    assert.equal(await whole(younger), expected);
    await tight.stop();
});

test('headers and a comment come at once, and a comment at least every 5 s, while a request waits', async () => {
    const running = [await writing(), await writing()];
    const c = await server.connect();
    const sent = Date.now();
    c.post(endless());
    await until('two comments', () => c.text.match(/^: reading prompt 0\/\d+ tokens$/gm)?.length >= 2);
    assert.match(c.text, /^HTTP\/1\.1 200 OK\r\n/);
    assert.ok(c.chunks[0].at - sent < 2000, `the first byte took ${c.chunks[0].at - sent} ms`);
    for (let i = 1; i < c.chunks.length; i++) assert.ok(c.chunks[i].at - c.chunks[i - 1].at < 5000);
    for (const k of [...running, c]) k.leave();
    await server.counts(0, 0);
});

test('comments count the prompt up while it is read', async () => {
    const c = await server.connect();
    c.post({ ...endless(), messages: [{ role: 'user', content: longText(30000) }] });
    await c.has(/: reading prompt [1-9]\d*\/\d+ tokens\n\n/);
    const [, done, all] = /: reading prompt ([1-9]\d*)\/(\d+) tokens/.exec(c.text).map(Number);
    assert.ok(done > 0 && done < all);
    c.leave();
    await server.counts(0, 0);
});

test('a client that does not read is given up after the idle timeout; one that waits longer than that is not', async () => {
    const impatient = await Server.start(['--idle-timeout', '1', '--max-running', '2']);
    const mark = impatient.log.length;
    const c = await impatient.connect();
    c.socket.pause();
    c.post(endless({ logprobs: true, top_logprobs: 20 })); // some 2 kB for each token
    await impatient.counts(1, 0);
    await impatient.counts(0, 0);
    const line = await logged(impatient, mark, /answer (\d+) tokens, ([\d.]+) s, the client stopped reading/);
    assert.ok(Number(line[2]) >= 1);
    c.leave();
    // A whole reply that takes longer than the timeout arrives all the same.
    const began = Date.now();
    const busy = await writing({}, impatient);
    const reply = await (await impatient.post(endless({ stream: false, max_tokens: 3000, seed: 5, messages: [{ role: 'user', content: longText(2000) }] }))).json();
    assert.equal(reply.usage.completion_tokens, 3000);
    assert.ok(Date.now() - began > 1000, 'it took longer than the timeout');
    busy.leave();
    await impatient.stop();
});

test('a connection without a request is closed after the idle timeout', async () => {
    const impatient = await Server.start(['--idle-timeout', '1']);
    const silent = await impatient.connect();
    const halfway = await impatient.connect();
    halfway.send('POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"mess');
    await silent.end(10000);
    await halfway.end(10000);
    await impatient.stop();
});

test('a connection is kept and used again, after streams, replies and errors', async () => {
    const c = await server.connect();
    const { request, text } = golden('hello');
    c.post({ ...request, stream: true });
    await c.has('0\r\n\r\n'); // the last chunk
    c.post(request);
    await c.has('"chat.completion"');
    c.post({ ...request, n: 2 });
    await c.has('HTTP/1.1 400');
    c.get('/health');
    await c.has('"status":"ok"');
    c.get('/v1/models');
    await c.has('"list"');
    assert.equal(c.text.match(/HTTP\/1\.1 200/g).length, 4);
    assert.equal(contentOf(events(c.text)), text);
    assert.equal(c.closed, false);
    c.leave();
});

test('requests sent ahead are answered one after the other, in order', async () => {
    const c = await server.connect();
    const { request, text } = golden('hello');
    c.post({ ...request, stream: true });
    c.get('/v1/models');
    c.post(request);
    c.get('/nowhere');
    await c.has('HTTP/1.1 404');
    const order = ['data: [DONE]', '"object":"list"', '"chat.completion"', 'HTTP/1.1 404'].map((t) => c.text.indexOf(t));
    assert.deepEqual([...order].sort((a, b) => a - b), order);
    assert.ok(order[0] > 0);
    assert.ok(c.text.includes(JSON.stringify(text)));
    c.leave();
});

test('a request that arrives byte by byte is read as one', async () => {
    const c = await server.connect();
    const body = JSON.stringify(golden('hello').request);
    const text = `POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;
    for (const byte of text) {
        c.send(byte);
        if (byte === '\n' || byte === ',') await new Promise(setImmediate);
    }
    await c.has('"chat.completion"');
    c.leave();
});

test('an HTTP/1.0 client gets the stream without chunks, up to the end of the connection', async () => {
    const c = await server.connect();
    const { request, text } = golden('hello');
    const body = JSON.stringify({ ...request, stream: true });
    c.send(`POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`);
    await c.end();
    assert.doesNotMatch(c.text, /Transfer-Encoding/i);
    assert.equal(contentOf(events(c.text)), text);
});

test('more connections than --max-connections get a 503 with Retry-After, and a place when others close', async () => {
    const small = await Server.start(['--max-connections', '4']);
    const held = await Promise.all([...Array(4)].map(() => small.connect()));
    for (const c of held) {
        c.get('/health');
        await c.has('HTTP/1.1 200');
    }
    const extra = await small.connect();
    extra.get('/health');
    await extra.has('HTTP/1.1 503');
    assert.match(extra.text, /Retry-After: \d/);
    assert.match(extra.text, /--max-connections/);
    await extra.end();
    for (const c of held) c.leave();
    await until('a place is free', async () => (await small.get('/health')).status === 200);
    await small.stop();
});

test('an idle server uses no processor time', async () => {
    await server.post(golden('hello').request);
    await server.counts(0, 0);
    const held = await server.connect(); // a connection that waits costs nothing either
    const before = server.cpuSeconds();
    await sleep(1000); // what is measured is the time itself
    const used = server.cpuSeconds() - before;
    assert.ok(used <= 0.02, `${used} s in one second`);
    held.leave();
});

test('SIGTERM: running answers finish, waiting ones are refused, new ones get a 503, and the end is 0', async () => {
    const ending = await Server.start(['--max-running', '1', '--max-queue', '4']);
    const watch = await ending.connect();
    watch.get('/health');
    await watch.has('"status":"ok"');
    const running = await writing({ max_tokens: 300, seed: 11, stream_options: { include_usage: true } }, ending);
    const waiting = await ending.connect();
    waiting.post(endless());
    const whole = ending.post(endless({ stream: false }));
    await ending.counts(1, 2);
    const ended = ending.terminate();
    await waiting.has('"error"');
    assert.match(waiting.text, /shutting down/);
    assert.equal((await whole).status, 503);
    watch.get('/health');
    await watch.has('"status":"draining"');
    assert.match(watch.text, /HTTP\/1\.1 503/);
    await running.has('data: [DONE]\n\n');
    assert.equal(events(running.text).at(-1).usage.completion_tokens, 300);
    assert.deepEqual(await ended, { code: 0, signal: null });
    for (const c of [watch, running, waiting]) c.leave();
});

test('SIGTERM: an answer that does not finish within --drain-timeout is cut off and its client told, and the end is 0', async () => {
    const ending = await Server.start(['--drain-timeout', '1']);
    const c = await writing({}, ending);
    const whole = ending.post(endless({ stream: false }));
    const reading = await ending.connect();
    reading.post({ ...endless(), messages: [{ role: 'user', content: longText(20000) }] });
    await ending.counts(3, 0);
    const began = Date.now();
    assert.deepEqual(await ending.terminate(), { code: 0, signal: null });
    assert.ok(Date.now() - began >= 900);
    assert.match(ending.log, /3 answers did not finish within --drain-timeout/);
    assert.equal((await whole).status, 503);
    for (const stream of [c, reading]) {
        await stream.end();
        assert.match(stream.text, /\ndata: \{"error":\{"message":"the server is shutting down"/);
        stream.leave();
    }
});

test('SIGTERM on an idle server ends it at once, and a second signal does not wait for answers', async () => {
    const idle = await Server.start();
    const keptOpen = await idle.connect();
    assert.deepEqual(await idle.terminate(), { code: 0, signal: null });
    keptOpen.leave();
    const busy = await Server.start();
    const c = await writing({}, busy);
    busy.child.kill('SIGINT');
    await until('it drains', () => busy.log.includes('no new requests'));
    assert.deepEqual(await busy.terminate(), { code: 143, signal: null });
    c.leave();
});
