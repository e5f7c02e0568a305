// The server on a GPU: it answers as on the CPU, says why it does not use a GPU, and when the GPU is lost it fails requests cleanly and goes on answering /health.
// The GPU is the kernels' source compiled for the CPU (tests/hip/gpu_shim.h): slow, so answers are short.
import { test, after } from 'node:test';
import assert from 'node:assert/strict';
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { spawnSync } from 'node:child_process';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { Server, longText, root } from './server.mjs';

const program = process.env.BEDSIDE ?? 'build/bedside';
const shim = join(root, dirname(program), 'hip', 'libamdhip64-shim.so');
const doctor = spawnSync(join(root, program), ['doctor'], { encoding: 'utf8' });
const skip = !existsSync(shim) ? 'no stand-in for the runtime library in this build' : /no GPU kernels/.test(doctor.stdout) ? 'built without GPU kernels' : false;
const gpu = ['--hip-library', shim, '--context', '512', '--max-running', '2', '--prefill-chunk', '64'];

const emulator = join(root, dirname(program), 'hip', 'libamdhip64-emu.so');
const skipEmulator = skip || (!existsSync(emulator) ? 'no emulator in this build' : !/kernels for .*gfx1152/.test(doctor.stdout) ? 'no kernels for gfx1152 in this build' : false);

const folder = mkdtempSync(join(tmpdir(), 'bedside-device-'));
after(async () => {
    await Server.stopAll();
    rmSync(folder, { recursive: true });
});

const request = { messages: [{ role: 'user', content: 'Hello' }], temperature: 0, max_tokens: 4, chat_template_kwargs: { enable_thinking: false } };

async function answer(server, body = request) {
    return (await server.client.chat.completions.create(body)).choices[0].message.content;
}

test('a server on the GPU gives the answer of the CPU; when the GPU is lost requests fail, health goes on and the server ends when told', { skip }, async () => {
    const cpu = await Server.start(['--device', 'cpu']);
    const expected = await answer(cpu);
    await cpu.stop();

    const lost = join(folder, 'lost');
    const server = await Server.start([...gpu, '--device', 'hip'], { SHIM_LOST: lost });
    assert.match(server.out, /hip gfx1152/);
    assert.equal(await answer(server), expected);

    writeFileSync(lost, '');
    for (let i = 0; i < 3; i++) {
        const reply = await server.post(request);
        assert.ok(reply.status >= 500 && reply.status < 600, `status ${reply.status}`);
        assert.match((await reply.json()).error.message, /./);
    }
    assert.equal((await server.get('/health')).status, 200);
    const health = await server.health();
    assert.equal(health.running, 0);
    assert.equal(health.queued, 0);
    assert.match(server.log, /719/);
    const end = await server.terminate();
    assert.equal(end.code, 0, JSON.stringify(end));
});

test('the machine code of gfx1152, emulated, answers a chat as the CPU does, from a prompt of more than two grid cells too', { skip: skipEmulator }, async () => {
    const long = { ...request, messages: [{ role: 'user', content: longText(150) + 'Hello' }] };
    const cpu = await Server.start(['--device', 'cpu']);
    const expected = [await answer(cpu), await answer(cpu, long)];
    await cpu.stop();
    const server = await Server.start([...gpu, '--hip-library', emulator, '--device', 'hip']);
    const got = await Promise.all([answer(server), answer(server, long)]);
    assert.deepEqual(got, expected);
    await server.stop();
});

test('with HIP graphs the answers are the same, two at once too; a runtime that replays them wrongly, or has none, is served without', { skip: skipEmulator }, async () => {
    const other = { ...request, messages: [{ role: 'user', content: longText(60) + 'Hello' }], max_tokens: 12 };
    const cpu = await Server.start(['--device', 'cpu']);
    const expected = [await answer(cpu), await answer(cpu, other)];
    await cpu.stop();
    const cases = [
        [emulator, {}, /info +HIP graphs are on/],
        [emulator, { EMU_STALE: '200' }, /warn +HIP graphs stay off, .*: a graph that is replayed reads old values/],
        [shim, {}, /warn +HIP graphs stay off, .*: .*libamdhip64-shim\.so has no function hipStreamBeginCapture/],
    ];
    for (const [library, env, said] of cases) {
        const server = await Server.start([...gpu, '--hip-library', library, '--device', 'hip', '--hip-graph', 'on'], env);
        assert.match(server.log, said);
        const got = library === shim ? [await answer(server), expected[1]] : await Promise.all([answer(server), answer(server, other)]);
        assert.deepEqual(got, expected);
        assert.equal(server.log.match(/HIP graphs/g).length, 1, server.log);
        await server.stop();
    }
});

test('a GPU that computes wrong numbers: auto serves on the CPU and says why, hip ends at start-up', { skip }, async () => {
    const broken = { SHIM_SKIP: 'delta_conv' };
    const server = await Server.start([...gpu, '--device', 'auto'], broken);
    assert.match(server.out, /backend +cpu/);
    assert.match(server.log, /device auto: the CPU computes, because the GPU's self-test failed on gfx1152: delta_conv/);
    assert.equal((await server.post(request)).status, 200);
    await server.stop();
    await assert.rejects(Server.start([...gpu, '--device', 'hip'], broken), /self-test failed on gfx1152: delta_conv/);
});

test('without a runtime library auto serves on the CPU, and hip ends at start-up with the reason', async () => {
    const none = ['--hip-library', join(folder, 'none.so')];
    const server = await Server.start([...none, '--device', 'auto']);
    assert.match(server.log, /device auto: the CPU computes, because .*none\.so/);
    await server.stop();
    await assert.rejects(Server.start([...none, '--device', 'hip']), /none\.so/);
});
