// Three chats are being written while one long prompt is read: how long their readers wait for the next token, and that the prompt gets on.
import { Server, endless, longText, until } from '../http/server.mjs';
import { metrics } from './client.mjs';

const written = /"(reasoning_)?content":"[^"]/g;

// The smallest bound that at least the part p of the samples in a histogram does not exceed; of its growth between two looks.
function histogramPercentile(before, after, name, p) {
    const bounds = Object.keys(after).filter((k) => k.startsWith(`bedside_${name}_bucket`));
    const grown = (k) => after[k] - (before[k] ?? 0);
    const all = grown(`bedside_${name}_bucket{le="+Inf"}`);
    const bound = (k) => Number(/le="(.*)"/.exec(k)[1].replace('+Inf', 'Infinity'));
    return bounds.map((k) => [bound(k), grown(k)]).sort((a, b) => a[0] - b[0]).find(([, n]) => n >= p * all)[0];
}

export async function measureGaps({ maxGap, promptTokens = 6600, options = [] }) {
    const server = await Server.start(['--max-gap', String(maxGap), ...options]);
    try {
        const chats = [];
        for (let i = 0; i < 3; i++) {
            const c = await server.connect();
            c.post(endless({ seed: i + 1 }));
            chats.push(c);
        }
        await Promise.all(chats.map((c) => c.has(/"(reasoning_)?content":"[^"]/, 60000)));

        const before = await metrics(server.url);
        const long = await server.connect();
        const began = performance.now();
        const from = chats.map((c) => c.chunks.length - 1);
        long.post(endless({ messages: [{ role: 'user', content: longText(promptTokens) }], max_tokens: 1, stream_options: { include_progress: true } }));
        await long.has('data: [DONE]', 300000);
        const ms = performance.now() - began;
        const to = chats.map((c) => c.chunks.length - 1);
        const after = await metrics(server.url);

        // Pieces of text that arrive together count as none apart.
        const gaps = chats.flatMap((c, k) => {
            const times = c.chunks.slice(from[k], to[k] + 1).flatMap((chunk) => Array(chunk.text.match(written)?.length ?? 0).fill(chunk.at));
            return times.slice(1).map((t, i) => t - times[i]);
        });
        gaps.sort((a, b) => a - b);
        const progress = [...long.text.matchAll(/"prompt_progress":\{"total":(\d+),"cached":\d+,"processed":(\d+)/g)].map((m) => Number(m[2]));
        const steps = after.bedside_steps_total - before.bedside_steps_total;
        for (const c of [...chats, long]) c.leave();
        await until('all is quiet', async () => (await metrics(server.url)).bedside_requests_running === 0);
        return {
            maxGap,
            gaps: gaps.length,
            p50: gaps[Math.ceil(gaps.length * 0.5) - 1],
            p95: gaps[Math.ceil(gaps.length * 0.95) - 1],
            max: gaps.at(-1),
            serverP95: 1000 * histogramPercentile(before, after, 'between_tokens_seconds', 0.95),
            promptTokens: after.bedside_prompt_tokens_computed_total - before.bedside_prompt_tokens_computed_total,
            promptMs: ms,
            steps,
            progress,
        };
    } finally {
        await server.stop();
    }
}

export function tellGaps(r) {
    return (
        `three chats beside a prompt of ${r.promptTokens} tokens, --max-gap ${r.maxGap} ms: ${r.gaps} gaps, median ${r.p50} ms, 95 % ${r.p95} ms ` +
        `(the server says at most ${r.serverP95} ms), longest ${r.max} ms; the prompt took ${Math.round(r.promptMs)} ms in ${r.steps} steps`
    );
}
