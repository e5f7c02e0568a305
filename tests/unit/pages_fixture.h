/* tests/unit/pages_fixture.h: a page pool over a backend that only counts. */
#ifndef BEDSIDE_TESTS_PAGES_FIXTURE_H
#define BEDSIDE_TESTS_PAGES_FIXTURE_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "engine/pages.h"

struct counting_backend {
    struct backend base;
    int reserved;
    bool full; /* refuses more pages */
};

static inline int counting_reserve(struct backend *b, int n, struct error *err)
{
    struct counting_backend *c = (struct counting_backend *)b;
    if (c->full)
        return error_set(err, "no memory for pages");
    assert_true(n >= c->reserved);
    c->reserved = n;
    return 0;
}

static const struct backend_ops counting_ops = {.name = "counting", .pages_reserve = counting_reserve};

struct fixture {
    struct counting_backend backend;
    struct page_pool pool;
};

static inline void fixture_open(struct fixture *f, int total)
{
    *f = (struct fixture){.backend = {.base = {.ops = &counting_ops}}};
    pages_open(&f->pool, &f->backend.base, total);
}

static inline void fixture_close(struct fixture *f)
{
    assert_int_equal(f->pool.n_running, 0);
    assert_int_equal(f->pool.n_idle, 0);
    assert_int_equal(pages_ready(&f->pool), f->backend.reserved);
    pages_close(&f->pool);
}

/* `ready`: free, of those reserved. */
static inline void expect_pages(const struct fixture *f, int running, int idle, int ready)
{
    assert_int_equal(f->pool.n_running, running);
    assert_int_equal(f->pool.n_idle, idle);
    assert_int_equal(pages_ready(&f->pool), ready);
    assert_int_equal(running + idle + ready, f->backend.reserved);
}

#endif
