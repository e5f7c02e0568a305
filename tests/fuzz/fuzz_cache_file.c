/* Fuzz target: a cache folder whose files and names are arbitrary bytes.
 *
 * The first byte chooses. Bit 0: encrypted. Bit 1: a state instead of a page. Bit 2: the rest is the whole file; without it the rest is a list of changes
 * (two bytes where, one byte what) to a good file, the first two of which are its length. Bits 3 and 4: the header's and the file's checksums are made
 * right again, so that what is behind them is reached. Bit 5: the rest is a list of names, of folders and of files in them, for a cache
 * that opens there.
 *
 * Whatever is read as good must be the good file's payload, and with encryption nothing but the good file is good. All in memory. */
#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/cache_disk.h"
#include "engine/cache_file.h"

enum { PAYLOAD = 300, MAX_FILE = 70000, ROOT = 1000, FOLDER = 1001, FILE_FD = 1002 };

/* A file system of one file, or of one list of names. */
struct memory {
    uint8_t data[MAX_FILE];
    size_t n, at;
    const char *names; /* NUL after NUL, [names_n] */
    size_t names_n;
};

static void must(int condition)
{
    if (!condition)
        abort();
}

static int m_open(void *ctx, int dir, const char *name, int flags, unsigned mode)
{
    struct memory *m = ctx;
    (void)name;
    (void)mode;
    if (flags & O_DIRECTORY)
        return dir == AT_FDCWD ? ROOT : FOLDER;
    if (flags & O_CREAT)
        m->n = 0;
    m->at = 0;
    return FILE_FD;
}

static long m_read(void *ctx, int fd, void *data, size_t n)
{
    struct memory *m = ctx;
    (void)fd;
    size_t k = m->n - m->at < n ? m->n - m->at : n;
    memcpy(data, m->data + m->at, k);
    m->at += k;
    return (long)k;
}

static long m_write(void *ctx, int fd, const void *data, size_t n)
{
    struct memory *m = ctx;
    (void)fd;
    must(m->n + n <= sizeof m->data);
    memcpy(m->data + m->n, data, n);
    m->n += n;
    return (long)n;
}

static int m_fd(void *ctx, int fd)
{
    (void)ctx;
    (void)fd;
    return 0;
}

static int m_stat(void *ctx, int fd, struct stat *st)
{
    const struct memory *m = ctx;
    memset(st, 0, sizeof *st);
    st->st_uid = geteuid();
    st->st_mode = fd == FILE_FD ? S_IFREG | 0600 : S_IFDIR | 0700;
    st->st_size = (off_t)m->n;
    return 0;
}

static int m_stat_at(void *ctx, int dir, const char *name, struct stat *st)
{
    (void)dir;
    m_stat(ctx, FILE_FD, st);
    st->st_size = (off_t)strlen(name) * 100;
    st->st_mtim.tv_sec = name[0];
    return 0;
}

static int m_rename(void *ctx, int dir, const char *from, const char *to)
{
    (void)ctx;
    (void)dir;
    must(from[0] && to[0] && !strchr(from, '/') && !strchr(to, '/'));
    return 0;
}

/* Only names of the cache's own kinds may ever be removed. */
static int m_unlink(void *ctx, int dir, const char *name, bool folder)
{
    struct cache_key id;
    bool state;
    (void)ctx;
    if (folder)
        must(dir == ROOT && (strncmp(name, "ns=", 3) == 0 || strncmp(name, "enc=", 4) == 0) && !strchr(name, '/'));
    else
        must(cache_file_name_parse(name, &id, &state) || cache_file_temp(name) || strcmp(name, CACHE_NAME_FILE) == 0);
    return 0;
}

static int m_named(void *ctx, int dir, const char *name, unsigned mode)
{
    (void)ctx;
    (void)dir;
    (void)name;
    must((mode & 077) == 0);
    return 0;
}

static int m_touch(void *ctx, int dir, const char *name)
{
    (void)ctx;
    (void)dir;
    (void)name;
    return 0;
}

static int m_list(void *ctx, int dir, void (*each)(void *arg, const char *name), void *arg)
{
    struct memory *m = ctx;
    (void)dir;
    for (size_t at = 0; at < m->names_n; at += strlen(m->names + at) + 1)
        each(arg, m->names + at);
    return 0;
}

static struct memory memory;
static const struct cache_file_ops ops = {.open = m_open,
                                          .read = m_read,
                                          .write = m_write,
                                          .fsync = m_fd,
                                          .close = m_fd,
                                          .stat = m_stat,
                                          .stat_at = m_stat_at,
                                          .rename = m_rename,
                                          .unlink = m_unlink,
                                          .mkdir = m_named,
                                          .chmod = m_named,
                                          .touch = m_touch,
                                          .lock = m_fd,
                                          .list = m_list,
                                          .ctx = &memory};

static struct cache_file_head good_head(bool state)
{
    struct cache_file_head h = {.kind = state ? CACHE_FILE_STATE : CACHE_FILE_PAGE, .position = 6400};
    memset(h.model_id, 'm', sizeof h.model_id);
    memset(h.key.bytes, 'k', sizeof h.key.bytes);
    if (!state) {
        memset(h.parent.bytes, 'p', sizeof h.parent.bytes);
        h.n_ids = CACHE_FILE_IDS;
        for (int i = 0; i < CACHE_FILE_IDS; i++)
            h.ids[i] = 1000 * i;
    }
    return h;
}

static void good_payload(uint8_t *payload)
{
    for (int i = 0; i < PAYLOAD; i++)
        payload[i] = (uint8_t)(i * 7);
}

static void try_file(uint8_t mode, const uint8_t *data, size_t size)
{
    struct cache_vault v = {.ops = &ops, .encrypted = mode & 1};
    memset(v.file_key, 'f', sizeof v.file_key);
    const bool state = mode & 2;
    const struct cache_file_head want = good_head(state);
    uint8_t payload[PAYLOAD], right[PAYLOAD];
    static uint8_t good[MAX_FILE];
    struct error err = {{0}};
    memory.n = 0;
    good_payload(right);
    good_payload(payload);
    must(cache_file_write(&v, FOLDER, "tmp", &want, payload, PAYLOAD, &err) == 0);
    const size_t good_n = memory.n;
    must(good_n == cache_file_bytes(PAYLOAD));
    memcpy(good, memory.data, good_n);

    if (mode & 4) {
        memory.n = size < MAX_FILE ? size : MAX_FILE;
        memcpy(memory.data, data, memory.n);
    } else {
        if (size >= 2) {
            size_t n = (size_t)(data[0] | data[1] << 8);
            if (n) {
                if (n > memory.n)
                    memset(memory.data + memory.n, 0, n - memory.n);
                memory.n = n;
            }
        }
        for (size_t i = 2; i + 3 <= size; i += 3) {
            size_t at = (size_t)(data[i] | data[i + 1] << 8);
            if (at < memory.n)
                memory.data[at] ^= data[i + 2];
        }
    }
    if ((mode & 8) && memory.n >= 128)
        crypto_generichash(memory.data + 96, 32, memory.data, 96, NULL, 0);
    if ((mode & 16) && memory.n >= 32)
        crypto_generichash(memory.data + memory.n - 32, 32, memory.data, memory.n - 32, NULL, 0);

    const bool unchanged = memory.n == good_n && memcmp(memory.data, good, good_n) == 0;
    uint8_t file_payload[PAYLOAD] = {0};
    if (memory.n == good_n)
        memcpy(file_payload, memory.data + CACHE_FILE_HEAD, PAYLOAD);
    enum cache_file_status s = cache_file_read(&v, FOLDER, "x", &want, payload, PAYLOAD, &err);
    must(s == CACHE_FILE_OK || err.text[0]);
    if (unchanged)
        must(s == CACHE_FILE_OK);
    if (s != CACHE_FILE_OK)
        return;
    must(memory.n == good_n);
    if (v.encrypted)
        must(unchanged && memcmp(payload, right, PAYLOAD) == 0);
    else
        must(memcmp(payload, file_payload, PAYLOAD) == 0);
}

static void try_names(uint8_t mode, const uint8_t *data, size_t size)
{
    static char names[MAX_FILE];
    static const char key_file[] = "thirty-two bytes are enough here";
    struct cache_disk *d;
    struct error err = {{0}};
    if (size > sizeof names - 1)
        size = sizeof names - 1;
    memcpy(names, data, size);
    names[size] = '\0';
    memory = (struct memory){.names = names, .names_n = size};
    memcpy(memory.data, key_file, sizeof key_file);
    memory.n = sizeof key_file;
    const struct cache_disk_options o = {.dir = "/x", .key_file = mode & 1 ? "key" : NULL, .budget = mode & 2 ? 10000 : 0, .ops = &ops};
    if (cache_disk_open(&d, &o, &err) < 0) {
        must(err.text[0] != '\0');
        return;
    }
    cache_disk_flush(d);
    static struct cache_namespace_info info[64];
    size_t n = cache_disk_list(d, info, 64);
    for (size_t i = 0; i < n && i < 64; i++) {
        struct cache_removed removed;
        must(!info[i].name[0] || cache_namespace_valid(info[i].name, strlen(info[i].name)));
        cache_disk_delete(d, info[i].name, &removed, &err);
        must(removed.files > 0);
    }
    cache_disk_close(d);
    memory.names_n = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    must(sodium_init() >= 0);
    log_set_level(LOG_ERROR);
    if (size < 1)
        return 0;
    if (cache_namespace_valid((const char *)data + 1, size - 1)) {
        must(size - 1 <= CACHE_NAMESPACE_MAX && data[1] != '.' && data[1] != '-');
        for (size_t i = 1; i < size; i++)
            must(data[i] > ' ' && data[i] < 0x7F && data[i] != '/' && data[i] != '=' && data[i] != '\\');
    }
    if (data[0] & 32)
        try_names(data[0], data + 1, size - 1);
    else
        try_file(data[0], data + 1, size - 1);
    return 0;
}
