// What a client gets from POST /v1/chat/completions: the openai package against the demo model.
import { test, before, after } from 'node:test';
import assert from 'node:assert/strict';
import { Server, golden, events, contentOf, endOfTurn } from './server.mjs';

let server;
before(async () => {
    server = await Server.start(['--max-running', '8']);
});
after(() => Server.stopAll());

async function whole(request) {
    return server.client.chat.completions.create(request);
}

// The whole stream: deltas joined, and all chunks.
async function streamed(request) {
    const stream = await server.client.chat.completions.create({ ...request, stream: true });
    const all = { content: '', reasoning: '', finish: null, usage: null, chunks: [] };
    for await (const chunk of stream) {
        all.chunks.push(chunk);
        const choice = chunk.choices[0];
        all.content += choice?.delta?.content ?? '';
        all.reasoning += choice?.delta?.reasoning_content ?? '';
        if (choice?.finish_reason) all.finish = choice.finish_reason;
        if (chunk.usage) all.usage = chunk.usage;
    }
    return all;
}

for (const name of ['dose', 'allergy-yes', 'latest-inr', 'interaction', 'multi-turn']) {
    test(`the demo model answers "${name}" with the right line, the same text in a stream and in one reply`, async () => {
        const { request, checks, text } = golden(name);
        const reply = await whole(request);
        const content = reply.choices[0].message.content;
        for (const check of checks) assert.ok(content.includes(check), `${content} lacks ${check}`);
        assert.equal(content, text);
        assert.equal(reply.choices[0].finish_reason, 'stop');
        const stream = await streamed(request);
        assert.equal(stream.content, content);
        assert.equal(stream.finish, 'stop');
    });
}

test('Spanish arrives whole: accents and the opening question mark', async () => {
    const { request, checks, text } = golden('spanish-hello');
    const stream = await streamed(request);
    assert.equal(stream.content, text);
    for (const check of checks) assert.ok(stream.content.includes(check));
    assert.match(stream.content, /demostración/);
});

test('with thinking on the reasoning comes apart from the answer, in both forms', async () => {
    const { request, text } = golden('latest-inr-think');
    const [reasoning, content] = text.split('\n</think>\n\n');
    const reply = (await whole(request)).choices[0].message;
    assert.equal(reply.content, content);
    assert.equal(reply.reasoning_content.trim(), reasoning.trim());
    const stream = await streamed(request);
    assert.equal(stream.content, content);
    assert.equal(stream.reasoning, reply.reasoning_content);
    const deltas = stream.chunks.map((c) => c.choices[0]?.delta ?? {});
    const firstContent = deltas.findIndex((d) => d.content);
    const lastReasoning = deltas.findLastIndex((d) => d.reasoning_content);
    assert.ok(lastReasoning < firstContent);
    assert.doesNotMatch(stream.content + stream.reasoning, /<\/?think>/);
});

test('with thinking off there is no reasoning, also by reasoning_effort none', async () => {
    const { request, text } = golden('latest-inr');
    delete request.chat_template_kwargs;
    const reply = (await whole({ ...request, reasoning_effort: 'none' })).choices[0].message;
    assert.equal(reply.content, text);
    assert.ok(!reply.reasoning_content);
});

test('usage counts exactly: the prompt as tokenised, the answer without the token that ends it', async () => {
    const { request, promptTokens, tokens } = golden('dose');
    const reply = await whole(request);
    assert.equal(tokens.at(-1), endOfTurn);
    assert.equal(reply.usage.prompt_tokens, promptTokens);
    assert.equal(reply.usage.completion_tokens, tokens.length - 1);
    assert.equal(reply.usage.total_tokens, promptTokens + tokens.length - 1);
    const thinking = golden('latest-inr-think');
    const close = thinking.tokens.indexOf(endOfTurn + 6); // </think>
    const usage = (await whole(thinking.request)).usage;
    assert.equal(usage.completion_tokens, thinking.tokens.length - 1);
    assert.equal(usage.completion_tokens_details.reasoning_tokens, close + 1);
});

test('include_usage adds one last chunk with the same numbers; without it there is none', async () => {
    const { request } = golden('dose');
    const usage = (await whole(request)).usage;
    const asked = await streamed({ ...request, stream_options: { include_usage: true } });
    assert.deepEqual(asked.chunks.at(-1).choices, []);
    assert.deepEqual(asked.usage, usage);
    const silent = await streamed(request);
    assert.equal(silent.usage, null);
});

test('every chunk of a stream has the same id, model and time, and the first one the role', async () => {
    const { chunks } = await streamed(golden('dose').request);
    assert.equal(new Set(chunks.map((c) => `${c.id} ${c.model} ${c.created} ${c.object}`)).size, 1);
    assert.equal(chunks[0].choices[0].delta.role, 'assistant');
    assert.match(chunks[0].id, /^chatcmpl-/);
});

test('max_tokens cuts exactly there and says length', async () => {
    const { request, text } = golden('dose');
    for (const field of ['max_tokens', 'max_completion_tokens']) {
        const { max_tokens: _, ...rest } = request;
        const reply = await whole({ ...rest, [field]: 4 });
        assert.equal(reply.choices[0].finish_reason, 'length');
        assert.equal(reply.usage.completion_tokens, 4);
        assert.ok(text.startsWith(reply.choices[0].message.content));
        assert.ok(reply.choices[0].message.content.length > 0);
    }
    assert.equal((await streamed({ ...request, max_tokens: 4 })).finish, 'length');
});

test('a stop string ends the answer before it, and no part of it is ever seen', async () => {
    const { request, text } = golden('dose'); // "The record lists metoprolol 50 mg twice daily [6]."
    const stop = 'mg twice d';
    const expected = text.slice(0, text.indexOf(stop));
    const reply = await whole({ ...request, stop });
    assert.equal(reply.choices[0].message.content, expected);
    assert.equal(reply.choices[0].finish_reason, 'stop');
    let seen = '';
    for (const chunk of (await streamed({ ...request, stop: ['never there', stop] })).chunks) {
        seen += chunk.choices[0]?.delta?.content ?? '';
        assert.ok(expected.startsWith(seen), `"${seen}" runs past the stop string`);
    }
    assert.equal(seen, expected);
});

test('a stop string that begins but never completes holds nothing back in the end', async () => {
    const { request, text } = golden('dose');
    const stream = await streamed({ ...request, stop: ['daily [6]. And', 'mg twice weekly'] });
    assert.equal(stream.content, text);
});

test('sixteen stop strings are taken and the first to appear wins', async () => {
    const { request, text } = golden('dose');
    const stop = [...Array(15).keys()].map((i) => `absent ${i}`).concat(' 50');
    const reply = await whole({ ...request, stop });
    assert.equal(reply.choices[0].message.content, text.slice(0, text.indexOf(' 50')));
});

test('a tool call arrives, as text at least', async () => {
    const { request, checks } = golden('tool-call');
    const content = (await whole(request)).choices[0].message.content;
    for (const check of checks) assert.ok(content.includes(check), content);
    assert.equal((await streamed(request)).content, content);
});

test('a conversation with a tool result is answered from it', async () => {
    const { request, text } = golden('tool-answer');
    assert.equal((await whole(request)).choices[0].message.content, text);
});

test('text parts are the same as one string', async () => {
    const { request, text } = golden('dose');
    const messages = request.messages.map((m) => {
        const half = Math.floor(m.content.length / 2);
        return { ...m, content: [{ type: 'text', text: m.content.slice(0, half) }, { type: 'text', text: m.content.slice(half) }] };
    });
    assert.equal((await whole({ ...request, messages })).choices[0].message.content, text);
});

test('an assistant message at the end is continued', async () => {
    const { request, text } = golden('dose');
    const messages = [...request.messages, { role: 'assistant', content: 'The record lists metoprolol' }];
    const content = (await whole({ ...request, messages })).choices[0].message.content;
    assert.equal('The record lists metoprolol' + content, text);
});

test('a control token typed by a user is text: it ends no turn and opens none', async () => {
    const tokens = async (content) => (await whole({ messages: [{ role: 'user', content }], max_tokens: 1 })).usage.prompt_tokens;
    const plain = await tokens('Hello');
    assert.ok((await tokens('Hello<|im_end|><|im_start|>')) > plain + 10, 'the markers were read letter by letter');
});

test('the same seed gives the same text, another one another; without a seed it varies', async () => {
    const request = { messages: [{ role: 'user', content: 'Hello' }], temperature: 2, max_tokens: 24, chat_template_kwargs: { enable_thinking: false } };
    const text = async (extra) => (await whole({ ...request, ...extra })).choices[0].message.content;
    const first = await text({ seed: 7 });
    assert.equal(await text({ seed: 7 }), first);
    assert.notEqual(await text({ seed: 8 }), first);
    assert.notEqual(await text({}), await text({}));
});

test('the answer is the same alone and among seven others', async () => {
    const request = { messages: [{ role: 'user', content: 'Hello' }], temperature: 1.5, seed: 3, max_tokens: 40, logit_bias: { [endOfTurn]: -100 } };
    const alone = (await whole(request)).choices[0].message;
    const replies = await Promise.all([...Array(8).keys()].map((i) => whole(i === 4 ? request : { ...golden('dose').request, seed: i })));
    assert.deepEqual(replies[4].choices[0].message, alone);
});

test('logprobs: one entry for each token of the content, with alternatives, and they sum to at most one', async () => {
    const { request, tokens } = golden('dose');
    const reply = await whole({ ...request, logprobs: true, top_logprobs: 3 });
    const list = reply.choices[0].logprobs.content;
    assert.equal(list.length, tokens.length - 1);
    assert.equal(list.map((l) => l.token).join(''), reply.choices[0].message.content);
    for (const l of list) {
        assert.equal(l.top_logprobs.length, 3);
        assert.equal(l.top_logprobs[0].token, l.token); // greedy
        assert.ok(l.top_logprobs.reduce((sum, t) => sum + Math.exp(t.logprob), 0) <= 1.0001);
    }
    const stream = await streamed({ ...request, logprobs: true, top_logprobs: 3 });
    assert.deepEqual(stream.chunks.flatMap((c) => c.choices[0]?.logprobs?.content ?? []), list);
});

test('logprobs do not show what a stop string withholds', async () => {
    const { request } = golden('dose');
    const reply = await whole({ ...request, stop: 'mg twice d', logprobs: true });
    const shown = reply.choices[0].logprobs.content.map((l) => l.token).join('');
    assert.equal(reply.choices[0].message.content, 'The record lists metoprolol 50 ');
    assert.equal(shown, 'The record lists metoprolol 50'); // the next token, " mg", lies partly in the stop string
    const stream = await streamed({ ...request, stop: 'mg twice d', logprobs: true });
    assert.equal(stream.chunks.flatMap((c) => c.choices[0]?.logprobs?.content ?? []).map((l) => l.token).join(''), shown);
});

test('the model list names the model, and both its names are accepted', async () => {
    const list = (await server.client.models.list()).data;
    assert.equal(list.length, 1);
    const one = await server.client.models.retrieve(list[0].id);
    assert.equal(one.id, list[0].id);
    for (const model of [list[0].id, 'demo-q8_0']) {
        const reply = await whole({ ...golden('hello').request, model });
        assert.equal(reply.model, list[0].id);
    }
});

test('the stream on the wire: headers, a comment at once, the role, [DONE] last', async () => {
    const response = await server.post({ ...golden('dose').request, stream: true });
    assert.equal(response.status, 200);
    assert.match(response.headers.get('content-type'), /^text\/event-stream/);
    assert.equal(response.headers.get('cache-control'), 'no-store');
    const text = await response.text();
    assert.match(text, /^: reading prompt 0\/184 tokens\n\ndata: \{.*"role":"assistant"/);
    assert.ok(text.endsWith('data: [DONE]\n\n'));
    assert.equal(contentOf(events(text)), golden('dose').text);
});

test('the page says what runs here and that the demo is not for clinical use', async () => {
    const response = await server.get('/');
    assert.match(response.headers.get('content-type'), /^text\/html/);
    const page = await response.text();
    assert.match(page, /demonstration/);
    assert.match(page, /often wrong/);
    assert.match(page, /not for\s+clinical use/);
});

test('nothing that was said is in the log', async () => {
    await whole({ ...golden('dose').request, messages: [{ role: 'user', content: 'Is Zebulon allergic to penicillin?' }] });
    assert.match(server.log, /POST \/v1\/chat\/completions 200, prompt \d+ tokens, answer \d+ tokens, [\d.]+ s/);
    assert.doesNotMatch(server.log, /Zebulon|penicillin|metoprolol|demo model/);
});
