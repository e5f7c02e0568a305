// What is refused, with which status, and how the message helps. Every refusal has OpenAI's shape.
import { test, before, after } from 'node:test';
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { Server, golden, longText } from './server.mjs';

let server, guarded;
before(async () => {
    [server, guarded] = await Promise.all([
        Server.start(['--context', '1024', '--max-body', '256']),
        Server.start(['--host', '0.0.0.0', '--alias', 'ward-7'], { BEDSIDE_API_KEY: 'correct-horse' }),
    ]);
});
after(() => Server.stopAll());

const hello = { messages: [{ role: 'user', content: 'Hello' }], max_tokens: 2 };

// The error object of a refusal, after checking its shape.
async function refusal(response, status) {
    const text = await response.text();
    assert.equal(response.status, status, text);
    assert.match(response.headers.get('content-type'), /^application\/json/);
    const { error } = JSON.parse(text);
    assert.deepEqual(Object.keys(error).sort(), ['code', 'message', 'param', 'type']);
    assert.equal(typeof error.message, 'string');
    assert.ok(error.message.length > 10);
    return error;
}

const refusedFields = {
    audio: { voice: 'alloy', format: 'wav' },
    functions: [{ name: 'f' }],
    function_call: 'auto',
    modalities: ['text', 'audio'],
    n: 2,
    prediction: { type: 'content', content: 'x' },
    response_format: { type: 'json_object' },
    store: true,
    web_search_options: {},
    temperature: 3,
    top_p: 1.5,
    presence_penalty: 5,
    frequency_penalty: -5,
    repeat_penalty: 0,
    min_p: 1.5,
    top_k: -3,
    max_tokens: 0,
    max_completion_tokens: -1,
    stop: Array(17).fill('x'),
    seed: 'seven',
    stream: 'yes',
    logit_bias: { 99999999: 1 },
    top_logprobs: 21,
    messages: [],
    chat_template_kwargs: { enable_thinking: 'no' },
    tool_choice: 'required',
};
for (const [field, value] of Object.entries(refusedFields)) {
    test(`${field}: ${JSON.stringify(value).slice(0, 40)} is refused by name`, async () => {
        const error = await refusal(await server.post({ ...hello, logprobs: field === 'top_logprobs' || undefined, [field]: value }), 400);
        assert.equal(error.type, 'invalid_request_error');
        assert.ok(error.param?.startsWith(field), `param is ${error.param}`);
        assert.ok(error.message.includes(field), error.message);
    });
}

test('unknown fields and null are ignored', async () => {
    const response = await server.post({ ...hello, no_such_field: [1], user: 'u', metadata: null, stop: null, temperature: null });
    assert.equal(response.status, 200, await response.text());
});

test('a body that is not JSON is a 400 before and after streaming is asked for', async () => {
    for (const body of ['', '{', '[]', 'nonsense', '{"messages": 1}', '{"stream": true}', '{"messages":[{"role":"user","content":"\\ud800"}]}'])
        await refusal(await server.post(body), 400);
});

test('image parts are refused, and the message says where', async () => {
    const content = [{ type: 'text', text: 'see' }, { type: 'image_url', image_url: { url: 'data:,' } }];
    const error = await refusal(await server.post({ messages: [{ role: 'user', content }] }), 400);
    assert.match(error.param, /^messages\[0\]\.content\[1\]/);
});

test('a prompt longer than the context is a 400 with both counts, also for a stream', async () => {
    for (const stream of [false, true]) {
        const response = await server.post({ ...hello, stream, messages: [{ role: 'user', content: longText(1500) }] });
        const error = await refusal(response, 400);
        assert.equal(error.code, 'context_length_exceeded');
        assert.match(error.message, /\b1[45]\d\d tokens/);
        assert.match(error.message, /\b1024\b/);
    }
});

test('max_tokens beyond the context is shortened to what fits, and the answer ends with length', async () => {
    const response = await server.post({ ...hello, max_tokens: 100000, logit_bias: { 4089: -100, 4087: -100 }, temperature: 1, seed: 1 });
    const reply = JSON.parse(await response.text());
    assert.equal(response.status, 200);
    assert.equal(reply.choices[0].finish_reason, 'length');
    assert.equal(reply.usage.total_tokens, 1024);
});

test('another model is a 404 that names the one served', async () => {
    const error = await refusal(await guarded.post({ ...hello, model: 'gpt-4o' }, { Authorization: 'Bearer correct-horse' }), 404);
    assert.equal(error.code, 'model_not_found');
    assert.match(error.message, /ward-7/);
    await refusal(await server.get('/v1/models/gpt-4o'), 404);
});

test('an unknown path is a 404 that lists the known ones', async () => {
    for (const path of ['/v1', '/v1/chat', '/v1/chat/completions/', '/v1/models/', '/v1/cache/', '/metrics/', '//']) {
        const error = await refusal(await server.get(path), 404);
        assert.match(error.message, /\/v1\/chat\/completions/);
    }
});

test('a wrong method is a 405 with Allow; HEAD and OPTIONS are answered', async () => {
    const wrong = await server.get('/v1/chat/completions');
    assert.equal(wrong.headers.get('allow'), 'POST, OPTIONS');
    await refusal(wrong, 405);
    await refusal(await fetch(`${server.url}/health`, { method: 'DELETE' }), 405);
    await refusal(await fetch(`${server.url}/v1/models`, { method: 'POST', body: '{}' }), 405);
    const head = await fetch(`${server.url}/health`, { method: 'HEAD' });
    assert.equal(head.status, 200);
    assert.equal(await head.text(), '');
    const options = await fetch(`${server.url}/v1/chat/completions`, { method: 'OPTIONS' });
    assert.equal(options.status, 204);
    assert.equal(options.headers.get('allow'), 'POST, OPTIONS');
});

test('a body that is not declared as JSON, or compressed, is a 415', async () => {
    await refusal(await server.post(hello, { 'Content-Type': 'text/plain' }), 415);
    await refusal(await server.post(hello, { 'Content-Type': 'application/jsonp' }), 415);
    await refusal(await server.post(hello, { 'Content-Encoding': 'gzip' }), 415);
    assert.equal((await server.post(hello, { 'Content-Type': 'Application/JSON; charset=utf-8' })).status, 200);
});

test('a body over --max-body is a 413 that its sender gets to read', async () => {
    const body = JSON.stringify({ messages: [{ role: 'user', content: 'x'.repeat(3 << 20) }] });
    const error = await refusal(await server.post(body), 413);
    assert.match(error.message, /max-body/);
});

test('a chunked body over --max-body is a 413 as well', async () => {
    const c = await server.connect();
    c.send('POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n');
    for (let i = 0; i < 6; i++) c.send(`10000\r\n${'x'.repeat(65536)}\r\n`);
    c.send('0\r\n\r\n');
    await c.has('HTTP/1.1 413');
    c.leave();
});

test('Expect: 100-continue: a good request is invited, a bad one refused before its body is sent', async () => {
    const body = JSON.stringify(hello);
    const c = await server.connect();
    const head = (length) =>
        `POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ${length}\r\nExpect: 100-continue\r\n\r\n`;
    c.send(head(body.length));
    await c.has('HTTP/1.1 100 Continue');
    c.send(body);
    await c.has('HTTP/1.1 200 OK');
    const big = await server.connect();
    big.send(head(1 << 30));
    await big.has('HTTP/1.1 413');
    assert.doesNotMatch(big.text, /100 Continue/);
    c.leave();
    big.leave();
});

test('two lengths for one body are a 400, and the connection is closed', async () => {
    const body = JSON.stringify(hello);
    for (const extra of [`Content-Length: ${body.length + 1}`, 'Transfer-Encoding: chunked']) {
        const c = await server.connect();
        c.post(body, [extra]);
        await c.has(/^HTTP\/1\.1 400/);
        await c.end();
    }
});

test('a header that others may read in another way is refused, and what follows it is never a request', async () => {
    const inner = 'DELETE /v1/cache/x HTTP/1.1\r\nHost: localhost\r\n\r\n';
    for (const line of [`Content-Length : ${inner.length}`, `Content-Length\t: ${inner.length}`, `X\x01Y: 1\r\nContent-Length: ${inner.length}`,
        `X: a\x7Fb\r\nContent-Length: ${inner.length}`, `X: a\rb\r\nContent-Length: ${inner.length}`]) {
        const c = await server.connect();
        c.send(`POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n${line}\r\n\r\n${inner}`);
        await c.end();
        assert.match(c.text, /^HTTP\/1\.1 400/, JSON.stringify(line));
        assert.doesNotMatch(c.text, /cache\.deleted/, JSON.stringify(line));
    }
});

test('a transfer encoding other than chunked is a 501 at once, not a wait for the end of the connection', async () => {
    for (const encoding of ['gzip, chunked', 'identity', 'xchunked', 'chunked, chunked']) {
        const c = await server.connect();
        c.send(`POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: ${encoding}\r\n\r\n`);
        await c.end(10000);
        assert.match(c.text, /^HTTP\/1\.1 501/, encoding);
    }
});

test('a body declared too long to be heard out is a 413 at once, before it is sent', async () => {
    const c = await server.connect();
    c.send('POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9223372036854775808\r\n\r\n');
    await c.end(10000);
    assert.match(c.text, /^HTTP\/1\.1 413/);
    assert.match(c.text, /max-body/);
});

test('header lines without end do not fill the memory', async () => {
    const c = await server.connect();
    c.send('GET /health HTTP/1.1\r\nHost: localhost\r\n');
    for (let i = 0; i < 64 && !c.closed; i++) c.send(`X-Filler-${i}: ${'y'.repeat(2048)}\r\n`);
    c.send('\r\n');
    await c.end();
    assert.doesNotMatch(c.text, /HTTP\/1\.1 200/);
    assert.equal((await server.get('/health')).status, 200);
});

test('a Host that is not this machine is a 403: a page cannot rebind its name to the server', async () => {
    for (const host of ['evil.example', 'evil.example:8080', '127.0.0.1.evil.example', 'localhost.evil.example', 'localhost:80evil', '']) {
        const c = await server.connect();
        c.get('/health', [`Host: ${host}`]);
        await c.has('HTTP/1.1 403');
        c.leave();
    }
    for (const host of ['localhost', 'LOCALHOST:1', '127.0.0.1', `127.0.0.1:${server.port}`, '[::1]:8080']) {
        const c = await server.connect();
        c.get('/health', [`Host: ${host}`]);
        await c.has('HTTP/1.1 200');
        c.leave();
    }
});

test('pages of other origins are refused, pages of this machine are let in', async () => {
    for (const origin of ['https://evil.example', 'null', 'http://localhost.evil.example', 'file://'])
        await refusal(await server.post(hello, { Origin: origin }), 403);
    const ours = await server.post(hello, { Origin: 'http://localhost:5173' });
    assert.equal(ours.status, 200);
    assert.equal(ours.headers.get('access-control-allow-origin'), 'http://localhost:5173');
    const c = await server.connect();
    c.send(
        'OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://127.0.0.1:3000\r\n' +
            'Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n\r\n');
    await c.has(/HTTP\/1\.1 204[^]*\r\n\r\n/);
    assert.match(c.text, /Access-Control-Allow-Origin: http:\/\/127\.0\.0\.1:3000\r\n/);
    assert.match(c.text, /Access-Control-Allow-Headers: authorization,content-type\r\n/);
    assert.match(c.text, /Access-Control-Allow-Methods: POST, OPTIONS\r\n/);
    c.leave();
});

test('with a key nothing under /v1 is answered without it; /health is', async () => {
    for (const headers of [{}, { Authorization: 'Bearer wrong' }, { Authorization: 'Bearer correct-horse!' }, { Authorization: 'correct-horse' }, { Authorization: 'Bearer ' }]) {
        const response = await guarded.post(hello, headers);
        assert.equal(response.headers.get('www-authenticate'), 'Bearer');
        const error = await refusal(response, 401);
        assert.equal(error.code, 'invalid_api_key');
        assert.doesNotMatch(error.message, /horse/);
    }
    await refusal(await guarded.get('/v1/models'), 401);
    assert.equal((await guarded.get('/health')).status, 200);
    const client = new OpenAI({ baseURL: `${guarded.url.replace('0.0.0.0', '127.0.0.1')}/v1`, apiKey: 'correct-horse', maxRetries: 0 });
    const reply = await client.chat.completions.create({ ...golden('dose').request, model: 'ward-7' });
    assert.equal(reply.choices[0].message.content, golden('dose').text);
    assert.equal(reply.model, 'ward-7');
    const elsewhere = await guarded.post(hello, { Authorization: 'Bearer correct-horse', Origin: 'https://ward.example' });
    assert.equal(elsewhere.status, 200);
});

test('errors reach the openai package as its own classes', async () => {
    await assert.rejects(server.client.chat.completions.create({ ...hello, n: 2 }), (e) => e instanceof OpenAI.BadRequestError && e.param === 'n');
    await assert.rejects(server.client.models.retrieve('nope'), (e) => e instanceof OpenAI.NotFoundError && e.code === 'model_not_found');
    await assert.rejects(guarded.client.models.list(), OpenAI.AuthenticationError);
});

test('a start that cannot work says so in one line and ends with 1 or 2', async () => {
    const cases = [
        [['--host', '0.0.0.0'], /BEDSIDE_API_KEY/],
        [['--port', String(server.port)], /Address already in use.*--port/],
        [['--host', 'no.such.host.invalid'], /no\.such\.host\.invalid.*--host/],
        [['--model', 'tests/demo-model/README.md'], /README\.md/],
    ];
    for (const [options, pattern] of cases) {
        await assert.rejects(Server.start(options), (e) => {
            const line = /bedside: .*$/m.exec(e.message);
            assert.ok(line, e.message);
            assert.match(line[0], pattern);
            assert.match(e.message, /"code":[12],/);
            return true;
        });
    }
});
