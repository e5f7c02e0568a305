/* The sampler: the documented distribution, the same draw everywhere, and ids that are never drawn. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/backend.h"
#include "engine/sampler.h"
#include "tests/unit/vocab_image.h"

enum { V = 420, FIRST_UNUSED = 400, HOLE = 300, MANY_DRAWS = 20000, SOME_DRAWS = 5000 }; /* id HOLE and those from FIRST_UNUSED on are unusable */

/* ---- helpers */

static const struct sampler_params off = {.temperature = 1, .top_p = 1, .repeat_penalty = 1};

static bool usable(int32_t id)
{
    return id != HOLE && id < FIRST_UNUSED;
}

static int setup(void **state)
{
    struct vocab v;
    struct tokenizer *t;
    struct error err;
    vocab_init(&v);
    while (v.n_tokens < V) {
        char text[32];
        bool padding = !usable((int32_t)v.n_tokens);
        snprintf(text, sizeof text, padding ? "[PAD%d]" : "word%d", (int)v.n_tokens);
        vocab_add(&v, text, padding ? TOKEN_UNUSED : TOKEN_NORMAL);
    }
    int rc = vocab_open(&t, &v, &err);
    *state = t;
    return rc;
}

static int teardown(void **state)
{
    tokenizer_close(*state);
    return 0;
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Logits as a model's: most low, some high, with ties. */
static void fill_logits(float logits[V], uint32_t seed, float spread)
{
    for (int i = 0; i < V; i++) {
        float u = (float)(next_random(&seed) % 1000) / 1000.0f;
        logits[i] = spread * u * u * u - 3.0f;
    }
}

static void fill(float logits[V], float value)
{
    for (int i = 0; i < V; i++)
        logits[i] = value;
}

static struct sampler *new_sampler(void **state, struct sampler_params p)
{
    struct sampler *s = sampler_new(*state, &p);
    assert_non_null(s);
    return s;
}

static int32_t pick(struct sampler *s, const float *logits)
{
    struct pick out;
    assert_int_equal(sampler_pick(s, logits, &out), 0);
    return out.id;
}

/* One pick of a new sampler. */
static int32_t pick_once(void **state, struct sampler_params p, const float *logits)
{
    struct sampler *s = new_sampler(state, p);
    int32_t id = pick(s, logits);
    sampler_free(s);
    return id;
}

/* ---- the definition, plainly */

static const float *plain_logits;

static int compare_plain(const void *pa, const void *pb)
{
    int32_t a, b;
    memcpy(&a, pa, sizeof a);
    memcpy(&b, pb, sizeof b);
    if (plain_logits[a] != plain_logits[b])
        return plain_logits[a] > plain_logits[b] ? -1 : 1;
    return a < b ? -1 : a > b;
}

/* Probability of every id after temperature, top_k, top_p and min_p, each on what the one before left, renormalised. */
static void plain_distribution(const float *logits, const struct sampler_params *p, double prob[V])
{
    static int32_t order[V];
    size_t n = 0;
    for (int32_t i = 0; i < V; i++) {
        prob[i] = 0;
        if (usable(i) && isfinite(logits[i]))
            order[n++] = i;
    }
    plain_logits = logits;
    qsort(order, n, sizeof *order, compare_plain);
    if (p->top_k > 0 && (size_t)p->top_k < n)
        n = (size_t)p->top_k;
    double sum = 0, best = exp(0);
    for (size_t i = 0; i < n; i++)
        sum += exp(((double)logits[order[i]] - (double)logits[order[0]]) / (double)p->temperature);
    double reached = 0;
    for (size_t i = 0; i < n; i++) {
        reached += exp(((double)logits[order[i]] - (double)logits[order[0]]) / (double)p->temperature) / sum;
        if (p->top_p < 1 && reached >= (double)p->top_p) {
            n = i + 1;
            break;
        }
    }
    sum = 0;
    for (size_t i = 0; i < n; i++) {
        double w = exp(((double)logits[order[i]] - (double)logits[order[0]]) / (double)p->temperature);
        prob[order[i]] = w >= (double)p->min_p * best ? w : 0;
        sum += prob[order[i]];
    }
    for (size_t i = 0; i < n; i++)
        prob[order[i]] /= sum;
}

/* Draws many times and compares with the definition: nothing outside it, and a chi-square that chance exceeds once in 10,000. */
static void check_distribution(void **state, struct sampler_params p, const float *logits, int n_draws)
{
    static double prob[V];
    static unsigned seen[V];
    plain_distribution(logits, &p, prob);
    memset(seen, 0, sizeof seen);
    struct sampler *s = new_sampler(state, p);
    for (int i = 0; i < n_draws; i++)
        seen[pick(s, logits)]++;
    sampler_free(s);

    double chi = 0, rest_expected = 0, rest_seen = 0, bins = 0;
    for (int i = 0; i < V; i++) {
        double expected = prob[i] * n_draws;
        if (prob[i] == 0.0) {
            assert_int_equal(seen[i], 0);
            continue;
        }
        if (expected < 8) {
            rest_expected += expected;
            rest_seen += seen[i];
            continue;
        }
        chi += (seen[i] - expected) * (seen[i] - expected) / expected;
        bins++;
    }
    if (rest_expected > 0) {
        chi += (rest_seen - rest_expected) * (rest_seen - rest_expected) / fmax(rest_expected, 1);
        bins++;
    }
    double freedom = bins > 1 ? bins - 1 : 1;
    double wilson = 1 - 2 / (9 * freedom) + 3.72 * sqrt(2 / (9 * freedom)); /* Wilson and Hilferty's approximation of the 0.9999 quantile */
    if (chi > freedom * wilson * wilson * wilson)
        fail_msg("chi-square %.1f at %.0f degrees of freedom (T %g, top_k %d, top_p %g, min_p %g)", chi, freedom, (double)p.temperature, p.top_k,
                 (double)p.top_p, (double)p.min_p);
}

/* ---- greedy */

static void greedy_takes_the_highest_logit_and_the_lowest_id_on_a_tie(void **state)
{
    struct sampler_params p = off;
    p.temperature = 0;
    float logits[V];
    fill_logits(logits, 1, 8);
    logits[350] = logits[310] = logits[390] = 9;
    assert_int_equal(pick_once(state, p, logits), 310);
    logits[390] = nextafterf(9, 10);
    assert_int_equal(pick_once(state, p, logits), 390);
    fill(logits, -5);
    assert_int_equal(pick_once(state, p, logits), 0);
    fill(logits, 0.0f);
    logits[0] = -0.0f; /* equal to the others */
    assert_int_equal(pick_once(state, p, logits), 0);
}

static void greedy_ignores_seed_and_truncation(void **state)
{
    float logits[V];
    fill_logits(logits, 2, 8);
    struct sampler_params p = off;
    p.temperature = 0;
    int32_t best = pick_once(state, p, logits);
    p.top_k = 3;
    p.top_p = 0.1f;
    p.min_p = 0.5f;
    for (p.seed = 0; p.seed < 20; p.seed++)
        assert_int_equal(pick_once(state, p, logits), best);
}

/* ---- draws */

static void the_same_seed_gives_the_same_sequence_and_another_seed_another(void **state)
{
    float logits[V];
    fill_logits(logits, 3, 8);
    struct sampler_params p = off;
    p.seed = 42;
    struct sampler *a = new_sampler(state, p), *b = new_sampler(state, p);
    p.seed = 43;
    struct sampler *c = new_sampler(state, p);
    int same = 0;
    for (int i = 0; i < 200; i++) {
        int32_t id = pick(a, logits);
        assert_int_equal(pick(b, logits), id);
        same += pick(c, logits) == id;
    }
    assert_true(same < 50);
    sampler_free(a);
    sampler_free(b);
    sampler_free(c);
}

static void a_seed_gives_the_same_tokens_on_every_machine(void **state)
{
    /* Equal logits: the token is the usable id number floor(399 u). Computed with another implementation of the two generators. */
    static const int32_t want[12] = {155, 315, 99, 44, 153, 341, 360, 231, 347, 388, 376, 330};
    /* A ramp: exp() decides. */
    static const int32_t want_ramp[12] = {34, 102, 20, 8, 33, 123, 143, 59, 129, 188, 165, 113};
    float logits[V];
    fill(logits, 1.5f);
    struct sampler_params p = off;
    p.seed = 20240607;
    struct sampler *s = new_sampler(state, p);
    for (int i = 0; i < 12; i++)
        assert_int_equal(pick(s, logits), want[i]);
    sampler_free(s);
    for (int i = 0; i < V; i++)
        logits[i] = (float)i / -100.0f;
    p.temperature = 0.75f;
    p.top_p = 0.95f;
    s = new_sampler(state, p);
    for (int i = 0; i < 12; i++)
        assert_int_equal(pick(s, logits), want_ramp[i]);
    sampler_free(s);
}

static void draws_follow_the_temperature(void **state)
{
    float logits[V];
    struct sampler_params p = off;
    for (uint32_t seed = 1; seed <= 3; seed++) {
        fill_logits(logits, seed, 9);
        p.seed = seed;
        p.temperature = 1;
        check_distribution(state, p, logits, SOME_DRAWS);
        p.temperature = 0.6f;
        check_distribution(state, p, logits, SOME_DRAWS);
        p.temperature = 2.5f;
        check_distribution(state, p, logits, SOME_DRAWS);
    }
}

static void draws_follow_top_k(void **state)
{
    static const int ks[] = {1, 2, 20, 255, 256, 257, 330, 398, 399, 5000};
    float logits[V];
    struct sampler_params p = off;
    fill_logits(logits, 4, 6); /* one value may have several ids: ties */
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
        p.top_k = ks[i];
        p.seed = i;
        check_distribution(state, p, logits, SOME_DRAWS);
    }
    p.top_k = 1; /* minus zero ties with zero */
    fill(logits, 0.0f);
    logits[0] = -0.0f;
    assert_int_equal(pick_once(state, p, logits), 0);
}

static void draws_follow_top_p(void **state)
{
    static const float ps[] = {1e-6f, 0.5f, 0.95f, 0.9999999f};
    static const float spreads[] = {2, 6, 14}; /* from nearly uniform, where the nucleus is nearly everything, to peaked */
    float logits[V];
    struct sampler_params p = off;
    for (size_t k = 0; k < 3; k++) {
        fill_logits(logits, 5, spreads[k]);
        for (size_t i = 0; i < sizeof ps / sizeof *ps; i++) {
            p.top_p = ps[i];
            p.seed = i;
            check_distribution(state, p, logits, SOME_DRAWS);
        }
    }
}

static void draws_follow_min_p(void **state)
{
    static const float ps[] = {0.001f, 0.05f, 0.3f, 0.99f};
    float logits[V];
    struct sampler_params p = off;
    fill_logits(logits, 6, 8);
    for (size_t i = 0; i < sizeof ps / sizeof *ps; i++) {
        p.min_p = ps[i];
        p.seed = i;
        check_distribution(state, p, logits, SOME_DRAWS);
    }
}

static void draws_follow_all_truncations_together_in_their_order(void **state)
{
    static const struct {
        float temperature;
        int top_k;
        float top_p, min_p;
    } cases[] = {
        {1.0f, 20, 0.95f, 0}, /* the models' published defaults */
        {0.7f, 20, 0.8f, 0},     {1.3f, 40, 0.9f, 0.05f}, {0.6f, 350, 0.99f, 0},        {2.0f, 330, 0.9f, 0.02f},
        {0.2f, 300, 0.5f, 0.1f}, {5.0f, 0, 0.97f, 0.1f},  {1.0f, 256, 0.9999f, 0.001f},
    };
    float logits[V];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fill_logits(logits, 10 + (uint32_t)i, 7);
        struct sampler_params p = off;
        p.temperature = cases[i].temperature;
        p.top_k = cases[i].top_k;
        p.top_p = cases[i].top_p;
        p.min_p = cases[i].min_p;
        p.seed = i;
        check_distribution(state, p, logits, MANY_DRAWS);
    }
}

static void extreme_temperatures_and_logits_stay_defined(void **state)
{
    float logits[V];
    fill_logits(logits, 7, 8);
    struct sampler_params p = off;
    p.temperature = 0;
    logits[pick_once(state, p, logits)] += 1; /* no tie */
    int32_t best = pick_once(state, p, logits);
    static const float cold[] = {FLT_MIN, 1e-30f, 1e-4f};
    for (size_t i = 0; i < 3; i++) {
        p.temperature = cold[i];
        assert_int_equal(pick_once(state, p, logits), best);
    }
    p.temperature = FLT_MAX; /* uniform */
    check_distribution(state, p, logits, SOME_DRAWS);
    p.temperature = 1;
    for (int i = 0; i < V; i++)
        logits[i] = i % 2 ? FLT_MAX : -FLT_MAX;
    logits[11] = nextafterf(FLT_MAX, 0);
    check_distribution(state, p, logits, SOME_DRAWS);
    p.top_p = 0.5f;
    p.top_k = 300;
    check_distribution(state, p, logits, SOME_DRAWS);
}

/* ---- what is never drawn */

static void unusable_ids_are_never_drawn_and_never_reported(void **state)
{
    float logits[V];
    fill_logits(logits, 8, 4);
    logits[HOLE] = 50;
    for (int i = FIRST_UNUSED; i < V; i++)
        logits[i] = 60;
    static const struct logit_bias up[] = {{HOLE, 100}, {FIRST_UNUSED, 100}};
    struct sampler_params p = off;
    p.want_logprob = true;
    p.n_top = SAMPLER_MAX_TOP;
    for (int round = 0; round < 4; round++) {
        p.temperature = round == 0 ? 0 : 1;
        p.top_k = round == 2 ? 5 : 0;
        p.bias = round == 3 ? up : NULL;
        p.n_bias = round == 3 ? 2 : 0;
        struct sampler *s = new_sampler(state, p);
        for (int i = 0; i < 300; i++) {
            struct pick out;
            assert_int_equal(sampler_pick(s, logits, &out), 0);
            assert_true(usable(out.id));
            assert_int_equal(out.n_top, SAMPLER_MAX_TOP);
            for (int k = 0; k < out.n_top; k++)
                assert_true(usable(out.top[k].id));
            assert_true(out.top[0].logprob > -10); /* nor do they take probability: 50 would */
        }
        sampler_free(s);
    }
}

static void logits_that_are_not_finite_are_never_picked(void **state)
{
    float logits[V];
    struct sampler_params p = off;
    for (int round = 0; round < 3; round++) {
        p.temperature = round ? 1 : 0;
        p.top_k = round == 2 ? 10 : 0;
        fill(logits, NAN);
        logits[5] = INFINITY;
        logits[6] = -INFINITY;
        logits[HOLE] = 1;
        struct sampler *s = new_sampler(state, p);
        struct pick out;
        assert_int_equal(sampler_pick(s, logits, &out), -1); /* no finite logit */
        assert_int_equal(out.id, -1);
        logits[77] = -3;
        for (int i = 0; i < 20; i++)
            assert_int_equal(pick(s, logits), 77);
        logits[390] = -3;
        bool seen[2] = {false, false};
        for (int i = 0; i < 60; i++) {
            int32_t id = pick(s, logits);
            assert_true(id == 77 || id == 390);
            seen[id == 390] = true;
        }
        assert_true(seen[0]);
        assert_int_equal(seen[1], round > 0);
        sampler_free(s);
    }
}

static void a_bias_of_minus_100_bans_and_plus_100_forces(void **state)
{
    float logits[V];
    fill_logits(logits, 9, 5);
    logits[10] = 12;
    logits[11] = 11;
    struct logit_bias bias[] = {{10, -100}, {-1, 100}, {V, 100}, {INT32_MAX, 100}};
    struct sampler_params p = off;
    p.bias = bias;
    p.n_bias = 4; /* those outside the vocabulary are ignored */
    for (int greedy = 0; greedy < 2; greedy++) {
        p.temperature = greedy ? 0 : 1;
        struct sampler *s = new_sampler(state, p);
        bias[0] = (struct logit_bias){334, 100}; /* the sampler has its own copy */
        for (int i = 0; i < 500; i++)
            assert_true(pick(s, logits) != 10);
        sampler_free(s);
        s = new_sampler(state, p);
        for (int i = 0; i < 500; i++)
            assert_int_equal(pick(s, logits), 334);
        sampler_free(s);
        bias[0] = (struct logit_bias){10, -100};
    }
    bias[0] = (struct logit_bias){11, 1.5f}; /* and in between it is added */
    p.temperature = 0;
    assert_int_equal(pick_once(state, p, logits), 11);
    bias[0].bias = 0.5f;
    assert_int_equal(pick_once(state, p, logits), 10);
}

/* ---- penalties */

static void the_repeat_penalty_divides_positive_and_multiplies_negative_logits(void **state)
{
    float logits[V];
    struct sampler_params p = off;
    p.temperature = 0;
    static const struct {
        float a, b, penalty; /* a was seen, b was not */
        bool a_wins;
    } cases[] = {
        {2.0f, 1.5f, 1.33f, true},    {2.0f, 1.5f, 1.34f, false}, {-1.0f, -1.2f, 1.19f, true},
        {-1.0f, -1.2f, 1.21f, false}, {1.5f, 2.0f, 0.74f, true},  {1.5f, 2.0f, 0.76f, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fill(logits, -50);
        logits[40] = cases[i].a;
        logits[50] = cases[i].b;
        p.repeat_penalty = cases[i].penalty;
        struct sampler *s = new_sampler(state, p);
        const int32_t prompt[] = {40, 40, 40}; /* however often: once */
        sampler_prompt(s, prompt, 3);
        assert_int_equal(pick(s, logits), cases[i].a_wins ? 40 : 50);
        sampler_free(s);
    }
}

static void the_repeat_penalty_covers_the_last_64_tokens_of_prompt_and_answer(void **state)
{
    float logits[V];
    fill(logits, -50);
    logits[40] = 3;
    logits[50] = 2;
    struct sampler_params p = off;
    p.temperature = 0;
    p.repeat_penalty = 2;
    int32_t prompt[200];
    for (int i = 0; i < 200; i++)
        prompt[i] = 100;

    prompt[199 - SAMPLER_REPEAT_WINDOW + 1] = 40; /* the oldest one that counts */
    struct sampler *s = new_sampler(state, p);
    sampler_prompt(s, prompt, 200);
    assert_int_equal(pick(s, logits), 50); /* 1.5 against 2 */
    assert_int_equal(pick(s, logits), 40); /* forgotten: 3 against 1 */
    assert_int_equal(pick(s, logits), 40); /* its own answer counts: 1.5 against 1 */
    logits[60] = 1.75f;
    assert_int_equal(pick(s, logits), 60);
    sampler_free(s);

    prompt[199 - SAMPLER_REPEAT_WINDOW + 1] = 100;
    prompt[199 - SAMPLER_REPEAT_WINDOW] = 40; /* one too old */
    s = new_sampler(state, p);
    sampler_prompt(s, prompt, 200);
    assert_int_equal(pick(s, logits), 40);
    sampler_free(s);

    const int32_t strange[] = {-1, V, INT32_MAX, INT32_MIN}; /* ignored */
    s = new_sampler(state, p);
    sampler_prompt(s, strange, 4);
    assert_int_equal(pick(s, logits), 40);
    sampler_free(s);
}

static void presence_and_frequency_penalties_are_subtracted_for_the_answers_own_tokens(void **state)
{
    float logits[V];
    fill(logits, -50);
    logits[40] = 1.0f;
    logits[50] = 0.5f;
    struct sampler_params p = off;
    p.temperature = 0;
    const int32_t prompt[] = {40, 40, 40, 40};

    p.presence_penalty = 0.4f;
    struct sampler *s = new_sampler(state, p);
    sampler_prompt(s, prompt, 4);
    for (int i = 0; i < 5; i++) /* 0.6 against 0.5, however often */
        assert_int_equal(pick(s, logits), 40);
    sampler_free(s);

    p.presence_penalty = 0.6f;
    s = new_sampler(state, p);
    sampler_prompt(s, prompt, 4);
    assert_int_equal(pick(s, logits), 40); /* the prompt does not count */
    assert_int_equal(pick(s, logits), 50); /* 0.4 against 0.5 */
    assert_int_equal(pick(s, logits), 40); /* 0.4 against -0.1 */
    sampler_free(s);

    p.presence_penalty = 0;
    p.frequency_penalty = 0.2f;
    s = new_sampler(state, p);
    int n40 = 0, n50 = 0;
    for (int i = 0; i < 12; i++) {
        float a = 1.0f - 0.2f * (float)n40, b = 0.5f - 0.2f * (float)n50;
        int32_t id = pick(s, logits);
        assert_int_equal(id, a >= b ? 40 : 50);
        n40 += id == 40;
        n50 += id == 50;
    }
    assert_true(n40 > n50 && n50 >= 4);
    sampler_free(s);

    p.frequency_penalty = 0;
    p.presence_penalty = -2; /* a reward */
    logits[50] = 1.5f;
    s = new_sampler(state, p);
    assert_int_equal(pick(s, logits), 50);
    logits[40] = 3.0f;
    assert_int_equal(pick(s, logits), 50); /* 3.5 */
    logits[40] = 4.0f;
    assert_int_equal(pick(s, logits), 40);
    sampler_free(s);
}

static void penalties_and_bias_enter_the_distribution_in_the_documented_order(void **state)
{
    float logits[V], adjusted[V];
    fill_logits(logits, 12, 7);
    const int32_t prompt[] = {3, 4, 5, 3};
    static const struct logit_bias bias[] = {{3, 2.0f}, {9, -1.5f}};
    struct sampler_params p = off;
    p.temperature = 0.8f;
    p.top_k = 50;
    p.repeat_penalty = 1.3f;
    p.bias = bias;
    p.n_bias = 2;
    memcpy(adjusted, logits, sizeof adjusted);
    adjusted[3] += 2.0f; /* bias first, the penalty on its result */
    adjusted[9] -= 1.5f;
    for (int i = 3; i <= 5; i++)
        adjusted[i] = adjusted[i] > 0 ? adjusted[i] / 1.3f : adjusted[i] * 1.3f;
    static double prob[V];
    static unsigned seen[V];
    plain_distribution(adjusted, &p, prob);
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < 4000; i++) { /* a new sampler for each: nothing picked before counts */
        p.seed = (uint64_t)i;
        struct sampler *s = new_sampler(state, p);
        sampler_prompt(s, prompt, 4);
        seen[pick(s, logits)]++;
        sampler_free(s);
    }
    for (int i = 0; i < V; i++) {
        double expected = prob[i] * 4000, sigma = sqrt(expected * (1 - prob[i]));
        assert_true(fabs(seen[i] - expected) <= 4.5 * sigma + 1e-9);
    }
}

/* ---- log probabilities */

static void log_probabilities_are_those_of_the_models_own_logits(void **state)
{
    float logits[V];
    fill_logits(logits, 13, 9);
    logits[HOLE] = 30;
    logits[20] = NAN;
    double sum = 0;
    for (int32_t i = 0; i < V; i++)
        sum += usable(i) && i != 20 ? exp((double)logits[i]) : 0;
    static const struct logit_bias bias[] = {{7, 30}, {8, -100}};
    struct sampler_params p = off;
    p.want_logprob = true;
    p.n_top = 20;
    for (int round = 0; round < 3; round++) {
        p.temperature = round == 0 ? 0 : 1.7f;
        p.top_k = round == 1 ? 4 : 0;
        p.bias = round == 2 ? bias : NULL; /* none of these may show in the log probabilities */
        p.n_bias = round == 2 ? 2 : 0;
        p.repeat_penalty = round == 2 ? 1.5f : 1;
        struct sampler *s = new_sampler(state, p);
        for (int n = 0; n < 20; n++) {
            struct pick out;
            assert_int_equal(sampler_pick(s, logits, &out), 0);
            assert_true(fabs((double)out.logprob - ((double)logits[out.id] - log(sum))) < 1e-5);
            assert_int_equal(out.n_top, 20);
            for (int k = 0; k < 20; k++) {
                int32_t id = out.top[k].id;
                assert_true(fabs((double)out.top[k].logprob - ((double)logits[id] - log(sum))) < 1e-5);
                int better = 0;
                for (int32_t i = 0; i < V; i++)
                    better += usable(i) && (logits[i] > logits[id] || (logits[i] == logits[id] && i < id));
                assert_int_equal(better, k);
            }
        }
        sampler_free(s);
    }
}

static void alternatives_are_reported_only_as_far_as_asked_and_available(void **state)
{
    float logits[V];
    fill(logits, -INFINITY);
    logits[3] = 1;
    logits[4] = 2;
    logits[5] = 1;
    struct sampler_params p = off;
    struct pick out;
    p.want_logprob = true;
    static const int asked[] = {0, 2, 3, 4, 20, 1000, -1};
    static const int given[] = {0, 2, 3, 3, 3, 3, 0};
    for (size_t i = 0; i < 7; i++) {
        p.n_top = asked[i];
        struct sampler *s = new_sampler(state, p);
        assert_int_equal(sampler_pick(s, logits, &out), 0);
        assert_int_equal(out.n_top, given[i]);
        static const int32_t order[] = {4, 3, 5};
        for (int k = 0; k < given[i]; k++)
            assert_int_equal(out.top[k].id, order[k]);
        assert_true(out.logprob < 0 && out.logprob > -2);
        sampler_free(s);
    }
    p.want_logprob = false;
    p.n_top = 5;
    struct sampler *s = new_sampler(state, p);
    assert_int_equal(sampler_pick(s, logits, &out), 0);
    assert_int_equal(out.n_top, 0);
    sampler_free(s);
}

static void asking_for_log_probabilities_does_not_change_the_tokens(void **state)
{
    float logits[V], before[V];
    fill_logits(logits, 14, 7);
    memcpy(before, logits, sizeof before);
    struct sampler_params p = off;
    p.seed = 5;
    p.top_p = 0.9f;
    p.repeat_penalty = 1.1f;
    p.frequency_penalty = 0.1f;
    struct sampler *without = new_sampler(state, p);
    p.want_logprob = true;
    p.n_top = 5;
    struct sampler *with = new_sampler(state, p);
    for (int i = 0; i < 100; i++)
        assert_int_equal(pick(with, logits), pick(without, logits));
    assert_memory_equal(logits, before, sizeof before); /* and the row is the caller's */
    sampler_free(with);
    sampler_free(without);
    sampler_free(NULL);
}

/* ---- from the best logits alone */

static int better_first(const void *pa, const void *pb)
{
    const struct top_logit *a = pa, *b = pb;
    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static int best_of(const float *logits, int k, struct top_logit out[V])
{
    int n = 0;
    for (int32_t i = 0; i < V; i++)
        if (usable(i) && isfinite(logits[i]))
            out[n++] = (struct top_logit){.id = i, .logit = logits[i]};
    qsort(out, (size_t)n, sizeof *out, better_first);
    return n < k ? n : k;
}

static void the_best_logits_give_the_same_tokens_as_the_row(void **state)
{
    static const int top_ks[] = {1, 2, 7, 20, 40, 63};
    for (int kind = 0; kind < 24; kind++) {
        struct sampler_params p = off;
        p.seed = 100 + (uint64_t)kind;
        p.top_k = top_ks[kind % 6];
        p.temperature = kind < 6 ? 0.0f : kind % 2 ? 0.7f : 1.5f;
        p.top_p = kind % 3 == 1 ? 0.8f : 1.0f;
        p.min_p = kind % 4 == 3 ? 0.2f : 0.0f;
        struct sampler *row = new_sampler(state, p), *best = new_sampler(state, p);
        const int k = sampler_best(best);
        assert_int_equal(k, p.temperature > 0 ? p.top_k + 1 : 1);
        float logits[V];
        struct top_logit list[V] = {{0}};
        struct pick a, b;
        for (uint32_t i = 0; i < 300; i++) {
            fill_logits(logits, 7 * i + (uint32_t)kind, i % 5 ? 8.0f : 0.02f);
            if (i % 3 == 0) {
                logits[i % V] = NAN;
                logits[(i + 5) % V] = INFINITY;
                logits[FIRST_UNUSED + 3] = 99;
            }
            if (i % 7 == 0) /* fewer finite ones than are asked for */
                for (int j = 10; j < V; j++)
                    logits[j] = -INFINITY;
            const int n = best_of(logits, k, list);
            assert_int_equal(sampler_pick(row, logits, &a), sampler_pick_best(best, list, n, &b));
            assert_int_equal(a.id, b.id);
            assert_int_equal(b.n_top, 0);
        }
        assert_int_equal(sampler_pick_best(best, list, 0, &b), -1);
        assert_int_equal(b.id, -1);
        sampler_free(row);
        sampler_free(best);
    }
}

static void whoever_looks_beyond_the_best_logits_gets_the_row(void **state)
{
    const struct logit_bias bias = {.id = 1, .bias = 1};
    struct sampler_params rows[] = {off, off, off, off, off, off, off};
    rows[0].top_k = 0;
    rows[1].top_k = 64;
    for (int i = 2; i < 7; i++)
        rows[i].top_k = 20;
    rows[2].want_logprob = true;
    rows[3].repeat_penalty = 1.1f;
    rows[4].presence_penalty = 0.5f;
    rows[5].frequency_penalty = -0.5f;
    rows[6].bias = &bias;
    rows[6].n_bias = 1;
    for (int i = 0; i < 7; i++) {
        struct sampler *s = new_sampler(state, rows[i]);
        assert_int_equal(sampler_best(s), 0);
        sampler_free(s);
    }
    uint32_t words[(V + 31) / 32];
    sampler_usable(*state, words);
    for (int32_t i = 0; i < V; i++)
        assert_int_equal(words[i / 32] >> (i % 32) & 1, usable(i));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_highest_logit_and_the_lowest_id_on_a_tie),
        cmocka_unit_test(greedy_ignores_seed_and_truncation),
        cmocka_unit_test(the_same_seed_gives_the_same_sequence_and_another_seed_another),
        cmocka_unit_test(a_seed_gives_the_same_tokens_on_every_machine),
        cmocka_unit_test(draws_follow_the_temperature),
        cmocka_unit_test(draws_follow_top_k),
        cmocka_unit_test(draws_follow_top_p),
        cmocka_unit_test(draws_follow_min_p),
        cmocka_unit_test(draws_follow_all_truncations_together_in_their_order),
        cmocka_unit_test(extreme_temperatures_and_logits_stay_defined),
        cmocka_unit_test(unusable_ids_are_never_drawn_and_never_reported),
        cmocka_unit_test(logits_that_are_not_finite_are_never_picked),
        cmocka_unit_test(a_bias_of_minus_100_bans_and_plus_100_forces),
        cmocka_unit_test(the_repeat_penalty_divides_positive_and_multiplies_negative_logits),
        cmocka_unit_test(the_repeat_penalty_covers_the_last_64_tokens_of_prompt_and_answer),
        cmocka_unit_test(presence_and_frequency_penalties_are_subtracted_for_the_answers_own_tokens),
        cmocka_unit_test(penalties_and_bias_enter_the_distribution_in_the_documented_order),
        cmocka_unit_test(log_probabilities_are_those_of_the_models_own_logits),
        cmocka_unit_test(alternatives_are_reported_only_as_far_as_asked_and_available),
        cmocka_unit_test(asking_for_log_probabilities_does_not_change_the_tokens),
        cmocka_unit_test(the_best_logits_give_the_same_tokens_as_the_row),
        cmocka_unit_test(whoever_looks_beyond_the_best_logits_gets_the_row),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, setup, teardown);
}
