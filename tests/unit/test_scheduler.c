/* The scheduler with a fake engine: the functions of engine/engine.h that it calls are defined here, so that the linker takes these and leaves
 * engine.o in the library. The fake records each step, can be held before it, and "writes" id FIRST, FIRST + 1, ... until told to end. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine.h"
#include "engine/gguf.h"
#include "server/scheduler.h"

enum { MAX_STEPS = 4096, MAX_ITEMS = 16, FIRST = 1000 };

/* ---- the fake engine ---- */

struct sequence {
    int length, picked;
};

struct step_record {
    int n_items, n_rows;
    struct sequence *seq[MAX_ITEMS];
    int n_tokens[MAX_ITEMS];
    int32_t first_token[MAX_ITEMS]; /* the prompts of these tests begin with a token that names their job */
    bool picks[MAX_ITEMS];
};

struct engine {
    struct engine_info info;
    struct tokenizer *tokenizer;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int allowed; /* steps that may run; -1: all */
    int waiting; /* 1 while a step is held */
    int alive, most_alive;
    int n_steps;
    struct step_record steps[MAX_STEPS];
    int32_t poison; /* a step with this token fails */
    int end_after;  /* picks before the end token; 0: never */
    int32_t end_id;
};

const struct engine_info *engine_info(const struct engine *e)
{
    return &e->info;
}

const struct tokenizer *engine_tokenizer(const struct engine *e)
{
    return e->tokenizer;
}

struct sequence *sequence_new(struct engine *e, struct error *err)
{
    if (e->alive >= e->info.max_sequences) {
        error_set(err, "too many sequences");
        return NULL;
    }
    e->alive++;
    if (e->alive > e->most_alive)
        e->most_alive = e->alive;
    return calloc(1, sizeof(struct sequence));
}

void sequence_free(struct engine *e, struct sequence *s)
{
    if (s)
        e->alive--;
    free(s);
}

int sequence_length(const struct sequence *s)
{
    return s->length;
}

int engine_step(struct engine *e, struct step_item *items, int n_items, struct error *err)
{
    pthread_mutex_lock(&e->lock);
    e->waiting = 1;
    pthread_cond_broadcast(&e->changed);
    while (e->allowed == 0)
        pthread_cond_wait(&e->changed, &e->lock);
    if (e->allowed > 0)
        e->allowed--;
    e->waiting = 0;
    int rc = 0;
    struct step_record *r = &e->steps[e->n_steps < MAX_STEPS ? e->n_steps++ : MAX_STEPS - 1];
    *r = (struct step_record){.n_items = n_items};
    for (int i = 0; i < n_items; i++) {
        r->seq[i] = items[i].seq;
        r->n_tokens[i] = items[i].n_tokens;
        r->first_token[i] = items[i].tokens[0];
        r->picks[i] = items[i].sampler != NULL;
        r->n_rows += items[i].n_tokens;
        for (int k = 0; k < items[i].n_tokens; k++)
            if (e->poison && items[i].tokens[k] == e->poison)
                rc = error_set(err, "poisoned");
    }
    if (r->n_rows > e->info.max_rows)
        rc = error_set(err, "too many rows");
    for (int i = 0; i < n_items && rc == 0; i++) {
        items[i].seq->length += items[i].n_tokens;
        if (items[i].sampler) {
            int k = items[i].seq->picked++;
            items[i].pick.id = e->end_after && k >= e->end_after ? e->end_id : FIRST + k;
        }
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

static void allow(struct engine *e, int steps)
{
    pthread_mutex_lock(&e->lock);
    e->allowed = steps;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* Until a step stands before the gate. */
static void wait_held(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    while (!e->waiting || e->allowed != 0)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

/* Lets one held step through and waits for the next one to arrive. */
static void one_step(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    int n = e->n_steps;
    e->allowed = 1;
    pthread_cond_broadcast(&e->changed);
    while (e->n_steps == n || !e->waiting)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

/* ---- a client ---- */

struct client {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct job *job;
    int n_tokens, ends, releases;
    int32_t first, last;
    enum job_end why;
    char message[64];
    int stop_after; /* the token callback says it is over; 0: never */
};

static bool on_token(void *ctx, const struct pick *pick)
{
    struct client *c = ctx;
    pthread_mutex_lock(&c->lock);
    if (c->n_tokens++ == 0)
        c->first = pick->id;
    c->last = pick->id;
    bool stop = c->stop_after && c->n_tokens >= c->stop_after;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return stop;
}

static void on_end(void *ctx, enum job_end why, const char *message, const struct job_report *report)
{
    (void)report;
    struct client *c = ctx;
    pthread_mutex_lock(&c->lock);
    c->ends++;
    c->why = why;
    if (message)
        strncpy(c->message, message, sizeof c->message - 1);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void on_release(void *ctx)
{
    struct client *c = ctx;
    pthread_mutex_lock(&c->lock);
    c->releases++;
    pthread_mutex_unlock(&c->lock);
}

static enum job_end wait_end(struct client *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->ends)
        pthread_cond_wait(&c->changed, &c->lock);
    enum job_end why = c->why;
    pthread_mutex_unlock(&c->lock);
    return why;
}

static enum submit_result submit(struct scheduler *s, struct client *c, int32_t name, int n_prompt, int max_tokens)
{
    static const struct sampler_params greedy = {.top_p = 1, .repeat_penalty = 1};
    int stop_after = c->stop_after;
    *c = (struct client){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .stop_after = stop_after};
    int32_t *prompt = calloc((size_t)n_prompt, sizeof *prompt);
    assert_non_null(prompt);
    for (int i = 0; i < n_prompt; i++)
        prompt[i] = name;
    enum submit_result r = scheduler_submit(s,
                                            &(struct job_options){.prompt = prompt,
                                                                  .n_prompt = n_prompt,
                                                                  .max_tokens = max_tokens,
                                                                  .sampling = &greedy,
                                                                  .token = on_token,
                                                                  .end = on_end,
                                                                  .release = on_release,
                                                                  .ctx = c},
                                            &c->job);
    free(prompt);
    return r;
}

/* ---- fixture ---- */

struct bench {
    struct gguf *file;
    struct engine engine;
    struct scheduler *scheduler;
};

static struct bench *bench_open(int max_running, int max_queue, int chunk, int pages)
{
    struct error err = {{0}};
    struct bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    if (gguf_open(&b->file, "tests/data/tiny-qwen3-f32.gguf", &err) || tokenizer_open(&b->engine.tokenizer, b->file, &err))
        fail_msg("%s", err.text);
    struct engine *e = &b->engine;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->info = (struct engine_info){.context = 4096, .max_rows = chunk + max_running, .max_sequences = max_running, .pages_total = pages};
    e->end_id = -1;
    for (int32_t id = 0; id < tokenizer_vocab_size(e->tokenizer); id++)
        if (tokenizer_ends_generation(e->tokenizer, id))
            e->end_id = id;
    assert_true(e->end_id >= 0);
    struct scheduler_options o = {.engine = e, .max_running = max_running, .max_queue = max_queue, .prefill_chunk = chunk};
    if (scheduler_open(&b->scheduler, &o, &err))
        fail_msg("%s", err.text);
    return b;
}

static void bench_close(struct bench *b)
{
    allow(&b->engine, -1);
    scheduler_close(b->scheduler);
    assert_int_equal(b->engine.alive, 0); /* every sequence was given back */
    tokenizer_close(b->engine.tokenizer);
    gguf_close(b->file);
    pthread_cond_destroy(&b->engine.changed);
    pthread_mutex_destroy(&b->engine.lock);
    free(b);
}

/* The rows that the job named `name` had in a recorded step (its prompt's rows only). */
static int rows_of(const struct step_record *r, int32_t name)
{
    int n = 0;
    for (int i = 0; i < r->n_items; i++)
        if (r->first_token[i] == name)
            n += r->n_tokens[i];
    return n;
}

/* Until the published counters say so; they follow the messages by less than a step. */
static void wait_counts(struct scheduler *s, int running, int queued)
{
    for (;;) {
        struct scheduler_stats n = scheduler_stats(s);
        if (n.running == running && n.queued == queued)
            return;
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

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

static void prompts_take_turns_when_a_step_has_no_room_for_all(void **state)
{
    (void)state;
    struct bench *b = bench_open(6, 6, 128, 1000);
    struct client first = {0}, c[5];
    memset(c, 0, sizeof c);
    assert_int_equal(submit(b->scheduler, &first, 20, 64, 1), SUBMIT_OK);
    wait_held(&b->engine);
    for (int i = 0; i < 5; i++)
        assert_int_equal(submit(b->scheduler, &c[i], 7 + i, 640, 1), SUBMIT_OK);
    allow(&b->engine, -1);
    for (int i = 0; i < 5; i++)
        assert_int_equal(wait_end(&c[i]), JOB_LENGTH);
    wait_end(&first);
    /* 5 prompts, 2 pages a step: after any 5 steps in a row each has had two pages. */
    for (int i = 0; i < 5; i++) {
        int rows = 0;
        for (int k = 1; k <= 5; k++)
            rows += rows_of(&b->engine.steps[k], 7 + i);
        assert_int_equal(rows, 128);
    }
    for (int i = 0; i < 5; i++)
        job_unref(c[i].job);
    job_unref(first.job);
    bench_close(b);
}

static void text_keeps_flowing_while_a_long_prompt_is_read(void **state)
{
    (void)state;
    struct bench *b = bench_open(2, 2, 512, 1000);
    struct client writer = {0}, reader = {0};
    assert_int_equal(submit(b->scheduler, &writer, 7, 10, 300), SUBMIT_OK);
    wait_held(&b->engine);
    one_step(&b->engine); /* its prompt is read; a decode step is held */
    assert_int_equal(submit(b->scheduler, &reader, 8, 2000, 1), SUBMIT_OK);
    allow(&b->engine, -1);
    wait_end(&reader);
    wait_end(&writer);
    int shared = 0;
    for (int k = 0; k < b->engine.n_steps; k++) {
        const struct step_record *r = &b->engine.steps[k];
        int chunk = rows_of(r, 8);
        if (!chunk)
            continue;
        shared++;
        assert_int_equal(r->n_items, 2); /* the writer has a row in every one of them */
        assert_true(chunk <= 128);
    }
    assert_true(shared >= 2000 / 128);
    job_unref(writer.job);
    job_unref(reader.job);
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

static void a_job_that_can_never_fit_is_refused_and_a_large_one_waits_its_turn(void **state)
{
    (void)state;
    struct bench *b = bench_open(4, 4, 128, 10); /* 640 tokens */
    struct client a = {0}, big = {0}, small = {0}, never = {0};
    assert_int_equal(submit(b->scheduler, &never, 7, 600, 41), SUBMIT_TOO_LARGE);
    assert_int_equal(submit(b->scheduler, &a, 7, 64, 64), SUBMIT_OK);     /* 2 pages */
    assert_int_equal(submit(b->scheduler, &big, 8, 500, 100), SUBMIT_OK); /* 10 pages */
    assert_int_equal(submit(b->scheduler, &small, 9, 10, 2), SUBMIT_OK);  /* 1 page, and does not overtake */
    wait_counts(b->scheduler, 1, 2);
    assert_int_equal(scheduler_stats(b->scheduler).pages_used, 2);
    allow(&b->engine, -1);
    assert_int_equal(wait_end(&small), JOB_LENGTH);
    assert_int_equal(wait_end(&big), JOB_LENGTH);
    for (int k = 0; k < b->engine.n_steps; k++) /* the small one only began when the big one was over */
        assert_false(rows_of(&b->engine.steps[k], 8) && rows_of(&b->engine.steps[k], 9));
    assert_int_equal(b->engine.most_alive, 1);
    job_unref(a.job);
    job_unref(big.job);
    job_unref(small.job);
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
    wait_counts(b->scheduler, 0, 0);
    assert_int_equal(scheduler_stats(b->scheduler).pages_used, 0);
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
        cmocka_unit_test(prompts_take_turns_when_a_step_has_no_room_for_all),
        cmocka_unit_test(text_keeps_flowing_while_a_long_prompt_is_read),
        cmocka_unit_test(a_full_queue_refuses_and_takes_again_when_a_place_is_free),
        cmocka_unit_test(a_job_that_can_never_fit_is_refused_and_a_large_one_waits_its_turn),
        cmocka_unit_test(a_client_that_leaves_frees_its_place_before_the_next_step),
        cmocka_unit_test(a_request_the_engine_cannot_serve_takes_no_other_down),
        cmocka_unit_test(draining_refuses_the_waiting_and_finishes_the_running),
        cmocka_unit_test(closing_ends_every_job_and_frees_every_sequence),
        cmocka_unit_test(every_job_of_many_ends_exactly_once_whatever_is_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
