/* One file of the disk cache: whatever happened to it, it is read back exactly or not at all. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <sodium.h>

#include "tests/unit/cache_fixture.h"

struct fixture {
    char *dir;
    const char *key_file; /* NULL: not encrypted */
    char key_path[PATH_BYTES];
    struct cache_vault vault;
    struct cache_file_ops ops;
    int fd; /* of dir */
    struct text text;
    uint8_t *good; /* a page file, as written */
    size_t good_bytes;
};

static const char file_name[] = "0123456789abcdef0123456789abcdef.page";

static struct cache_file_head page_head(const struct text *t, int i)
{
    struct cache_file_head h = {
        .kind = CACHE_FILE_PAGE, .key = t->keys[i], .parent = i ? t->keys[i - 1] : t->root, .position = (i + 1) * 64, .n_ids = CACHE_FILE_IDS};
    memcpy(h.model_id, model_number(1).id, sizeof h.model_id);
    memcpy(h.ids, t->ids + (ptrdiff_t)i * 64, sizeof h.ids);
    return h;
}

static void write_page(struct fixture *f, int i, const char *name)
{
    struct cache_file_head head = page_head(&f->text, i);
    uint8_t *data = contents(&f->text.keys[i], false);
    struct error err;
    assert_int_equal(cache_file_write(&f->vault, f->fd, "tmp.0", &head, data, PAGE_BYTES, &err), 0);
    assert_int_equal(cache_file_commit(&f->vault, f->fd, "tmp.0", name, &err), 0);
    free(data);
}

static int setup(void **state)
{
    bool encrypted = *state != NULL;
    struct fixture *f = calloc(1, sizeof *f);
    assert_true(sodium_init() >= 0);
    f->dir = temp_folder();
    f->fd = open(f->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    f->ops = quick_ops();
    if (encrypted) {
        snprintf(f->key_path, sizeof f->key_path, "%s/key", f->dir);
        write_file(f->key_path, "a key file of some forty bytes, not random", 40, 0600);
        f->key_file = f->key_path;
    }
    struct error err = {{0}};
    if (cache_vault_open(&f->vault, &f->ops, f->key_file, &err) < 0)
        fail_msg("%s", err.text);
    struct cache_model m = model_number(1);
    f->text = text_make("patient-7", &m, 7, 2);
    write_page(f, 1, file_name);
    f->good = read_whole(path_in(f->dir, file_name), &f->good_bytes);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    cache_vault_close(&f->vault);
    close(f->fd);
    free(f->good);
    remove_folder_at(f->dir);
    free(f);
    return 0;
}

static enum cache_file_status read_as(struct fixture *f, const struct cache_file_head *want, const char *name)
{
    uint8_t data[PAGE_BYTES];
    struct error err = {{0}};
    enum cache_file_status s = cache_file_read(&f->vault, f->fd, name, want, data, PAGE_BYTES, &err);
    if (s == CACHE_FILE_OK) {
        uint8_t *right = contents(&want->key, false);
        assert_memory_equal(data, right, PAGE_BYTES);
        free(right);
    } else if (s != CACHE_FILE_ABSENT) {
        assert_true(err.text[0] != '\0');
    }
    return s;
}

static enum cache_file_status read_page(struct fixture *f)
{
    struct cache_file_head want = page_head(&f->text, 1);
    return read_as(f, &want, file_name);
}

/* Reads the file with n bytes of `data` in it. */
static enum cache_file_status read_bytes(struct fixture *f, const uint8_t *data, size_t n)
{
    write_file(path_in(f->dir, file_name), data, n, 0600);
    return read_page(f);
}

static void what_is_written_is_read_back(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(f->good_bytes, cache_file_bytes(PAGE_BYTES));
    assert_int_equal(read_page(f), CACHE_FILE_OK);
    struct stat st;
    assert_int_equal(stat(path_in(f->dir, file_name), &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
}

static void the_format_is_the_one_documented(void **state)
{
    struct fixture *f = *state;
    const uint8_t *g = f->good;
    assert_memory_equal(g, "BEDCACHE", 8);
    assert_int_equal(g[8] | g[9] << 8, 1);
    assert_int_equal(g[10], CACHE_FILE_PAGE);
    assert_int_equal(g[11], f->key_file ? 1 : 0);
    assert_memory_equal(g + 16, model_number(1).id, 32);
    assert_int_equal(g[48] | g[49] << 8, PAGE_BYTES);
    uint8_t sum[32];
    crypto_generichash(sum, sizeof sum, g, 96, NULL, 0);
    assert_memory_equal(g + 96, sum, sizeof sum);
    if (f->key_file) {
        uint8_t again[32] = {0};
        assert_memory_not_equal(g + 64, again, 24);
        assert_int_equal(g[87] & 1, 0);
        return;
    }
    assert_memory_equal(g + 128, f->text.keys[1].bytes, 16);
    assert_memory_equal(g + 144, f->text.keys[0].bytes, 16);
    assert_int_equal(g[160], 128);
    assert_int_equal(g[164], 64);
    int32_t id = (int32_t)((uint32_t)g[168] | (uint32_t)g[169] << 8 | (uint32_t)g[170] << 16 | (uint32_t)g[171] << 24);
    assert_int_equal(id, f->text.ids[64]);
    crypto_generichash(sum, sizeof sum, g, f->good_bytes - 32, NULL, 0);
    assert_memory_equal(g + f->good_bytes - 32, sum, sizeof sum);
}

static void a_flipped_bit_anywhere_in_the_headers_is_bad(void **state)
{
    struct fixture *f = *state;
    for (size_t i = 0; i < CACHE_FILE_HEAD; i++) {
        const uint8_t kept = f->good[i];
        f->good[i] ^= (uint8_t)(1 << (i % 8));
        assert_int_equal(read_bytes(f, f->good, f->good_bytes), CACHE_FILE_BAD);
        f->good[i] = (uint8_t)~kept;
        assert_int_equal(read_bytes(f, f->good, f->good_bytes), CACHE_FILE_BAD);
        f->good[i] = kept;
    }
    assert_int_equal(read_bytes(f, f->good, f->good_bytes), CACHE_FILE_OK);
}

static void a_flipped_bit_in_the_payload_or_trailer_is_bad(void **state)
{
    struct fixture *f = *state;
    for (size_t i = CACHE_FILE_HEAD; i < f->good_bytes; i += i + 97 < f->good_bytes - CACHE_FILE_TRAILER ? 97 : 1) {
        f->good[i] ^= (uint8_t)(1 << (i % 8));
        assert_int_equal(read_bytes(f, f->good, f->good_bytes), CACHE_FILE_BAD);
        f->good[i] ^= (uint8_t)(1 << (i % 8));
    }
}

static void a_file_cut_short_at_any_header_byte_or_in_the_payload_is_bad(void **state)
{
    struct fixture *f = *state;
    for (size_t n = 0; n < f->good_bytes; n += n < CACHE_FILE_HEAD + 2 || n + 40 > f->good_bytes ? 1 : 191)
        assert_int_equal(read_bytes(f, f->good, n), CACHE_FILE_BAD);
}

static void a_lengthened_file_is_bad(void **state)
{
    struct fixture *f = *state;
    uint8_t *longer = calloc(1, f->good_bytes + 100000);
    memcpy(longer, f->good, f->good_bytes);
    const size_t extra[] = {1, 2, 16, 32, 448, 4096, 100000};
    for (size_t i = 0; i < sizeof extra / sizeof extra[0]; i++)
        assert_int_equal(read_bytes(f, longer, f->good_bytes + extra[i]), CACHE_FILE_BAD);
    free(longer);
}

/* Recomputes what needs no key, as somebody would who may write to the folder but does not have it. */
static void resum(uint8_t *file, size_t n, bool whole)
{
    crypto_generichash(file + 96, 32, file, 96, NULL, 0);
    if (whole)
        crypto_generichash(file + n - 32, 32, file, n - 32, NULL, 0);
}

static void a_payload_exchanged_between_two_right_headers_is_bad(void **state)
{
    struct fixture *f = *state;
    size_t n;
    write_page(f, 0, "other");
    uint8_t *other = read_whole(path_in(f->dir, "other"), &n);
    assert_int_equal(n, f->good_bytes);
    uint8_t *mixed = malloc(n);
    memcpy(mixed, f->good, CACHE_FILE_HEAD);
    memcpy(mixed + CACHE_FILE_HEAD, other + CACHE_FILE_HEAD, n - CACHE_FILE_HEAD); /* payload and trailer */
    assert_int_equal(read_bytes(f, mixed, n), CACHE_FILE_BAD);
    memcpy(mixed + n - CACHE_FILE_TRAILER, f->good + n - CACHE_FILE_TRAILER, CACHE_FILE_TRAILER); /* payload only */
    assert_int_equal(read_bytes(f, mixed, n), CACHE_FILE_BAD);
    memcpy(mixed, other, n);
    memcpy(mixed, f->good, 128); /* the public header */
    assert_int_equal(read_bytes(f, mixed, n), CACHE_FILE_BAD);
    memcpy(mixed, f->good, n);
    memcpy(mixed + n - CACHE_FILE_TRAILER, other + n - CACHE_FILE_TRAILER, 16); /* one tag */
    assert_int_equal(read_bytes(f, mixed, n), CACHE_FILE_BAD);
    free(mixed);
    free(other);
}

static void a_whole_file_under_another_name_is_bad(void **state)
{
    struct fixture *f = *state;
    write_page(f, 0, file_name);
    assert_int_equal(read_page(f), CACHE_FILE_BAD);
    struct cache_file_head want = page_head(&f->text, 0);
    assert_int_equal(read_as(f, &want, file_name), CACHE_FILE_OK);
    /* Right in everything but one field of what it says of itself. */
    want.position += 64;
    assert_int_equal(read_as(f, &want, file_name), CACHE_FILE_BAD);
    want = page_head(&f->text, 0);
    want.ids[63] ^= 1;
    assert_int_equal(read_as(f, &want, file_name), CACHE_FILE_BAD);
    want = page_head(&f->text, 0);
    want.parent.bytes[0] ^= 1;
    assert_int_equal(read_as(f, &want, file_name), CACHE_FILE_BAD);
    want = page_head(&f->text, 0);
    want.kind = CACHE_FILE_STATE;
    assert_int_equal(read_as(f, &want, file_name), CACHE_FILE_BAD);
}

static void another_models_file_is_told_from_a_damaged_one(void **state)
{
    struct fixture *f = *state;
    struct cache_file_head want = page_head(&f->text, 1);
    want.model_id[31] ^= 1;
    assert_int_equal(read_as(f, &want, file_name), CACHE_FILE_OTHER);
}

static void right_checksums_do_not_make_a_wrong_header_right(void **state)
{
    struct fixture *f = *state;
    static const struct {
        int at;
        uint8_t flip;
    } changes[] = {{8, 3}, {9, 1}, {10, 3}, {11, 1}, {11, 2}, {12, 1}, {48, 1}, {49, 1}, {51, 0x80}, {55, 0x80}, {55, 0x7F}};
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        uint8_t *changed = malloc(f->good_bytes);
        memcpy(changed, f->good, f->good_bytes);
        changed[changes[i].at] ^= changes[i].flip;
        resum(changed, f->good_bytes, !f->key_file);
        assert_int_equal(read_bytes(f, changed, f->good_bytes), CACHE_FILE_BAD);
        free(changed);
    }
}

static void without_the_key_nothing_can_be_forged(void **state)
{
    struct fixture *f = *state;
    struct cache_vault other = f->vault;
    other.file_key[0] ^= 1;
    struct cache_file_head head = page_head(&f->text, 1);
    uint8_t *data = contents(&f->text.keys[1], false);
    assert_int_equal(cache_file_write(&other, f->fd, "tmp.1", &head, data, PAGE_BYTES, NULL), 0);
    assert_int_equal(cache_file_commit(&other, f->fd, "tmp.1", file_name, NULL), 0);
    free(data);
    assert_int_equal(read_page(f), CACHE_FILE_BAD);
    /* A file in clear where encrypted ones are expected. */
    other.encrypted = false;
    data = contents(&f->text.keys[1], false);
    assert_int_equal(cache_file_write(&other, f->fd, "tmp.1", &head, data, PAGE_BYTES, NULL), 0);
    assert_int_equal(cache_file_commit(&other, f->fd, "tmp.1", file_name, NULL), 0);
    free(data);
    assert_int_equal(read_page(f), CACHE_FILE_BAD);
}

static void two_files_never_share_a_nonce(void **state)
{
    struct fixture *f = *state;
    size_t n;
    write_page(f, 1, "again");
    uint8_t *again = read_whole(path_in(f->dir, "again"), &n);
    assert_memory_not_equal(again + 64, f->good + 64, 24);
    assert_memory_not_equal(again + 128, f->good + 128, 64);
    free(again);
}

static void a_key_that_others_may_read_is_refused_unless_systemd_keeps_it(void **state)
{
    struct fixture *f = *state;
    const char *dirs[] = {NULL, "", f->dir, "/nowhere"};
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s", path_in(f->dir, "entrusted"));
    write_file(path, "thirty-two bytes or more, no secret", 35, 0600);
    for (size_t i = 0; i < sizeof dirs / sizeof dirs[0]; i++) {
        static const unsigned modes[] = {0600, 0400, 0440, 0640, 0444, 0460, 0450, 0604};
        if (dirs[i])
            assert_int_equal(setenv("CREDENTIALS_DIRECTORY", dirs[i], 1), 0);
        for (size_t k = 0; k < sizeof modes / sizeof modes[0]; k++) {
            struct cache_vault v;
            struct error err = {""};
            assert_int_equal(chmod(path, modes[k]), 0);
            const int rc = cache_vault_open(&v, &f->ops, path, &err);
            assert_int_equal(rc, k < 2 || (k < 4 && i == 2) ? 0 : -1);
            if (rc)
                assert_non_null(strstr(err.text, "chmod 600"));
            cache_vault_close(&v);
        }
    }
    assert_int_equal(unsetenv("CREDENTIALS_DIRECTORY"), 0);
    assert_int_equal(unlink(path), 0);
}

static void what_is_no_private_regular_file_is_bad_and_never_waits(void **state)
{
    struct fixture *f = *state;
    const char *path = path_in(f->dir, file_name);
    char kept[PATH_BYTES];
    snprintf(kept, sizeof kept, "%s", path_in(f->dir, "kept"));
    assert_int_equal(rename(path, kept), 0);
    assert_int_equal(read_page(f), CACHE_FILE_ABSENT);

    assert_int_equal(symlink("kept", path), 0);
    assert_int_equal(read_page(f), CACHE_FILE_BAD);
    assert_int_equal(unlink(path), 0);

    assert_int_equal(symlink("nowhere", path), 0);
    assert_int_equal(read_page(f), CACHE_FILE_BAD);
    assert_int_equal(unlink(path), 0);

    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(read_page(f), CACHE_FILE_BAD);
    assert_int_equal(unlink(path), 0);

    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(read_page(f), CACHE_FILE_BAD);
    assert_int_equal(rmdir(path), 0);

    assert_int_equal(rename(kept, path), 0);
    assert_int_equal(read_page(f), CACHE_FILE_OK);
    static const unsigned modes[] = {0666, 0640, 0604, 0620, 0602, 0610, 0601};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        assert_int_equal(chmod(path, modes[i]), 0);
        assert_int_equal(read_page(f), CACHE_FILE_BAD);
    }
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(read_page(f), CACHE_FILE_OK);
    if (geteuid() == 0) {
        assert_int_equal(chown(path, 12345, (gid_t)-1), 0);
        assert_int_equal(read_page(f), CACHE_FILE_BAD);
    }
}

static void file_names_are_read_strictly(void **state)
{
    (void)state;
    struct cache_key id, back;
    char name[CACHE_FILE_NAME_MAX];
    bool is_state;
    for (int i = 0; i < 16; i++)
        id.bytes[i] = (uint8_t)(i * 17 + 1);
    for (int s = 0; s < 2; s++) {
        cache_file_name(&id, s, name);
        assert_true(cache_file_name_parse(name, &back, &is_state));
        assert_true(cache_key_equal(&id, &back) && is_state == (s == 1));
    }
    static const char *const wrong[] = {"",
                                        "x",
                                        "0123456789abcdef0123456789abcdef",
                                        "0123456789abcdef0123456789abcdef.",
                                        "0123456789abcdef0123456789abcdef.pag",
                                        "0123456789abcdef0123456789abcdef.pages",
                                        "0123456789abcdef0123456789abcdef.page.page",
                                        "0123456789ABCDEF0123456789abcdef.page",
                                        "0123456789abcdef0123456789abcde.page",
                                        "0123456789abcdef0123456789abcdef0.page",
                                        "g123456789abcdef0123456789abcdef.page",
                                        " 123456789abcdef0123456789abcdef.page",
                                        "0123456789abcdef0123456789abcdef.STATE",
                                        "tmp.0000000000000000",
                                        "namespace"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_false(cache_file_name_parse(wrong[i], &back, &is_state));
    cache_file_temp_name(UINT64_MAX, name);
    assert_true(cache_file_temp(name));
    assert_false(cache_file_temp("tmp."));
    assert_false(cache_file_temp("tmp.000000000000000"));
    assert_false(cache_file_temp("tmp.00000000000000000"));
    assert_false(cache_file_temp("tmp.000000000000000g"));
    assert_false(cache_file_temp("tmp.my important file"));
}

#define BOTH(test)                                                                                                                                   \
    {#test "_plain", test, setup, teardown, NULL},                                                                                                   \
    {                                                                                                                                                \
#test "_encrypted", test, setup, teardown, yes                                                                                               \
    }

int main(void)
{
    static char yes[] = "encrypted";
    const struct CMUnitTest tests[] = {
        BOTH(what_is_written_is_read_back),
        BOTH(the_format_is_the_one_documented),
        BOTH(a_flipped_bit_anywhere_in_the_headers_is_bad),
        BOTH(a_flipped_bit_in_the_payload_or_trailer_is_bad),
        BOTH(a_file_cut_short_at_any_header_byte_or_in_the_payload_is_bad),
        BOTH(a_lengthened_file_is_bad),
        BOTH(a_payload_exchanged_between_two_right_headers_is_bad),
        BOTH(a_whole_file_under_another_name_is_bad),
        BOTH(another_models_file_is_told_from_a_damaged_one),
        BOTH(right_checksums_do_not_make_a_wrong_header_right),
        BOTH(a_key_that_others_may_read_is_refused_unless_systemd_keeps_it),
        BOTH(what_is_no_private_regular_file_is_bad_and_never_waits),
        cmocka_unit_test_prestate_setup_teardown(without_the_key_nothing_can_be_forged, setup, teardown, yes),
        cmocka_unit_test_prestate_setup_teardown(two_files_never_share_a_nonce, setup, teardown, yes),
        cmocka_unit_test(file_names_are_read_strictly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
