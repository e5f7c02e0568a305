// One request over node's HTTP client, read as it comes; it can be given up at any point.
import http from 'node:http';

// Sends a request and reads its reply: { status, headers, text }. Rejects when the connection breaks, or when nothing moves for `quiet` ms.
// `leave`: { afterMs } or { onText: (text) => bool } or { headers: true } or { halfBody: true } give the request up: { left: true, text }.
export function exchange(url, { method = 'GET', path, body, headers = {}, agent = false, quiet = 120000, leave }) {
    return new Promise((resolve, reject) => {
        const payload = body === undefined ? undefined : Buffer.from(JSON.stringify(body));
        const at = new URL(url);
        const request = http.request({
            host: at.hostname,
            port: at.port,
            method,
            path,
            agent,
            headers: { ...headers, ...(payload && { 'Content-Type': 'application/json', 'Content-Length': payload.length }) },
        });
        let timer;
        let text = '';
        let left = false;
        const done = (settle, value) => {
            clearTimeout(timer);
            settle(value);
        };
        const giveUp = () => {
            left = true;
            request.destroy();
            done(resolve, { left, text });
        };
        request.setTimeout(quiet, () => request.destroy(new Error(`nothing moved for ${quiet} ms: ${method} ${path}`)));
        request.on('error', (e) => left || done(reject, e));
        request.on('response', (response) => {
            response.setEncoding('utf8');
            response.on('data', (d) => {
                text += d;
                if (leave?.onText?.(text) && !left) giveUp();
            });
            response.on('error', (e) => left || done(reject, e));
            response.on('end', () => left || done(resolve, { status: response.statusCode, headers: response.headers, text }));
            if (leave?.headers) giveUp();
        });
        if (leave?.afterMs !== undefined) timer = setTimeout(giveUp, leave.afterMs);
        if (leave?.halfBody) {
            request.write(payload.subarray(0, payload.length >> 1));
            timer = setTimeout(giveUp, 5);
        } else {
            request.end(payload);
        }
    });
}

// The numbers of GET /metrics, by name with labels: { 'bedside_requests_running': 0, ... }.
export async function metrics(url) {
    const { status, text } = await exchange(url, { path: '/metrics' });
    if (status !== 200) throw new Error(`/metrics: status ${status}`);
    return Object.fromEntries([...text.matchAll(/^(bedside_\S+) (\S+)$/gm)].map(([, name, value]) => [name, Number(value)]));
}

// What an answer says and how it ended, the same for a stream and a reply in one piece.
export function answerOf(text, stream) {
    const parts = stream ? [...text.matchAll(/^data: (\{.*\})$/gm)].map((m) => JSON.parse(m[1])) : [JSON.parse(text)];
    const answer = { reasoning: '', content: '', finish: null, prompt: 0, tokens: 0, cached: 0 };
    for (const part of parts) {
        if (part.error) throw new Error(`an error in a stream: ${part.error.message}`);
        const choice = part.choices[0];
        const said = choice?.delta ?? choice?.message;
        answer.reasoning += said?.reasoning_content ?? '';
        answer.content += said?.content ?? '';
        answer.finish = choice?.finish_reason ?? answer.finish;
        if (part.usage) {
            answer.prompt = part.usage.prompt_tokens;
            answer.tokens = part.usage.completion_tokens;
            answer.cached = part.usage.prompt_tokens_details?.cached_tokens ?? 0;
        }
    }
    if (stream && !text.endsWith('data: [DONE]\n\n')) throw new Error(`a stream without its end: ...${text.slice(-60)}`);
    return answer;
}

// Numbers that look random and are the same for the same seed (mulberry32).
export function randomness(seed) {
    let state = seed >>> 0;
    const unit = () => {
        state = (state + 0x6d2b79f5) >>> 0;
        let z = Math.imul(state ^ (state >>> 15), state | 1);
        z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
        return ((z ^ (z >>> 14)) >>> 0) / 4294967296;
    };
    const below = (n) => Math.floor(unit() * n);
    return { unit, below, among: (list) => list[below(list.length)], chance: (p) => unit() < p };
}
