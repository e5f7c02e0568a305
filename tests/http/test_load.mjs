// A short run of tests/load (make load runs it for longer), and the gap between tokens beside a long prompt.
import { test, after } from 'node:test';
import assert from 'node:assert/strict';
import { Server } from './server.mjs';
import { load } from '../load/load.mjs';
import { measureGaps, tellGaps } from '../load/gaps.mjs';

after(() => Server.stopAll());

test('64 clients on five places with cancels, deletions and kill -9: answers are undisturbed, nothing leaks, nothing hangs', async (t) => {
    const result = await load({ seconds: 10, seed: 42180584, between: 2500 });
    t.diagnostic(result.tell());
    assert.deepEqual(result.failures, []);
    const { counts } = result;
    for (const what of ['completed', 'hits', 'cancelled', 'warmed', 'kills', 'cut by kill -9']) assert.ok(counts[what] > 0, `${what}: ${counts[what]}`);
});

test('three chats go on beside a prompt of 6,000 tokens within --max-gap, and the prompt is read', async (t) => {
    const r = await measureGaps({ maxGap: 100 });
    t.diagnostic(tellGaps(r));
    assert.ok(r.promptTokens > 6000);
    assert.ok(r.steps > 6000 / 512, 'in several steps');
    assert.ok(r.gaps > 3 * 10, `${r.gaps} gaps: the chats went on meanwhile`);
    assert.ok(r.progress.every((n, i) => i === 0 || n > r.progress[i - 1]), `progress rises: ${r.progress}`);
    assert.ok(r.p95 <= 3 * r.maxGap, `95 % of the gaps are within ${r.p95} ms`); // this machine may be busy with other things
});
