/* The scheduler when KV memory is short: who is admitted, who is paused, and that nobody's text is lost. With the fake engine. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/scheduler_fixture.h"

static void a_job_that_can_never_fit_is_refused(void **state)
{
    (void)state;
    struct bench *b = bench_open(4, 4, 128, 10); /* 640 tokens */
    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 640, 1), SUBMIT_TOO_LARGE); /* not even one token */
    c = (struct client){.asked = true};
    assert_int_equal(submit(b->scheduler, &c, 7, 600, 41), SUBMIT_TOO_LARGE); /* the client wants all of them */
    assert_int_equal(c.releases, 0);
    assert_int_equal(scheduler_stats(b->scheduler).refused_large, 2);
    allow(&b->engine, -1);
    assert_int_equal(submit(b->scheduler, &c, 7, 600, 40), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_LENGTH);
    assert_int_equal(c.n_tokens, 40);
    job_unref(c.job);
    struct client w = {.warm = true};
    assert_int_equal(submit(b->scheduler, &w, 7, 640, 0), SUBMIT_OK);
    assert_int_equal(wait_end(&w), JOB_STOP);
    job_unref(w.job);
    bench_close(b);
}

static void an_answer_without_a_wish_ends_where_memory_does(void **state)
{
    (void)state;
    struct bench *b = bench_open(4, 4, 128, 10);
    allow(&b->engine, -1);
    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 600, 5000), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_LENGTH);
    assert_int_equal(c.n_tokens, 41); /* 640 in memory, and the one that the last of them gave */
    assert_false(c.broken);
    assert_int_equal(b->engine.short_steps, 0);
    job_unref(c.job);
    bench_close(b);
}

/* The first step with rows of the job whose prompt is made of this token. */
static int first_step_of(const struct bench *b, int token)
{
    int k = 0;
    while (!rows_of(&b->engine.steps[k], token))
        k++;
    return k;
}

static void a_small_job_that_finds_room_does_not_wait_for_a_large_one(void **state)
{
    (void)state;
    struct bench *b = bench_open(4, 4, 128, 10);
    struct client a = {0}, big = {0}, small = {0}, same = {0};
    assert_int_equal(submit(b->scheduler, &a, 7, 64, 64), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &big, 8, 500, 100), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &same, 10, 500, 100), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &small, 9, 10, 2), SUBMIT_OK);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&small), JOB_LENGTH);
    assert_int_equal(wait_end(&big), JOB_LENGTH);
    assert_int_equal(wait_end(&same), JOB_LENGTH);
    assert_true(first_step_of(b, 9) < first_step_of(b, 8));
    assert_true(first_step_of(b, 8) < first_step_of(b, 10)); /* among those of one size it goes in order */
    assert_true(first_step_of(b, 8) >= 64);                  /* the first one had finished */
    job_unref(a.job);
    job_unref(big.job);
    job_unref(same.job);
    job_unref(small.job);
    bench_close(b);
}

static void a_large_job_is_overtaken_a_few_times_only(void **state)
{
    (void)state;
    enum { SMALL = 14 };
    struct bench *b = bench_open(4, SMALL + 4, 128, 10);
    struct client a = {0}, big = {0}, small[SMALL];
    memset(small, 0, sizeof small);
    assert_int_equal(submit(b->scheduler, &a, 7, 64, 250), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &big, 8, 500, 100), SUBMIT_OK);
    for (int i = 0; i < SMALL; i++)
        assert_int_equal(submit(b->scheduler, &small[i], 20 + i, 10, 2), SUBMIT_OK);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&big), JOB_LENGTH);
    int before = 0;
    for (int i = 0; i < SMALL; i++) {
        assert_int_equal(wait_end(&small[i]), JOB_LENGTH);
        before += first_step_of(b, 20 + i) < first_step_of(b, 8);
        job_unref(small[i].job);
    }
    assert_int_equal(before, 8);
    job_unref(a.job);
    job_unref(big.job);
    bench_close(b);
}

static void what_an_answer_may_grow_to_is_not_set_aside(void **state)
{
    (void)state;
    struct bench *b = bench_open(8, 8, 128, 100); /* 6400 tokens */
    struct client c[8];
    memset(c, 0, sizeof c);
    for (int i = 0; i < 8; i++) /* together 8 x 6100 */
        assert_int_equal(submit(b->scheduler, &c[i], 20 + i, 100, 6000), SUBMIT_OK);
    wait_all_run(b, 8);
    for (int i = 0; i < 8; i++)
        job_cancel(c[i].job);
    allow(&b->engine, -1);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(wait_end(&c[i]), JOB_CANCELLED);
        job_unref(c[i].job);
    }
    bench_close(b);
}

static void when_pages_run_out_the_youngest_is_paused_and_all_finish_with_their_whole_text(void **state)
{
    (void)state;
    enum { N = 4, TOKENS = 800 };
    struct bench *b = bench_open(N, N, 128, 20); /* 1280 tokens; the four come to 3600 */
    struct client c[N];
    memset(c, 0, sizeof c);
    for (int i = 0; i < N; i++)
        assert_int_equal(submit(b->scheduler, &c[i], 20 + i, 100, TOKENS), SUBMIT_OK);
    wait_all_run(b, N);
    allow(&b->engine, -1);
    for (int i = 0; i < N; i++) {
        assert_int_equal(wait_end(&c[i]), JOB_LENGTH);
        assert_int_equal(c[i].n_tokens, TOKENS);
        assert_false(c[i].broken); /* no token lost, none twice */
    }
    wait_idle(b->scheduler);
    const struct scheduler_stats n = scheduler_stats(b->scheduler);
    assert_int_equal(c[0].report.pauses, 0); /* the oldest never */
    assert_true(c[N - 1].report.pauses >= 1);
    assert_true(n.pauses >= 3 && n.pauses < 12); /* and no thrashing */
    assert_int_equal(n.resumes, n.pauses);
    assert_true(n.resume_tokens_computed > 0);
    assert_int_equal(n.prompt_tokens_computed, N * 100);
    assert_int_equal(b->engine.short_steps, 0); /* the engine never had to refuse */
    for (int i = 0; i < N; i++)
        job_unref(c[i].job);
    bench_close(b);
}

/* An old and a young job, the young one paused: 20 pages, of which the old one will need 14. */
static struct bench *one_paused(struct client *old, struct client *young)
{
    struct bench *b = bench_open(2, 2, 256, 20);
    assert_int_equal(submit(b->scheduler, old, 7, 100, 800), SUBMIT_OK);
    wait_held(&b->engine);
    assert_int_equal(submit(b->scheduler, young, 8, 400, 800), SUBMIT_OK);
    while (scheduler_stats(b->scheduler).paused == 0)
        one_step(&b->engine);
    assert_int_equal(b->engine.n_alive, 1);
    assert_true(young->n_tokens > 0 && young->n_tokens < 800);
    return b;
}

static void a_client_that_leaves_while_paused_is_gone_at_once(void **state)
{
    (void)state;
    struct client old = {0}, young = {0};
    struct bench *b = one_paused(&old, &young);
    const int before = young.n_tokens;
    job_cancel(young.job);
    assert_int_equal(wait_end(&young), JOB_CANCELLED); /* although a step is held */
    assert_int_equal(young.n_tokens, before);
    assert_int_equal(young.report.pauses, 1);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&old), JOB_LENGTH);
    job_unref(old.job);
    job_unref(young.job);
    bench_close(b);
}

static void a_paused_answer_is_finished_although_the_server_drains(void **state)
{
    (void)state;
    struct client old = {0}, young = {0};
    struct bench *b = one_paused(&old, &young);
    scheduler_drain(b->scheduler);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&old), JOB_LENGTH);
    assert_int_equal(wait_end(&young), JOB_LENGTH);
    assert_int_equal(young.n_tokens, 800);
    assert_false(young.broken);
    job_unref(old.job);
    job_unref(young.job);
    bench_close(b);
}

static void closing_ends_paused_jobs_too(void **state)
{
    (void)state;
    struct client old = {0}, young = {0};
    struct bench *b = one_paused(&old, &young);
    bench_close(b);
    assert_int_equal(old.why, JOB_REFUSED);
    assert_int_equal(young.why, JOB_REFUSED);
    job_unref(old.job);
    job_unref(young.job);
    assert_int_equal(young.releases, 1);
}

static void a_paused_job_of_a_forgotten_namespace_is_resumed_without_the_cache(void **state)
{
    (void)state;
    struct client old = {.ns = "a"}, young = {.ns = "b"};
    struct bench *b = one_paused(&old, &young);
    b->engine.cached = 64;
    allow(&b->engine, -1);
    struct engine_cache_removed removed;
    assert_int_equal(scheduler_cache_drop(b->scheduler, "b", &removed, 10000), 0);
    assert_int_equal(wait_end(&young), JOB_LENGTH);
    assert_int_equal(b->engine.no_cache_starts, 1);
    assert_false(young.broken);
    assert_int_equal(wait_end(&old), JOB_LENGTH);
    job_unref(old.job);
    job_unref(young.job);
    bench_close(b);
}

static void memory_that_turns_out_to_be_missing_pauses_the_youngest_and_fails_nobody(void **state)
{
    (void)state;
    struct bench *b = bench_open(3, 3, 256, 60);
    struct client c[3];
    memset(c, 0, sizeof c);
    for (int i = 0; i < 3; i++)
        assert_int_equal(submit(b->scheduler, &c[i], 20 + i, 500, 500), SUBMIT_OK);
    wait_held(&b->engine);
    for (int k = 0; k < 10; k++)
        one_step(&b->engine);
    pthread_mutex_lock(&b->engine.lock);
    b->engine.pages_now = 20; /* of which 24 are in use */
    pthread_mutex_unlock(&b->engine.lock);
    allow(&b->engine, -1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(wait_end(&c[i]), JOB_LENGTH);
        assert_int_equal(c[i].n_tokens, 500);
        assert_false(c[i].broken);
        job_unref(c[i].job);
    }
    assert_int_equal(c[0].report.pauses, 0);
    bench_close(b);
}

static void a_full_queue_counts_those_that_wait_for_memory(void **state)
{
    (void)state;
    struct bench *b = bench_open(8, 2, 128, 12);
    struct client c[4];
    memset(c, 0, sizeof c);
    for (int i = 0; i < 3; i++)
        assert_int_equal(submit(b->scheduler, &c[i], 20 + i, 500, 10), SUBMIT_OK);
    wait_counts(b->scheduler, 1, 2); /* seven places are free, but there is no memory for any */
    assert_int_equal(submit(b->scheduler, &c[3], 30, 10, 10), SUBMIT_FULL);
    assert_int_equal(scheduler_stats(b->scheduler).refused_full, 1);
    assert_true(scheduler_stats(b->scheduler).retry_after_s >= 1);
    allow(&b->engine, -1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(wait_end(&c[i]), JOB_LENGTH);
        job_unref(c[i].job);
    }
    bench_close(b);
}

static uint32_t draw(uint32_t *seed) /* a linear congruential generator: any will do */
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void after_200_jobs_with_random_cancels_and_failures_nothing_is_left(void **state)
{
    (void)state;
    enum { N = 200 };
    static struct client c[N];
    for (uint32_t round = 0; round < 3; round++) {
        uint32_t seed = round;
        memset(c, 0, sizeof c);
        struct bench *b = bench_open(6, N, 192, 30);
        b->engine.cached = 128;
        b->engine.row_ns = 1000000;
        b->engine.end_after = 150;
        fake_stop_every = 256;
        allow(&b->engine, -1);
        int want[N];
        for (int i = 0; i < N; i++) {
            want[i] = 1 + (int)(draw(&seed) % 300);
            c[i].warm = draw(&seed) % 16 == 0;
            c[i].ns = draw(&seed) % 2 ? "a" : NULL;
            assert_int_equal(submit(b->scheduler, &c[i], 20 + i, 1 + (int)(draw(&seed) % 900), want[i]), SUBMIT_OK);
            if (draw(&seed) % 4 == 0)
                job_cancel(c[draw(&seed) % (uint32_t)(i + 1)].job);
            if (draw(&seed) % 16 == 0) {
                struct engine_cache_removed removed;
                scheduler_cache_drop(b->scheduler, "a", &removed, (int)(draw(&seed) % 3));
            }
            if (draw(&seed) % 8 == 0) {
                pthread_mutex_lock(&b->engine.lock);
                b->engine.fail_starts = 2;
                pthread_mutex_unlock(&b->engine.lock);
            }
            if (draw(&seed) % 8 == 0)
                nap();
        }
        uint64_t ends[5] = {0};
        for (int i = 0; i < N; i++)
            ends[wait_end(&c[i])]++;
        wait_idle(b->scheduler);
        const struct scheduler_stats n = scheduler_stats(b->scheduler);
        assert_int_equal(n.submitted, N);
        assert_int_equal(n.completed, ends[JOB_STOP] + ends[JOB_LENGTH]);
        assert_int_equal(n.cancelled, ends[JOB_CANCELLED]);
        assert_int_equal(n.failed, ends[JOB_FAILED]);
        assert_int_equal(n.refused, 0);
        assert_int_equal(n.paused + n.decoding + n.prefilling, 0);
        assert_true(n.completed > N / 3);
        assert_int_equal(b->engine.short_steps, 0);
        for (int i = 0; i < N; i++) {
            assert_false(c[i].broken);
            if (c[i].why == JOB_LENGTH)
                assert_int_equal(c[i].n_tokens, want[i]);
            if (c[i].why == JOB_STOP)
                assert_int_equal(c[i].n_tokens, c[i].warm ? 0 : 150);
            job_unref(c[i].job);
        }
        bench_close(b);
        for (int i = 0; i < N; i++) {
            assert_int_equal(c[i].ends, 1);
            assert_int_equal(c[i].releases, 1);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_job_that_can_never_fit_is_refused),
        cmocka_unit_test(an_answer_without_a_wish_ends_where_memory_does),
        cmocka_unit_test(a_small_job_that_finds_room_does_not_wait_for_a_large_one),
        cmocka_unit_test(a_large_job_is_overtaken_a_few_times_only),
        cmocka_unit_test(what_an_answer_may_grow_to_is_not_set_aside),
        cmocka_unit_test(when_pages_run_out_the_youngest_is_paused_and_all_finish_with_their_whole_text),
        cmocka_unit_test(a_client_that_leaves_while_paused_is_gone_at_once),
        cmocka_unit_test(a_paused_answer_is_finished_although_the_server_drains),
        cmocka_unit_test(closing_ends_paused_jobs_too),
        cmocka_unit_test(a_paused_job_of_a_forgotten_namespace_is_resumed_without_the_cache),
        cmocka_unit_test(memory_that_turns_out_to_be_missing_pauses_the_youngest_and_fails_nobody),
        cmocka_unit_test(a_full_queue_counts_those_that_wait_for_memory),
        cmocka_unit_test(after_200_jobs_with_random_cancels_and_failures_nothing_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
