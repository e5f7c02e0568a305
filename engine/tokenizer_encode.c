/* engine/tokenizer_encode.c: text to token ids (spec/tokenizer-and-template.md sections 3 and 8).
 *
 * Added tokens are cut out first, in the text as it came, so that trusted ranges keep their offsets. Each stretch between them is then
 * made valid UTF-8, normalised, cut into pre-tokens and merged. Merges make only ordinary tokens, so nothing after the first step can
 * produce a control token. Every step is at most n log n in the length of the text, and none recurses. */
#include "engine/tokenizer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <uninorm.h>

#include "base/alloc.h"
#include "engine/tokenizer_impl.h"
#include "engine/tokenizer_split.h"
#include "engine/utf8.h"

enum { NO_NODE = -1 };

#define NO_RANK UINT32_MAX

/* A symbol of the piece being merged; the symbols form a list in text order. */
struct node {
    int32_t id;
    int32_t prev, next; /* NO_NODE at the ends */
    uint32_t rank;      /* of the merge with `next`, NO_RANK: none */
    int32_t merged;     /* what that merge gives */
};

/* What one call of tokenizer_encode works with. */
struct encoder {
    const struct tokenizer *t;
    unsigned flags;
    struct token_list *out;
    struct node *nodes;
    size_t nodes_cap;
    uint64_t *heap; /* rank << 32 | node: the least is the next merge, leftmost on ties */
    size_t heap_cap, heap_len;
    struct buf clean; /* a stretch with U+FFFD for what was invalid */
};

void token_list_free(struct token_list *list)
{
    free(list->ids);
    *list = (struct token_list){0};
}

int token_list_add(struct token_list *list, int32_t id)
{
    if (alloc_grow(&list->ids, &list->cap, list->len + 1, sizeof *list->ids))
        return -1;
    list->ids[list->len++] = id;
    return 0;
}

/* ---- merging the byte pairs of one pre-token */

static void heap_push(struct encoder *e, uint64_t key)
{
    size_t i = e->heap_len++;
    while (i > 0) {
        size_t up = (i - 1) / 2;
        if (e->heap[up] <= key)
            break;
        e->heap[i] = e->heap[up];
        i = up;
    }
    e->heap[i] = key;
}

static uint64_t heap_pop(struct encoder *e)
{
    uint64_t least = e->heap[0], last = e->heap[--e->heap_len];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= e->heap_len)
            break;
        if (child + 1 < e->heap_len && e->heap[child + 1] < e->heap[child])
            child++;
        if (e->heap[child] >= last)
            break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    e->heap[i] = last;
    return least;
}

/* Looks up the merge of a node with its right neighbour and queues it. */
static void offer(struct encoder *e, int32_t at)
{
    struct node *node = &e->nodes[at];
    node->rank = NO_RANK;
    if (node->next == NO_NODE)
        return;
    const struct merge *m = merge_find(e->t, node->id, e->nodes[node->next].id);
    if (!m)
        return;
    node->rank = m->rank;
    node->merged = m->id;
    heap_push(e, (uint64_t)m->rank << 32 | (uint32_t)at);
}

/* Appends the ids of one pre-token of `len` >= 1 bytes. 0, or -1 out of memory. */
static int merge_piece(struct encoder *e, const unsigned char *bytes, size_t len)
{
    const struct tokenizer *t = e->t;
    if (len == 1)
        return token_list_add(e->out, t->byte_id[bytes[0]]);
    /* Each merge takes one entry off the heap and adds at most two: it never holds more than 2 * len. */
    if (alloc_grow(&e->nodes, &e->nodes_cap, len, sizeof *e->nodes) || alloc_grow(&e->heap, &e->heap_cap, 2 * len, sizeof *e->heap))
        return -1;
    for (size_t i = 0; i < len; i++)
        e->nodes[i] = (struct node){t->byte_id[bytes[i]], (int32_t)i - 1, i + 1 < len ? (int32_t)i + 1 : NO_NODE, NO_RANK, 0};
    e->heap_len = 0;
    for (size_t i = 0; i + 1 < len; i++)
        offer(e, (int32_t)i);

    while (e->heap_len > 0) {
        uint64_t key = heap_pop(e);
        int32_t at = (int32_t)(key & UINT32_MAX);
        struct node *left = &e->nodes[at];
        if (left->rank != (uint32_t)(key >> 32)) /* since it was queued, one of the pair was merged with another */
            continue;
        struct node *right = &e->nodes[left->next];
        left->id = left->merged;
        left->next = right->next;
        if (right->next != NO_NODE)
            e->nodes[right->next].prev = at;
        right->rank = NO_RANK; /* what is queued for it is void */
        offer(e, at);
        if (left->prev != NO_NODE)
            offer(e, left->prev);
    }

    for (int32_t at = 0; at != NO_NODE; at = e->nodes[at].next)
        if (token_list_add(e->out, e->nodes[at].id))
            return -1;
    return 0;
}

/* ---- a stretch of text between added tokens */

/* Whether the text needs repair (invalid UTF-8) and whether normalisation could change it: composition and canonical equivalents begin
 * at U+0300. */
static void inspect(const char *text, size_t len, bool *valid, bool *may_compose)
{
    *valid = true;
    *may_compose = false;
    for (size_t at = 0; at < len;) {
        uint32_t cp;
        size_t used;
        if (utf8_decode(text + at, len - at, &cp, &used) != UTF8_OK)
            *valid = false;
        else if (cp >= 0x300)
            *may_compose = true;
        at += used;
    }
}

static int encode_stretch(struct encoder *e, const char *text, size_t len, struct error *err)
{
    bool valid, may_compose;
    uint8_t *normal = NULL;
    int rc = -1;
    inspect(text, len, &valid, &may_compose);
    if (!valid) {
        struct utf8_stream stream = {0};
        buf_clear(&e->clean);
        utf8_stream_add(&stream, text, len, &e->clean);
        utf8_stream_end(&stream, &e->clean);
        if (e->clean.failed)
            goto no_memory;
        text = e->clean.data;
        len = e->clean.len;
    }
    if (may_compose && (e->flags & TOKENIZER_NFC)) {
        size_t normal_len = 0;
        normal = u8_normalize(UNINORM_NFC, (const uint8_t *)text, len, NULL, &normal_len);
        if (!normal)
            goto no_memory; /* the text is valid, so nothing else can fail */
        text = (const char *)normal;
        len = normal_len;
    }
    if (len > INT32_MAX) { /* replacement may triple it */
        error_set(err, "the text is longer than 2 GiB: shorten it");
        goto done;
    }
    for (size_t at = 0; at < len;) {
        size_t end = split_next(e->t->pattern, text, len, at);
        if (merge_piece(e, (const unsigned char *)text + at, end - at))
            goto no_memory;
        at = end;
    }
    rc = 0;
    goto done;
no_memory:
    error_set(err, "out of memory while tokenizing a text of %zu bytes", len);
done:
    free(normal);
    return rc;
}

/* ---- added tokens */

/* Occurrences of added tokens: order << 32 | offset while they compete, then offset << 32 | order of the winners. */
struct matches {
    uint64_t *keys;
    size_t len, cap;
};

static int add_match(struct matches *m, uint64_t key)
{
    if (alloc_grow(&m->keys, &m->cap, m->len + 1, sizeof *m->keys))
        return -1;
    m->keys[m->len++] = key;
    return 0;
}

static int compare_keys(const void *pa, const void *pb)
{
    uint64_t a, b;
    memcpy(&a, pa, sizeof a);
    memcpy(&b, pb, sizeof b);
    return a < b ? -1 : a > b;
}

/* First of added[lo..hi), all longer than `depth` and equal up to there, whose byte at `depth` is >= byte. */
static uint32_t lower_bound(const struct added_token *added, uint32_t lo, uint32_t hi, uint32_t depth, unsigned byte)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if ((unsigned char)added[mid].text[depth] < byte)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Adds every added token that starts at text[at] and may match there: user-defined ones, and control tokens that end by `trusted_end`. */
static int match_at(const struct tokenizer *t, const char *text, size_t len, size_t at, size_t trusted_end, struct matches *m)
{
    unsigned char first = (unsigned char)text[at];
    uint32_t lo = t->added_first[first], hi = t->added_first[first + 1];
    for (uint32_t depth = 1; lo < hi; depth++) { /* added[lo..hi) agree with the text in the first `depth` bytes */
        const struct added_token *a = &t->added[lo];
        if (a->len == depth) {
            if ((!a->control || at + depth <= trusted_end) && add_match(m, (uint64_t)a->order << 32 | at))
                return -1;
            lo++;
        }
        if (at + depth == len)
            break;
        unsigned char next = (unsigned char)text[at + depth];
        lo = lower_bound(t->added, lo, hi, depth, next);
        hi = lower_bound(t->added, lo, hi, depth, next + 1u);
    }
    return 0;
}

/* Leaves in *m the added tokens of the text as offset << 32 | order, ascending: longest token first over the whole text, each from left
 * to right. 0, or -1 out of memory. */
static int find_added(const struct tokenizer *t, const char *text, size_t len, const struct text_range *trusted, size_t n_trusted, struct matches *m)
{
    size_t range = 0;
    for (size_t at = 0; at < len; at++) {
        unsigned char first = (unsigned char)text[at];
        if (t->added_first[first] == t->added_first[first + 1])
            continue;
        while (range < n_trusted && trusted[range].end <= at)
            range++;
        size_t trusted_end = range < n_trusted && trusted[range].begin <= at ? trusted[range].end : 0;
        if (match_at(t, text, len, at, trusted_end, m))
            return -1;
    }
    if (m->len == 0)
        return 0;

    bool *taken = alloc_array(len, sizeof *taken);
    if (!taken)
        return -1;
    qsort(m->keys, m->len, sizeof *m->keys, compare_keys);
    size_t kept = 0;
    for (size_t i = 0; i < m->len; i++) {
        uint32_t order = (uint32_t)(m->keys[i] >> 32), at = (uint32_t)(m->keys[i] & UINT32_MAX);
        uint32_t token_len = t->added[t->added_by_order[order]].len;
        if (taken[at] || taken[at + token_len - 1]) /* what was taken before is no shorter: it covers an end or nothing */
            continue;
        memset(taken + at, true, token_len);
        m->keys[kept++] = (uint64_t)at << 32 | order;
    }
    free(taken);
    m->len = kept;
    qsort(m->keys, m->len, sizeof *m->keys, compare_keys);
    return 0;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, const struct text_range *trusted, size_t n_trusted, unsigned flags,
                     struct token_list *out, struct error *err)
{
    if (len > INT32_MAX)
        return error_set(err, "the text is longer than 2 GiB: shorten it");
    for (size_t i = 0; i < n_trusted; i++)
        if (trusted[i].begin > trusted[i].end || trusted[i].end > len || (i > 0 && trusted[i].begin < trusted[i - 1].end))
            return error_set(err, "trusted range %zu is not ascending or lies outside the text", i);

    struct encoder e = {.t = t, .flags = flags, .out = out};
    struct matches m = {0};
    size_t out_len = out->len, at = 0;
    int rc = -1;
    if (find_added(t, text, len, trusted, n_trusted, &m)) {
        error_set(err, "out of memory while tokenizing a text of %zu bytes", len);
        goto done;
    }
    for (size_t i = 0; i < m.len; i++) {
        const struct added_token *a = &t->added[t->added_by_order[m.keys[i] & UINT32_MAX]];
        size_t begin = (size_t)(m.keys[i] >> 32);
        if (begin > at && encode_stretch(&e, text + at, begin - at, err))
            goto done;
        if (token_list_add(out, a->id)) {
            error_set(err, "out of memory while tokenizing a text of %zu bytes", len);
            goto done;
        }
        at = begin + a->len;
    }
    if (len > at && encode_stretch(&e, text + at, len - at, err))
        goto done;
    rc = 0;
done:
    if (rc)
        out->len = out_len; /* all or nothing */
    free(m.keys);
    free(e.nodes);
    free(e.heap);
    buf_free(&e.clean);
    return rc;
}
