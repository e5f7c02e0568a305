/* Launches that repeat as HIP graphs (hip/graph.c): no answer changes, whatever is replayed, fails or comes between, and a runtime that replays wrongly is
 * not trusted. Lists of launches and failing calls on faulty_runtime.c; whole models and old values on the real machine code under the emulator. */
#include "tests/golden/golden_util.h"
#include "tests/hip/faulty.h"

#include "hip/device.h"
#include "hip/hip_impl.h"
#include "tests/hip/emu/counters.h"

static const char model[] = "tests/data/tiny-qwen35moe-q8_0.gguf";
static char faulty[4400], emulator[4400];
static emu_submissions_fn *submissions;
static emu_last_fault_fn *last_fault;

static int setup_group(void **state)
{
    (void)state;
    snprintf(faulty, sizeof faulty, "%s", hip_test_library("faulty"));
    snprintf(emulator, sizeof emulator, "%s", hip_test_library("emu"));
    faulty_load();
    void *handle = hip_can_emulate("gfx1152") ? dlopen(emulator, RTLD_NOW) : NULL;
    if (handle) {
        faulty_find(handle, "emu_submissions", &submissions);
        faulty_find(handle, "emu_last_fault", &last_fault);
    }
    return 0;
}

static int setup(void **state)
{
    unsetenv("EMU_STALE");
    unsetenv("EMU_FAIL");
    return faulty_setup(state);
}

static void need_emulator(void)
{
    if (!submissions)
        skip();
}

/* ---- lists of launches, on a device without kernels ---- */

enum { N = 40 }; /* launches of a list; more than GRAPH_FEWEST of hip/graph.h */

static struct hip_device *open_device(void)
{
    struct hip_device *d = NULL;
    struct error err = {""};
    hip_need_bundle();
    assert_ok(hip_device_open(&d, faulty, 0, &err), err);
    assert_ok(hip_device_graphs_on(d, &err), err);
    return d;
}

/* A step's launches; lists of different `kind` differ in one number. */
static void launch_list(struct hip_device *d, int n, int kind)
{
    for (int i = 0; i < n; i++) {
        const struct act_params p = {.x = (const float *)16, .n = i == n / 2 ? 1000 + kind : i};
        HIP_LAUNCH(d, act, 1 + (unsigned)i, 1, 1, p);
    }
}

struct calls {
    long kernels, captures, replays;
};

static struct calls calls(void)
{
    return (struct calls){faulty_calls("hipModuleLaunchKernel"), faulty_calls("hipStreamBeginCapture"), faulty_calls("hipGraphLaunch")};
}

/* What a step of that list asks of the runtime. */
static struct calls step_calls(struct hip_device *d, int n, int kind)
{
    struct error err = {""};
    const struct calls before = calls();
    hip_device_repeats(d, true);
    launch_list(d, n, kind);
    assert_ok(hip_device_sync(d, &err), err);
    const struct calls after = calls();
    return (struct calls){after.kernels - before.kernels, after.captures - before.captures, after.replays - before.replays};
}

#define assert_calls(got, a, b, c)                                                                                                                   \
    do {                                                                                                                                             \
        const struct calls got_ = (got);                                                                                                             \
        assert_int_equal(got_.kernels, (a));                                                                                                         \
        assert_int_equal(got_.captures, (b));                                                                                                        \
        assert_int_equal(got_.replays, (c));                                                                                                         \
    } while (0)

static void a_list_is_launched_then_captured_then_one_submission(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    assert_calls(step_calls(d, N, 0), N, 0, 0);
    assert_calls(step_calls(d, N, 0), N, 1, 1); /* the launches are the capture's */
    for (int i = 0; i < 5; i++)
        assert_calls(step_calls(d, N, 0), 0, 0, 1);
    assert_calls(step_calls(d, N, 1), N, 0, 0); /* one number of one launch is another */
    assert_calls(step_calls(d, N, 0), 0, 0, 1);
    assert_calls(step_calls(d, N, 1), N, 1, 1);
    assert_calls(step_calls(d, N - 1, 0), N - 1, 0, 0);
    const struct hip_device_graphs g = hip_device_graphs(d);
    assert_true(g.on);
    assert_int_equal(g.captured, 2);
    assert_int_equal(g.replayed, 8);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static void short_lists_and_prompts_are_launched_as_they_come(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    for (int i = 0; i < 4; i++)
        assert_calls(step_calls(d, 15, 0), 15, 0, 0);
    hip_device_repeats(d, false);
    for (int i = 0; i < 4; i++) {
        const long before = calls().kernels;
        launch_list(d, N, 0);
        assert_int_equal(calls().kernels - before, N); /* nothing is held back */
        assert_ok(hip_device_sync(d, &err), err);
    }
    assert_int_equal(calls().replays, 0);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static void without_graphs_launches_are_never_held_back(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    hip_device_graphs_off(d);
    assert_false(hip_device_graphs(d).on);
    hip_device_repeats(d, true);
    launch_list(d, N, 0);
    assert_int_equal(calls().kernels, N);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

/* Whatever else touches the queue or the memory comes after the launches before it. */
static void launches_go_out_before_anything_else(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    static const char *const names[] = {"hipMemcpyAsync", "hipMemcpyAsync", "hipMemsetAsync", "hipMemcpyAsync", "hipStreamSynchronize", "hipFree"};
    for (int what = 0; what < 6; what++) {
        char byte = 1;
        char *p = hip_device_alloc(d, 64, &err);
        assert_non_null(p);
        hip_device_repeats(d, true);
        launch_list(d, 5, 0);
        faulty_forget_calls();
        setenv("FAULTY", "hipModuleLaunchKernel:1:98", 1); /* the other call is not made if the launches came first */
        if (what == 0)
            hip_device_write(d, p, &byte, 1);
        else if (what == 1)
            hip_device_copy(d, p, p + 1, 1);
        else if (what == 2)
            hip_device_zero(d, p, 1);
        else if (what == 3)
            hip_device_read(d, &byte, p, 1, &err);
        else if (what == 4)
            hip_device_repeats(d, false);
        else
            hip_device_stage(d, 16);
        unsetenv("FAULTY");
        assert_int_equal(calls().kernels, 1);
        assert_int_equal(faulty_calls(names[what]), 0);
        assert_int_equal(hip_device_sync(d, &err), -1);
        assert_contains(err.text, "act: made to fail");
        assert_ok(hip_device_sync(d, &err), err);
        hip_device_repeats(d, true);
        launch_list(d, 5, 0);
        faulty_forget_calls();
        hip_device_free(d, p);
        assert_int_equal(calls().kernels, 5);
    }
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

/* After an error nothing of that step may run in a later one. */
static void what_was_held_back_when_a_step_failed_is_dropped(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    hip_device_repeats(d, true);
    launch_list(d, N, 0);
    hip_device_fail(d, "a bad weight");
    assert_int_equal(hip_device_sync(d, &err), -1);
    assert_int_equal(calls().kernels, 0);
    assert_calls(step_calls(d, N, 1), N, 0, 0);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static void few_graphs_are_kept_and_those_needed_last_stay(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    for (int kind = 0; kind < 20; kind++) {
        assert_calls(step_calls(d, N, kind), N, 0, 0);
        assert_calls(step_calls(d, N, kind), N, 1, 1);
        assert_calls(step_calls(d, N, 0), 0, 0, 1); /* needed every time */
    }
    for (int kind = 13; kind < 20; kind++)
        assert_calls(step_calls(d, N, kind), 0, 0, 1);
    const long made = faulty_calls("hipGraphInstantiate"), gone = faulty_calls("hipGraphExecDestroy");
    assert_int_equal(made, 20);
    assert_int_equal(gone, 12); /* eight are kept */
    /* Many lists in turn, more than are kept: no graph is made for each of them every time. */
    const long captures = calls().captures;
    for (int i = 0; i < 5; i++)
        for (int kind = 100; kind < 140; kind++)
            assert_calls(step_calls(d, N, kind), N, 0, 0);
    assert_int_equal(calls().captures, captures);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static void a_graph_that_may_still_run_is_not_destroyed(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    for (int kind = 0; kind < 10; kind++)
        for (int i = 0; i < 2; i++) {
            hip_device_repeats(d, true);
            launch_list(d, N, kind);
        }
    hip_device_repeats(d, true);
    assert_int_equal(calls().captures, 9); /* eight are kept, one gave way, and the tenth would need another to go */
    assert_int_equal(faulty_calls("hipGraphExecDestroy"), 0);
    assert_ok(hip_device_sync(d, &err), err);
    assert_int_equal(faulty_calls("hipGraphExecDestroy"), 1);
    assert_calls(step_calls(d, N, 9), N, 1, 1);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static void graphs_go_with_the_memory_that_they_may_name(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    void *p = hip_device_alloc(d, 64, &err);
    assert_non_null(p);
    for (int i = 0; i < 3; i++)
        step_calls(d, N, 0);
    hip_device_free(d, p);
    assert_int_equal(faulty_calls("hipGraphExecDestroy"), 1);
    assert_calls(step_calls(d, N, 0), N, 1, 1);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

/* ---- every call may fail ---- */

enum { STEPS = 6 };

/* Some steps of one list and one of another. How many failed; -1: the device or its graphs could not be had. */
static int work(struct error *err)
{
    struct hip_device *d = NULL;
    if (hip_device_open(&d, faulty, 0, err))
        return -1;
    if (hip_device_graphs_on(d, err)) {
        hip_device_close(d);
        return -1;
    }
    int failed = 0;
    for (int i = 0; i < STEPS; i++) {
        hip_device_repeats(d, true);
        launch_list(d, N, i == 4);
        failed += hip_device_sync(d, err) != 0;
    }
    hip_device_close(d);
    return failed;
}

static void whichever_call_fails_at_most_one_step_does_and_nothing_is_left_behind(void **state)
{
    (void)state;
    hip_need_bundle();
    static const struct {
        const char *function;
        int failing; /* steps, for a call that fails once */
    } functions[] = {
        {"hipStreamBeginCapture", 0}, {"hipStreamEndCapture", 0}, {"hipGraphInstantiate", 0},
        {"hipGraphDestroy", 0},       {"hipGraphExecDestroy", 0}, {"hipGraphLaunch", 1},
    };
    struct error err = {""};
    assert_int_equal(work(&err), 0);
    assert_int_equal(faulty_live(), 0);
    long n_calls[6];
    for (size_t i = 0; i < 6; i++) {
        n_calls[i] = faulty_calls(functions[i].function);
        assert_true(n_calls[i] > 0);
    }
    for (size_t i = 0; i < 6; i++)
        for (long nth = 1; nth <= n_calls[i]; nth++)
            for (int once = 0; once < 2; once++) {
                char fault[96];
                snprintf(fault, sizeof fault, "%s:%ld:98", functions[i].function, nth);
                faulty_forget_calls();
                unsetenv(once ? "FAULTY" : "FAULTY_ONCE");
                setenv(once ? "FAULTY_ONCE" : "FAULTY", fault, 1);
                const int failed = work(&err);
                if (failed != functions[i].failing)
                    fail_msg("%s: %d steps failed (%s)", fault, failed, err.text);
                if (faulty_live() != 0)
                    fail_msg("%s: %ld things left behind", fault, faulty_live());
            }
    unsetenv("FAULTY");
    setenv("FAULTY_ONCE", "hipStreamCreateWithFlags:2:98", 1); /* the one to capture on */
    faulty_forget_calls();
    assert_int_equal(work(&err), -1);
    assert_contains(err.text, "made to fail");
    assert_int_equal(faulty_live(), 0);
}

/* The launches of a capture are no steps: those that fail there are made again. */
static void a_launch_that_fails_in_a_capture_is_made_again_without(void **state)
{
    (void)state;
    hip_need_bundle();
    struct error err = {""};
    for (int nth = 1; nth <= 2 * N; nth += 13) {
        char fault[96];
        snprintf(fault, sizeof fault, "hipModuleLaunchKernel:%d:98", nth);
        faulty_forget_calls();
        setenv("FAULTY_ONCE", fault, 1);
        assert_int_equal(work(&err), nth <= N); /* the first list goes out as it is */
        assert_int_equal(faulty_live(), 0);
    }
}

static void a_library_without_graphs_says_so(void **state)
{
    (void)state;
    hip_need_bundle();
    struct hip_device *d = NULL;
    struct error err = {""};
    assert_ok(hip_device_open(&d, hip_test_library("shim"), 0, &err), err);
    assert_int_equal(hip_graphs_try(d, &err), -1);
    assert_contains(err.text, "has no function hipStreamBeginCapture");
    assert_false(hip_device_graphs(d).on);
    assert_false(hip_device_failed(d));
    hip_device_close(d);
}

/* ---- the check at start ---- */

/* Kernels of faulty_runtime.c do nothing: a graph of nothing is not taken for a right one. */
static void a_gpu_that_computes_nothing_does_not_pass(void **state)
{
    (void)state;
    hip_need_bundle();
    struct hip_device *d = NULL;
    struct error err = {""};
    assert_ok(hip_device_open(&d, faulty, 0, &err), err);
    assert_int_equal(hip_graphs_try(d, &err), -1);
    assert_contains(err.text, "wrong without a graph");
    assert_false(hip_device_graphs(d).on);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static int try_emulated(struct error *err, uint64_t *replayed)
{
    struct hip_device *d = NULL;
    assert_ok(hip_device_open(&d, emulator, 0, err), *err);
    const int rc = hip_graphs_try(d, err);
    const struct hip_device_graphs g = hip_device_graphs(d);
    assert_int_equal(g.on, rc == 0);
    *replayed = g.replayed;
    assert_false(hip_device_failed(d));
    hip_device_close(d);
    assert_int_equal(submissions().graphs_live, 0);
    return rc;
}

static void replays_that_read_old_values_are_found(void **state)
{
    (void)state;
    need_emulator();
    struct error err = {""};
    uint64_t replayed = 0;
    assert_ok(try_emulated(&err, &replayed), err);
    assert_true(replayed >= 20);
    static const char *const from[] = {"1", "200", "500"}; /* only in graphs of so many kernels or more */
    for (size_t i = 0; i < sizeof from / sizeof *from; i++) {
        setenv("EMU_STALE", from[i], 1);
        assert_int_equal(try_emulated(&err, &replayed), -1);
        assert_contains(err.text, "a graph that is replayed reads old values");
    }
    unsetenv("EMU_STALE");
    static const char *const calls_of[] = {"hipStreamBeginCapture:1", "hipStreamEndCapture:2", "hipGraphInstantiate:1", "hipGraphLaunch:9:98"};
    for (size_t i = 0; i < sizeof calls_of / sizeof *calls_of; i++) {
        setenv("EMU_FAIL", calls_of[i], 1);
        assert_int_equal(try_emulated(&err, &replayed), -1);
        assert_true(err.text[0] != '\0');
    }
    assert_string_equal(last_fault(), "");
}

/* ---- whole models ---- */

static struct engine *open_engine(const char *path, bool graphs, bool checked)
{
    struct engine_options o = golden_options(path, false);
    o.kv_type = KV_F16;
    o.kv_budget = (uint64_t)48 << 20;
    o.device = DEVICE_HIP;
    o.hip_library = emulator;
    o.hip_graph = graphs;
    o.no_selftest = !checked;
    return golden_engine_with(&o);
}

enum { SEQUENCES = 4, LENGTH = 300, MOST_ROWS = 200 };

struct play {
    struct engine *e;
    struct sequence *s[SEQUENCES];
    int32_t text[SEQUENCES][LENGTH];
    float *rows; /* [MOST_ROWS][v], the logits of every single row, in order */
    size_t v;
    int n_rows;
};

/* share[i] tokens of sequence i, 0: none. One token wants its logits. */
static void play_step(struct play *p, const int share[SEQUENCES])
{
    struct step_item items[SEQUENCES];
    int n = 0;
    for (int i = 0; i < SEQUENCES; i++) {
        if (share[i] == 0)
            continue;
        items[n++] = (struct step_item){.seq = p->s[i],
                                        .tokens = p->text[i] + sequence_length(p->s[i]),
                                        .n_tokens = share[i],
                                        .logits = share[i] == 1 ? p->rows + (size_t)p->n_rows++ * p->v : NULL};
    }
    assert_true(p->n_rows <= MOST_ROWS);
    golden_step(p->e, items, n);
}

static void play_steps(struct play *p, int times, int a, int b, int c, int d)
{
    for (int i = 0; i < times; i++)
        play_step(p, (const int[SEQUENCES]){a, b, c, d});
}

/* Sequences come and go, prompts are read between and beside the answers, and the first one passes position 256, where attention is cut into two parts. All
 * logits [*n_rows][V]; release with free(). */
static float *play(struct engine *e, int *n_rows)
{
    struct play p = {.e = e, .v = (size_t)tokenizer_vocab_size(engine_tokenizer(e)), .rows = golden_rows(e, MOST_ROWS)};
    uint32_t seed = 77;
    for (int i = 0; i < SEQUENCES; i++) {
        p.s[i] = golden_sequence(e);
        for (int t = 0; t < LENGTH; t++) {
            seed = seed * 1664525u + 1013904223u;
            p.text[i][t] = (int32_t)((seed >> 8) % (p.v < 1000 ? p.v : 1000));
        }
    }
    play_steps(&p, 1, 245, 0, 0, 0);
    play_steps(&p, 5, 1, 0, 0, 0);
    play_steps(&p, 1, 1, 20, 0, 0); /* the second one's prompt beside the first one's answer */
    play_steps(&p, 8, 1, 1, 0, 0);  /* past 256 */
    play_steps(&p, 1, 1, 17, 1, 0); /* rows that are no neighbours want logits */
    play_steps(&p, 4, 1, 1, 1, 0);
    play_steps(&p, 1, 0, 0, 0, 64);
    play_steps(&p, 4, 1, 1, 1, 1);
    sequence_free(e, p.s[1]);
    p.s[1] = golden_sequence(e); /* in the other one's place */
    play_steps(&p, 4, 1, 0, 1, 1);
    play_steps(&p, 1, 0, 30, 0, 0);
    play_steps(&p, 5, 1, 1, 1, 1);
    play_steps(&p, 4, 0, 1, 0, 0);
    play_steps(&p, 4, 1, 0, 0, 0);
    for (int i = 0; i < SEQUENCES; i++)
        sequence_free(e, p.s[i]);
    *n_rows = p.n_rows;
    return p.rows;
}

/* What the last model said without graphs. */
static struct {
    const char *path;
    float *rows;
    int n;
} plain;

static void play_without_graphs(const char *path)
{
    if (plain.path && strcmp(plain.path, path) == 0)
        return;
    const uint64_t none = submissions().graphs;
    struct engine *e = open_engine(path, false, false);
    free(plain.rows);
    plain.rows = play(e, &plain.n);
    plain.path = path;
    engine_close(e);
    assert_int_equal(submissions().graphs, none);
}

static int teardown_group(void **state)
{
    (void)state;
    free(plain.rows);
    return 0;
}

/* Plays with graphs: how many rows of logits differ from those without. */
static int differing_rows(const char *path, bool checked, uint64_t *replays)
{
    int n = 0, differing = 0;
    play_without_graphs(path);
    struct engine *e = open_engine(path, true, checked);
    const size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    const uint64_t before = submissions().graphs;
    float *rows = play(e, &n);
    *replays = submissions().graphs - before;
    engine_close(e);
    assert_int_equal(n, plain.n);
    for (int i = 0; i < n; i++)
        differing += memcmp(plain.rows + (size_t)i * v, rows + (size_t)i * v, v * sizeof *rows) != 0;
    free(rows);
    assert_int_equal(submissions().graphs_live, 0);
    assert_string_equal(last_fault(), "");
    return differing;
}

static void graphs_change_no_bit_of_any_logit(void **state)
{
    (void)state;
    need_emulator();
    static const char *const models[] = {"tests/data/tiny-qwen35-tied-f32.gguf", "tests/data/tiny-qwen35moe-wide-q4_k.gguf",
                                         "tests/data/tiny-qwen3-wide-q4_k.gguf", model};
    for (size_t i = hip_in_full() ? 0 : 2; i < 4; i++) {
        uint64_t replays = 0;
        assert_int_equal(differing_rows(models[i], false, &replays), 0);
        print_message("# %s: %d steps were replayed\n", models[i], (int)replays);
        assert_true(replays > 20);
    }
}

/* The tests above can fail: replays with old values change logits. And the check at start keeps them from it. */
static void a_runtime_that_replays_old_values_changes_logits_and_is_not_used(void **state)
{
    (void)state;
    need_emulator();
    uint64_t replays = 0;
    play_without_graphs(model);
    setenv("EMU_STALE", "1", 1);
    assert_true(differing_rows(model, false, &replays) > 0);
    assert_true(replays > 20);
    setenv("EMU_STALE", "200", 1);
    assert_int_equal(differing_rows(model, true, &replays), 0);
    assert_int_equal(replays, 0);
}

static void whichever_graph_call_fails_the_logits_are_right(void **state)
{
    (void)state;
    need_emulator();
    static const char *const faults[] = {"hipStreamBeginCapture:1", "hipStreamEndCapture:2",   "hipGraphInstantiate:2", "hipGraphDestroy:1",
                                         "hipGraphExecDestroy:1",   "hipStreamBeginCapture:4", "hipGraphInstantiate:1", "hipStreamEndCapture:1"};
    play_without_graphs(model);
    for (size_t i = 0; i < (hip_in_full() ? 8u : 3u); i++) {
        uint64_t replays = 0;
        setenv("EMU_FAIL", faults[i], 1);
        assert_int_equal(differing_rows(model, false, &replays), 0);
    }
}

/* A greedy step that only writes: the description goes up, one graph runs, the best logits come back, and two waits, the second with nothing to wait
 * for. */
static void a_decode_step_is_one_upload_one_graph_and_one_read(void **state)
{
    (void)state;
    need_emulator();
    enum { WARM = 4, TOKENS = 12, BOTH = 2 };
    for (int graphs = 0; graphs < 2; graphs++) {
        struct engine *e = open_engine(model, graphs, false);
        const struct sampler_params greedy = {.temperature = 0, .top_p = 1, .repeat_penalty = 1};
        struct sampler *sampler[BOTH];
        struct sequence *s[BOTH];
        int32_t next[BOTH] = {5, 9};
        for (int i = 0; i < BOTH; i++) {
            s[i] = golden_sequence(e);
            sampler[i] = sampler_new(engine_tokenizer(e), &greedy);
            assert_non_null(sampler[i]);
        }
        for (int t = 0; t < TOKENS; t++) {
            const struct emu_submissions a = submissions();
            struct step_item items[BOTH];
            for (int i = 0; i < BOTH; i++)
                items[i] = (struct step_item){.seq = s[i], .tokens = &next[i], .n_tokens = 1, .sampler = sampler[i]};
            golden_step(e, items, BOTH);
            const struct emu_submissions b = submissions();
            for (int i = 0; i < BOTH; i++)
                next[i] = items[i].pick.id;
            if (t == TOKENS - 1)
                print_message("# a step with graphs %s: %d kernels, %d graphs, %d copies, %d fills, %d waits\n", graphs ? "on" : "off",
                              (int)(b.kernels - a.kernels), (int)(b.graphs - a.graphs), (int)(b.copies - a.copies), (int)(b.fills - a.fills),
                              (int)(b.waits - a.waits));
            if (t < WARM)
                continue;
            assert_int_equal(b.graphs - a.graphs, graphs);
            assert_int_equal(b.kernels - a.kernels > 0, !graphs);
            assert_int_equal(b.copies - a.copies, 2);
            assert_int_equal(b.fills - a.fills, 0);
            assert_int_equal(b.waits - a.waits, 2);
        }
        for (int i = 0; i < BOTH; i++) {
            sequence_free(e, s[i]);
            sampler_free(sampler[i]);
        }
        engine_close(e);
    }
}

/* A step is lost with the graph that did not start; the next ones do without. */
static void a_replay_that_fails_costs_one_step(void **state)
{
    (void)state;
    need_emulator();
    struct engine *e = open_engine(model, true, false);
    struct sequence *s = golden_sequence(e);
    struct error err = {""};
    float *row = golden_rows(e, 1);
    int failed = 0;
    setenv("EMU_FAIL", "hipGraphLaunch:3:98", 1);
    for (int t = 0; t < 12; t++) {
        const int32_t token = 3 + t;
        struct step_item item = {.seq = s, .tokens = &token, .n_tokens = 1, .logits = row};
        if (engine_step(e, &item, 1, &err) == 0)
            continue;
        assert_contains(err.text, "replaying a step");
        failed++;
    }
    assert_int_equal(failed, 1);
    assert_int_equal(sequence_length(s), 11);
    free(row);
    sequence_free(e, s);
    engine_close(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_list_is_launched_then_captured_then_one_submission, setup),
        cmocka_unit_test_setup(short_lists_and_prompts_are_launched_as_they_come, setup),
        cmocka_unit_test_setup(without_graphs_launches_are_never_held_back, setup),
        cmocka_unit_test_setup(launches_go_out_before_anything_else, setup),
        cmocka_unit_test_setup(what_was_held_back_when_a_step_failed_is_dropped, setup),
        cmocka_unit_test_setup(few_graphs_are_kept_and_those_needed_last_stay, setup),
        cmocka_unit_test_setup(a_graph_that_may_still_run_is_not_destroyed, setup),
        cmocka_unit_test_setup(graphs_go_with_the_memory_that_they_may_name, setup),
        cmocka_unit_test_setup(whichever_call_fails_at_most_one_step_does_and_nothing_is_left_behind, setup),
        cmocka_unit_test_setup(a_launch_that_fails_in_a_capture_is_made_again_without, setup),
        cmocka_unit_test_setup(a_library_without_graphs_says_so, setup),
        cmocka_unit_test_setup(a_gpu_that_computes_nothing_does_not_pass, setup),
        cmocka_unit_test_setup(replays_that_read_old_values_are_found, setup),
        cmocka_unit_test_setup(graphs_change_no_bit_of_any_logit, setup),
        cmocka_unit_test_setup(a_runtime_that_replays_old_values_changes_logits_and_is_not_used, setup),
        cmocka_unit_test_setup(whichever_graph_call_fails_the_logits_are_right, setup),
        cmocka_unit_test_setup(a_decode_step_is_one_upload_one_graph_and_one_read, setup),
        cmocka_unit_test_setup(a_replay_that_fails_costs_one_step, setup),
    };
    return cmocka_run_group_tests(tests, setup_group, teardown_group);
}
