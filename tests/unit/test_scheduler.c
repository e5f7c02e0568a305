/* The scheduler with a fake engine: jobs from submission to their end, chunks, fairness, and that text flows. Memory has a file of its own. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/scheduler_fixture.h"

/* ---- tests ---- */

static void an_answer_has_exactly_max_tokens_and_ends_with_length(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 128, 100);
    allow(&b->engine, -1);
    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 10, 5), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_LENGTH);
    assert_int_equal(c.n_tokens, 5);
    assert_int_equal(c.first, FIRST);
    assert_int_equal(c.last, FIRST + 4);
    assert_int_equal(job_prompt_done(c.job), 10);
    job_unref(c.job);
    bench_close(b);
    assert_int_equal(c.ends, 1);
    assert_int_equal(c.releases, 1);
}

static void the_end_token_stops_the_answer_and_is_not_handed_out(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 128, 100);
    b->engine.end_after = 3;
    allow(&b->engine, -1);
    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 10, 50), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_STOP);
    assert_int_equal(c.n_tokens, 3);
    job_unref(c.job);
    bench_close(b);
}

static void the_token_callback_can_end_the_answer(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 128, 100);
    allow(&b->engine, -1);
    struct client c = {.stop_after = 4};
    assert_int_equal(submit(b->scheduler, &c, 7, 10, 50), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_STOP);
    assert_int_equal(c.n_tokens, 4);
    job_unref(c.job);
    bench_close(b);
}

static void a_prompt_is_read_in_chunks_that_end_on_grid_lines(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 200, 100);
    allow(&b->engine, -1);
    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 500, 1), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_LENGTH);
    const int expected[] = {192, 192, 116};
    assert_int_equal(b->engine.n_steps, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(b->engine.steps[i].n_rows, expected[i]);
        assert_int_equal(b->engine.steps[i].picks[0], i == 2); /* only the last row of the prompt is asked for a token */
    }
    job_unref(c.job);
    bench_close(b);
}

static void a_chunk_smaller_than_the_grid_still_reads_the_prompt(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 1, 100);
    allow(&b->engine, -1);
    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 130, 2), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_LENGTH);
    assert_int_equal(b->engine.n_steps, 131);
    job_unref(c.job);
    bench_close(b);
}

static void a_short_prompt_is_not_stuck_behind_a_long_one(void **state)
{
    (void)state;
    struct bench *b = bench_open(4, 4, 256, 1000);
    struct client lng = {0}, shrt = {0};
    assert_int_equal(submit(b->scheduler, &lng, 7, 3000, 1), SUBMIT_OK);
    wait_held(&b->engine);
    assert_int_equal(submit(b->scheduler, &shrt, 8, 100, 1), SUBMIT_OK);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&shrt), JOB_LENGTH);
    assert_int_equal(wait_end(&lng), JOB_LENGTH);
    /* Step 0 was built before the short one came; both share step 1, which ends the short one. */
    assert_int_equal(b->engine.steps[0].n_rows, 256);
    assert_int_equal(rows_of(&b->engine.steps[1], 8), 100);
    assert_true(rows_of(&b->engine.steps[1], 7) >= 64);
    assert_true(b->engine.steps[1].n_rows <= 256);
    job_unref(lng.job);
    job_unref(shrt.job);
    bench_close(b);
}

static void a_long_prompt_gets_its_turn_however_many_short_ones_come(void **state)
{
    (void)state;
    enum { SHORT = 40, RUNNING = 8 };
    struct bench *b = bench_open(RUNNING, 64, 256, 1000);
    struct client lng = {0};
    static struct client c[SHORT];
    memset(c, 0, sizeof c);
    assert_int_equal(submit(b->scheduler, &lng, 7, 3000, 1), SUBMIT_OK);
    wait_held(&b->engine);
    for (int i = 0; i < SHORT; i++)
        assert_int_equal(submit(b->scheduler, &c[i], 20 + i, 500, 1), SUBMIT_OK);
    allow(&b->engine, -1);
    for (int i = 0; i < SHORT; i++)
        assert_int_equal(wait_end(&c[i]), JOB_LENGTH);
    assert_int_equal(wait_end(&lng), JOB_LENGTH);
    int since = 0, shared = 0;
    for (int k = 0, fed = 0; fed < 3000; k++) {
        const int rows = rows_of(&b->engine.steps[k], 7);
        since = rows ? 0 : since + 1;
        assert_true(since < RUNNING);
        shared += rows > 0 && b->engine.steps[k].n_items > 1;
        fed += rows;
    }
    assert_true(shared >= 10); /* it was not read alone, before or after the others */
    /* And the short ones went first all the same: the first of them did not wait for a tenth of the long one. */
    int before = 0, k = 0;
    for (int fed = 0; fed < 500; k++) {
        fed += rows_of(&b->engine.steps[k], 20);
        before += rows_of(&b->engine.steps[k], 7);
    }
    assert_true(before < 1000);
    for (int i = 0; i < SHORT; i++)
        job_unref(c[i].job);
    job_unref(lng.job);
    bench_close(b);
}

/* Three answers are being written, each of 400 tokens, and a prompt of 8000 tokens comes. */
static struct bench *three_chats_and_a_long_prompt(struct client chats[3], struct client *lng)
{
    struct bench *b = bench_open(4, 4, 512, 1000);
    for (int i = 0; i < 3; i++)
        assert_int_equal(submit(b->scheduler, &chats[i], 20 + i, 40, 400), SUBMIT_OK);
    wait_held(&b->engine);
    one_step(&b->engine);
    one_step(&b->engine);
    assert_int_equal(submit(b->scheduler, lng, 7, 8000, 1), SUBMIT_OK);
    return b;
}

static void finish_chats(struct bench *b, struct client chats[3], struct client *lng)
{
    for (int i = 0; i < 3; i++) {
        assert_int_equal(wait_end(&chats[i]), JOB_LENGTH);
        assert_false(chats[i].broken);
        job_unref(chats[i].job);
    }
    assert_int_equal(wait_end(lng), JOB_LENGTH);
    job_unref(lng->job);
    bench_close(b);
}

static void a_long_prompt_progresses_in_every_step_beside_three_chats(void **state)
{
    (void)state;
    struct client chats[3] = {[0].stop_after = 0}, lng = {0};
    struct bench *b = three_chats_and_a_long_prompt(chats, &lng);
    b->engine.row_ns = 1000000;
    allow(&b->engine, -1);
    wait_end(&lng);
    int fed = 0, k = 0;
    while (rows_of(&b->engine.steps[k], 7) == 0)
        k++;
    assert_true(k <= 4);
    for (; fed < 8000; k++) {
        const struct step_record *r = &b->engine.steps[k];
        const int rows = prompt_rows_of(r, 7, 8000);
        assert_true(rows >= 16 || fed + rows == 8000);
        for (int i = 0; i < 3; i++)
            assert_int_equal(rows_of(r, 20 + i), 1);
        fed += rows;
    }
    assert_true(k < 100); /* and not in the smallest portions: 80 rows a step at least, on average */
    finish_chats(b, chats, &lng);
}

static void a_neighbours_long_prompt_never_opens_a_gap_above_the_bound(void **state)
{
    (void)state;
    /* Prices of a row and of a step, in ms; 250 ms is the bound, and never reached. */
    static const uint64_t prices[][2] = {{1, 0}, {1, 60}, {2, 100}, {5, 20}, {10, 0}};
    for (size_t p = 0; p < sizeof prices / sizeof prices[0]; p++) {
        struct client chats[3] = {[0].stop_after = 0}, lng = {0};
        struct bench *b = three_chats_and_a_long_prompt(chats, &lng);
        b->engine.row_ns = prices[p][0] * 1000000;
        b->engine.step_ns = prices[p][1] * 1000000;
        b->engine.start_ns = 20000000;
        allow(&b->engine, -1);
        wait_end(&lng);
        const struct scheduler_stats n = scheduler_stats(b->scheduler);
        assert_true(n.between_tokens.count > 100);
        for (int i = 0; i <= HISTOGRAM_BOUNDS; i++)
            if (i == HISTOGRAM_BOUNDS || histogram_bounds[i] > 0.25)
                assert_int_equal(n.between_tokens.buckets[i], 0);
        finish_chats(b, chats, &lng);
    }
}

static void text_flows_again_soon_when_the_machine_becomes_slower(void **state)
{
    (void)state;
    struct client chats[3] = {[0].stop_after = 0}, lng = {0};
    struct bench *b = three_chats_and_a_long_prompt(chats, &lng);
    struct engine *e = &b->engine;
    e->row_ns = 500000;
    for (int k = 0; k < 10; k++)
        one_step(e);
    e->row_ns = 2500000; /* a fifth as fast from here on */
    const int from = e->n_steps;
    allow(e, -1);
    wait_end(&lng);
    int above = 0;
    for (int k = from; k < e->n_steps && rows_of(&e->steps[k], 7); k++)
        above += (uint64_t)e->steps[k].n_rows * e->row_ns > 250000000u;
    assert_in_range(above, 1, 4);
    finish_chats(b, chats, &lng);
}

static void chunks_end_where_a_snapshot_is_wanted(void **state)
{
    (void)state;
    struct bench *b = bench_open(3, 3, 512, 1000);
    fake_stop_every = 320;
    struct client c[3] = {[0].stop_after = 0};
    for (int i = 0; i < 3; i++)
        assert_int_equal(submit(b->scheduler, &c[i], 20 + i, 1000 + 100 * i, 3), SUBMIT_OK);
    allow(&b->engine, -1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(wait_end(&c[i]), JOB_LENGTH);
        job_unref(c[i].job);
    }
    for (int k = 0; k < b->engine.n_steps; k++) {
        const struct step_record *r = &b->engine.steps[k];
        for (int i = 0; i < r->n_items; i++)
            assert_true(r->from[i] / 320 == (r->from[i] + r->n_tokens[i] - 1) / 320);
    }
    bench_close(b);
}

static void only_what_the_cache_does_not_have_is_read(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 512, 1000);
    b->engine.cached = 192;
    allow(&b->engine, -1);
    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 300, 2), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_LENGTH);
    assert_int_equal(b->engine.steps[0].from[0], 192);
    assert_int_equal(b->engine.steps[0].n_rows, 108);
    assert_int_equal(c.report.cache.cached, 192);
    assert_int_equal(c.report.cache.source, CACHE_FROM_MEMORY);
    assert_int_equal(job_prompt_cached(c.job), 192);
    assert_int_equal(job_prompt_done(c.job), 300);
    job_unref(c.job);
    wait_idle(b->scheduler);
    const struct scheduler_stats n = scheduler_stats(b->scheduler);
    assert_int_equal(n.prompt_tokens_cached, 192);
    assert_int_equal(n.prompt_tokens_computed, 108);
    assert_int_equal(n.hits_memory, 1);
    assert_int_equal(n.tokens, 2);
    bench_close(b);
}

static void a_warming_job_reads_its_prompt_and_picks_nothing(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 128, 1000);
    allow(&b->engine, -1);
    struct client c = {.warm = true};
    assert_int_equal(submit(b->scheduler, &c, 7, 300, 0), SUBMIT_OK);
    assert_int_equal(wait_end(&c), JOB_STOP);
    assert_int_equal(c.n_tokens, 0);
    assert_int_equal(job_prompt_done(c.job), 300);
    assert_int_equal(b->engine.n_steps, 3);
    for (int k = 0; k < 3; k++)
        assert_int_equal(b->engine.steps[k].n_picks, 0);
    job_unref(c.job);
    bench_close(b);
}

static void the_report_says_where_the_time_went(void **state)
{
    (void)state;
    struct bench *b = bench_open(1, 2, 512, 1000);
    b->engine.row_ns = 1000000;
    struct client first = {0}, second = {0};
    assert_int_equal(submit(b->scheduler, &first, 7, 100, 11), SUBMIT_OK);
    wait_held(&b->engine);
    assert_int_equal(submit(b->scheduler, &second, 8, 50, 3), SUBMIT_OK);
    wait_counts(b->scheduler, 1, 1);
    allow(&b->engine, -1);
    wait_end(&first);
    wait_end(&second);
    assert_true(first.report.queue_ms == 0 && first.report.prefill_ms == 100 && first.report.decode_ms == 10);
    assert_true(second.report.queue_ms == 110 && second.report.prefill_ms == 50 && second.report.decode_ms == 2);
    assert_int_equal(second.report.prompt_tokens, 50);
    assert_int_equal(second.report.completion_tokens, 3);
    assert_int_equal(second.report.cache.miss, CACHE_MISS_EMPTY);
    assert_int_equal(second.report.pauses, 0);
    wait_idle(b->scheduler);
    const struct scheduler_stats n = scheduler_stats(b->scheduler);
    assert_int_equal(n.completed, 2);
    assert_int_equal(n.misses[CACHE_MISS_EMPTY], 2);
    assert_int_equal(n.step_time.count, 14);
    assert_int_equal(n.queue_time.count, 2);
    assert_int_equal(n.first_token_time.count, 2);
    assert_int_equal(n.between_tokens.count, 12);
    assert_true(n.step_time.sum > 0.16199 && n.step_time.sum < 0.16201);
    job_unref(first.job);
    job_unref(second.job);
    bench_close(b);
}

static void a_client_that_leaves_while_its_job_starts_costs_no_step(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 128, 1000);
    b->engine.hold_starts = true;
    struct client c = {.image = calloc(1, sizeof(struct cache_image))};
    assert_int_equal(submit(b->scheduler, &c, 7, 300, 5), SUBMIT_OK);
    wait_held(&b->engine);
    job_cancel(c.job);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&c), JOB_CANCELLED);
    wait_idle(b->scheduler);
    assert_int_equal(b->engine.n_steps, 0);
    assert_int_equal(b->engine.images, 1); /* and it was freed: the sanitizers would say */
    job_unref(c.job);
    bench_close(b);
}

static void a_start_that_fails_ends_its_job_when_nobody_could_make_room(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 128, 1000);
    b->engine.fail_starts = 1;
    allow(&b->engine, -1);
    struct client bad = {0}, good = {0};
    assert_int_equal(submit(b->scheduler, &bad, 7, 100, 5), SUBMIT_OK);
    assert_int_equal(wait_end(&bad), JOB_FAILED);
    assert_string_equal(bad.message, "no memory for a state");
    assert_int_equal(submit(b->scheduler, &good, 8, 100, 5), SUBMIT_OK);
    assert_int_equal(wait_end(&good), JOB_LENGTH);
    job_unref(bad.job);
    job_unref(good.job);
    bench_close(b);
}

static void a_start_that_fails_is_tried_again_when_another_job_ends(void **state)
{
    (void)state;
    struct bench *b = bench_open(3, 3, 128, 1000);
    struct client run = {0}, wait = {0}, behind = {0};
    assert_int_equal(submit(b->scheduler, &run, 7, 100, 50), SUBMIT_OK);
    wait_held(&b->engine);
    b->engine.fail_starts = 1;
    assert_int_equal(submit(b->scheduler, &wait, 8, 100, 5), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &behind, 9, 100, 5), SUBMIT_OK);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&run), JOB_LENGTH);
    assert_int_equal(wait_end(&wait), JOB_LENGTH);
    assert_int_equal(wait_end(&behind), JOB_LENGTH);
    assert_int_equal(b->engine.starts, 4);
    for (int k = 0; k < b->engine.n_steps; k++) /* not tried in vain meanwhile */
        assert_false(rows_of(&b->engine.steps[k], 7) && rows_of(&b->engine.steps[k], 8));
    job_unref(run.job);
    job_unref(wait.job);
    job_unref(behind.job);
    bench_close(b);
}

static void count_call(struct engine *e, void *arg)
{
    (void)e;
    (*(int *)arg)++;
}

static void a_call_runs_between_steps_or_not_at_all(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 128, 1000);
    int calls = 0;
    assert_int_equal(scheduler_call(b->scheduler, count_call, &calls, 10000), 0); /* idle: at once */
    assert_int_equal(calls, 1);

    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 300, 5), SUBMIT_OK);
    wait_held(&b->engine);
    assert_int_equal(scheduler_call(b->scheduler, count_call, &calls, 20), -1); /* a step is in hand for longer */
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&c), JOB_LENGTH);
    assert_int_equal(scheduler_call(b->scheduler, count_call, &calls, 10000), 0);
    assert_int_equal(calls, 2); /* the one that was given up never came */
    job_unref(c.job);

    struct engine_cache_removed removed;
    assert_int_equal(scheduler_cache_drop(b->scheduler, "patient", &removed, 10000), 0);
    assert_int_equal(removed.pages, 7);
    struct engine_cache_entry entries[1];
    size_t n = 0;
    assert_int_equal(scheduler_cache_list(b->scheduler, entries, 1, &n, 10000), 0);
    assert_int_equal(n, 2);
    assert_string_equal(entries[0].ns, "patient");
    bench_close(b);
}

static void what_waits_when_its_namespace_is_forgotten_leaves_the_cache_alone(void **state)
{
    (void)state;
    struct bench *b = bench_open(1, 4, 128, 1000);
    struct client run = {.ns = "a"}, same = {.ns = "a"}, other = {.ns = "b"};
    assert_int_equal(submit(b->scheduler, &run, 7, 100, 16000), SUBMIT_OK);
    wait_held(&b->engine);
    same.image = calloc(1, sizeof(struct cache_image));
    assert_int_equal(submit(b->scheduler, &same, 8, 100, 5), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &other, 9, 100, 5), SUBMIT_OK);
    wait_counts(b->scheduler, 1, 2);
    allow(&b->engine, -1);
    struct engine_cache_removed removed;
    assert_int_equal(scheduler_cache_drop(b->scheduler, "a", &removed, 10000), 0);
    job_cancel(run.job); /* only now do the others start */
    assert_int_equal(wait_end(&run), JOB_CANCELLED);
    wait_end(&same);
    wait_end(&other);
    assert_int_equal(b->engine.starts, 3);
    assert_int_equal(b->engine.no_cache_starts, 1);
    assert_int_equal(b->engine.images, 0);
    job_unref(run.job);
    job_unref(same.job);
    job_unref(other.job);
    bench_close(b);
}

static void an_idle_scheduler_uses_no_processor_time(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 128, 1000);
    allow(&b->engine, -1);
    struct client c = {0};
    assert_int_equal(submit(b->scheduler, &c, 7, 300, 5), SUBMIT_OK);
    wait_end(&c);
    wait_idle(b->scheduler);
    struct timespec before, after;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    const int64_t used = (int64_t)(after.tv_sec - before.tv_sec) * 1000000000 + (after.tv_nsec - before.tv_nsec);
    assert_true(used < 3000000);
    job_unref(c.job);
    bench_close(b);
}

static void a_full_queue_refuses_and_takes_again_when_a_place_is_free(void **state)
{
    (void)state;
    struct bench *b = bench_open(1, 2, 128, 100);
    struct client c[5];
    memset(c, 0, sizeof c);
    for (int i = 0; i < 3; i++)
        assert_int_equal(submit(b->scheduler, &c[i], 7, 10, 2), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &c[3], 7, 10, 2), SUBMIT_FULL);
    assert_int_equal(c[3].releases, 0); /* a refused job never calls back */
    wait_counts(b->scheduler, 1, 2);
    job_cancel(c[2].job);
    assert_int_equal(wait_end(&c[2]), JOB_CANCELLED);
    assert_int_equal(submit(b->scheduler, &c[4], 7, 10, 2), SUBMIT_OK);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&c[4]), JOB_LENGTH);
    for (int i = 0; i < 5; i++)
        if (i != 3)
            job_unref(c[i].job);
    bench_close(b);
}

static void a_client_that_leaves_frees_its_place_before_the_next_step(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 4, 128, 1000);
    struct client prefill = {0}, decode = {0}, queued = {0}, next = {0};
    assert_int_equal(submit(b->scheduler, &decode, 7, 10, 100), SUBMIT_OK);
    wait_held(&b->engine);
    one_step(&b->engine);
    assert_int_equal(submit(b->scheduler, &prefill, 8, 3000, 100), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &queued, 9, 10, 100), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &next, 10, 10, 1), SUBMIT_OK);
    one_step(&b->engine); /* the held step now has both the decode row and a chunk */
    wait_counts(b->scheduler, 2, 2);

    int before = decode.n_tokens;
    job_cancel(queued.job);
    assert_int_equal(wait_end(&queued), JOB_CANCELLED); /* at once, although a step is in hand */
    job_cancel(prefill.job);
    job_cancel(decode.job);
    int n = b->engine.n_steps;
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&prefill), JOB_CANCELLED);
    assert_int_equal(wait_end(&decode), JOB_CANCELLED);
    assert_int_equal(wait_end(&next), JOB_LENGTH);
    assert_int_equal(decode.n_tokens, before); /* nothing more is handed out */
    /* The step in hand, then the next job alone. */
    assert_int_equal(b->engine.n_steps, n + 2);
    assert_int_equal(b->engine.steps[n + 1].n_items, 1);
    assert_int_equal(rows_of(&b->engine.steps[n + 1], 10), 10);
    job_unref(prefill.job);
    job_unref(decode.job);
    job_unref(queued.job);
    job_unref(next.job);
    bench_close(b);
}

static void a_request_the_engine_cannot_serve_takes_no_other_down(void **state)
{
    (void)state;
    struct bench *b = bench_open(3, 4, 128, 1000);
    struct client good = {0}, bad = {0};
    b->engine.poison = 66;
    assert_int_equal(submit(b->scheduler, &good, 7, 10, 20), SUBMIT_OK);
    wait_held(&b->engine);
    assert_int_equal(submit(b->scheduler, &bad, 66, 10, 20), SUBMIT_OK);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&bad), JOB_FAILED);
    assert_string_equal(bad.message, "poisoned");
    assert_int_equal(wait_end(&good), JOB_LENGTH);
    assert_int_equal(good.n_tokens, 20);
    assert_int_equal(good.last, FIRST + 19);
    job_unref(good.job);
    job_unref(bad.job);
    bench_close(b);
}

static void draining_refuses_the_waiting_and_finishes_the_running(void **state)
{
    (void)state;
    struct bench *b = bench_open(1, 4, 128, 1000);
    struct client run = {0}, wait = {0}, late = {0};
    assert_int_equal(submit(b->scheduler, &run, 7, 10, 20), SUBMIT_OK);
    assert_int_equal(submit(b->scheduler, &wait, 8, 10, 20), SUBMIT_OK);
    wait_held(&b->engine);
    scheduler_drain(b->scheduler);
    assert_int_equal(wait_end(&wait), JOB_REFUSED);
    assert_int_equal(submit(b->scheduler, &late, 9, 10, 20), SUBMIT_DRAINING);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&run), JOB_LENGTH);
    assert_int_equal(run.n_tokens, 20);
    job_unref(run.job);
    job_unref(wait.job);
    bench_close(b);
}

static void closing_ends_every_job_and_frees_every_sequence(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 4, 128, 1000);
    struct client c[4];
    memset(c, 0, sizeof c);
    for (int i = 0; i < 4; i++)
        assert_int_equal(submit(b->scheduler, &c[i], 7 + i, 2000, 1000), SUBMIT_OK);
    wait_held(&b->engine);
    bench_close(b); /* checks that no sequence is left */
    for (int i = 0; i < 4; i++) {
        assert_int_equal(c[i].ends, 1);
        assert_int_equal(c[i].why, JOB_REFUSED);
        assert_int_equal(c[i].releases, 0);
        job_unref(c[i].job); /* jobs outlive the scheduler */
        assert_int_equal(c[i].releases, 1);
    }
}

static void every_job_of_many_ends_exactly_once_whatever_is_cancelled(void **state)
{
    (void)state;
    enum { N = 60 };
    struct bench *b = bench_open(8, N, 256, 1000);
    static struct client c[N];
    memset(c, 0, sizeof c);
    allow(&b->engine, -1);
    for (int i = 0; i < N; i++) {
        assert_int_equal(submit(b->scheduler, &c[i], 7, 1 + i * 37 % 700, 1 + i % 40), SUBMIT_OK);
        if (i % 3 == 0)
            job_cancel(c[i / 2].job);
    }
    for (int i = 0; i < N; i++)
        wait_end(&c[i]);
    wait_idle(b->scheduler);
    for (int i = 0; i < N; i++) {
        assert_true(c[i].why == JOB_CANCELLED || c[i].why == JOB_LENGTH);
        if (c[i].why == JOB_LENGTH)
            assert_int_equal(c[i].n_tokens, 1 + i % 40);
        job_unref(c[i].job);
    }
    bench_close(b);
    for (int i = 0; i < N; i++) {
        assert_int_equal(c[i].ends, 1);
        assert_int_equal(c[i].releases, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_has_exactly_max_tokens_and_ends_with_length),
        cmocka_unit_test(the_end_token_stops_the_answer_and_is_not_handed_out),
        cmocka_unit_test(the_token_callback_can_end_the_answer),
        cmocka_unit_test(a_prompt_is_read_in_chunks_that_end_on_grid_lines),
        cmocka_unit_test(a_chunk_smaller_than_the_grid_still_reads_the_prompt),
        cmocka_unit_test(a_short_prompt_is_not_stuck_behind_a_long_one),
        cmocka_unit_test(a_long_prompt_gets_its_turn_however_many_short_ones_come),
        cmocka_unit_test(a_long_prompt_progresses_in_every_step_beside_three_chats),
        cmocka_unit_test(a_neighbours_long_prompt_never_opens_a_gap_above_the_bound),
        cmocka_unit_test(text_flows_again_soon_when_the_machine_becomes_slower),
        cmocka_unit_test(chunks_end_where_a_snapshot_is_wanted),
        cmocka_unit_test(only_what_the_cache_does_not_have_is_read),
        cmocka_unit_test(a_warming_job_reads_its_prompt_and_picks_nothing),
        cmocka_unit_test(the_report_says_where_the_time_went),
        cmocka_unit_test(a_client_that_leaves_while_its_job_starts_costs_no_step),
        cmocka_unit_test(a_start_that_fails_ends_its_job_when_nobody_could_make_room),
        cmocka_unit_test(a_start_that_fails_is_tried_again_when_another_job_ends),
        cmocka_unit_test(a_call_runs_between_steps_or_not_at_all),
        cmocka_unit_test(what_waits_when_its_namespace_is_forgotten_leaves_the_cache_alone),
        cmocka_unit_test(an_idle_scheduler_uses_no_processor_time),
        cmocka_unit_test(a_full_queue_refuses_and_takes_again_when_a_place_is_free),
        cmocka_unit_test(a_client_that_leaves_frees_its_place_before_the_next_step),
        cmocka_unit_test(a_request_the_engine_cannot_serve_takes_no_other_down),
        cmocka_unit_test(draining_refuses_the_waiting_and_finishes_the_running),
        cmocka_unit_test(closing_ends_every_job_and_frees_every_sequence),
        cmocka_unit_test(every_job_of_many_ends_exactly_once_whatever_is_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
