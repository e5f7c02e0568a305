/* What the tests of engine/cache_disk.h share: a folder for each test, plain or encrypted, and texts to store. */
#ifndef BEDSIDE_TESTS_UNIT_CACHE_DISK_SETUP_H
#define BEDSIDE_TESTS_UNIT_CACHE_DISK_SETUP_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <sodium.h>
#include <time.h>

#include "tests/unit/cache_fixture.h"

struct fixture {
    char *base, *dir; /* the cache folder `dir` is made by the cache, in `base` */
    const char *key_file;
    char key_path[PATH_BYTES];
    struct cache_file_ops ops;
    struct cache_disk_options options;
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    f->base = temp_folder();
    f->dir = strdup(path_in(f->base, "cache"));
    f->ops = quick_ops();
    f->options = (struct cache_disk_options){.dir = f->dir, .ops = &f->ops};
    if (*state) {
        snprintf(f->key_path, sizeof f->key_path, "%s/key", f->base);
        write_file(f->key_path, "forty bytes of a key file, not random at", 40, 0600);
        f->key_file = f->options.key_file = f->key_path;
    }
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    remove_folder_at(f->base);
    free(f->dir);
    free(f);
    return 0;
}

static struct text text_of(const char *ns, unsigned seed, int n)
{
    struct cache_model m = model_number(1);
    return text_make(ns, &m, seed, n);
}

#define BOTH(test)                                                                                                                                   \
    {#test "_plain", test, setup, teardown, NULL},                                                                                                   \
    {                                                                                                                                                \
#test "_encrypted", test, setup, teardown, yes                                                                                               \
    }
#define PLAIN(test)     cmocka_unit_test_setup_teardown(test, setup, teardown)
#define ENCRYPTED(test) cmocka_unit_test_prestate_setup_teardown(test, setup, teardown, yes)

#endif
