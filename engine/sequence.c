#include "engine/sequence.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "engine/engine.h"
#include "engine/pages.h"

int slots_available(const struct slots *s)
{
    return s->n_free + (s->total - s->reserved);
}

int slots_prepare(struct slots *s, struct backend *b, int n, int step, struct error *err)
{
    if (n <= s->n_free)
        return 0;
    if (n > slots_available(s))
        return error_set(err, "%d wanted, %d of %d are free", n, slots_available(s), s->total);
    int more = n - s->n_free;
    if (more < step)
        more = step;
    if (more > s->total - s->reserved)
        more = s->total - s->reserved;
    if (alloc_grow(&s->free_list, &s->cap, (size_t)(s->reserved + more), sizeof *s->free_list))
        return error_set(err, "out of memory for a free list");
    if (s->reserve(b, s->reserved + more, err))
        return -1;
    /* Taken from the end: the lowest number of the new ones comes first. */
    for (int i = s->reserved + more - 1; i >= s->reserved; i--)
        s->free_list[s->n_free++] = i;
    s->reserved += more;
    return 0;
}

int32_t slots_take(struct slots *s)
{
    return s->free_list[--s->n_free];
}

void slots_give(struct slots *s, int32_t slot)
{
    s->free_list[s->n_free++] = slot; /* there is room for all that were reserved */
}

void slots_close(struct slots *s)
{
    free(s->free_list);
    *s = (struct slots){0};
}

int sequence_room(struct sequence *s, int length)
{
    if (alloc_grow(&s->ids, &s->cap_ids, (size_t)length, sizeof *s->ids))
        return -1;
    return alloc_grow(&s->pages, &s->cap_pages, (size_t)pages_for(length), sizeof *s->pages);
}

void sequence_drop_pages(struct sequence *s, struct page_pool *pages, int n)
{
    while (s->n_pages > n)
        pages_leave(pages, s->pages[--s->n_pages]);
}

int sequence_length(const struct sequence *s)
{
    return s->length;
}

const int32_t *sequence_tokens(const struct sequence *s)
{
    return s->ids;
}

int sequence_rollback(struct sequence *s, int n)
{
    /* The token that fills a grid cell moves the state to the next grid line, from where there is no way back: both ends must lie in one cell. */
    if (n < 0 || n > ROLLBACK || n > s->length || (s->length - n) / GRID != s->length / GRID)
        return -1;
    /* The convolution's history reaches back ROLLBACK rows from where the sequence has been, and not behind what a tail brought along. */
    if (n && (s->high - (s->length - n) > ROLLBACK || s->length - n < s->held_from))
        return -1;
    s->length -= n;
    return 0;
}
