#include "engine/prefix_plan.h"

#include <string.h>

struct prefix_marks prefix_marks_of(const struct tokenizer *t)
{
    return (struct prefix_marks){.tokenizer = t, .im_start = tokenizer_find(t, "<|im_start|>"), .im_end = tokenizer_find(t, "<|im_end|>")};
}

/* Whether the tokens begin with this text. */
static bool begins_with(const struct tokenizer *t, const int32_t *ids, int n, const char *text)
{
    size_t left = strlen(text);
    for (int i = 0; i < n && left; i++) {
        size_t len;
        const char *bytes = tokenizer_bytes(t, ids[i], &len);
        if (len > left)
            len = left;
        if (memcmp(bytes, text, len) != 0)
            return false;
        text += len;
        left -= len;
    }
    return left == 0;
}

/* Behind the line that opens a message, "<|im_start|>ROLE\n" from i on. */
static int role_end(const struct tokenizer *t, const int32_t *ids, int n, int i)
{
    enum { ROLE_TOKENS = 16 }; /* of a vocabulary whose tokens are single bytes, too */
    for (int k = i + 1; k < n && k <= i + ROLE_TOKENS; k++) {
        size_t len;
        const char *bytes = tokenizer_bytes(t, ids[k], &len);
        if (len && bytes[len - 1] == '\n')
            return k + 1;
    }
    return i;
}

/* Behind the <|im_end|> at i, and the newline that always follows it. */
static int message_end(int i, int n)
{
    return i + 2 < n ? i + 2 : n;
}

int prefix_system_end(const struct prefix_marks *m, const int32_t *ids, int n)
{
    if (m->im_start < 0 || m->im_end < 0 || n < 1 || ids[0] != m->im_start || !begins_with(m->tokenizer, ids + 1, n - 1, "system\n"))
        return 0;
    for (int i = 1; i < n; i++)
        if (ids[i] == m->im_end)
            return message_end(i, n);
    return 0;
}

struct plan {
    int from, end; /* positions wanted: from < p < end */
    int n_ids;
    bool exact;
    int most, n;
    int *out;
};

static void want_exactly(struct plan *p, int position)
{
    if (!p->exact || position < GRID) /* a tail needs a cell to hang on */
        position -= position % GRID;
    if (position <= p->from || position >= p->end || p->n == p->most)
        return;
    int i = p->n;
    while (i > 0 && p->out[i - 1] > position)
        i--;
    if (i > 0 && p->out[i - 1] == position)
        return;
    memmove(p->out + i + 1, p->out + i, (size_t)(p->n - i) * sizeof *p->out);
    p->out[i] = position;
    p->n++;
}

static void want_line(struct plan *p, int position)
{
    want_exactly(p, position - position % GRID);
}

/* Whether one can begin less than a cell before this position, or (`above`) behind it. To compute so few tokens again is cheaper than what a snapshot
 * costs: a step of its own, a copy of the whole state, a place in the budget and on disk. */
static bool crowded(const struct plan *p, int position, bool above)
{
    if (position - p->from < GRID && p->from > 0)
        return true;
    for (int i = 0; i < p->n; i++) {
        const int apart = position - p->out[i];
        if (p->out[i] == p->n_ids) /* the text's very end: nobody who repeats this text can begin there, at least one token must be left */
            continue;
        if ((apart >= 0 && apart < GRID) || (above && apart < 0 && apart > -GRID))
            return true;
    }
    return false;
}

int prefix_plan(const struct prefix_marks *m, const int32_t *ids, int n, int from, int branch, bool exact, int most, int out[PLAN_MOST])
{
    const int last = n > 0 ? (n - 1) / GRID * GRID : 0;
    struct plan p = {.from = from, .end = exact ? n + 1 : n, .n_ids = n, .exact = exact, .most = most < PLAN_MOST ? most : PLAN_MOST, .out = out};
    int ends[PLAN_MESSAGES], n_ends = 0;
    for (int i = n - 1; i > 0 && n_ends < PLAN_MESSAGES && m->im_end >= 0; i--)
        if (ids[i] == m->im_end)
            ends[n_ends++] = message_end(i, n);
    /* What the next turn is sure to repeat includes the line that opens the answer; of what follows it (an empty block of reasoning) it is not. */
    if (n_ends)
        want_exactly(&p, ends[0] < n && ids[ends[0]] == m->im_start ? role_end(m->tokenizer, ids, n, ends[0]) : ends[0]);
    want_exactly(&p, prefix_system_end(m, ids, n));
    if (!exact || !crowded(&p, branch, true))
        want_line(&p, branch);
    if (!exact || !crowded(&p, last, true))
        want_line(&p, last);
    int next = n; /* the end above that is wanted */
    for (int i = 1; i < n_ends; i++) {
        if (exact && (crowded(&p, ends[i], false) || (next < n && next - ends[i] < GRID)))
            continue;
        want_exactly(&p, ends[i]);
        next = ends[i];
    }
    if (p.n < p.most) {
        /* In steps that leave room for the last one too. */
        int apart = PLAN_EVERY;
        while ((last - from) / apart > p.most - p.n)
            apart *= 2;
        for (int at = from - from % GRID + apart; at < last; at += apart)
            want_line(&p, at);
    }
    return p.n;
}

int prefix_ends(const struct prefix_marks *m, const int32_t *ids, int n, int most, int *out)
{
    const int system = prefix_system_end(m, ids, n);
    int at = most; /* filled from the back */
    for (int i = n - 1; i > 0 && at > 1 && m->im_end >= 0; i--) {
        if (ids[i] != m->im_end)
            continue;
        const int end = message_end(i, n), open = end < n && ids[end] == m->im_start ? role_end(m->tokenizer, ids, n, end) : end;
        if (open < n && open > end)
            out[--at] = open;
        if (end < n && at > 1)
            out[--at] = end;
    }
    if (system && system < n && (at == most || system < out[at]))
        out[--at] = system;
    memmove(out, out + at, (size_t)(most - at) * sizeof *out);
    return most - at;
}
