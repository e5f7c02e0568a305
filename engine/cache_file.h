/* engine/cache_file.h: one file of the prefix cache: its format, how it is written so that it is whole or absent, and how it is believed.
 *
 * A file, all numbers little-endian:
 *
 *      at  size  public header, never encrypted
 *       0     8  "BEDCACHE"
 *       8     2  version, 1
 *      10     1  kind: 1 page, 2 state, 3 a namespace's name
 *      11     1  flags: bit 0 encrypted
 *      12     4  zero
 *      16    32  model id (zero for a name)
 *      48     8  payload bytes
 *      56     8  written, Unix seconds
 *      64    24  nonce (zero when not encrypted); its last bit is zero
 *      88     8  zero
 *      96    32  BLAKE2b-256 of the 96 bytes before
 *                private header: what says something of the text
 *     128    16  key
 *     144    16  parent's key (a page; else zero)
 *     160     4  position: tokens from the start of the text to the end of this page or state; a state's that is no multiple of 64 is that of a tail, whose
 *                payload is a page with the tokens since the last multiple, then the state
 *     164     4  number of token ids: 64 for a page, else 0
 *     168   256  token ids, int32
 *     424    24  zero
 *     448        payload
 *     ...    32  trailer. Not encrypted: BLAKE2b-256 of everything before. Encrypted: two XChaCha20-Poly1305 tags, 16 bytes each: the first of the private
 *                header (nonce as above; the public header is associated data), the second of the payload (nonce with its last bit set;
 *                associated data: the public header and the private header in clear)
 *
 * So no part of a file can be exchanged for another file's, and every size is known before anything is read. Private to engine/cache_*.c and tests. */
#ifndef BEDSIDE_ENGINE_CACHE_FILE_H
#define BEDSIDE_ENGINE_CACHE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "base/error.h"
#include "engine/cache_key.h"

/* The system calls used, so that tests can make any of them fail. Results and errno as POSIX; `dir` is a folder's descriptor or AT_FDCWD. */
struct cache_file_ops {
    int (*open)(void *ctx, int dir, const char *name, int flags, unsigned mode);
    long (*read)(void *ctx, int fd, void *data, size_t n);
    long (*write)(void *ctx, int fd, const void *data, size_t n);
    int (*fsync)(void *ctx, int fd);
    int (*close)(void *ctx, int fd);
    int (*stat)(void *ctx, int fd, struct stat *st);
    int (*stat_at)(void *ctx, int dir, const char *name, struct stat *st); /* does not follow a link */
    int (*rename)(void *ctx, int dir, const char *from, const char *to);
    int (*unlink)(void *ctx, int dir, const char *name, bool folder);
    int (*mkdir)(void *ctx, int dir, const char *name, unsigned mode);
    int (*chmod)(void *ctx, int dir, const char *name, unsigned mode);
    int (*touch)(void *ctx, int dir, const char *name); /* sets the time of last change to now; does not follow a link */
    int (*lock)(void *ctx, int fd);                     /* exclusive, does not wait (EWOULDBLOCK) */
    int (*list)(void *ctx, int dir, void (*each)(void *arg, const char *name), void *arg); /* all names but . and .. */
    void *ctx;
};
extern const struct cache_file_ops cache_file_system;

/* How files are named and sealed. */
struct cache_vault {
    const struct cache_file_ops *ops;
    bool encrypted;
    uint8_t file_key[32], name_key[32]; /* when encrypted */
};

enum cache_file_kind { CACHE_FILE_PAGE = 1, CACHE_FILE_STATE = 2, CACHE_FILE_NAME = 3 };

enum { CACHE_FILE_IDS = 64, CACHE_FILE_HEAD = 448, CACHE_FILE_TRAILER = 32, CACHE_FILE_NAME_MAX = 48 };

/* What a file must say of itself to be the one that was asked for. */
struct cache_file_head {
    enum cache_file_kind kind;
    uint8_t model_id[CACHE_MODEL_ID];
    struct cache_key key, parent;
    int32_t position;
    int32_t n_ids;
    int32_t ids[CACHE_FILE_IDS];
};

enum cache_file_status {
    CACHE_FILE_OK,
    CACHE_FILE_ABSENT,
    CACHE_FILE_BAD,    /* not what was written under this name: damaged, exchanged, or no private regular file */
    CACHE_FILE_OTHER,  /* whole, but of another model */
    CACHE_FILE_FAILED, /* the system could not read it (now); the file may well be good */
};

/* Bytes of a file with n bytes of payload, n <= CACHE_PAYLOAD_MAX. */
#define CACHE_PAYLOAD_MAX ((size_t)1 << 36)
static inline uint64_t cache_file_bytes(size_t n)
{
    return (uint64_t)n + CACHE_FILE_HEAD + CACHE_FILE_TRAILER;
}

/* Reads the key file's secret. -1 with err when it cannot be read, is not private or too short. NULL path: nothing is encrypted. */
int cache_vault_open(struct cache_vault *v, const struct cache_file_ops *ops, const char *key_file, struct error *err);
void cache_vault_close(struct cache_vault *v); /* forgets the keys */

/* The 16 bytes that name a page or state within its folder: the key itself, or a keyed hash of it. */
struct cache_key cache_vault_file_id(const struct cache_vault *v, const struct cache_key *key, bool state);

/* The folder of a namespace: "ns=NAME", or "enc=" and 32 hex digits. `encrypted` need not be the vault's own way, but needs its keys if true.
 * folder: [CACHE_FOLDER_MAX]. */
enum { CACHE_FOLDER_MAX = CACHE_NAMESPACE_MAX + 4 };
void cache_vault_folder(const struct cache_vault *v, const char *ns, bool encrypted, char *folder);

/* Holds the namespace's name in a folder whose own name hides it: kind 3, payload [CACHE_NAMESPACE_MAX], zeros after the name. */
#define CACHE_NAME_FILE "namespace"

/* "32 hex digits.page" or ".state"; name: [CACHE_FILE_NAME_MAX]. */
void cache_file_name(const struct cache_key *id, bool state, char *name);
/* The reverse. False: not such a name. */
bool cache_file_name_parse(const char *name, struct cache_key *id, bool *state);
/* "tmp." and 16 hex digits: a file being written. cache_file_temp: whether a name is such. */
void cache_file_temp_name(uint64_t number, char *name);
bool cache_file_temp(const char *name);

/* Reads the file `name`, believes nothing of it before it is verified and compares it with `want`. payload: [n], undefined unless OK. A message with
 * the cause (and nothing of the content) is set unless the status is OK or ABSENT. */
enum cache_file_status cache_file_read(const struct cache_vault *v, int dir, const char *name, const struct cache_file_head *want, uint8_t *payload,
                                       size_t n, struct error *err);

/* Writes a whole file under a temporary name, synced to disk, mode 0600. `payload` is overwritten when the vault encrypts. 0, or -1 with err and no
 * file left behind (as far as the system allows). */
int cache_file_write(const struct cache_vault *v, int dir, const char *temp, const struct cache_file_head *head, uint8_t *payload, size_t n,
                     struct error *err);
/* Gives it its name, in place of what had it, and syncs the folder. 0, or -1 with err and no file under either name changed or left. */
int cache_file_commit(const struct cache_vault *v, int dir, const char *temp, const char *name, struct error *err);

/* Makes a folder of mode 0700 whatever the umask. 0 also when it is there already; -1 with errno. */
int cache_folder_make(const struct cache_file_ops *ops, int dir, const char *name);
/* Opens a folder that must be ours alone (links are not followed unless at_root). A descriptor, or -1 with err; *absent tells whether it was not there. */
int cache_folder_open(const struct cache_file_ops *ops, int dir, const char *name, bool at_root, bool *absent, struct error *err);

/* Ours, and without any right for group or others. */
bool cache_file_private(const struct stat *st);

/* The ops with EINTR tried again. */
int cache_op_close(const struct cache_file_ops *ops, int fd); /* fd may be -1 */
int cache_op_unlink(const struct cache_file_ops *ops, int dir, const char *name, bool folder);
int cache_op_stat_at(const struct cache_file_ops *ops, int dir, const char *name, struct stat *st);
int cache_op_open(const struct cache_file_ops *ops, int dir, const char *name, int flags, unsigned mode);
int cache_op_list(const struct cache_file_ops *ops, int dir, void (*each)(void *arg, const char *name), void *arg);
int cache_op_lock(const struct cache_file_ops *ops, int fd);
int cache_op_fsync(const struct cache_file_ops *ops, int fd);
int cache_op_touch(const struct cache_file_ops *ops, int dir, const char *name);

#endif
