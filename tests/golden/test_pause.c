/* Real models under the scheduler, with too little memory for all: an answer that was paused and resumed has the same tokens and the same logprobs, bit for
 * bit, as one that nobody disturbed, with and without the prefix cache. */
#include "tests/golden/golden_util.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "server/scheduler.h"

enum { TOKENS = 320, PROMPT = 90, PAGES = 20, PAUSES = 3, MOST_ENDS = 8 };

struct client {
    struct job *job;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool ended, slow;
    enum job_end why;
    struct job_report report;
    int n;
    atomic_int n_seen;
    struct pick picks[PAGES * GRID];
};

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
}

static bool on_token(void *ctx, const struct pick *pick)
{
    struct client *c = ctx;
    if (c->slow) /* so that whoever watches it keeps up on a busy machine */
        nap();
    c->picks[c->n++] = *pick;
    atomic_store(&c->n_seen, c->n);
    return false;
}

static void on_end(void *ctx, enum job_end why, const char *message, const struct job_report *report)
{
    struct client *c = ctx;
    if (message)
        print_message("%s\n", message);
    pthread_mutex_lock(&c->lock);
    c->why = why;
    c->report = *report;
    c->ended = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void on_release(void *ctx)
{
    (void)ctx;
}

static void wait_end(struct client *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->ended)
        pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
    job_unref(c->job);
}

/* Greedy, or drawn with everything that depends on what was written before. No end token: the answers have their full length. */
static struct sampler_params params_of(const struct tokenizer *t, bool drawn, struct logit_bias bias[MOST_ENDS])
{
    struct sampler_params p = {.top_p = 1, .repeat_penalty = 1, .want_logprob = true, .n_top = SAMPLER_MAX_TOP, .bias = bias};
    for (int32_t id = 0; id < tokenizer_vocab_size(t) && p.n_bias < MOST_ENDS; id++)
        if (tokenizer_ends_generation(t, id))
            bias[p.n_bias++] = (struct logit_bias){id, -INFINITY};
    if (drawn) {
        p.temperature = 0.9f;
        p.top_p = 0.95f;
        p.top_k = 40;
        p.repeat_penalty = 1.2f;
        p.presence_penalty = 0.4f;
        p.frequency_penalty = 0.3f;
        p.seed = 42;
    }
    return p;
}

static void submit(struct scheduler *s, struct client *c, const struct sampler_params *p, int first_token, int n_prompt, int max_tokens)
{
    int32_t prompt[PROMPT];
    for (int i = 0; i < n_prompt; i++) /* any text will do; no two jobs share theirs */
        prompt[i] = (first_token + i * 7) % 200 + 3;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    const struct job_options o = {.prompt = prompt,
                                  .n_prompt = n_prompt,
                                  .max_tokens = max_tokens,
                                  .sampling = p,
                                  .token = on_token,
                                  .end = on_end,
                                  .release = on_release,
                                  .ctx = c};
    assert_int_equal(scheduler_submit(s, &o, &c->job), SUBMIT_OK);
}

static struct scheduler *open_scheduler(struct engine *e)
{
    struct scheduler *s = NULL;
    struct error err = {""};
    const struct scheduler_options o = {.engine = e, .max_running = 2, .max_queue = 2, .prefill_chunk = 256};
    if (scheduler_open(&s, &o, &err))
        fail_msg("%s", err.text);
    return s;
}

/* ---- somebody else who takes all the memory there is, between two steps ---- */

struct hog {
    struct sequence *seq;
};

static void take_all(struct engine *e, void *arg)
{
    struct hog *h = arg;
    static const int32_t tokens[GRID];
    struct error err;
    struct engine_cache_stats n;
    h->seq = sequence_new(e, &err);
    for (engine_cache_stats(e, &n); h->seq && n.pages_running < n.pages_total; engine_cache_stats(e, &n)) {
        struct step_item it = {.seq = h->seq, .tokens = tokens, .n_tokens = GRID};
        if (engine_step(e, &it, 1, &err))
            break;
    }
}

static void give_back(struct engine *e, void *arg)
{
    struct hog *h = arg;
    sequence_free(e, h->seq);
}

/* Takes the memory away when the answer has `after` tokens, until it is paused. */
static void pause_once(struct scheduler *s, struct client *c, int after)
{
    struct hog hog = {NULL};
    while (atomic_load(&c->n_seen) < after)
        nap();
    assert_int_equal(scheduler_call(s, take_all, &hog, 10000), 0);
    assert_non_null(hog.seq);
    while (scheduler_stats(s).paused == 0)
        nap();
    assert_int_equal(scheduler_call(s, give_back, &hog, 10000), 0);
    while (scheduler_stats(s).paused)
        nap();
}

static struct engine_options options_of(const char *path)
{
    struct engine_options o = golden_options(path, false);
    o.max_sequences = 3;
    o.max_rows = 256 + 3;
    o.context = PAGES * GRID;
    return o;
}

static void check_model(const char *path, bool drawn)
{
    static struct client alone, paused, older;
    memset(&alone, 0, sizeof alone);
    struct logit_bias bias[MOST_ENDS];

    struct engine_options o = options_of(path);
    struct engine *e = golden_engine_with(&o);
    const struct engine_info *info = engine_info(e);
    const uint64_t budget = (uint64_t)PAGES * info->page_bytes + (uint64_t)info->max_sequences * info->state_bytes;
    const uint64_t snapshots = 6 * (uint64_t)info->state_bytes + 1;
    struct sampler_params p = params_of(engine_tokenizer(e), drawn, bias);
    struct scheduler *s = open_scheduler(e);
    submit(s, &alone, &p, 50, PROMPT, TOKENS);
    wait_end(&alone);
    assert_int_equal(alone.n, TOKENS);
    scheduler_close(s);
    engine_close(e);

    for (int cache = 0; cache < 2; cache++) {
        memset(&paused, 0, sizeof paused);
        memset(&older, 0, sizeof older);
        o.kv_budget = budget;
        o.cache_memory = cache ? snapshots : 0;
        e = golden_engine_with(&o);
        assert_int_equal(engine_info(e)->pages_total, PAGES);
        s = open_scheduler(e);
        paused.slow = true;
        submit(s, &older, &p, 60, PROMPT, PAGES * GRID - PROMPT);
        submit(s, &paused, &p, 50, PROMPT, TOKENS);
        for (int i = 0; i < PAUSES; i++)
            pause_once(s, &paused, 20 + 60 * i);
        wait_end(&paused);
        job_cancel(older.job);
        wait_end(&older);
        assert_int_equal(paused.why, JOB_LENGTH);
        assert_int_equal(older.report.pauses, 0);
        assert_true(paused.report.pauses >= PAUSES);
        assert_int_equal(paused.n, TOKENS);
        assert_memory_equal(paused.picks, alone.picks, (size_t)TOKENS * sizeof alone.picks[0]);
        if (!cache)
            assert_true(scheduler_stats(s).resume_tokens_computed > PAUSES * PROMPT);
        scheduler_close(s);
        engine_close(e);
    }
}

static void check(const char *path)
{
    check_model(path, false);
    check_model(path, true);
}

static void a_paused_answer_of_a_hybrid_is_the_undisturbed_one(void **state)
{
    (void)state;
    check("tests/data/tiny-qwen35-f32.gguf");
}

static void a_paused_answer_of_a_mixture_is_the_undisturbed_one(void **state)
{
    (void)state;
    check("tests/data/tiny-qwen35moe-q8_0.gguf");
}

static void a_paused_answer_of_a_dense_model_is_the_undisturbed_one(void **state)
{
    (void)state;
    check("tests/data/tiny-qwen3-q8_0.gguf");
}

static void a_paused_answer_of_the_demo_model_is_the_undisturbed_one(void **state)
{
    (void)state;
    check("tests/demo-model/demo-q8_0.gguf");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_paused_answer_of_a_hybrid_is_the_undisturbed_one),
        cmocka_unit_test(a_paused_answer_of_a_mixture_is_the_undisturbed_one),
        cmocka_unit_test(a_paused_answer_of_a_dense_model_is_the_undisturbed_one),
        cmocka_unit_test(a_paused_answer_of_the_demo_model_is_the_undisturbed_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
