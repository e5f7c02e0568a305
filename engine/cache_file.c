#include "engine/cache_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

/* Offsets of the format in cache_file.h. */
enum {
    AT_VERSION = 8,
    AT_KIND = 10,
    AT_FLAGS = 11,
    AT_MODEL = 16,
    AT_PAYLOAD = 48,
    AT_TIME = 56,
    AT_NONCE = 64,
    AT_CHECKSUM = 96,
    PUBLIC = 128,
    AT_KEY = 128,
    AT_PARENT = 144,
    AT_POSITION = 160,
    AT_N_IDS = 164,
    AT_IDS = 168,
    PRIVATE = CACHE_FILE_HEAD - PUBLIC,
    VERSION = 1,
    FLAG_ENCRYPTED = 1,
    TAG = crypto_aead_xchacha20poly1305_ietf_ABYTES,
    NONCE = crypto_aead_xchacha20poly1305_ietf_NPUBBYTES,
    KEY_FILE_MIN = 32,
    KEY_FILE_MAX = 4096,
};
_Static_assert(CACHE_FILE_TRAILER == 2 * TAG, "the trailer holds two tags or one checksum");
_Static_assert(AT_NONCE + NONCE <= AT_CHECKSUM, "the nonce has its place");

static const char magic[8] = {'B', 'E', 'D', 'C', 'A', 'C', 'H', 'E'};

/* ---- the system's calls ---- */

static int system_open(void *ctx, int dir, const char *name, int flags, unsigned mode)
{
    (void)ctx;
    return openat(dir, name, flags, (mode_t)mode);
}

static long system_read(void *ctx, int fd, void *data, size_t n)
{
    (void)ctx;
    return read(fd, data, n);
}

static long system_write(void *ctx, int fd, const void *data, size_t n)
{
    (void)ctx;
    return write(fd, data, n);
}

static int system_fsync(void *ctx, int fd)
{
    (void)ctx;
    return fsync(fd);
}

static int system_close(void *ctx, int fd)
{
    (void)ctx;
    return close(fd);
}

static int system_stat(void *ctx, int fd, struct stat *st)
{
    (void)ctx;
    return fstat(fd, st);
}

static int system_stat_at(void *ctx, int dir, const char *name, struct stat *st)
{
    (void)ctx;
    return fstatat(dir, name, st, AT_SYMLINK_NOFOLLOW);
}

static int system_rename(void *ctx, int dir, const char *from, const char *to)
{
    (void)ctx;
    return renameat(dir, from, dir, to);
}

static int system_unlink(void *ctx, int dir, const char *name, bool folder)
{
    (void)ctx;
    return unlinkat(dir, name, folder ? AT_REMOVEDIR : 0);
}

static int system_mkdir(void *ctx, int dir, const char *name, unsigned mode)
{
    (void)ctx;
    return mkdirat(dir, name, (mode_t)mode);
}

static int system_chmod(void *ctx, int dir, const char *name, unsigned mode)
{
    (void)ctx;
    return fchmodat(dir, name, (mode_t)mode, 0);
}

static int system_touch(void *ctx, int dir, const char *name)
{
    (void)ctx;
    return utimensat(dir, name, NULL, AT_SYMLINK_NOFOLLOW);
}

static int system_lock(void *ctx, int fd)
{
    (void)ctx;
    return flock(fd, LOCK_EX | LOCK_NB);
}

static int system_list(void *ctx, int dir, void (*each)(void *arg, const char *name), void *arg)
{
    (void)ctx;
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* its own position, unlike dup */
    if (fd < 0)
        return -1;
    DIR *d = fdopendir(fd);
    if (!d) {
        int why = errno;
        close(fd);
        errno = why;
        return -1;
    }
    const struct dirent *e;
    errno = 0;
    while ((e = readdir(d))) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            each(arg, e->d_name);
        errno = 0;
    }
    int why = errno;
    closedir(d);
    errno = why;
    return why ? -1 : 0;
}

const struct cache_file_ops cache_file_system = {
    .open = system_open,
    .read = system_read,
    .write = system_write,
    .fsync = system_fsync,
    .close = system_close,
    .stat = system_stat,
    .stat_at = system_stat_at,
    .rename = system_rename,
    .unlink = system_unlink,
    .mkdir = system_mkdir,
    .chmod = system_chmod,
    .touch = system_touch,
    .lock = system_lock,
    .list = system_list,
};

/* Tries a call again while a signal interrupts it. */
#define AGAIN(result, call)                                                                                                                          \
    do {                                                                                                                                             \
        (result) = (call);                                                                                                                           \
    } while ((result) < 0 && errno == EINTR)

int cache_op_close(const struct cache_file_ops *ops, int fd)
{
    return fd < 0 ? 0 : ops->close(ops->ctx, fd); /* never again after EINTR: Linux has closed it by then */
}

int cache_op_unlink(const struct cache_file_ops *ops, int dir, const char *name, bool folder)
{
    int r;
    AGAIN(r, ops->unlink(ops->ctx, dir, name, folder));
    return r;
}

int cache_op_stat_at(const struct cache_file_ops *ops, int dir, const char *name, struct stat *st)
{
    int r;
    AGAIN(r, ops->stat_at(ops->ctx, dir, name, st));
    return r;
}

int cache_op_open(const struct cache_file_ops *ops, int dir, const char *name, int flags, unsigned mode)
{
    int r;
    AGAIN(r, ops->open(ops->ctx, dir, name, flags, mode));
    return r;
}

int cache_op_list(const struct cache_file_ops *ops, int dir, void (*each)(void *arg, const char *name), void *arg)
{
    int r;
    AGAIN(r, ops->list(ops->ctx, dir, each, arg));
    return r;
}

int cache_op_lock(const struct cache_file_ops *ops, int fd)
{
    int r;
    AGAIN(r, ops->lock(ops->ctx, fd));
    return r;
}

static int op_stat(const struct cache_file_ops *ops, int fd, struct stat *st)
{
    int r;
    AGAIN(r, ops->stat(ops->ctx, fd, st));
    return r;
}

static int op_chmod(const struct cache_file_ops *ops, int dir, const char *name, unsigned mode)
{
    int r;
    AGAIN(r, ops->chmod(ops->ctx, dir, name, mode));
    return r;
}

int cache_op_touch(const struct cache_file_ops *ops, int dir, const char *name)
{
    int r;
    AGAIN(r, ops->touch(ops->ctx, dir, name));
    return r;
}

int cache_op_fsync(const struct cache_file_ops *ops, int fd)
{
    int r;
    AGAIN(r, ops->fsync(ops->ctx, fd));
    return r;
}

/* Reads up to n bytes, fewer only at the file's end. -1 with errno. */
static long read_all(const struct cache_file_ops *ops, int fd, uint8_t *data, size_t n)
{
    size_t done = 0;
    while (done < n) {
        long k;
        AGAIN(k, ops->read(ops->ctx, fd, data + done, n - done));
        if (k < 0)
            return -1;
        if (k == 0)
            break;
        done += (size_t)k;
    }
    return (long)done;
}

/* Writes n bytes. -1 with errno. */
static int write_all(const struct cache_file_ops *ops, int fd, const uint8_t *data, size_t n)
{
    size_t done = 0;
    while (done < n) {
        long k;
        AGAIN(k, ops->write(ops->ctx, fd, data + done, n - done));
        if (k < 0)
            return -1;
        if (k == 0) { /* would go on for ever */
            errno = EIO;
            return -1;
        }
        done += (size_t)k;
    }
    return 0;
}

bool cache_file_private(const struct stat *st)
{
    return st->st_uid == geteuid() && (st->st_mode & (S_IRWXG | S_IRWXO)) == 0;
}

/* ---- names and keys ---- */

/* Whether the file lies in the folder where systemd puts what a service is entrusted with (LoadCredential=): only the service's user is let into it, and the files
 * are root's, with that user's right to read shown as the group's. */
static bool is_credential(const char *path, const struct stat *st)
{
    const char *dir = getenv("CREDENTIALS_DIRECTORY");
    const size_t n = dir ? strlen(dir) : 0;
    return n > 0 && strncmp(path, dir, n) == 0 && path[n] == '/' && path[n + 1] && !strchr(path + n + 1, '/') &&
           (st->st_uid == 0 || st->st_uid == geteuid()) && (st->st_mode & (S_IWGRP | S_IXGRP | S_IRWXO)) == 0;
}

int cache_vault_open(struct cache_vault *v, const struct cache_file_ops *ops, const char *key_file, struct error *err)
{
    *v = (struct cache_vault){.ops = ops, .encrypted = key_file != NULL};
    if (!key_file)
        return 0;
    int result = -1;
    uint8_t secret[KEY_FILE_MAX + 1], master[crypto_kdf_KEYBYTES];
    struct stat st;
    int fd = cache_op_open(ops, AT_FDCWD, key_file, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (fd < 0)
        return error_set(err, "cache key file %s: %s", key_file, strerror(errno));
    if (op_stat(ops, fd, &st) < 0) {
        error_set(err, "cache key file %s: %s", key_file, strerror(errno));
        goto done;
    }
    if (!S_ISREG(st.st_mode)) {
        error_set(err, "cache key file %s: not a regular file", key_file);
        goto done;
    }
    if (!cache_file_private(&st) && !is_credential(key_file, &st)) {
        error_set(err, "cache key file %s: others may read or change it; it must belong to the server's user, mode 0600 (chmod 600 %s)", key_file,
                  key_file);
        goto done;
    }
    long n = read_all(ops, fd, secret, sizeof secret);
    if (n < 0) {
        error_set(err, "cache key file %s: %s", key_file, strerror(errno));
        goto done;
    }
    if (n < KEY_FILE_MIN || n > KEY_FILE_MAX) {
        error_set(err, "cache key file %s: %ld bytes%s; it needs %d to %d random ones (head -c 32 /dev/urandom > FILE)", key_file, n,
                  n > KEY_FILE_MAX ? " or more" : "", KEY_FILE_MIN, KEY_FILE_MAX);
        goto done;
    }
    crypto_generichash(master, sizeof master, secret, (unsigned long long)n, NULL, 0);
    crypto_kdf_derive_from_key(v->file_key, sizeof v->file_key, 1, "bedcache", master);
    crypto_kdf_derive_from_key(v->name_key, sizeof v->name_key, 2, "bedcache", master);
    result = 0;
done:
    sodium_memzero(secret, sizeof secret);
    sodium_memzero(master, sizeof master);
    cache_op_close(ops, fd);
    return result;
}

void cache_vault_close(struct cache_vault *v)
{
    sodium_memzero(v->file_key, sizeof v->file_key);
    sodium_memzero(v->name_key, sizeof v->name_key);
}

/* A 16-byte hash under the name key; `what` keeps the uses apart. */
static struct cache_key keyed_id(const struct cache_vault *v, char what, const void *data, size_t n)
{
    struct cache_key id;
    crypto_generichash_state s;
    crypto_generichash_init(&s, v->name_key, sizeof v->name_key, sizeof id.bytes);
    crypto_generichash_update(&s, (const unsigned char *)&what, 1);
    crypto_generichash_update(&s, data, n);
    crypto_generichash_final(&s, id.bytes, sizeof id.bytes);
    return id;
}

struct cache_key cache_vault_file_id(const struct cache_vault *v, const struct cache_key *key, bool state)
{
    return v->encrypted ? keyed_id(v, state ? 's' : 'p', key->bytes, sizeof key->bytes) : *key;
}

void cache_vault_folder(const struct cache_vault *v, const char *ns, bool encrypted, char *folder)
{
    if (encrypted) {
        struct cache_key id = keyed_id(v, 'n', ns, strlen(ns));
        memcpy(folder, "enc=", 4);
        sodium_bin2hex(folder + 4, CACHE_FOLDER_MAX - 4, id.bytes, sizeof id.bytes);
    } else {
        snprintf(folder, CACHE_FOLDER_MAX, "ns=%.*s", CACHE_NAMESPACE_MAX, ns);
    }
}

void cache_file_name(const struct cache_key *id, bool state, char *name)
{
    sodium_bin2hex(name, CACHE_FILE_NAME_MAX, id->bytes, sizeof id->bytes);
    memcpy(name + 32, state ? ".state" : ".page", state ? 7 : 6);
}

bool cache_file_name_parse(const char *name, struct cache_key *id, bool *state)
{
    for (int i = 0; i < 32; i++) {
        char c = name[i];
        unsigned digit;
        if (c >= '0' && c <= '9')
            digit = (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f')
            digit = (unsigned)(c - 'a') + 10;
        else
            return false;
        id->bytes[i / 2] = (uint8_t)(i % 2 ? id->bytes[i / 2] | digit : digit << 4);
    }
    *state = strcmp(name + 32, ".state") == 0;
    return *state || strcmp(name + 32, ".page") == 0;
}

void cache_file_temp_name(uint64_t number, char *name)
{
    snprintf(name, CACHE_FILE_NAME_MAX, "tmp.%016" PRIx64, number);
}

bool cache_file_temp(const char *name)
{
    return strncmp(name, "tmp.", 4) == 0 && strlen(name) == 20 && strspn(name + 4, "0123456789abcdef") == 16;
}

/* ---- the format ---- */

static void put_u32(uint8_t *at, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(v >> (8 * i));
}

static void put_u64(uint8_t *at, uint64_t v)
{
    put_u32(at, (uint32_t)v);
    put_u32(at + 4, (uint32_t)(v >> 32));
}

static uint64_t get_u64(const uint8_t *at)
{
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--)
        v = v << 8 | at[i];
    return v;
}

/* What `head` looks like in a file; time, nonce and checksum stay zero. out: [CACHE_FILE_HEAD]. */
static void encode_head(const struct cache_file_head *head, size_t n, bool encrypted, uint8_t *out)
{
    memset(out, 0, CACHE_FILE_HEAD);
    memcpy(out, magic, sizeof magic);
    out[AT_VERSION] = VERSION;
    out[AT_KIND] = (uint8_t)head->kind;
    out[AT_FLAGS] = encrypted ? FLAG_ENCRYPTED : 0;
    memcpy(out + AT_MODEL, head->model_id, CACHE_MODEL_ID);
    put_u64(out + AT_PAYLOAD, n);
    memcpy(out + AT_KEY, head->key.bytes, sizeof head->key.bytes);
    memcpy(out + AT_PARENT, head->parent.bytes, sizeof head->parent.bytes);
    put_u32(out + AT_POSITION, (uint32_t)head->position);
    put_u32(out + AT_N_IDS, (uint32_t)head->n_ids);
    for (int i = 0; i < CACHE_FILE_IDS; i++)
        put_u32(out + AT_IDS + 4 * i, (uint32_t)head->ids[i]);
}

static void header_checksum(const uint8_t *head, uint8_t *sum)
{
    crypto_generichash(sum, 32, head, AT_CHECKSUM, NULL, 0);
}

static void whole_checksum(const uint8_t *head, const uint8_t *payload, size_t n, uint8_t *sum)
{
    crypto_generichash_state s;
    crypto_generichash_init(&s, NULL, 0, CACHE_FILE_TRAILER);
    crypto_generichash_update(&s, head, CACHE_FILE_HEAD);
    crypto_generichash_update(&s, payload, n);
    crypto_generichash_final(&s, sum, CACHE_FILE_TRAILER);
}

/* The payload's nonce: never the private header's, whatever the random bits are. */
static void payload_nonce(const uint8_t *head, uint8_t *nonce)
{
    memcpy(nonce, head + AT_NONCE, NONCE);
    nonce[NONCE - 1] |= 1;
}

/* Encrypts the private header and the payload in place and makes the trailer. */
static void seal(const struct cache_vault *v, uint8_t *head, uint8_t *payload, size_t n, uint8_t *trailer)
{
    uint8_t nonce[NONCE];
    payload_nonce(head, nonce);
    crypto_aead_xchacha20poly1305_ietf_encrypt_detached(payload, trailer + TAG, NULL, payload, n, head, CACHE_FILE_HEAD, NULL, nonce, v->file_key);
    crypto_aead_xchacha20poly1305_ietf_encrypt_detached(head + PUBLIC, trailer, NULL, head + PUBLIC, PRIVATE, head, PUBLIC, NULL, head + AT_NONCE,
                                                        v->file_key);
}

/* The reverse. False: not sealed with this key, or changed since. */
static bool unseal(const struct cache_vault *v, uint8_t *head, uint8_t *payload, size_t n, const uint8_t *trailer)
{
    uint8_t nonce[NONCE];
    payload_nonce(head, nonce);
    return crypto_aead_xchacha20poly1305_ietf_decrypt_detached(head + PUBLIC, NULL, head + PUBLIC, PRIVATE, trailer, head, PUBLIC, head + AT_NONCE,
                                                               v->file_key) == 0 &&
           crypto_aead_xchacha20poly1305_ietf_decrypt_detached(payload, NULL, payload, n, trailer + TAG, head, CACHE_FILE_HEAD, nonce, v->file_key) ==
               0;
}

static enum cache_file_status bad(struct error *err, const char *what)
{
    error_set(err, "%s", what);
    return CACHE_FILE_BAD;
}

static enum cache_file_status failed(struct error *err)
{
    error_set(err, "%s", strerror(errno));
    return CACHE_FILE_FAILED;
}

/* Checks the public header of what was read against the one expected (encode_head's). */
static enum cache_file_status check_public(const uint8_t *head, const uint8_t *expect, struct error *err)
{
    uint8_t sum[32];
    header_checksum(head, sum);
    if (memcmp(head, magic, sizeof magic) != 0)
        return bad(err, "not a cache file");
    if (memcmp(sum, head + AT_CHECKSUM, sizeof sum) != 0)
        return bad(err, "its header is damaged");
    if (memcmp(head + AT_VERSION, expect + AT_VERSION, AT_MODEL - AT_VERSION) != 0)
        return bad(err, "its version, kind or encryption is not what its name says");
    if (get_u64(head + AT_PAYLOAD) != get_u64(expect + AT_PAYLOAD))
        return bad(err, "its size is not this model's");
    if (memcmp(head + AT_MODEL, expect + AT_MODEL, CACHE_MODEL_ID) != 0) {
        error_set(err, "it is another model's");
        return CACHE_FILE_OTHER;
    }
    return CACHE_FILE_OK;
}

/* The part of cache_file_read that has the file open. */
static enum cache_file_status read_open(const struct cache_vault *v, int fd, const struct cache_file_head *want, uint8_t *payload, size_t n,
                                        struct error *err)
{
    const struct cache_file_ops *ops = v->ops;
    struct stat st;
    if (op_stat(ops, fd, &st) < 0)
        return failed(err);
    if (!S_ISREG(st.st_mode))
        return bad(err, "not a regular file");
    if (!cache_file_private(&st))
        return bad(err, "others may read or change it");
    if (n > CACHE_PAYLOAD_MAX || st.st_size < 0 || (uint64_t)st.st_size != cache_file_bytes(n))
        return bad(err, "its length is not what its name says");

    uint8_t head[CACHE_FILE_HEAD], expect[CACHE_FILE_HEAD], trailer[CACHE_FILE_TRAILER], sum[CACHE_FILE_TRAILER];
    encode_head(want, n, v->encrypted, expect);
    long k = read_all(ops, fd, head, sizeof head);
    if (k < 0)
        return failed(err);
    if ((size_t)k < sizeof head)
        return bad(err, "it ends too early");
    enum cache_file_status status = check_public(head, expect, err);
    if (status != CACHE_FILE_OK)
        return status;
    k = read_all(ops, fd, payload, n);
    if (k < 0)
        return failed(err);
    if ((size_t)k < n)
        return bad(err, "it ends too early");
    k = read_all(ops, fd, trailer, sizeof trailer);
    if (k < 0)
        return failed(err);
    if ((size_t)k < sizeof trailer)
        return bad(err, "it ends too early");

    if (v->encrypted) {
        if (!unseal(v, head, payload, n, trailer))
            return bad(err, "it is damaged, or was written with another key");
    } else {
        whole_checksum(head, payload, n, sum);
        if (memcmp(sum, trailer, sizeof sum) != 0)
            return bad(err, "its checksum is wrong");
    }
    if (memcmp(head + PUBLIC, expect + PUBLIC, PRIVATE) != 0)
        return bad(err, "it holds another text than its name says");
    return CACHE_FILE_OK;
}

enum cache_file_status cache_file_read(const struct cache_vault *v, int dir, const char *name, const struct cache_file_head *want, uint8_t *payload,
                                       size_t n, struct error *err)
{
    /* O_NONBLOCK: a FIFO must not make a reader wait. */
    int fd = cache_op_open(v->ops, dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
    if (fd < 0) {
        if (errno == ENOENT)
            return CACHE_FILE_ABSENT;
        if (errno == ELOOP || errno == ENXIO) /* a link; a socket */
            return bad(err, "not a regular file");
        return failed(err);
    }
    enum cache_file_status status = read_open(v, fd, want, payload, n, err);
    cache_op_close(v->ops, fd);
    return status;
}

int cache_file_write(const struct cache_vault *v, int dir, const char *temp, const struct cache_file_head *head, uint8_t *payload, size_t n,
                     struct error *err)
{
    const struct cache_file_ops *ops = v->ops;
    uint8_t bytes[CACHE_FILE_HEAD], trailer[CACHE_FILE_TRAILER];
    encode_head(head, n, v->encrypted, bytes);
    put_u64(bytes + AT_TIME, (uint64_t)time(NULL));
    if (v->encrypted) {
        randombytes_buf(bytes + AT_NONCE, NONCE);
        bytes[AT_NONCE + NONCE - 1] &= 0xFE;
    }
    header_checksum(bytes, bytes + AT_CHECKSUM);
    if (v->encrypted)
        seal(v, bytes, payload, n, trailer);
    else
        whole_checksum(bytes, payload, n, trailer);

    int fd = cache_op_open(ops, dir, temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return error_set(err, "%s", strerror(errno));
    bool ok = op_chmod(ops, dir, temp, 0600) == 0 && /* a umask may have taken the owner's bits */
              write_all(ops, fd, bytes, sizeof bytes) == 0 && write_all(ops, fd, payload, n) == 0 &&
              write_all(ops, fd, trailer, sizeof trailer) == 0 && cache_op_fsync(ops, fd) == 0;
    if (!ok)
        error_set(err, "%s", strerror(errno));
    cache_op_close(ops, fd); /* a failure here says nothing after a good fsync */
    if (!ok)
        cache_op_unlink(ops, dir, temp, false);
    return ok ? 0 : -1;
}

int cache_file_commit(const struct cache_vault *v, int dir, const char *temp, const char *name, struct error *err)
{
    int r;
    AGAIN(r, v->ops->rename(v->ops->ctx, dir, temp, name));
    if (r < 0) {
        error_set(err, "%s", strerror(errno));
        cache_op_unlink(v->ops, dir, temp, false);
        return -1;
    }
    /* The file is whole and has its name; if the folder's entry does not reach the disk, a power cut loses a file and nothing else. */
    cache_op_fsync(v->ops, dir);
    return 0;
}

/* ---- folders ---- */

int cache_folder_make(const struct cache_file_ops *ops, int dir, const char *name)
{
    int r;
    AGAIN(r, ops->mkdir(ops->ctx, dir, name, 0700));
    if (r < 0)
        return errno == EEXIST ? 0 : -1;
    return op_chmod(ops, dir, name, 0700); /* a umask may have taken the owner's bits */
}

int cache_folder_open(const struct cache_file_ops *ops, int dir, const char *name, bool at_root, bool *absent, struct error *err)
{
    int fd = cache_op_open(ops, dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (at_root ? 0 : O_NOFOLLOW), 0);
    *absent = fd < 0 && errno == ENOENT;
    if (fd < 0)
        return error_set(err, "%s", strerror(errno));
    struct stat st;
    if (op_stat(ops, fd, &st) < 0) {
        error_set(err, "%s", strerror(errno));
    } else if (!cache_file_private(&st)) {
        error_set(err, "others have rights in it; it must belong to the server's user, mode 0700");
    } else {
        return fd;
    }
    cache_op_close(ops, fd);
    return -1;
}
