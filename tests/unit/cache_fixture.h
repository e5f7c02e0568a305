/* What the tests of the disk cache share: a temporary folder, texts whose pages and states have known contents, and checks on what is read back. */
#ifndef BEDSIDE_TESTS_CACHE_FIXTURE_H
#define BEDSIDE_TESTS_CACHE_FIXTURE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/cache_disk.h"
#include "engine/cache_file.h"

enum { PAGE_BYTES = 1500, STATE_BYTES = 3100, MAX_PAGES = 12, PATH_BYTES = 4096 };

static inline struct cache_model model_number(int number)
{
    struct cache_model m = {.page_bytes = PAGE_BYTES, .state_bytes = STATE_BYTES};
    memset(m.id, 0x40 + number, sizeof m.id);
    return m;
}

/* ---- folders ---- */

static inline char *temp_folder(void)
{
    const char *tmp = getenv("TMPDIR");
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/bedside-cache-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(path));
    return strdup(path);
}

static inline int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static inline void remove_folder_at(char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(path);
}

/* folder/name, in one of a few buffers that are used in turn. */
static inline const char *path_in(const char *folder, const char *name)
{
    static _Thread_local char paths[8][PATH_BYTES];
    static _Thread_local int next;
    char *path = paths[next++ % 8];
    size_t n = strlen(folder), m = strlen(name);
    assert_true(n + m + 2 <= PATH_BYTES);
    memmove(path, folder, n);
    path[n] = '/';
    memmove(path + n + 1, name, m + 1);
    return path;
}

/* Not with O_TRUNC: some file systems then wait for the disk at every close. */
static inline void write_file(const char *path, const void *data, size_t n, unsigned mode)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, n), n);
    assert_int_equal(ftruncate(fd, (off_t)n), 0);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static inline uint8_t *read_whole(const char *path, size_t *n)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    *n = (size_t)st.st_size;
    uint8_t *data = malloc(*n + 1);
    assert_non_null(data);
    assert_int_equal(read(fd, data, *n), *n);
    close(fd);
    return data;
}

static inline bool exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

/* How many names a folder holds; 0 when it is not there. */
static inline int count_names(const char *folder)
{
    DIR *d = opendir(folder);
    int n = 0;
    for (const struct dirent *e; d && (e = readdir(d));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    if (d)
        closedir(d);
    return n;
}

/* ---- texts ---- */

struct text {
    char ns[CACHE_NAMESPACE_MAX + 1];
    int n;
    int32_t ids[MAX_PAGES * 64];
    struct cache_key root, keys[MAX_PAGES];
};

static inline void text_keys(struct text *t, const struct cache_model *m)
{
    t->root = cache_key_root(m->id, t->ns);
    for (int i = 0; i < t->n; i++)
        t->keys[i] = cache_key_next(i ? &t->keys[i - 1] : &t->root, t->ids + (ptrdiff_t)i * 64, 64);
}

/* n pages of tokens; texts of the same seed have the same tokens. */
static inline struct text text_make(const char *ns, const struct cache_model *m, unsigned seed, int n)
{
    struct text t = {.n = n};
    snprintf(t.ns, sizeof t.ns, "%s", ns);
    uint32_t x = seed * 2654435761U + 1;
    for (int i = 0; i < n * 64; i++) {
        x = x * 1664525U + 1013904223U;
        t.ids[i] = (int32_t)(x >> 14);
    }
    text_keys(&t, m);
    return t;
}

/* The right contents of the page or state of a key. */
static inline uint8_t *contents(const struct cache_key *key, bool state)
{
    size_t n = state ? STATE_BYTES : PAGE_BYTES;
    uint8_t *data = malloc(n);
    assert_non_null(data);
    uint64_t x;
    memcpy(&x, key->bytes, sizeof x);
    x ^= state ? 0x9E3779B97F4A7C15U : 0;
    for (size_t i = 0; i < n; i++) {
        x = x * 6364136223846793005U + 1442695040888963407U;
        data[i] = (uint8_t)(x >> 56);
    }
    return data;
}

static inline bool put_page(struct cache_disk *d, const struct text *t, int i)
{
    return cache_disk_put_page(d, t->ns, &t->keys[i], i ? &t->keys[i - 1] : &t->root, (i + 1) * 64, t->ids + (ptrdiff_t)i * 64,
                               contents(&t->keys[i], false));
}

static inline bool put_state(struct cache_disk *d, const struct text *t, int i)
{
    return cache_disk_put_state(d, t->ns, &t->keys[i], (i + 1) * 64, contents(&t->keys[i], true));
}

/* Stores the pages of a text and the state at its end. */
static inline void store_text(struct cache_disk *d, const struct text *t)
{
    for (int i = 0; i < t->n; i++)
        put_page(d, t, i);
    put_state(d, t, t->n - 1);
    cache_disk_flush(d);
}

/* Reads from first_page on. The number of pages, checked byte for byte, or 0 for a miss. */
static inline int read_text_from(struct cache_disk *d, const struct text *t, int first_page)
{
    struct cache_image image;
    bool hit = cache_disk_read(d, t->ns, &(struct cache_text){.keys = t->keys, .ids = t->ids, .n = t->n}, first_page * 64, &image);
    assert_non_null(image.reason);
    assert_int_equal(image.first_page, first_page);
    if (!hit) {
        assert_true(image.reason[0] != '\0');
        assert_null(image.pages);
        assert_null(image.state);
        assert_int_equal(image.n_pages, 0);
        return 0;
    }
    assert_true(image.n_pages > 0 && first_page + image.n_pages <= t->n);
    assert_true(first_page + image.n_pages == t->n ? 1 : image.reason[0] != '\0');
    for (int i = 0; i < image.n_pages; i++) {
        uint8_t *right = contents(&t->keys[first_page + i], false);
        assert_memory_equal(image.pages + (size_t)i * PAGE_BYTES, right, PAGE_BYTES);
        free(right);
    }
    if (image.state) {
        uint8_t *right = contents(&t->keys[first_page + image.n_pages - 1], true);
        assert_int_equal(image.state_bytes, STATE_BYTES);
        assert_memory_equal(image.state, right, STATE_BYTES);
        free(right);
    }
    int n = image.n_pages;
    cache_image_free(&image);
    return n;
}

static inline int read_text(struct cache_disk *d, const struct text *t)
{
    return read_text_from(d, t, 0);
}

/* ---- opening ---- */

/* The system's calls without the waiting for the disk, for tests that do not care. */
static inline int no_fsync(void *ctx, int fd)
{
    (void)ctx;
    (void)fd;
    return 0;
}

static inline struct cache_file_ops quick_ops(void)
{
    struct cache_file_ops ops = cache_file_system;
    ops.fsync = no_fsync;
    return ops;
}

static inline struct cache_disk *open_with(const struct cache_disk_options *o, int model)
{
    struct cache_disk *d;
    struct error err = {{0}};
    if (cache_disk_open(&d, o, &err) < 0)
        fail_msg("%s", err.text);
    struct cache_model m = model_number(model);
    cache_disk_bind(d, &m);
    return d;
}

/* The path of the file of a key in the folder of a cache opened with the key file (or NULL). */
static inline const char *key_path(const char *dir, const char *key_file, const char *ns, const struct cache_key *key, bool state)
{
    struct cache_vault v;
    char folder[CACHE_FOLDER_MAX], name[CACHE_FILE_NAME_MAX];
    assert_int_equal(cache_vault_open(&v, &cache_file_system, key_file, NULL), 0);
    cache_vault_folder(&v, ns, v.encrypted, folder);
    struct cache_key id = cache_vault_file_id(&v, key, state);
    cache_file_name(&id, state, name);
    cache_vault_close(&v);
    char both[CACHE_FOLDER_MAX + CACHE_FILE_NAME_MAX];
    snprintf(both, sizeof both, "%s/%s", folder, name);
    return path_in(dir, both);
}

static inline const char *file_path(const char *dir, const char *key_file, const struct text *t, int i, bool state)
{
    return key_path(dir, key_file, t->ns, &t->keys[i], state);
}

/* Changes a bit of a file. */
static inline void damage(const char *path, size_t at)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static inline const char *space_path(const char *dir, const char *key_file, const char *ns)
{
    struct cache_vault v;
    char folder[CACHE_FOLDER_MAX];
    assert_int_equal(cache_vault_open(&v, &cache_file_system, key_file, NULL), 0);
    cache_vault_folder(&v, ns, v.encrypted, folder);
    cache_vault_close(&v);
    return path_in(dir, folder);
}

/* ---- the log ---- */

struct captured {
    FILE *file;
    int stderr_fd;
};

static inline struct captured capture_log(void)
{
    struct captured c = {.file = tmpfile(), .stderr_fd = dup(STDERR_FILENO)};
    assert_non_null(c.file);
    assert_true(dup2(fileno(c.file), STDERR_FILENO) >= 0);
    return c;
}

/* Ends the capture: how many lines were logged. `text`, when not NULL, must be in each of them. */
static inline int captured_lines(struct captured c, const char *text)
{
    dup2(c.stderr_fd, STDERR_FILENO);
    close(c.stderr_fd);
    rewind(c.file);
    char line[4096];
    int n = 0;
    while (fgets(line, sizeof line, c.file)) {
        n++;
        if (text && !strstr(line, text))
            fail_msg("a line without '%s': %s", text, line);
    }
    fclose(c.file);
    return n;
}

/* Ends the capture, which must hold no line. */
static inline void captured_nothing(struct captured c)
{
    captured_lines(c, "(no line at all)");
}

#endif
