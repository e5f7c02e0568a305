/* engine/tokenizer.c: the vocabulary of a GGUF file: checks it, builds the tables for encoding, answers questions about single tokens.
 *
 * Ordinary tokens are spelled in the printable alphabet of spec/tokenizer-and-template.md section 2 and kept here as the bytes they stand
 * for; added tokens are spelled as themselves. Ids come from the file by text, never from constants. */
#include "engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "engine/tokenizer_impl.h"
#include "engine/utf8.h"

enum { MAX_VOCAB = 1 << 21, MAX_MERGES = 1 << 24, ALPHABET_END = 0x144 };

#define KEY "tokenizer.ggml."

/* Tokens known by their text (section 6). Control ones are control whatever the file's types say: a converter that called <|im_end|> an
 * ordinary or user-defined token would otherwise let a client's text end a turn. The kinds of the others count only without types. */
static const struct known_token {
    const char *text;
    enum token_kind kind;
    bool ends; /* generation ends at it */
} known_tokens[] = {
    {"<|endoftext|>", TOKEN_CONTROL, true},
    {"<|im_start|>", TOKEN_CONTROL, false},
    {"<|im_end|>", TOKEN_CONTROL, true},
    {"<|object_ref_start|>", TOKEN_CONTROL, false},
    {"<|object_ref_end|>", TOKEN_CONTROL, false},
    {"<|box_start|>", TOKEN_CONTROL, false},
    {"<|box_end|>", TOKEN_CONTROL, false},
    {"<|quad_start|>", TOKEN_CONTROL, false},
    {"<|quad_end|>", TOKEN_CONTROL, false},
    {"<|vision_start|>", TOKEN_CONTROL, false},
    {"<|vision_end|>", TOKEN_CONTROL, false},
    {"<|vision_pad|>", TOKEN_CONTROL, false},
    {"<|image_pad|>", TOKEN_CONTROL, false},
    {"<|video_pad|>", TOKEN_CONTROL, false},
    {"<|fim_prefix|>", TOKEN_CONTROL, false},
    {"<|fim_middle|>", TOKEN_CONTROL, false},
    {"<|fim_suffix|>", TOKEN_CONTROL, false},
    {"<|fim_pad|>", TOKEN_CONTROL, true},
    {"<|repo_name|>", TOKEN_CONTROL, true},
    {"<|file_sep|>", TOKEN_CONTROL, true},
    {"<|audio_start|>", TOKEN_CONTROL, false},
    {"<|audio_end|>", TOKEN_CONTROL, false},
    {"<|audio_pad|>", TOKEN_CONTROL, false},
    {"<tts_pad>", TOKEN_CONTROL, false},
    {"<tts_text_bos>", TOKEN_CONTROL, false},
    {"<tts_text_eod>", TOKEN_CONTROL, false},
    {"<tts_text_bos_single>", TOKEN_CONTROL, false},
    {"<tool_call>", TOKEN_USER, false},
    {"</tool_call>", TOKEN_USER, false},
    {"<tool_response>", TOKEN_USER, false},
    {"</tool_response>", TOKEN_USER, false},
    {"<think>", TOKEN_USER, false},
    {"</think>", TOKEN_USER, false},
};

static const struct known_token *known_token(const char *text, size_t len)
{
    if (len == 0 || text[0] != '<')
        return NULL;
    for (size_t i = 0; i < sizeof known_tokens / sizeof *known_tokens; i++)
        if (strlen(known_tokens[i].text) == len && memcmp(known_tokens[i].text, text, len) == 0)
            return &known_tokens[i];
    return NULL;
}

/* [PADn], with which converters fill the vocabulary up to the rows of the output matrix. Some call them user-defined, so that the text
 * "[PAD7]" would become a token the model never saw. */
static bool is_padding(const char *text, size_t len)
{
    if (len < 6 || memcmp(text, "[PAD", 4) != 0 || text[len - 1] != ']')
        return false;
    for (size_t i = 4; i < len - 1; i++)
        if (text[i] < '0' || text[i] > '9')
            return false;
    return true;
}

/* ---- the printable alphabet */

/* byte_of[code point] = the byte it stands for, or -1. */
static void alphabet_init(int16_t byte_of[ALPHABET_END])
{
    for (int cp = 0; cp < ALPHABET_END; cp++)
        byte_of[cp] = -1;
    int next = 0x100;
    for (int b = 0; b < 256; b++) {
        bool itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        byte_of[itself ? b : next++] = (int16_t)b;
    }
}

/* Writes the bytes that text[0..len) stands for to out [len]; their number, or SIZE_MAX when a character is not in the alphabet. */
static size_t alphabet_decode(const int16_t byte_of[ALPHABET_END], const char *text, size_t len, char *out)
{
    size_t n = 0;
    for (size_t at = 0; at < len;) {
        uint32_t cp;
        size_t used;
        if (utf8_decode(text + at, len - at, &cp, &used) != UTF8_OK || cp >= ALPHABET_END || byte_of[cp] < 0)
            return SIZE_MAX;
        out[n++] = (char)byte_of[cp];
        at += used;
    }
    return n;
}

/* ---- ordinary tokens by their bytes */

static uint32_t hash_bytes(const char *bytes, size_t len)
{
    uint64_t h = 0xCBF29CE484222325u; /* FNV-1a */
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)bytes[i]) * 0x100000001B3u;
    return (uint32_t)(h ^ h >> 29);
}

/* A power of two with at least half of the slots free for n entries. */
static uint32_t table_size(uint64_t n)
{
    uint32_t size = 16;
    while (size < 2 * n)
        size *= 2;
    return size;
}

/* The slot that holds these bytes, or the free one where they belong. */
static int32_t *bytes_slot(const struct tokenizer *t, const char *bytes, size_t len)
{
    for (uint32_t i = hash_bytes(bytes, len) & t->by_bytes_mask;; i = (i + 1) & t->by_bytes_mask) {
        int32_t *slot = &t->by_bytes[i];
        if (*slot == 0)
            return slot;
        uint32_t start = t->start[*slot - 1];
        if (t->start[*slot] - start == len && memcmp(t->blob + start, bytes, len) == 0)
            return slot;
    }
}

static int32_t ordinary_find(const struct tokenizer *t, const char *bytes, size_t len)
{
    return *bytes_slot(t, bytes, len) - 1;
}

/* ---- opening */

/* The array `key` with elements of `element` kind; NULL with err set. `count` != 0 asks for exactly so many. */
static const struct gguf_value *array_of(const struct gguf *g, const char *key, enum gguf_kind element, uint64_t count, struct error *err)
{
    const struct gguf_value *v = gguf_value(g, key);
    if (!v) {
        error_set(err, "%s is missing: the file has no tokenizer; convert the model again with its tokenizer", key);
        return NULL;
    }
    if (v->kind != GGUF_ARRAY || v->element != element) {
        error_set(err, "%s has the wrong type: it must be an array of %s", key, element == GGUF_STRING ? "strings" : "32-bit integers");
        return NULL;
    }
    if (count && v->count != count) {
        error_set(err, "%s has %llu entries, but the vocabulary has %llu tokens", key, (unsigned long long)v->count, (unsigned long long)count);
        return NULL;
    }
    return v;
}

static int read_pattern(struct tokenizer *t, const struct gguf *g, struct error *err)
{
    struct gguf_string s = {0};
    int got = gguf_get_string(g, KEY "model", &s, err);
    if (got < 0)
        return -1;
    if (got == 0)
        return error_set(err, KEY "model is missing: the file has no tokenizer; convert the model again with its tokenizer");
    if (s.len != 4 || memcmp(s.data, "gpt2", 4) != 0)
        return error_set(err, KEY "model is \"%.*s\"; only gpt2 (byte-level BPE) is supported", (int)(s.len < 40 ? s.len : 40), s.data);
    got = gguf_get_string(g, KEY "pre", &s, err);
    if (got < 0)
        return -1;
    if (got == 0)
        return error_set(err, KEY "pre is missing: it must be qwen2 or qwen35; convert the model again with a current converter");
    if (s.len == 5 && memcmp(s.data, "qwen2", 5) == 0)
        t->pattern = SPLIT_QWEN2;
    else if (s.len == 6 && memcmp(s.data, "qwen35", 6) == 0)
        t->pattern = SPLIT_QWEN35;
    else
        return error_set(err, KEY "pre is \"%.*s\"; only qwen2 and qwen35 are supported", (int)(s.len < 40 ? s.len : 40), s.data);
    return 0;
}

/* The kind of token i, whose spelling is s; types may be NULL. 0 with err set when the file's number means nothing. */
static enum token_kind kind_of(const struct gguf_value *types, uint64_t i, struct gguf_string s, uint64_t *n_corrected, struct error *err)
{
    int64_t kind = TOKEN_NORMAL;
    if (types && (!gguf_array_i64(types, i, &kind) || kind < 0 || kind > TOKEN_BYTE)) {
        error_set(err, KEY "token_type[%llu] is %lld; it must be 1 to 6", (unsigned long long)i, (long long)kind);
        return 0;
    }
    if (kind == 0) /* "undefined" in the oldest files */
        kind = TOKEN_NORMAL;
    if (is_padding(s.data, s.len))
        return TOKEN_UNUSED;
    const struct known_token *known = known_token(s.data, s.len);
    if (!known || kind == (int64_t)known->kind)
        return (enum token_kind)kind;
    if (!types)
        return known->kind;
    if (known->kind != TOKEN_CONTROL)
        return (enum token_kind)kind;
    (*n_corrected)++;
    return TOKEN_CONTROL;
}

static bool is_added(enum token_kind kind)
{
    return kind == TOKEN_CONTROL || kind == TOKEN_USER || kind == TOKEN_UNKNOWN;
}

/* Fills n, blob, start, kind, by_bytes and byte_id. */
static int read_tokens(struct tokenizer *t, const struct gguf *g, const int16_t byte_of[ALPHABET_END], struct error *err)
{
    const struct gguf_value *tokens = array_of(g, KEY "tokens", GGUF_STRING, 0, err);
    if (!tokens)
        return -1;
    if (tokens->count < 1 || tokens->count > MAX_VOCAB)
        return error_set(err, KEY "tokens has %llu entries; 1 to %d are supported", (unsigned long long)tokens->count, MAX_VOCAB);
    const struct gguf_value *types = NULL;
    if (gguf_value(g, KEY "token_type") && !(types = array_of(g, KEY "token_type", GGUF_I32, tokens->count, err)))
        return -1;
    const struct gguf_value *scores = gguf_value(g, KEY "scores"); /* unused, but a wrong length means a damaged file */
    if (scores && (scores->kind != GGUF_ARRAY || scores->count != tokens->count))
        return error_set(err, KEY "scores has %llu entries, but the vocabulary has %llu tokens", (unsigned long long)scores->count,
                         (unsigned long long)tokens->count);

    uint64_t text_bytes = 0;
    for (uint64_t i = 0; i < tokens->count; i++)
        text_bytes += gguf_array_string(tokens, i).len; /* at most the file's size */
    if (text_bytes > UINT32_MAX)
        return error_set(err, KEY "tokens holds more than 4 GiB of text");
    size_t n = (size_t)tokens->count;
    uint32_t slots = table_size(n);
    t->n = (int32_t)n;
    t->blob = alloc_array((size_t)text_bytes, 1);
    t->start = alloc_array(n + 1, sizeof *t->start);
    t->kind = alloc_array(n, sizeof *t->kind);
    t->ends = alloc_array(n, sizeof *t->ends);
    t->by_bytes = alloc_array(slots, sizeof *t->by_bytes);
    t->by_bytes_mask = slots - 1;
    if (!t->blob || !t->start || !t->kind || !t->ends || !t->by_bytes)
        return error_set(err, "out of memory for a vocabulary of %zu tokens", n);

    uint64_t n_corrected = 0, n_misspelt = 0;
    uint32_t end = 0;
    for (size_t i = 0; i < n; i++) {
        struct gguf_string s = gguf_array_string(tokens, i);
        enum token_kind kind = kind_of(types, i, s, &n_corrected, err);
        if (!kind)
            return -1;
        t->kind[i] = (uint8_t)kind;
        t->start[i] = end;
        size_t len = SIZE_MAX;
        bool ordinary = kind == TOKEN_NORMAL || kind == TOKEN_BYTE;
        if (ordinary) {
            len = alphabet_decode(byte_of, s.data, s.len, t->blob + end);
            n_misspelt += len == SIZE_MAX;
        }
        bool by_bytes = len != SIZE_MAX && len > 0;
        if (len == SIZE_MAX) { /* spelled as itself; an ordinary token so spelled can be printed but no text encodes to it */
            len = s.len;
            if (len)
                memcpy(t->blob + end, s.data, len);
        }
        end += (uint32_t)len;
        t->start[i + 1] = end;
        if (by_bytes)
            *bytes_slot(t, t->blob + t->start[i], len) = (int32_t)i + 1; /* of equal ones the last counts, as elsewhere */
    }
    if (n_corrected)
        log_warn("tokenizer: %llu control tokens have another type in the file; treated as control tokens", (unsigned long long)n_corrected);
    if (n_misspelt)
        log_warn("tokenizer: %llu ordinary tokens are not spelled in the byte alphabet; no text becomes one of them", (unsigned long long)n_misspelt);

    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        t->byte_id[b] = ordinary_find(t, &byte, 1);
        if (t->byte_id[b] < 0)
            return error_set(err, KEY "tokens has no token for byte 0x%02X: not a byte-level vocabulary", (unsigned)b);
    }
    return 0;
}

/* One merge, "left right": false when it is malformed or its parts or product are no ordinary tokens. scratch has room for s.len bytes. */
static bool add_merge(struct tokenizer *t, const int16_t byte_of[ALPHABET_END], struct gguf_string s, uint32_t rank, char *scratch)
{
    const char *space = s.len > 1 ? memchr(s.data + 1, ' ', s.len - 1) : NULL;
    if (!space)
        return false;
    size_t left_len = (size_t)(space - s.data), right_len = s.len - left_len - 1;
    size_t a = alphabet_decode(byte_of, s.data, left_len, scratch);
    if (a == SIZE_MAX || a == 0)
        return false;
    size_t b = alphabet_decode(byte_of, space + 1, right_len, scratch + a);
    if (b == SIZE_MAX || b == 0)
        return false;
    int32_t left = ordinary_find(t, scratch, a), right = ordinary_find(t, scratch + a, b), id = ordinary_find(t, scratch, a + b);
    if (left < 0 || right < 0 || id < 0)
        return false;
    uint64_t key = merge_key(left, right);
    uint32_t i = merge_slot(t, key);
    while (t->merges[i].key != 0 && t->merges[i].key != key)
        i = (i + 1) & t->merges_mask;
    if (t->merges[i].key == 0) /* else the lower rank stays */
        t->merges[i] = (struct merge){key, rank, id};
    return true;
}

static int read_merges(struct tokenizer *t, const struct gguf *g, const int16_t byte_of[ALPHABET_END], struct error *err)
{
    const struct gguf_value *merges = array_of(g, KEY "merges", GGUF_STRING, 0, err);
    if (!merges)
        return -1;
    if (merges->count > MAX_MERGES)
        return error_set(err, KEY "merges has %llu entries; at most %d are supported", (unsigned long long)merges->count, MAX_MERGES);
    size_t longest = 0;
    for (uint64_t i = 0; i < merges->count; i++) {
        size_t len = gguf_array_string(merges, i).len;
        longest = len > longest ? len : longest;
    }
    uint32_t slots = table_size(merges->count);
    t->merges = alloc_array(slots, sizeof *t->merges);
    t->merges_mask = slots - 1;
    char *scratch = alloc_array(longest, 1);
    int rc = -1;
    if (!t->merges || !scratch) {
        error_set(err, "out of memory for %llu merges", (unsigned long long)merges->count);
        goto done;
    }
    uint64_t n_bad = 0;
    for (uint64_t i = 0; i < merges->count; i++)
        n_bad += !add_merge(t, byte_of, gguf_array_string(merges, i), (uint32_t)i, scratch);
    if (n_bad)
        log_warn("tokenizer: %llu of %llu merges do not fit the vocabulary and are ignored", (unsigned long long)n_bad,
                 (unsigned long long)merges->count);
    rc = 0;
done:
    free(scratch);
    return rc;
}

/* By text; of equal texts the control token first, then the higher id: the first is kept. */
static int compare_text(const void *pa, const void *pb)
{
    const struct added_token *a = pa, *b = pb;
    int c = memcmp(a->text, b->text, a->len < b->len ? a->len : b->len);
    if (c)
        return c;
    if (a->len != b->len)
        return a->len < b->len ? -1 : 1;
    if (a->control != b->control)
        return a->control ? -1 : 1;
    return a->id > b->id ? -1 : a->id < b->id;
}

/* length, id and index of an added token, for sorting by the order in which they are matched. */
struct ordered {
    uint32_t len;
    int32_t id;
    uint32_t index;
};

static int compare_order(const void *pa, const void *pb)
{
    const struct ordered *a = pa, *b = pb;
    if (a->len != b->len)
        return a->len > b->len ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* Fills added, added_by_order and added_first. */
static int index_added(struct tokenizer *t, struct error *err)
{
    size_t n = 0;
    for (int32_t i = 0; i < t->n; i++)
        n += is_added(t->kind[i]);
    t->added = alloc_array(n, sizeof *t->added);
    t->added_by_order = alloc_array(n, sizeof *t->added_by_order);
    struct ordered *ordered = alloc_array(n, sizeof *ordered);
    int rc = -1;
    if (!t->added || !t->added_by_order || !ordered) {
        error_set(err, "out of memory for %zu added tokens", n);
        goto done;
    }
    n = 0;
    for (int32_t i = 0; i < t->n; i++) {
        uint32_t len = t->start[i + 1] - t->start[i];
        if (is_added(t->kind[i]) && len > 0) /* an empty text would match everywhere */
            t->added[n++] = (struct added_token){t->blob + t->start[i], len, i, 0, t->kind[i] != TOKEN_USER};
    }
    qsort(t->added, n, sizeof *t->added, compare_text);
    for (size_t i = 0; i < n; i++) {
        const struct added_token *a = &t->added[i];
        const struct added_token *last = t->n_added ? &t->added[t->n_added - 1] : NULL;
        if (!last || last->len != a->len || memcmp(last->text, a->text, a->len) != 0)
            t->added[t->n_added++] = *a;
    }
    for (uint32_t i = 0; i < t->n_added; i++) {
        ordered[i] = (struct ordered){t->added[i].len, t->added[i].id, i};
        t->added_first[(unsigned char)t->added[i].text[0] + 1]++;
    }
    for (int b = 0; b < 256; b++)
        t->added_first[b + 1] += t->added_first[b];
    qsort(ordered, t->n_added, sizeof *ordered, compare_order);
    for (uint32_t i = 0; i < t->n_added; i++) {
        t->added_by_order[i] = ordered[i].index;
        t->added[ordered[i].index].order = i;
    }
    rc = 0;
done:
    free(ordered);
    return rc;
}

/* Checks the special ids of the metadata and marks the tokens at which generation ends. */
static int read_special_ids(struct tokenizer *t, const struct gguf *g, struct error *err)
{
    static const struct {
        const char *key;
        bool ends;
    } specials[] = {
        {KEY "bos_token_id", false}, {KEY "eos_token_id", true},      {KEY "eot_token_id", true},
        {KEY "eom_token_id", true},  {KEY "padding_token_id", false}, {KEY "unknown_token_id", false},
    };
    for (size_t i = 0; i < sizeof specials / sizeof *specials; i++) {
        uint64_t id = 0;
        int got = gguf_get_u64(g, specials[i].key, &id, err);
        if (got < 0)
            return -1;
        if (got == 0)
            continue;
        if (id >= (uint64_t)t->n)
            return error_set(err, "%s is %llu, but the vocabulary has %d tokens", specials[i].key, (unsigned long long)id, t->n);
        if (specials[i].ends)
            t->ends[id] = true;
    }
    const struct gguf_value *list = gguf_value(g, KEY "eos_token_ids"); /* some converters list several */
    for (uint64_t i = 0; list && list->kind == GGUF_ARRAY && i < list->count; i++) {
        int64_t id;
        if (!gguf_array_i64(list, i, &id) || id < 0 || id >= t->n)
            return error_set(err, KEY "eos_token_ids[%llu] is not an id of the vocabulary (%d tokens)", (unsigned long long)i, t->n);
        t->ends[id] = true;
    }
    for (uint32_t i = 0; i < t->n_added; i++) {
        const struct known_token *known = known_token(t->added[i].text, t->added[i].len);
        if (known && known->ends)
            t->ends[t->added[i].id] = true;
    }
    return 0;
}

int tokenizer_open(struct tokenizer **out, const struct gguf *g, struct error *err)
{
    *out = NULL;
    struct tokenizer *t = alloc_array(1, sizeof *t);
    if (!t)
        return error_set(err, "out of memory for the tokenizer");
    int16_t byte_of[ALPHABET_END];
    alphabet_init(byte_of);
    if (read_pattern(t, g, err) || read_tokens(t, g, byte_of, err) || read_merges(t, g, byte_of, err) || index_added(t, err) ||
        read_special_ids(t, g, err)) {
        tokenizer_close(t);
        return -1;
    }
    *out = t;
    return 0;
}

void tokenizer_close(struct tokenizer *t)
{
    if (!t)
        return;
    free(t->blob);
    free(t->start);
    free(t->kind);
    free(t->ends);
    free(t->by_bytes);
    free(t->merges);
    free(t->added);
    free(t->added_by_order);
    free(t);
}

/* ---- questions about single tokens */

static bool is_id(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->n;
}

int32_t tokenizer_vocab_size(const struct tokenizer *t)
{
    return t->n;
}

enum token_kind tokenizer_kind(const struct tokenizer *t, int32_t id)
{
    return is_id(t, id) ? (enum token_kind)t->kind[id] : TOKEN_UNUSED;
}

const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *len)
{
    *len = 0;
    if (!is_id(t, id))
        return NULL;
    *len = t->start[id + 1] - t->start[id];
    return t->blob + t->start[id];
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text)
{
    size_t len = strlen(text);
    if (len == 0)
        return -1;
    unsigned char first = (unsigned char)text[0];
    for (uint32_t i = t->added_first[first]; i < t->added_first[first + 1]; i++)
        if (t->added[i].len == len && memcmp(t->added[i].text, text, len) == 0)
            return t->added[i].id;
    return ordinary_find(t, text, len);
}

bool tokenizer_ends_generation(const struct tokenizer *t, int32_t id)
{
    return is_id(t, id) && t->ends[id];
}

bool tokenizer_usable(const struct tokenizer *t, int32_t id)
{
    return is_id(t, id) && t->kind[id] != TOKEN_UNUSED;
}
