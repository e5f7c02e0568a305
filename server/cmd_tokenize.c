/* server/cmd_tokenize.c: `bedside tokenize --model FILE [TEXT...]`, text to token ids as the model sees them. */
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/buf.h"
#include "config/config.h"
#include "engine/gguf.h"
#include "engine/tokenizer.h"
#include "server/commands.h"
#include "server/show.h"

enum { MAX_INPUT = 64 << 20, PIECE_SHOWN = 60 };

struct options {
    bool ids_only, special, no_nfc;
};

static void print_usage(FILE *out)
{
    fputs("usage: bedside tokenize --model FILE [options] [TEXT...]\n"
          "\n"
          "Prints the token ids of the text, one a line with its piece. Without TEXT standard input is read, its last newline included.\n"
          "  --ids-only  only the ids, on one line\n"
          "  --special   recognise control tokens such as <|im_start|> in the text; a client's text never becomes one\n"
          "  --no-nfc    do not normalise the text to Unicode NFC first\n",
          out);
}

/* Takes this command's own options out of argv (they are no settings). True when help is wanted. */
static bool take_options(int *argc, char **argv, struct options *o)
{
    int kept = 0;
    bool help = false, only_words = false;
    for (int i = 0; i < *argc; i++) {
        const char *arg = argv[i];
        only_words = only_words || strcmp(arg, "--") == 0;
        if (!only_words && strcmp(arg, "--ids-only") == 0)
            o->ids_only = true;
        else if (!only_words && strcmp(arg, "--special") == 0)
            o->special = true;
        else if (!only_words && strcmp(arg, "--no-nfc") == 0)
            o->no_nfc = true;
        else if (!only_words && (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0))
            help = true;
        else
            argv[kept++] = argv[i];
    }
    *argc = kept;
    return help;
}

static int read_stdin(struct buf *text, struct error *err)
{
    for (;;) {
        if (!buf_reserve(text, 65536))
            return error_set(err, "out of memory");
        ssize_t n = read(STDIN_FILENO, text->data + text->len, 65536);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_set(err, "standard input: %s", strerror(errno));
        if (n == 0)
            return buf_add(text, "", 0) ? 0 : error_set(err, "out of memory");
        text->len += (size_t)n;
        if (text->len > MAX_INPUT)
            return error_set(err, "standard input: more than %d MiB", MAX_INPUT >> 20);
    }
}

/* The words with a space between, or standard input. */
static int read_text(struct buf *text, const char **words, int n_words, struct error *err)
{
    if (n_words == 0)
        return read_stdin(text, err);
    for (int i = 0; i < n_words; i++) {
        if (i)
            buf_putc(text, ' ');
        buf_puts(text, words[i]);
    }
    return text->failed ? error_set(err, "out of memory") : 0;
}

static void print_tokens(const struct tokenizer *t, const struct token_list *list, bool ids_only)
{
    for (size_t i = 0; i < list->len; i++) {
        if (ids_only) {
            printf("%s%" PRId32, i ? " " : "", list->ids[i]);
            continue;
        }
        size_t len;
        const char *piece = tokenizer_bytes(t, list->ids[i], &len);
        printf("%8" PRId32 "  ", list->ids[i]);
        show_quoted(stdout, piece, len, PIECE_SHOWN);
        puts(tokenizer_kind(t, list->ids[i]) == TOKEN_CONTROL ? "  (control)" : "");
    }
    if (ids_only)
        putchar('\n');
    else
        printf("%zu tokens\n", list->len);
}

int cmd_tokenize(int argc, char **argv)
{
    struct options o = {0};
    if (take_options(&argc, argv, &o)) {
        print_usage(stdout);
        return 0;
    }
    struct error err = {""};
    struct config c = {0};
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct token_list list = {0};
    struct buf text = BUF_INIT;
    int n_words = 0, status = 1;
    const char **words = alloc_array((size_t)argc, sizeof *words);
    if (!words) {
        error_set(&err, "out of memory");
        goto out;
    }
    if (config_load(&c, argc, argv, words, argc, &n_words, &err)) {
        status = 2;
        goto out;
    }
    if (!*c.model) {
        error_set(&err, "which model's vocabulary? give --model FILE");
        status = 2;
        goto out;
    }
    if (gguf_open(&g, c.model, &err) || tokenizer_open(&t, g, &err) || read_text(&text, words, n_words, &err))
        goto out;
    struct text_range all = {0, text.len};
    if (tokenizer_encode(t, text.data, text.len, o.special ? &all : NULL, o.special ? 1 : 0, o.no_nfc ? 0 : TOKENIZER_NFC, &list, &err))
        goto out;
    print_tokens(t, &list, o.ids_only);
    if (fflush(stdout) || ferror(stdout)) {
        error_set(&err, "standard output: %s", strerror(errno));
        goto out;
    }
    status = 0;
out:
    if (status)
        fprintf(stderr, "bedside tokenize: %s\n", err.text);
    token_list_free(&list);
    buf_free(&text);
    tokenizer_close(t);
    gguf_close(g);
    config_free(&c);
    free(words);
    return status;
}
