#include "engine/pages.h"

#include <assert.h>
#include <stdlib.h>

#include "base/alloc.h"

enum { PAGE_STEP = 16 }; /* pages reserved at a time */

void pages_open(struct page_pool *p, struct backend *b, int total)
{
    *p = (struct page_pool){.backend = b, .slots = {.total = total, .reserve = b->ops->pages_reserve}};
}

void pages_close(struct page_pool *p)
{
    slots_close(&p->slots);
    free(p->counts);
    *p = (struct page_pool){0};
}

int pages_prepare(struct page_pool *p, int n, struct error *err)
{
    if (n <= p->slots.n_free)
        return 0;
    /* Room to count first, for as many as could come: a page must never exist without its counts. */
    int most = p->slots.reserved + (n > PAGE_STEP ? n : PAGE_STEP);
    if (most > p->slots.total)
        most = p->slots.total;
    if (alloc_grow(&p->counts, &p->cap_counts, (size_t)most, sizeof *p->counts))
        return error_set(err, "out of memory for counting pages");
    const int before = p->slots.reserved;
    if (slots_prepare(&p->slots, p->backend, n, PAGE_STEP, err))
        return -1;
    for (int i = before; i < p->slots.reserved; i++)
        p->counts[i] = (struct page_counts){0};
    return 0;
}

bool pages_settle(struct page_pool *p, int n)
{
    if (n > slots_available(&p->slots))
        return false;
    p->slots.total = p->slots.reserved;
    return true;
}

int pages_ready(const struct page_pool *p)
{
    return p->slots.n_free;
}

int32_t pages_take(struct page_pool *p)
{
    int32_t page = slots_take(&p->slots);
    p->counts[page].users = 1;
    p->n_running++;
    return page;
}

void pages_use(struct page_pool *p, int32_t page)
{
    struct page_counts *c = &p->counts[page];
    assert(c->users || c->keepers);
    if (c->users++ == 0) {
        p->n_running++;
        p->n_idle--;
    }
}

void pages_leave(struct page_pool *p, int32_t page)
{
    struct page_counts *c = &p->counts[page];
    assert(c->users);
    if (--c->users)
        return;
    p->n_running--;
    if (c->keepers)
        p->n_idle++;
    else
        slots_give(&p->slots, page);
}

void pages_keep(struct page_pool *p, int32_t page)
{
    struct page_counts *c = &p->counts[page];
    assert(c->users || c->keepers);
    c->keepers++;
}

void pages_discard(struct page_pool *p, int32_t page)
{
    struct page_counts *c = &p->counts[page];
    assert(c->keepers);
    if (--c->keepers || c->users)
        return;
    p->n_idle--;
    slots_give(&p->slots, page);
}
