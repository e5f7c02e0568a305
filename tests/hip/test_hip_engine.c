/* The engine and a GPU that cannot be used, has too little memory, computes wrong numbers, or is lost while it works: what is said, that the CPU takes
 * over where that was asked for, and that nothing is left behind. */
#include "tests/hip/faulty.h"

#include "engine/engine.h"

static const char model[] = "tests/data/tiny-qwen35moe-q8_0.gguf";
static const char *faulty, *shim;
static char faulty_path[4400], shim_path[4400];

static int setup_group(void **state)
{
    (void)state;
    snprintf(faulty_path, sizeof faulty_path, "%s", hip_test_library("faulty"));
    snprintf(shim_path, sizeof shim_path, "%s", hip_test_library("shim"));
    faulty = faulty_path;
    shim = shim_path;
    faulty_load();
    return 0;
}

static struct engine_options options_for(enum device device, const char *library)
{
    return (struct engine_options){.model_path = model,
                                   .context = 256,
                                   .n_threads = 1,
                                   .kv_type = KV_F16,
                                   .kv_budget = 64 << 20,
                                   .max_sequences = 2,
                                   .device = device,
                                   .hip_library = library,
                                   .no_selftest = true};
}

static struct engine *must_open(const struct engine_options *o)
{
    struct engine *e = NULL;
    struct error err = {""};
    assert_ok(engine_open(&e, o, &err), err);
    return e;
}

/* ---- choosing the device ---- */

static void the_cpu_takes_over_only_where_auto_was_asked_for(void **state)
{
    (void)state;
    struct engine_options o = options_for(DEVICE_AUTO, "/nonexistent/libamdhip64.so");
    struct engine *e = must_open(&o);
    assert_string_equal(engine_info(e)->backend, "cpu");
    engine_close(e);
    struct error err = {""};
    o.device = DEVICE_HIP;
    assert_int_equal(engine_open(&e, &o, &err), -1);
    assert_contains(err.text, "/nonexistent/libamdhip64.so");
}

static void the_gpu_is_taken_where_it_works(void **state)
{
    (void)state;
    hip_need_bundle();
    for (int i = 0; i < 2; i++) {
        const struct engine_options o = options_for(i ? DEVICE_AUTO : DEVICE_HIP, faulty);
        struct engine *e = must_open(&o);
        assert_string_equal(engine_info(e)->backend, "hip gfx1152");
        engine_close(e);
        assert_int_equal(faulty_live(), 0);
    }
}

static void f32_keys_and_values_stay_on_the_cpu(void **state)
{
    (void)state;
    hip_need_bundle();
    struct engine_options o = options_for(DEVICE_AUTO, faulty);
    struct error err = {""};
    o.kv_type = KV_F32;
    struct engine *e = must_open(&o);
    assert_string_equal(engine_info(e)->backend, "cpu");
    engine_close(e);
    o.device = DEVICE_HIP;
    assert_int_equal(engine_open(&e, &o, &err), -1);
    assert_contains(err.text, "kv-type");
    assert_int_equal(faulty_live(), 0);
}

static void too_little_memory_is_told_with_the_kernel_parameter(void **state)
{
    (void)state;
    hip_need_bundle();
    struct engine_options o = options_for(DEVICE_HIP, faulty);
    struct error err = {""};
    struct engine *e = NULL;
    o.kv_budget = 0; /* by what the GPU has */
    setenv("FAULTY_FREE", "500000000", 1);
    assert_int_equal(engine_open(&e, &o, &err), -1);
    assert_contains(err.text, "ttm.pages_limit");
    assert_contains(err.text, "476.8 MiB available");
    o.device = DEVICE_AUTO;
    e = must_open(&o);
    assert_string_equal(engine_info(e)->backend, "cpu");
    engine_close(e);
    assert_int_equal(faulty_live(), 0);
}

static void whichever_allocation_fails_the_cpu_takes_over_and_nothing_is_left_behind(void **state)
{
    (void)state;
    hip_need_bundle();
    const struct engine_options hip = options_for(DEVICE_HIP, faulty), fallback = options_for(DEVICE_AUTO, faulty);
    struct engine *e = must_open(&hip);
    engine_close(e);
    const long calls = faulty_calls("hipMalloc");
    assert_true(calls > 50);
    for (long nth = 1; nth <= calls; nth += nth < 30 || nth + 5 > calls ? 1 : 5) {
        struct error err = {""};
        char fault[64];
        snprintf(fault, sizeof fault, "hipMalloc:%ld:2", nth);
        setenv("FAULTY", fault, 1);
        faulty_forget_calls();
        assert_int_equal(engine_open(&e, &hip, &err), -1);
        assert_contains(err.text, "out of memory");
        assert_int_equal(faulty_live(), 0);
        if (nth % 10 == 1) {
            faulty_forget_calls();
            e = must_open(&fallback);
            assert_string_equal(engine_info(e)->backend, "cpu");
            engine_close(e);
            assert_int_equal(faulty_live(), 0);
        }
    }
}

/* ---- while it works ---- */

enum { PROMPT = 20 };
static const int32_t tokens[PROMPT] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20};

static int step(struct engine *e, struct sequence *s, int from, int n, struct error *err)
{
    static float logits[PROMPT * 4096];
    struct step_item item = {.seq = s, .tokens = tokens + from, .n_tokens = n, .logits = logits};
    return engine_step(e, &item, 1, err);
}

static void a_call_that_fails_costs_one_step_and_no_more(void **state)
{
    (void)state;
    hip_need_bundle();
    static const char *const faults[] = {"hipModuleLaunchKernel:3:1", "hipModuleLaunchKernel:20:98", "hipMemcpyAsync:1:1"};
    const struct engine_options o = options_for(DEVICE_HIP, faulty);
    struct engine *e = must_open(&o);
    struct error err = {""};
    struct sequence *s = sequence_new(e, &err);
    assert_non_null(s);
    int length = 0;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        assert_ok(step(e, s, length, 5, &err), err);
        length += 5;
        faulty_forget_calls();
        setenv("FAULTY_ONCE", faults[i], 1);
        assert_int_equal(step(e, s, length, 5, &err), -1);
        assert_contains(err.text, "made to fail");
        assert_int_equal(sequence_length(s), length);
        unsetenv("FAULTY_ONCE");
    }
    assert_ok(step(e, s, length, 5, &err), err);
    engine_close(e);
    assert_int_equal(faulty_live(), 0);
}

/* The convolution's history reaches ROLLBACK rows back: a step that failed behind more of them may have written over what a second try needs. Both in one grid cell. */
static void after_a_failed_step_a_sequence_goes_on_only_where_its_state_is_whole(void **state)
{
    (void)state;
    hip_need_bundle();
    static const struct {
        int before, n, after;
        bool lost;
    } cases[] = {{0, 15, 15, false}, {5, 8, 8, false}, {5, 9, 1, true}, {5, 15, 15, true}};
    const struct engine_options o = options_for(DEVICE_HIP, faulty);
    struct engine *e = must_open(&o);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct error err = {""};
        struct sequence *s = sequence_new(e, &err);
        assert_non_null(s);
        if (cases[i].before)
            assert_ok(step(e, s, 0, cases[i].before, &err), err);
        faulty_forget_calls();
        setenv("FAULTY_ONCE", "hipModuleLaunchKernel:20:98", 1);
        assert_int_equal(step(e, s, cases[i].before, cases[i].n, &err), -1);
        unsetenv("FAULTY_ONCE");
        assert_int_equal(step(e, s, cases[i].before, cases[i].after, &err), cases[i].lost ? -1 : 0);
        if (cases[i].lost)
            assert_contains(err.text, "start it again");
        else
            assert_int_equal(sequence_rollback(s, 1), 0);
        sequence_free(e, s);
    }
    engine_close(e);
    assert_int_equal(faulty_live(), 0);
}

/* Rows that failed have been written too: fewer may be taken back. */
static void what_a_failed_step_wrote_counts_against_taking_rows_back(void **state)
{
    (void)state;
    hip_need_bundle();
    const struct engine_options o = options_for(DEVICE_HIP, faulty);
    struct engine *e = must_open(&o);
    struct error err = {""};
    struct sequence *s = sequence_new(e, &err);
    assert_non_null(s);
    assert_ok(step(e, s, 0, 10, &err), err);
    faulty_forget_calls();
    setenv("FAULTY_ONCE", "hipModuleLaunchKernel:20:98", 1);
    assert_int_equal(step(e, s, 10, 6, &err), -1);
    unsetenv("FAULTY_ONCE");
    assert_ok(step(e, s, 10, 1, &err), err); /* 11 now, and 16 were there */
    assert_int_equal(sequence_rollback(s, 4), -1);
    assert_int_equal(sequence_rollback(s, 3), 0);
    engine_close(e);
    assert_int_equal(faulty_live(), 0);
}

/* Otherwise it would begin with what the slot's last owner left. */
static void a_state_that_cannot_be_cleared_is_not_given_out(void **state)
{
    (void)state;
    hip_need_bundle();
    const struct engine_options o = options_for(DEVICE_HIP, faulty);
    struct engine *e = must_open(&o);
    struct error err = {""};
    for (int i = 0; i < 3; i++) { /* more often than there are slots */
        struct sequence *s = sequence_new(e, &err);
        assert_non_null(s);
        sequence_free(e, s);
        faulty_forget_calls();
        setenv("FAULTY_ONCE", "hipMemsetAsync:1:98", 1);
        assert_null(sequence_new(e, &err));
        assert_contains(err.text, "a state for a new sequence");
        unsetenv("FAULTY_ONCE");
    }
    struct sequence *s = sequence_new(e, &err);
    assert_non_null(s);
    assert_ok(step(e, s, 0, 5, &err), err);
    engine_close(e);
    assert_int_equal(faulty_live(), 0);
}

static void after_the_device_is_lost_every_step_fails_and_the_engine_closes(void **state)
{
    (void)state;
    hip_need_bundle();
    static const char *const faults[] = {"hipStreamSynchronize:1:719", "hipModuleLaunchKernel:2:700", "hipMemcpyAsync:1:719"};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        const struct engine_options o = options_for(DEVICE_HIP, faulty);
        struct engine *e = must_open(&o);
        struct error err = {""};
        struct sequence *s = sequence_new(e, &err);
        assert_ok(step(e, s, 0, 5, &err), err);
        faulty_forget_calls();
        setenv("FAULTY_ONCE", faults[i], 1);
        for (int k = 0; k < 3; k++) {
            assert_int_equal(step(e, s, 5, 5, &err), -1);
            assert_contains(err.text, "restart");
            assert_int_equal(sequence_length(s), 5);
        }
        struct sequence *other = sequence_new(e, &err); /* may or may not be had, but must not hang or crash */
        if (other)
            assert_int_equal(step(e, other, 0, 5, &err), -1);
        engine_close(e);
        unsetenv("FAULTY_ONCE");
        assert_int_equal(faulty_live(), 0);
    }
}

/* ---- the self-test ---- */

static void a_kernel_that_does_nothing_is_found_by_the_self_test(void **state)
{
    (void)state;
    hip_need_bundle();
    static const struct {
        const char *kernel, *operation;
    } cases[] = {{"embed", "embed"}, {"act", "project"}, {"attn_store", "attn_store"}, {"delta_conv", "delta_conv"}, {"moe_sum", "moe"}};
    struct engine_options o = options_for(DEVICE_HIP, shim);
    o.no_selftest = false;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct error err = {""};
        struct engine *e = NULL;
        setenv("SHIM_SKIP", cases[i].kernel, 1);
        assert_int_equal(engine_open(&e, &o, &err), -1);
        assert_contains(err.text, "self-test failed on gfx1152");
        assert_contains(err.text, cases[i].operation);
        assert_contains(err.text, "device cpu");
    }
    o.device = DEVICE_AUTO;
    struct engine *e = must_open(&o);
    assert_string_equal(engine_info(e)->backend, "cpu");
    engine_close(e);
}

/* The self-test is small. A large model's first step is run while there is still a choice; the file here is large only by the hole at its end. */
static void a_gpu_lost_in_the_first_real_step_is_not_served_with(void **state)
{
    (void)state;
    hip_need_bundle();
    char path[] = "/tmp/bedside-large-XXXXXX", block[4096];
    const int fd = mkstemp(path);
    FILE *from = fopen(model, "rb"), *to = fd < 0 ? NULL : fdopen(fd, "wb");
    assert_true(from && to);
    for (size_t n; (n = fread(block, 1, sizeof block, from)) > 0;)
        assert_int_equal(fwrite(block, 1, n, to), n);
    fclose(from);
    assert_int_equal(fflush(to), 0);
    const bool large = ftruncate(fd, (1L << 30) + (1L << 20)) == 0;
    fclose(to);
    if (!large) {
        unlink(path);
        skip();
    }
    struct engine_options o = options_for(DEVICE_HIP, shim);
    struct error err = {""};
    struct engine *e = NULL;
    o.model_path = path;
    setenv("SHIM_FAIL", "moe_sum", 1);
    const int hip = engine_open(&e, &o, &err);
    o.device = DEVICE_AUTO;
    struct engine *on_cpu = hip ? must_open(&o) : NULL;
    unlink(path);
    assert_int_equal(hip, -1);
    assert_contains(err.text, "the first step failed");
    assert_contains(err.text, "restart");
    assert_string_equal(engine_info(on_cpu)->backend, "cpu");
    engine_close(on_cpu);
}

static void a_gpu_lost_in_the_self_test_is_refused(void **state)
{
    (void)state;
    hip_need_bundle();
    struct engine_options o = options_for(DEVICE_HIP, shim);
    struct error err = {""};
    struct engine *e = NULL;
    o.no_selftest = false;
    setenv("SHIM_FAIL", "moe_sum", 1);
    assert_int_equal(engine_open(&e, &o, &err), -1);
    assert_contains(err.text, "719");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_cpu_takes_over_only_where_auto_was_asked_for, faulty_setup),
        cmocka_unit_test_setup(the_gpu_is_taken_where_it_works, faulty_setup),
        cmocka_unit_test_setup(f32_keys_and_values_stay_on_the_cpu, faulty_setup),
        cmocka_unit_test_setup(too_little_memory_is_told_with_the_kernel_parameter, faulty_setup),
        cmocka_unit_test_setup(whichever_allocation_fails_the_cpu_takes_over_and_nothing_is_left_behind, faulty_setup),
        cmocka_unit_test_setup(a_call_that_fails_costs_one_step_and_no_more, faulty_setup),
        cmocka_unit_test_setup(after_a_failed_step_a_sequence_goes_on_only_where_its_state_is_whole, faulty_setup),
        cmocka_unit_test_setup(what_a_failed_step_wrote_counts_against_taking_rows_back, faulty_setup),
        cmocka_unit_test_setup(a_state_that_cannot_be_cleared_is_not_given_out, faulty_setup),
        cmocka_unit_test_setup(after_the_device_is_lost_every_step_fails_and_the_engine_closes, faulty_setup),
        cmocka_unit_test_setup(a_kernel_that_does_nothing_is_found_by_the_self_test, faulty_setup),
        cmocka_unit_test_setup(a_gpu_lost_in_the_first_real_step_is_not_served_with, faulty_setup),
        cmocka_unit_test_setup(a_gpu_lost_in_the_self_test_is_refused, faulty_setup),
    };
    return cmocka_run_group_tests(tests, setup_group, NULL);
}
