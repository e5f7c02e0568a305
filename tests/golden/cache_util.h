/* tests/golden/cache_util.h: running prompts with and without the prefix cache, and comparing every bit of what comes out. */
#ifndef BEDSIDE_TESTS_CACHE_UTIL_H
#define BEDSIDE_TESTS_CACHE_UTIL_H

#include "tests/golden/golden_util.h"

#include <ftw.h>
#include <unistd.h>

#include "engine/cache_disk.h"

enum { ANSWER = 64 }; /* greedy tokens of a run */

/* What a run computed: the logits of the prompt's last token and of each answer token, and the answer. */
struct run {
    struct cache_result cache;
    int n_answer;
    int32_t answer[ANSWER];
    float *rows; /* [1 + n_answer][V] */
};

static inline void run_free(struct run *r)
{
    free(r->rows);
    r->rows = NULL;
}

/* Feeds prompt[sequence_length(s)..upto) in steps that end where the sequence asks for it. */
static inline void run_feed(struct engine *e, struct sequence *s, const int32_t *prompt, int upto)
{
    while (sequence_length(s) < upto) {
        const int at = sequence_length(s), stop = sequence_stop(s);
        assert_true(stop > at);
        const int left = (stop < upto ? stop : upto) - at;
        struct step_item it = {.seq = s, .tokens = prompt + at, .n_tokens = left < 512 ? left : 512};
        golden_step(e, &it, 1);
    }
}

static inline struct sequence *run_start(struct engine *e, const struct sequence_options *o, struct cache_result *r)
{
    struct error err = {""};
    struct sequence *s = sequence_start(e, o, r, &err);
    if (!s)
        fail_msg("%s", err.text);
    assert_int_equal(sequence_length(s), r->cached);
    assert_in_range(r->cached, 0, o->n_prompt - 1);
    assert_in_range(r->matched, r->cached, o->n_prompt);
    assert_true(r->cached > 0 || r->miss != CACHE_MISS_NONE);
    assert_int_equal(r->source == CACHE_FROM_NONE, r->cached == 0);
    assert_memory_equal(sequence_tokens(s) ? sequence_tokens(s) : o->prompt, o->prompt, (size_t)r->cached * sizeof *o->prompt);
    return s;
}

/* Reads the prompt and answers greedily: n_answer tokens, all of them fed. */
static inline struct run run_with(struct engine *e, const struct sequence_options *o, int n_answer)
{
    const size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    struct run r = {.n_answer = n_answer};
    r.rows = golden_rows(e, 1 + n_answer);
    struct sequence *s = run_start(e, o, &r.cache);
    run_feed(e, s, o->prompt, o->n_prompt - 1);
    golden_feed(e, s, o->prompt + o->n_prompt - 1, 1, 1, r.rows, NULL);
    for (int i = 0; i < n_answer; i++) {
        r.answer[i] = golden_argmax(r.rows + (size_t)i * v, v);
        golden_feed(e, s, &r.answer[i], 1, 1, r.rows + (size_t)(i + 1) * v, NULL);
    }
    assert_memory_equal(sequence_tokens(s), o->prompt, (size_t)o->n_prompt * sizeof *o->prompt);
    sequence_free(e, s);
    return r;
}

/* As far as both go. */
static inline void run_same(const struct engine *e, const struct run *a, const struct run *b, const char *what)
{
    const size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    const int n = a->n_answer < b->n_answer ? a->n_answer : b->n_answer;
    for (int i = 0; i <= n; i++)
        if (memcmp(a->rows + (size_t)i * v, b->rows + (size_t)i * v, v * sizeof(float)) != 0)
            fail_msg("%s: the logits after answer token %d differ from the cold run's (%d tokens from the cache)", what, i, b->cache.cached);
    assert_memory_equal(a->answer, b->answer, (size_t)n * sizeof a->answer[0]);
}

/* The prompt with whatever the cache gives, compared with a cold run on the same engine. `answer` (may be NULL) receives the answer. */
static inline struct cache_result run_exact(struct engine *e, const struct sequence_options *o, int n_answer, const char *what, int32_t *answer)
{
    struct sequence_options cold_options = *o;
    cold_options.no_cache = true;
    cold_options.image = NULL;
    struct run cold = run_with(e, &cold_options, n_answer), own = run_with(e, o, n_answer);
    assert_int_equal(cold.cache.miss, CACHE_MISS_OFF);
    assert_int_equal(cold.cache.cached, 0);
    run_same(e, &cold, &own, what);
    if (answer)
        memcpy(answer, own.answer, (size_t)n_answer * sizeof *answer);
    run_free(&cold);
    run_free(&own);
    return own.cache;
}

/* ---- the disk ---- */

struct folder {
    char path[64];
};

static inline struct folder new_folder(void)
{
    struct folder f = {"/tmp/bedside-cache-XXXXXX"};
    const char *tmp = getenv("TMPDIR");
    if (tmp && strlen(tmp) < 32)
        snprintf(f.path, sizeof f.path, "%s/bedside-cache-XXXXXX", tmp);
    assert_non_null(mkdtemp(f.path));
    return f;
}

static inline int remove_entry(const char *path, const struct stat *info, int type, struct FTW *at)
{
    (void)info;
    (void)type;
    (void)at;
    return remove(path);
}

static inline void remove_folder(const struct folder *f)
{
    assert_int_equal(nftw(f->path, remove_entry, 8, FTW_DEPTH | FTW_PHYS), 0);
}

/* An engine that writes to the folder, as a server does. */
struct server {
    struct cache_disk *disk;
    struct engine *e;
};

static inline struct server server_open(const struct engine_options *options, const struct folder *f)
{
    struct server s = {0};
    struct error err = {""};
    struct cache_disk_options d = {.dir = f->path};
    if (cache_disk_open(&s.disk, &d, &err))
        fail_msg("%s", err.text);
    struct engine_options o = *options;
    o.disk = s.disk;
    s.e = golden_engine_with(&o);
    return s;
}

static inline void server_close(struct server *s)
{
    engine_close(s->e);
    cache_disk_close(s->disk);
}

/* What the disk has for a prompt. */
static inline bool read_image(const struct server *s, const char *ns, const int32_t *ids, int n, struct cache_image *image)
{
    struct cache_key keys[64], before = cache_key_root(engine_info(s->e)->model_id, ns);
    const int cells = (n - 1) / GRID;
    assert_in_range(cells, 0, 64);
    for (int i = 0; i < cells; i++)
        before = keys[i] = cache_key_next(&before, ids + (size_t)i * GRID, GRID);
    struct cache_tail tails[CACHE_TAILS_MAX];
    const int n_tails = engine_cache_tails(s->e, ids, n, tails);
    for (int i = 0; i < n_tails; i++) {
        const int at = tails[i].position / GRID;
        tails[i].key = cache_key_next(&keys[at - 1], ids + (size_t)at * GRID, tails[i].position % GRID);
    }
    const struct cache_text text = {.keys = keys, .ids = ids, .n = cells, .tails = tails, .n_tails = n_tails};
    return cache_disk_read(s->disk, ns, &text, 0, image);
}

#endif
