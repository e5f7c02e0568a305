/* engine/sampler.c: from a row of logits to a token.
 *
 * Definitions (usable ids only; a logit that is not finite, NaN and +inf included, counts as -inf and is never picked):
 *   adjusted  l[i] = logit[i] + bias[i]; then for every distinct id of the last SAMPLER_REPEAT_WINDOW tokens l / r if l > 0, else l * r
 *             (repeat penalty r, as in CTRL and Hugging Face); then l -= presence + frequency * count for ids the answer already holds.
 *   greedy    the highest l, the lowest id on a tie.
 *   otherwise ids are ranked by l, the lower id first on a tie, with weights w[i] = exp((l[i] - max l) / temperature), in double.
 *             top_k keeps the first k; top_p the shortest beginning of those whose weights reach top_p of the weights top_k left;
 *             min_p those with w >= min_p (the best has w = 1). The best is always kept.
 *   draw      u in [0, 1) from xoshiro256**; the first kept token, in ascending order of id, at which the running sum exceeds
 *             u * total. Order of id and not of rank: noise in the last bit of two near-equal logits then hardly ever changes a draw.
 *
 * exp() is written here, because the C library's may differ in the last bit from one machine to the next; everything else is IEEE
 * arithmetic in a fixed order. A row of 248,320 logits is looked at a fixed number of times: a few tenths of a millisecond with a small top_k,
 * a few milliseconds for the whole vocabulary. */
#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "engine/backend.h"

enum {
    SMALL = 256,                  /* up to here the best are found by a heap, beyond by sorting everything */
    RADIX_BITS = 11,              /* three passes over the 32 bits of a logit */
    RADIX_SIZE = 1 << RADIX_BITS, /* counters fit the first-level cache */
};

/* A logit and its id as one number: a greater key is a better rank (higher logit, then lower id). */
typedef uint64_t rank_key;

struct sampler {
    struct sampler_params params; /* params.bias points at the copy below */
    struct logit_bias *bias;
    int32_t n_vocab;

    struct text_range *usable; /* [n_usable] ranges [begin, end) of ids that may be picked */
    size_t n_usable;

    float *adjusted;          /* [n_vocab] l */
    double *weights;          /* [n_vocab] w of the ids that were weighed in this pick */
    rank_key *keys;           /* [n_vocab] finite ones, ascending id */
    rank_key *sorted, *spare; /* [n_vocab] each; touched only where sorting is needed */

    int32_t recent[SAMPLER_REPEAT_WINDOW]; /* ring of the last tokens */
    size_t n_recent, recent_at;
    uint32_t *count;  /* [n_vocab] of the answer's tokens; NULL without presence and frequency penalty */
    int32_t *counted; /* [n_counted <= n_vocab] the ids with count > 0 */
    size_t n_counted;

    uint64_t random[4];
};

/* ---- random numbers */

/* One step of splitmix64 (Steele, Lea, Flood 2014); spreads a seed over the state. */
static uint64_t splitmix64(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static uint64_t rotate_left(uint64_t x, int k)
{
    return x << k | x >> (64 - k);
}

/* xoshiro256** (Blackman, Vigna 2018): the next 64 random bits. */
static uint64_t random_bits(uint64_t s[4])
{
    uint64_t result = rotate_left(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

/* Uniform in [0, 1), a multiple of 2^-53. */
static double random_unit(uint64_t s[4])
{
    return (double)(random_bits(s) >> 11) * 0x1p-53;
}

/* ---- numbers */

/* exp(x) for x <= 0, the same bits on every machine; relative error below 1e-15, 0 below -700. */
static inline double exp_down(double x)
{
    if (!(x > -700.0))
        return 0.0;
    /* x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the first exact in the product with n */
    double n = (double)(int)(x * 1.4426950408889634 - 0.5);
    double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
    /* Taylor polynomial to r^13 / 13!, in pairs so that the processor can overlap them (Estrin's scheme) */
    double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
    double low = ((1.0 + r) + (1.0 / 2 + 1.0 / 6 * r) * r2) + ((1.0 / 24 + 1.0 / 120 * r) + (1.0 / 720 + 1.0 / 5040 * r) * r2) * r4;
    double high = ((1.0 / 40320 + 1.0 / 362880 * r) + (1.0 / 3628800 + 1.0 / 39916800 * r) * r2) + (1.0 / 479001600 + 1.0 / 6227020800.0 * r) * r4;
    double p = low + high * r8;
    uint64_t bits = (uint64_t)((int)n + 1023) << 52; /* 2^n; n >= -1010, so never subnormal */
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static rank_key key_of(float logit, int32_t id)
{
    uint32_t bits;
    logit += 0.0f; /* -0 ranks as +0 */
    memcpy(&bits, &logit, sizeof bits);
    bits ^= bits >> 31 ? 0xFFFFFFFFu : 0x80000000u; /* order of floats to order of integers */
    return (uint64_t)bits << 32 | (0xFFFFFFFFu - (uint32_t)id);
}

static int32_t key_id(rank_key key)
{
    return (int32_t)(0xFFFFFFFFu - (uint32_t)key);
}

static float key_logit(rank_key key)
{
    uint32_t bits = (uint32_t)(key >> 32);
    bits ^= bits >> 31 ? 0x80000000u : 0xFFFFFFFFu;
    float logit;
    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

/* ---- ranking */

static void sift_down(rank_key *heap, size_t n, size_t i)
{
    rank_key key = heap[i];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n)
            break;
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= key)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

/* Writes the k (<= n) greatest of keys[0..n) to best, descending. A heap whose least element is the bar the others must clear. */
static void greatest_by_heap(const rank_key *keys, size_t n, size_t k, rank_key *best)
{
    if (k == 0)
        return;
    memcpy(best, keys, k * sizeof *best);
    for (size_t i = k / 2; i-- > 0;)
        sift_down(best, k, i);
    for (size_t i = k; i < n; i++) {
        if (keys[i] > best[0]) {
            best[0] = keys[i];
            sift_down(best, k, 0);
        }
    }
    for (size_t end = k - 1; end > 0; end--) { /* the least goes last */
        rank_key least = best[0];
        best[0] = best[end];
        best[end] = least;
        sift_down(best, end, 0);
    }
}

/* Sorts all keys, descending, into s->sorted: least significant digit first over the logit's bits. Keys come in ascending id, and the
 * sort is stable, so equal logits stay in that order. */
static void sort_all(struct sampler *s, size_t n)
{
    const rank_key *from = s->keys;
    rank_key *to = s->sorted;
    for (int pass = 0; pass < 3; pass++) {
        int shift = 32 + pass * RADIX_BITS;
        size_t at[RADIX_SIZE] = {0};
        for (size_t i = 0; i < n; i++)
            at[from[i] >> shift & (RADIX_SIZE - 1)]++;
        size_t sum = 0;
        for (size_t d = RADIX_SIZE; d-- > 0;) { /* the greatest digit first */
            size_t digits = at[d];
            at[d] = sum;
            sum += digits;
        }
        for (size_t i = 0; i < n; i++)
            to[at[from[i] >> shift & (RADIX_SIZE - 1)]++] = from[i];
        from = to;
        to = to == s->sorted ? s->spare : s->sorted;
    }
}

static int compare_by_id(const void *pa, const void *pb)
{
    rank_key a, b;
    memcpy(&a, pa, sizeof a);
    memcpy(&b, pb, sizeof b);
    return key_id(a) < key_id(b) ? -1 : key_id(a) > key_id(b);
}

/* ---- steps of a pick */

/* Fills s->adjusted for usable ids. */
static void adjust(struct sampler *s, const float *logits)
{
    const struct sampler_params *p = &s->params;
    memcpy(s->adjusted, logits, (size_t)s->n_vocab * sizeof *logits);
    for (size_t i = 0; i < p->n_bias; i++)
        if (p->bias[i].id >= 0 && p->bias[i].id < s->n_vocab)
            s->adjusted[p->bias[i].id] += p->bias[i].bias;
    if (p->repeat_penalty != 1.0f) {
        for (size_t i = 0; i < s->n_recent; i++) {
            int32_t id = s->recent[i];
            bool again = false;
            for (size_t k = 0; k < i && !again; k++)
                again = s->recent[k] == id;
            if (again) /* however often it occurred */
                continue;
            float l = s->adjusted[id];
            s->adjusted[id] = l > 0 ? l / p->repeat_penalty : l * p->repeat_penalty;
        }
    }
    for (size_t i = 0; i < s->n_counted; i++) {
        int32_t id = s->counted[i];
        s->adjusted[id] -= p->presence_penalty + p->frequency_penalty * (float)s->count[id];
    }
}

/* Fills s->keys from the finite values among the usable ids, ascending id; their number. *max is the highest. */
static size_t collect(struct sampler *s, const float *values, float *max)
{
    size_t n = 0;
    float highest = -INFINITY;
    rank_key *keys = s->keys;
    for (size_t r = 0; r < s->n_usable; r++) {
        for (size_t i = s->usable[r].begin; i < s->usable[r].end; i++) {
            float value = values[i];
            if (!isfinite(value))
                continue;
            keys[n++] = key_of(value, (int32_t)i);
            highest = value > highest ? value : highest;
        }
    }
    *max = highest;
    return n;
}

/* The token of rank 0 among finite values of usable ids, or -1. */
static int32_t best_id(const struct sampler *s, const float *values)
{
    int32_t best = -1;
    float max = -INFINITY;
    for (size_t r = 0; r < s->n_usable; r++) {
        for (size_t i = s->usable[r].begin; i < s->usable[r].end; i++) {
            if (values[i] > max && isfinite(values[i])) {
                max = values[i];
                best = (int32_t)i;
            }
        }
    }
    return best;
}

/* Fills s->weights for the ids of these keys; their sum. */
static double weigh(struct sampler *s, const rank_key *keys, size_t n, float max)
{
    double sum = 0, temperature = (double)s->params.temperature;
    for (size_t i = 0; i < n; i++) {
        double w = exp_down(((double)key_logit(keys[i]) - (double)max) / temperature);
        s->weights[key_id(keys[i])] = w;
        sum += w;
    }
    return sum;
}

/* Length of the shortest beginning of ranked[0..n), already weighed, whose weight reaches `target`; n + 1 when even all of it does not. */
static size_t reach(const struct sampler *s, const rank_key *ranked, size_t n, double target)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += s->weights[key_id(ranked[i])];
        if (sum >= target)
            return i + 1;
    }
    return n + 1;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Applies top_k and top_p to s->keys[0..n): returns how many are kept, weighed, in s->keys from the start, ascending id. */
static size_t keep_ranked(struct sampler *s, size_t n, float max)
{
    const struct sampler_params *p = &s->params;
    size_t k = p->top_k > 0 ? smaller((size_t)p->top_k, n) : n;
    bool nucleus = p->top_p < 1.0f;
    if (k == n && !nucleus) {
        weigh(s, s->keys, n, max);
        return n;
    }

    /* The best `ranked` of them, in order. Without top_k a nucleus is usually small too: try that before sorting everything. */
    size_t ranked = smaller(k, SMALL);
    if (k > SMALL && k < n) {
        sort_all(s, n);
        ranked = k;
    } else {
        greatest_by_heap(s->keys, n, ranked, s->sorted);
    }
    double total = k < n ? weigh(s, s->sorted, k, max) : weigh(s, s->keys, n, max);
    size_t kept = k;
    if (nucleus) {
        double target = (double)p->top_p * total;
        kept = reach(s, s->sorted, ranked, target);
        if (kept > ranked && ranked < k) {
            sort_all(s, n);
            kept = reach(s, s->sorted, k, target);
        }
        kept = smaller(kept, k); /* the order of summation may leave the sum just short */
    }

    /* Back to ascending id. */
    if (kept <= SMALL) {
        qsort(s->sorted, kept, sizeof *s->sorted, compare_by_id);
        memcpy(s->keys, s->sorted, kept * sizeof *s->keys);
        return kept;
    }
    rank_key bar = s->sorted[kept - 1];
    size_t n_kept = 0;
    for (size_t i = 0; i < n; i++)
        if (s->keys[i] >= bar)
            s->keys[n_kept++] = s->keys[i];
    return n_kept;
}

/* Draws from s->keys[0..n), ascending id, of which `max` is the highest logit; -1 when n is 0. */
static int32_t draw(struct sampler *s, size_t n, float max)
{
    if (n == 0)
        return -1;
    n = keep_ranked(s, n, max);
    double min_weight = (double)s->params.min_p, total = 0;
    for (size_t i = 0; i < n; i++) {
        double w = s->weights[key_id(s->keys[i])];
        total += w >= min_weight ? w : 0.0;
    }
    double target = random_unit(s->random) * total, sum = 0;
    int32_t id = -1;
    for (size_t i = 0; i < n; i++) {
        double w = s->weights[key_id(s->keys[i])];
        if (w < min_weight || w == 0.0)
            continue;
        id = key_id(s->keys[i]);
        sum += w;
        if (sum > target)
            break;
    }
    return id; /* the last one kept when rounding left the sum short */
}

/* Log probabilities of the model's own logits over the usable ids: of the picked token and of the best n_top. */
static void report(struct sampler *s, const float *logits, struct pick *out)
{
    float max;
    size_t n = collect(s, logits, &max);
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += exp_down((double)key_logit(s->keys[i]) - (double)max);
    double log_total = (double)max + log(sum);
    out->logprob = (float)((double)logits[out->id] - log_total);
    size_t n_top = s->params.n_top > 0 ? smaller(smaller((size_t)s->params.n_top, SAMPLER_MAX_TOP), n) : 0;
    rank_key best[SAMPLER_MAX_TOP];
    greatest_by_heap(s->keys, n, n_top, best);
    for (size_t i = 0; i < n_top; i++)
        out->top[i] = (struct token_logprob){key_id(best[i]), (float)((double)key_logit(best[i]) - log_total)};
    out->n_top = (int)n_top;
}

static void remember_recent(struct sampler *s, int32_t id)
{
    s->recent[s->recent_at] = id;
    s->recent_at = (s->recent_at + 1) % SAMPLER_REPEAT_WINDOW;
    s->n_recent = smaller(s->n_recent + 1, SAMPLER_REPEAT_WINDOW);
}

/* ---- interface */

/* Ranges of usable ids. 0, or -1 out of memory. */
static int find_usable(struct sampler *s, const struct tokenizer *t)
{
    size_t cap = 0;
    for (int32_t id = 0; id < s->n_vocab; id++) {
        if (!tokenizer_usable(t, id))
            continue;
        if (s->n_usable && s->usable[s->n_usable - 1].end == (size_t)id) {
            s->usable[s->n_usable - 1].end++;
            continue;
        }
        if (alloc_grow(&s->usable, &cap, s->n_usable + 1, sizeof *s->usable))
            return -1;
        s->usable[s->n_usable++] = (struct text_range){(size_t)id, (size_t)id + 1};
    }
    return 0;
}

struct sampler *sampler_new(const struct tokenizer *t, const struct sampler_params *params)
{
    struct sampler *s = alloc_array(1, sizeof *s);
    if (!s)
        return NULL;
    s->params = *params;
    s->n_vocab = tokenizer_vocab_size(t);
    size_t n = (size_t)s->n_vocab;
    s->bias = alloc_array(params->n_bias, sizeof *s->bias);
    s->adjusted = alloc_array(n, sizeof *s->adjusted);
    s->weights = alloc_array(n, sizeof *s->weights);
    s->keys = alloc_array(n, sizeof *s->keys);
    s->sorted = alloc_array(n, sizeof *s->sorted);
    s->spare = alloc_array(n, sizeof *s->spare);
    bool counts = params->presence_penalty != 0 || params->frequency_penalty != 0;
    if (counts) {
        s->count = alloc_array(n, sizeof *s->count);
        s->counted = alloc_array(n, sizeof *s->counted);
    }
    if (!s->bias || !s->adjusted || !s->weights || !s->keys || !s->sorted || !s->spare || (counts && (!s->count || !s->counted)) ||
        find_usable(s, t)) {
        sampler_free(s);
        return NULL;
    }
    if (params->n_bias)
        memcpy(s->bias, params->bias, params->n_bias * sizeof *s->bias);
    s->params.bias = s->bias;
    uint64_t seed = params->seed;
    for (int i = 0; i < 4; i++)
        s->random[i] = splitmix64(&seed);
    return s;
}

void sampler_free(struct sampler *s)
{
    if (!s)
        return;
    free(s->bias);
    free(s->usable);
    free(s->adjusted);
    free(s->weights);
    free(s->keys);
    free(s->sorted);
    free(s->spare);
    free(s->count);
    free(s->counted);
    free(s);
}

void sampler_prompt(struct sampler *s, const int32_t *ids, size_t n)
{
    for (size_t i = n > SAMPLER_REPEAT_WINDOW ? n - SAMPLER_REPEAT_WINDOW : 0; i < n; i++)
        if (ids[i] >= 0 && ids[i] < s->n_vocab)
            remember_recent(s, ids[i]);
}

/* The token is the next one of the answer. */
static void remember(struct sampler *s, int32_t id)
{
    remember_recent(s, id);
    if (s->count && s->count[id]++ == 0)
        s->counted[s->n_counted++] = id;
}

int sampler_best(const struct sampler *s)
{
    const struct sampler_params *p = &s->params;
    if (p->want_logprob || p->n_bias > 0 || p->repeat_penalty != 1.0f || p->presence_penalty != 0 || p->frequency_penalty != 0)
        return 0;
    if (p->temperature <= 0)
        return 1;
    /* One more than are kept, so that the same sums run in the same order as over a whole row. */
    return p->top_k > 0 && p->top_k < TOP_MOST ? p->top_k + 1 : 0;
}

void sampler_usable(const struct tokenizer *t, uint32_t *words)
{
    const int32_t n = tokenizer_vocab_size(t);
    memset(words, 0, ((size_t)n + 31) / 32 * sizeof *words);
    for (int32_t id = 0; id < n; id++)
        if (tokenizer_usable(t, id))
            words[id / 32] |= 1u << (id % 32);
}

int sampler_pick_best(struct sampler *s, const struct top_logit *best, int n, struct pick *out)
{
    *out = (struct pick){.id = -1};
    if (n < 1)
        return -1;
    if (s->params.temperature > 0) {
        for (int i = 0; i < n; i++)
            s->keys[i] = key_of(best[i].logit, best[i].id);
        qsort(s->keys, (size_t)n, sizeof *s->keys, compare_by_id);
        out->id = draw(s, (size_t)n, best[0].logit);
    } else {
        out->id = best[0].id;
    }
    remember(s, out->id);
    return 0;
}

int sampler_pick(struct sampler *s, const float *logits, struct pick *out)
{
    *out = (struct pick){.id = -1};
    const float *values = logits; /* with nothing to adjust the row is read in place */
    if (s->params.n_bias > 0 || s->params.repeat_penalty != 1.0f || s->n_counted > 0) {
        adjust(s, logits);
        values = s->adjusted;
    }
    if (s->params.temperature > 0) {
        float max;
        const size_t n = collect(s, values, &max);
        out->id = draw(s, n, max);
    } else {
        out->id = best_id(s, values);
    }
    if (out->id < 0)
        return -1;
    if (s->params.want_logprob)
        report(s, logits, out);
    remember(s, out->id);
    return 0;
}
