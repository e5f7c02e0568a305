#include "config/config.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"

/* ---- the table ---- */

enum kind { TEXT, CHOICE, WHOLE, REAL, SWITCH };

struct setting {
    const char *section;
    const char *name; /* as on the command line, without "--"; BEDSIDE_<NAME> in the environment */
    enum kind kind;
    size_t offset;             /* in struct config: char * for TEXT and CHOICE, int64_t, double or bool */
    const char *preset;        /* the default, as a user would write it */
    int64_t min, max;          /* WHOLE and REAL */
    bool above_min, below_max; /* the bound itself is out of range */
    int64_t auto_whole;        /* what "auto" stores (REAL: NAN); only where `automatic` is set */
    const char *automatic;     /* what "auto" means; NULL: the word is not accepted */
    const char *choices;       /* CHOICE: words with | between; in one that ends in ":N" the N stands for a number from 0 to 99 */
    const char *value;         /* what --help calls the value */
    bool not_in_file;
    const char *help;
};

#define AT(field) .offset = offsetof(struct config, field)
#define MODEL     "Model"
#define SERVER    "Server"
#define CACHE     "Prefix cache: text that was read once is not read again"
#define SAMPLING  "Sampling, where a request says nothing"
#define OTHER     "Other"
#define RUN       "Only for bedside run"
#define BENCH     "Only for bedside bench"

static const struct setting settings[] = {
    {MODEL, "model", TEXT, AT(model), .preset = "", .value = "FILE", .help = "the GGUF file to use; of a split model, its first part"},
    {MODEL, "alias", TEXT, AT(alias), .preset = "", .value = "NAME", .help = "the model name shown to clients; empty: the name in the file"},
    {MODEL, "context", WHOLE, AT(context), .preset = "auto", .min = 64, .max = 1048576, .auto_whole = 0,
     .automatic = "the model's own limit, at most 32768", .value = "TOKENS", .help = "most tokens of one request, prompt and answer together"},
    {MODEL, "device", CHOICE, AT(device), .preset = "auto", .choices = "auto|cpu|hip|hip:N", .value = "DEVICE",
     .help = "what computes: hip is an AMD GPU (hip:1 the second one), and the program ends when it cannot be used; auto: the GPU if it can, else "
             "the CPU"},
    {MODEL, "hip-library", TEXT, AT(hip_library), .preset = "", .value = "FILE",
     .help = "AMD's HIP runtime library; empty: libamdhip64 where the system finds it"},
    {MODEL, "hip-graph", CHOICE, AT(hip_graph), .preset = "off", .choices = "on|off", .value = "on|off",
     .help =
         "on: the GPU gets a step of writing as one HIP graph instead of some hundred kernels, unless a check at start finds replayed graphs wrong"},
    {MODEL, "threads", WHOLE, AT(threads), .preset = "auto", .min = 1, .max = 1024, .auto_whole = 0, .automatic = "one per physical core",
     .value = "N", .help = "CPU threads that compute"},
    {MODEL, "kv-type", CHOICE, AT(kv_type), .preset = "f16", .choices = "f16|q8_0|f32", .value = "TYPE",
     .help = "how keys and values of the context are kept; q8_0 takes about half the memory of f16, and answers may differ slightly"},
    {MODEL, "kv-memory", WHOLE, AT(kv_memory), .preset = "auto", .min = 1, .max = 16777216, .auto_whole = 0,
     .automatic = "what is free, less a margin", .value = "MIB", .help = "MiB for the contexts of all requests"},

    {SERVER, "host", TEXT, AT(host), .preset = "127.0.0.1", .value = "ADDRESS",
     .help = "address to listen on; any but a loopback address needs an API key"},
    {SERVER, "port", WHOLE, AT(port), .preset = "8080", .min = 0, .max = 65535, .value = "PORT", .help = "port to listen on; 0: any free one"},
    {SERVER, "api-key", TEXT, AT(api_key), .preset = "", .value = "KEY",
     .help = "what clients must send as \"Authorization: Bearer KEY\"; empty: nothing. Other users see command lines, so use the environment or "
             "the config file"},
    {SERVER, "max-running", WHOLE, AT(max_running), .preset = "auto", .min = 1, .max = 256, .auto_whole = 0,
     .automatic = "as many as memory allows, at most 64", .value = "N", .help = "most answers written at the same time"},
    {SERVER, "max-queue", WHOLE, AT(max_queue), .preset = "64", .min = 0, .max = 65536, .value = "N",
     .help = "requests that wait for their turn; more get status 429"},
    {SERVER, "max-connections", WHOLE, AT(max_connections), .preset = "256", .min = 1, .max = 65536, .value = "N",
     .help = "connections open at the same time"},
    {SERVER, "max-body", WHOLE, AT(max_body), .preset = "8192", .min = 1, .max = 1048576, .value = "KIB",
     .help = "largest request body, in KiB; a larger one gets status 413"},
    {SERVER, "idle-timeout", WHOLE, AT(idle_timeout), .preset = "60", .min = 1, .max = 86400, .value = "SECONDS",
     .help = "a connection that moves no byte for so long is closed"},
    {SERVER, "drain-timeout", WHOLE, AT(drain_timeout), .preset = "30", .min = 0, .max = 3600, .value = "SECONDS",
     .help = "how long running answers may go on after SIGTERM"},
    {SERVER, "max-gap", WHOLE, AT(max_gap), .preset = "250", .min = 20, .max = 10000, .value = "MS",
     .help = "aim for at most this time between two tokens of an answer while other prompts are read"},
    {SERVER, "deterministic", SWITCH, AT(deterministic), .preset = "false",
     .help = "the same request gives the same answer, byte for byte, also without a seed: one that sends none gets seed 0. (With a seed that is so "
             "in any case.)"},
    {SERVER, "prefill-chunk", WHOLE, AT(prefill_chunk), .preset = "512", .min = 1, .max = 8192, .value = "TOKENS",
     .help = "tokens of a prompt read in one step; fewer: answers that run meanwhile stall less"},

    {CACHE, "cache-memory", WHOLE, AT(cache_memory), .preset = "auto", .min = 0, .max = 16777216, .auto_whole = -1,
     .automatic = "an eighth of what is free, at most 4096", .value = "MIB",
     .help = "MiB for snapshots of the model's state; 0: no cache. Cached keys and values live in --kv-memory and yield to running requests"},
    {CACHE, "cache-dir", TEXT, AT(cache_dir), .preset = "", .value = "FOLDER",
     .help = "keep the cache on disk too, below this private folder, so that it survives a restart; empty: in memory only"},
    {CACHE, "cache-disk", WHOLE, AT(cache_disk), .preset = "16384", .min = 0, .max = 16777216, .value = "MIB",
     .help = "most MiB on disk, the least recently used go first; 0: no limit"},
    {CACHE, "cache-key", TEXT, AT(cache_key), .preset = "", .value = "FILE",
     .help = "encrypt what is on disk with this file's 32 or more bytes, which only you may be able to read"},
    {CACHE, "share-system", SWITCH, AT(share_system), .preset = "false",
     .help = "let namespaces share cached system messages and tools. Only where system messages hold no patient's data: how fast an answer comes "
             "tells what was read before"},

    {SAMPLING, "temperature", REAL, AT(temperature), .preset = "auto", .min = 0, .max = 2, .automatic = "the model file's, else 1", .value = "X",
     .help = "0: always the likeliest token"},
    {SAMPLING, "top-p", REAL, AT(top_p), .preset = "auto", .min = 0, .above_min = true, .max = 1, .automatic = "the model file's, else 1",
     .value = "X", .help = "draw from the likeliest tokens that together have this probability; 1: from all"},
    {SAMPLING, "top-k", WHOLE, AT(top_k), .preset = "auto", .min = 0, .max = 2097152, .auto_whole = -1, .automatic = "the model file's, else 0",
     .value = "N", .help = "draw from the N likeliest tokens; 0: from all"},
    {SAMPLING, "min-p", REAL, AT(min_p), .preset = "auto", .min = 0, .max = 1, .below_max = true, .automatic = "0", .value = "X",
     .help = "leave out tokens less likely than X times the likeliest; 0: none"},
    {SAMPLING, "repeat-penalty", REAL, AT(repeat_penalty), .preset = "auto", .min = 0, .above_min = true, .max = 10, .automatic = "1", .value = "X",
     .help = "above 1: recent tokens become less likely; 1: off"},
    {SAMPLING, "max-tokens", WHOLE, AT(max_tokens), .preset = "0", .min = 0, .max = 1048576, .value = "N",
     .help = "longest answer; 0: to the end of the context"},

    {OTHER, "log-level", CHOICE, AT(log_level), .preset = "info", .choices = "error|warn|info|debug", .value = "LEVEL",
     .help = "what is logged to standard error; never prompts or answers"},
    {OTHER, "config", TEXT, AT(config_file), .preset = "", .value = "FILE", .not_in_file = true,
     .help = "a file of \"name = value\" lines; lines that start with # are comments"},

    {RUN, "prompt", TEXT, AT(prompt), .preset = "", .value = "TEXT", .help = "the question; empty: read from standard input"},
    {RUN, "system", TEXT, AT(system), .preset = "", .value = "TEXT", .help = "the system message"},
    {RUN, "no-think", SWITCH, AT(no_think), .preset = "false", .help = "answer without thinking first"},
    {RUN, "seed", WHOLE, AT(seed), .preset = "auto", .min = 0, .max = INT64_MAX, .auto_whole = -1, .automatic = "a random one", .value = "N",
     .help = "the same seed gives the same answer"},

    {BENCH, "clients", TEXT, AT(clients), .preset = "1,2,4,8", .value = "LIST",
     .help = "how many clients ask at the same time: a row of the table for each number, at most 16 from 1 to 256"},
    {BENCH, "prompt-tokens", WHOLE, AT(prompt_tokens), .preset = "512", .min = 1, .max = 1048576, .value = "N",
     .help = "length of each prompt; no two are alike"},
    {BENCH, "answer-tokens", WHOLE, AT(answer_tokens), .preset = "64", .min = 1, .max = 65536, .value = "N", .help = "length of each answer"},
    {BENCH, "requests", WHOLE, AT(requests), .preset = "2", .min = 1, .max = 1000, .value = "N",
     .help = "requests of each client, one after the other"},
    {BENCH, "json", SWITCH, AT(json), .preset = "false", .help = "print JSON instead of a table"},
};
enum { N_SETTINGS = sizeof settings / sizeof settings[0], NAME_ROOM = 64 };

/* ---- names ---- */

/* BEDSIDE_KV_TYPE from kv-type. */
static void env_name(const struct setting *s, char out[NAME_ROOM])
{
    snprintf(out, NAME_ROOM, "BEDSIDE_%s", s->name);
    for (char *p = out; *p; p++) {
        if (*p == '-')
            *p = '_';
        else if (*p >= 'a' && *p <= 'z')
            *p = (char)(*p - 'a' + 'A');
    }
}

/* A name of any source in the table's spelling: "KV_TYPE" and "kv_type" as "kv-type", cut to fit. */
static void plain_name(const char *name, size_t len, char out[NAME_ROOM])
{
    if (len > NAME_ROOM - 1)
        len = NAME_ROOM - 1;
    for (size_t i = 0; i < len; i++) {
        char c = name[i];
        out[i] = c == '_' ? '-' : c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
    }
    out[len] = '\0';
}

static const struct setting *find_setting(const char *plain)
{
    for (size_t i = 0; i < N_SETTINGS; i++)
        if (strcmp(settings[i].name, plain) == 0)
            return &settings[i];
    return NULL;
}

/* Fewest insertions, deletions and replacements that turn a into b; both shorter than NAME_ROOM. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[NAME_ROOM], n = strlen(b);
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[n];
}

/* The setting a mistyped name most likely meant, or NULL. */
static const struct setting *nearest_setting(const char *plain)
{
    const struct setting *best = NULL;
    size_t least = strlen(plain) / 3 + 2; /* farther than this is no typing mistake */
    for (size_t i = 0; i < N_SETTINGS; i++) {
        size_t distance = edit_distance(plain, settings[i].name);
        if (distance < least) {
            least = distance;
            best = &settings[i];
        }
    }
    return best;
}

/* ---- values ---- */

/* "64 to 1048576" and the like; empty for kinds without a range. */
static void range_text(const struct setting *s, char *out, size_t room)
{
    out[0] = '\0';
    if (s->kind == CHOICE)
        snprintf(out, room, "%s", s->choices);
    else if (s->kind == WHOLE && s->max == INT64_MAX)
        snprintf(out, room, "%" PRId64 " or more", s->min);
    else if (s->kind == WHOLE || s->kind == REAL)
        snprintf(out, room, "%s%" PRId64 " to %s%" PRId64, s->above_min ? "above " : "", s->min, s->below_max ? "below " : "", s->max);
    else if (s->kind == SWITCH)
        snprintf(out, room, "true or false");
}

static void *field(struct config *c, const struct setting *s)
{
    return (char *)c + s->offset;
}

static bool parse_whole(const char *text, int64_t *out)
{
    const char *digits = text[0] == '-' ? text + 1 : text;
    if (!*digits || strspn(digits, "0123456789") != strlen(digits))
        return false;
    errno = 0;
    long long value = strtoll(text, NULL, 10);
    *out = value;
    return errno == 0;
}

static bool parse_real(const char *text, double *out)
{
    if (!*text || strspn(text, "0123456789.eE+-") != strlen(text)) /* also keeps out inf, nan and hexadecimal */
        return false;
    char *end;
    *out = strtod(text, &end);
    return *end == '\0' && isfinite(*out);
}

/* Whether text [len] is the choice [n], or its form with a number. */
static bool matches(const char *choice, size_t n, const char *text, size_t len)
{
    if (n < 2 || memcmp(choice + n - 2, ":N", 2) != 0)
        return n == len && memcmp(choice, text, n) == 0;
    const size_t digits = len > n - 1 ? len - (n - 1) : 0;
    return digits >= 1 && digits <= 2 && memcmp(choice, text, n - 1) == 0 && strspn(text + n - 1, "0123456789") == digits;
}

static bool is_choice(const char *choices, const char *text)
{
    size_t len = strlen(text);
    for (const char *p = choices; len; p++) {
        size_t n = strcspn(p, "|");
        if (matches(p, n, text, len))
            return true;
        p += n;
        if (!*p)
            return false;
    }
    return false;
}

static bool parse_switch(const char *text, bool *out)
{
    *out = strcmp(text, "true") == 0 || strcmp(text, "1") == 0 || strcmp(text, "yes") == 0 || strcmp(text, "on") == 0;
    return *out || strcmp(text, "false") == 0 || strcmp(text, "0") == 0 || strcmp(text, "no") == 0 || strcmp(text, "off") == 0;
}

static bool in_range(const struct setting *s, double value)
{
    double min = (double)s->min, max = (double)s->max;
    return (s->above_min ? value > min : value >= min) && (s->below_max ? value < max : value <= max);
}

/* Stores `text` in the setting's field. No message repeats the text of a TEXT setting, which may be a secret. `where` says where it came from: "config.conf:3", "BEDSIDE_PORT", "--port". */
static int set_value(struct config *c, const struct setting *s, const char *text, const char *where, struct error *err)
{
    char range[80];
    range_text(s, range, sizeof range);
    const char *also = s->automatic ? ", or auto" : "";
    if (s->automatic && strcmp(text, "auto") == 0) {
        if (s->kind == WHOLE)
            *(int64_t *)field(c, s) = s->auto_whole;
        else
            *(double *)field(c, s) = (double)NAN;
        return 0;
    }
    switch (s->kind) {
    case TEXT:
    case CHOICE: {
        if (s->kind == CHOICE && !is_choice(s->choices, text))
            return error_set(err, "%s: '%.60s' is not a value of %s; it is one of %s", where, text, s->name, range);
        char *copy = alloc_text(text, strlen(text));
        if (!copy)
            return error_set(err, "%s: out of memory", where);
        char **at = field(c, s);
        free(*at);
        *at = copy;
        return 0;
    }
    case WHOLE: {
        int64_t value;
        if (!parse_whole(text, &value))
            return error_set(err, "%s: '%.60s' is not a whole number; %s is %s%s", where, text, s->name, range, also);
        bool is_auto = s->automatic && value == s->auto_whole;
        if (!is_auto && (value < s->min || value > s->max))
            return error_set(err, "%s: %" PRId64 " is out of range; %s is %s%s", where, value, s->name, range, also);
        *(int64_t *)field(c, s) = value;
        return 0;
    }
    case REAL: {
        double value;
        if (!parse_real(text, &value))
            return error_set(err, "%s: '%.60s' is not a number; %s is %s%s", where, text, s->name, range, also);
        if (!in_range(s, value))
            return error_set(err, "%s: %.60s is out of range; %s is %s%s", where, text, s->name, range, also);
        *(double *)field(c, s) = value;
        return 0;
    }
    case SWITCH:
        if (!parse_switch(text, field(c, s)))
            return error_set(err, "%s: '%.60s' is not a value of %s; it is %s", where, text, s->name, range);
        return 0;
    }
    return 0;
}

/* ---- sources ---- */

static int set_defaults(struct config *c, struct error *err)
{
    memset(c, 0, sizeof *c);
    for (size_t i = 0; i < N_SETTINGS; i++)
        if (set_value(c, &settings[i], settings[i].preset, "default", err))
            return -1;
    return 0;
}

static char *trim(char *text)
{
    static const char space[] = " \t\r\n";
    text += strspn(text, space);
    size_t len = strlen(text);
    while (len && strchr(space, text[len - 1]))
        len--;
    text[len] = '\0';
    return text;
}

/* One line of a config file, without its newline or with it. */
static int set_from_line(struct config *c, char *line, const char *where, struct error *err)
{
    char *name = trim(line);
    if (!*name || *name == '#')
        return 0;
    char *equals = strchr(name, '=');
    if (!equals) /* the line may hold a secret: it is not repeated */
        return error_set(err, "%s: there is no '=' in this line; settings are written \"name = value\"", where);
    *equals = '\0';
    name = trim(name);
    char plain[NAME_ROOM];
    plain_name(name, strlen(name), plain);
    const struct setting *s = find_setting(plain);
    if (!s) {
        const struct setting *near = nearest_setting(plain);
        return error_set(err, "%s: there is no setting '%s'%s%s%s", where, plain, near ? "; did you mean '" : "", near ? near->name : "",
                         near ? "'?" : "; bedside --help lists them");
    }
    if (s->not_in_file)
        return error_set(err, "%s: '%s' cannot be set in a config file", where, s->name);
    return set_value(c, s, trim(equals + 1), where, err);
}

static int set_from_file(struct config *c, const char *path, struct error *err)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return error_set(err, "config file %s: %s", path, strerror(errno));
    char *line = NULL;
    size_t cap = 0;
    ssize_t len;
    int rc = 0;
    errno = 0;
    for (unsigned number = 1; rc == 0 && (len = getline(&line, &cap, f)) >= 0; number++) {
        char where[256];
        snprintf(where, sizeof where, "%.200s:%u", path, number);
        if (strlen(line) != (size_t)len)
            rc = error_set(err, "%s: the line has a NUL byte in it", where);
        else
            rc = set_from_line(c, line, where, err);
    }
    if (rc == 0 && ferror(f))
        rc = error_set(err, "config file %s: %s", path, strerror(errno));
    free(line);
    fclose(f);
    return rc;
}

/* Every BEDSIDE_ variable must be a setting; an empty one counts as not set. */
static int set_from_environment(struct config *c, struct error *err)
{
    static const char prefix[] = "BEDSIDE_";
    for (char **e = environ; e && *e; e++) {
        if (strncmp(*e, prefix, sizeof prefix - 1) != 0)
            continue;
        const char *name = *e + sizeof prefix - 1;
        size_t len = strcspn(name, "=");
        if (!name[len] || !name[len + 1])
            continue;
        char plain[NAME_ROOM], env[NAME_ROOM];
        plain_name(name, len, plain);
        const struct setting *s = find_setting(plain);
        if (!s) {
            const struct setting *near = nearest_setting(plain);
            if (near)
                env_name(near, env);
            return error_set(err, "environment variable %s%.*s: there is no such setting%s%s%s", prefix, (int)(len < NAME_ROOM ? len : NAME_ROOM),
                             name, near ? "; did you mean " : "", near ? env : "", near ? "?" : "; bedside --help lists them");
        }
        char where[NAME_ROOM + 32];
        env_name(s, env);
        snprintf(where, sizeof where, "environment variable %s", env);
        if (set_value(c, s, name + len + 1, where, err))
            return -1;
    }
    return 0;
}

/* One step through the command line. */
struct word {
    const struct setting *setting; /* NULL: positional, or help */
    const char *value;             /* of the setting, or the positional word */
    bool help;
};

/* Reads the word at argv[*i], and its value, and moves *i behind both. *only_words becomes true after "--". */
static int next_word(int argc, char **argv, int *i, bool *only_words, struct word *w, struct error *err)
{
    const char *arg = argv[(*i)++];
    *w = (struct word){.value = arg};
    if (*only_words || arg[0] != '-' || !arg[1])
        return 0;
    if (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0) {
        w->help = true;
        return 0;
    }
    if (strcmp(arg, "--") == 0) {
        *only_words = true;
        w->value = NULL;
        return 0;
    }
    const char *name = arg + (arg[1] == '-' ? 2 : 1);
    size_t len = strcspn(name, "=");
    char plain[NAME_ROOM];
    plain_name(name, len, plain);
    const struct setting *s = arg[1] == '-' ? find_setting(plain) : NULL;
    if (!s) {
        const struct setting *near = nearest_setting(plain);
        return error_set(err, "there is no option %s%s%s%s%s", arg[1] == '-' ? "--" : "-", plain, near ? "; did you mean --" : "",
                         near ? near->name : "", near ? "?" : "; bedside --help lists them");
    }
    w->setting = s;
    if (name[len] == '=') {
        w->value = name + len + 1;
    } else if (s->kind == SWITCH) {
        w->value = "true";
    } else {
        if (*i >= argc)
            return error_set(err, "--%s needs a value: --%s %s", s->name, s->name, s->value);
        w->value = argv[(*i)++];
    }
    return 0;
}

/* First look at the command line: is help wanted, and which config file? Sets *help, or *file when --config is there. */
static int scan_command_line(int argc, char **argv, bool *help, const char **file, struct error *err)
{
    bool only_words = false;
    for (int i = 0; i < argc;) {
        struct word w;
        if (next_word(argc, argv, &i, &only_words, &w, err))
            return -1;
        if (w.help) {
            *help = true;
            return 0;
        }
        if (w.setting && w.setting->offset == offsetof(struct config, config_file))
            *file = w.value;
    }
    return 0;
}

static int set_from_command_line(struct config *c, int argc, char **argv, const char **positional, int max, int *n_positional, struct error *err)
{
    bool only_words = false;
    int n = 0;
    for (int i = 0; i < argc;) {
        struct word w;
        if (next_word(argc, argv, &i, &only_words, &w, err))
            return -1;
        if (w.setting) {
            char where[NAME_ROOM];
            snprintf(where, sizeof where, "--%s", w.setting->name);
            if (set_value(c, w.setting, w.value, where, err))
                return -1;
            if (strcmp(w.setting->section, RUN) == 0 && !c->run_option)
                c->run_option = w.setting->name;
            if (strcmp(w.setting->section, BENCH) == 0 && !c->bench_option)
                c->bench_option = w.setting->name;
        } else if (w.value) {
            if (n >= max)
                return error_set(err, "'%.60s' is not expected here; options start with --", w.value);
            positional[n++] = w.value;
        }
    }
    if (n_positional)
        *n_positional = n;
    return 0;
}

/* ---- checks over several settings ---- */

static bool is_loopback(const char *host)
{
    struct in_addr v4;
    struct in6_addr v6;
    char bare[INET6_ADDRSTRLEN];
    const size_t len = strlen(host);
    if (strcmp(host, "localhost") == 0)
        return true;
    if (len > 2 && len < sizeof bare && host[0] == '[' && host[len - 1] == ']') { /* as a URL has it */
        snprintf(bare, sizeof bare, "%.*s", (int)len - 2, host + 1);
        return inet_pton(AF_INET6, bare, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
    }
    if (inet_pton(AF_INET, host, &v4) == 1)
        return ntohl(v4.s_addr) >> 24 == 127;
    if (inet_pton(AF_INET6, host, &v6) == 1)
        return IN6_IS_ADDR_LOOPBACK(&v6);
    return false;
}

static int check(const struct config *c, struct error *err)
{
    if (!*c->host)
        return error_set(err, "host is empty; 127.0.0.1 is the usual one");
    for (const char *p = c->api_key; *p; p++)
        if ((unsigned char)*p <= 0x20 || (unsigned char)*p >= 0x7F)
            return error_set(err, "api-key may only have printable ASCII characters, no spaces: clients send it in a header");
    if (!is_loopback(c->host) && !*c->api_key)
        return error_set(err, "host %.80s can be reached from other machines, so an API key is needed: set BEDSIDE_API_KEY, or use --host 127.0.0.1",
                         c->host);
    return 0;
}

int config_load(struct config *c, int argc, char **argv, const char **positional, int max, int *n_positional, struct error *err)
{
    memset(c, 0, sizeof *c);
    if (n_positional)
        *n_positional = 0;
    bool help = false;
    const char *file = getenv("BEDSIDE_CONFIG");
    if (scan_command_line(argc, argv, &help, &file, err))
        return -1;
    if (help) {
        config_help(stdout);
        return 1;
    }
    if (set_defaults(c, err) || (file && *file && set_from_file(c, file, err)) || set_from_environment(c, err) ||
        set_from_command_line(c, argc, argv, positional, max, n_positional, err) || check(c, err)) {
        config_free(c);
        return -1;
    }
    return 0;
}

void config_free(struct config *c)
{
    for (size_t i = 0; i < N_SETTINGS; i++)
        if (settings[i].kind == TEXT || settings[i].kind == CHOICE)
            free(*(char **)field(c, &settings[i]));
    memset(c, 0, sizeof *c);
}

/* ---- help ---- */

enum { HELP_INDENT = 28, HELP_WIDTH = 100 };

/* Writes words of `text` from `column` on, wrapped. Returns the column after them. */
static int print_wrapped(FILE *out, int column, const char *text)
{
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (column > HELP_INDENT && column + 1 + n > HELP_WIDTH) {
            fprintf(out, "\n%*s", HELP_INDENT, "");
            column = HELP_INDENT;
        } else if (column > HELP_INDENT) {
            fputc(' ', out);
            column++;
        }
        fprintf(out, "%.*s", n, text);
        column += n;
        text += n;
        text += strspn(text, " ");
    }
    return column;
}

/* "[default 8080; 0 to 65535]" */
static void limits_text(const struct setting *s, char *out, size_t room)
{
    char range[80];
    range_text(s, range, sizeof range);
    if (s->kind == SWITCH)
        out[0] = '\0';
    else if (s->automatic)
        snprintf(out, room, "[default auto: %s; %s]", s->automatic, range);
    else if (!*s->preset)
        out[0] = '\0';
    else
        snprintf(out, room, "[default %s%s%s]", s->preset, *range ? "; " : "", range);
}

void config_help(FILE *out)
{
    fputs("bedside: a local inference server with an OpenAI-style API\n"
          "\n"
          "  bedside serve    --model FILE [options]             answer requests over HTTP\n"
          "  bedside run      --model FILE [options] [TEXT...]   one question, answered in the terminal\n"
          "  bedside bench    --model FILE [options]             how fast several clients are served at once\n"
          "  bedside inspect  FILE [--tensors]                   what a model file holds\n"
          "  bedside tokenize --model FILE [options] [TEXT...]   text to token ids (bedside tokenize --help)\n"
          "  bedside doctor   [--model FILE] [--device hip:N]    can the GPU be used; what is missing\n"
          "  bedside help [--markdown]                           this page, or its settings as a table\n"
          "  bedside version\n"
          "\n"
          "Settings come from, each stronger than the one before: their defaults, a config file (--config),\n"
          "environment variables (BEDSIDE_PORT for --port), the command line.\n",
          out);
    const char *section = "";
    for (size_t i = 0; i < N_SETTINGS; i++) {
        const struct setting *s = &settings[i];
        if (strcmp(s->section, section) != 0)
            fprintf(out, "\n%s:\n", s->section);
        section = s->section;
        int column = fprintf(out, "  --%s%s%s", s->name, s->value ? " " : "", s->value ? s->value : "");
        fprintf(out, "%*s", column < HELP_INDENT ? HELP_INDENT - column : 1, "");
        char limits[160];
        limits_text(s, limits, sizeof limits);
        print_wrapped(out, print_wrapped(out, HELP_INDENT, s->help), limits);
        fputc('\n', out);
    }
}

void config_markdown(FILE *out)
{
    const char *section = "";
    for (size_t i = 0; i < N_SETTINGS; i++) {
        const struct setting *s = &settings[i];
        if (strcmp(s->section, section) != 0)
            fprintf(out, "%s**%s**\n\n| flag | environment | default | values | meaning |\n|---|---|---|---|---|\n", *section ? "\n" : "",
                    s->section);
        section = s->section;
        char env[NAME_ROOM], range[80], text[80];
        env_name(s, env);
        range_text(s, range, sizeof range);
        if (s->automatic)
            snprintf(text, sizeof text, "auto: %s", s->automatic);
        else
            snprintf(text, sizeof text, "%s", *s->preset ? s->preset : "none");
        fprintf(out, "| `--%s` | `%s` | %s | ", s->name, env, text);
        for (const char *p = range; *p; p++)
            if (*p == '|')
                fputs(", ", out);
            else
                fputc(*p, out);
        fprintf(out, " | %s |\n", s->help);
    }
}
