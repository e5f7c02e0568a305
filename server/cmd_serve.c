/* server/cmd_serve.c: `bedside serve`: puts the parts together, and takes them apart in the right order.
 *
 * Threads: this one waits for signals; libmicrohttpd has one that accepts and one per connection; the scheduler has its loop and the engine thread.
 * The port is bound before the model is loaded, so that a conflict shows at once and /health can say "loading". */
#include <errno.h>
#include <microhttpd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "config/config.h"
#include "engine/cache_disk.h"
#include "engine/engine.h"
#include "server/chat.h"
#include "server/commands.h"
#include "server/http.h"
#include "server/page.h"
#include "server/scheduler.h"
#include "server/setup.h"
#include "server/show.h"

/* ---- signals ---- */

/* SIGTERM and SIGINT are blocked in every thread and read from a descriptor. SIGPIPE is ignored: a client that left is an error of write. */
static int open_signals(struct error *err)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    if (signal(SIGPIPE, SIG_IGN) == SIG_ERR || pthread_sigmask(SIG_BLOCK, &set, NULL))
        return error_set(err, "cannot set up signals: %s", strerror(errno));
    int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return fd >= 0 ? fd : error_set(err, "cannot set up signals: %s", strerror(errno));
}

/* Sleeps until a signal comes (its number), the other descriptor is readable (0), or timeout_ms passed (-1; a negative timeout never does). */
static int wait_signal(int signal_fd, int other_fd, int timeout_ms)
{
    struct pollfd fds[2] = {{.fd = signal_fd, .events = POLLIN}, {.fd = other_fd, .events = POLLIN}};
    const uint64_t deadline = clock_ns() + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000u;
    for (;;) {
        const uint64_t now = clock_ns();
        int left = timeout_ms < 0 ? -1 : now >= deadline ? 0 : (int)((deadline - now + 999999u) / 1000000u);
        int n = poll(fds, 2, left);
        struct signalfd_siginfo info;
        if (n > 0 && fds[0].revents && read(signal_fd, &info, sizeof info) == (ssize_t)sizeof info)
            return (int)info.ssi_signo;
        if (n > 0 && fds[1].revents) {
            eventfd_t count;
            eventfd_read(other_fd, &count);
            return 0;
        }
        if (n == 0)
            return -1;
    }
}

/* A second signal, or one while the model loads: nothing is worth waiting for. */
static _Noreturn void stop_at_once(int signal_number)
{
    log_warn("%s: stopped at once", signal_number == SIGINT ? "SIGINT" : "SIGTERM");
    _exit(128 + signal_number);
}

/* A connection takes two descriptors, its socket and its outbox, and systems often allow a program 1024 unless it asks for more. */
static void allow_connections(const struct config *c)
{
    enum { OTHERS = 128 }; /* descriptors for everything else, and for connections that are only told to come later */
    const rlim_t need = 2 * (rlim_t)c->max_connections + OTHERS;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= need)
        return;
    limit.rlim_cur = limit.rlim_max < need ? limit.rlim_max : need;
    if (setrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur < need)
        log_warn("--max-connections %lld may take %llu open files, more than this program may have: raise the limit (ulimit -n) or lower the setting",
                 (long long)c->max_connections, (unsigned long long)need);
}

/* ---- loading ---- */

struct loading {
    struct engine_options options;
    struct engine *engine;
    struct error err;
    int rc;
    int done_fd;
};

static void *load_main(void *arg)
{
    struct loading *l = arg;
    l->rc = engine_open(&l->engine, &l->options, &l->err);
    eventfd_write(l->done_fd, 1);
    return NULL;
}

/* Opens the engine on a thread of its own, so that a signal ends a long load. */
static int load(struct loading *l, int signal_fd, struct error *err)
{
    l->done_fd = eventfd(0, EFD_CLOEXEC);
    if (l->done_fd < 0)
        return error_set(err, "cannot load the model: %s", strerror(errno));
    pthread_t thread;
    int rc = pthread_create(&thread, NULL, load_main, l);
    if (rc) {
        close(l->done_fd);
        return error_set(err, "cannot start a thread to load the model: %s", strerror(rc));
    }
    int signal_number = wait_signal(signal_fd, l->done_fd, -1);
    if (signal_number > 0)
        stop_at_once(signal_number);
    pthread_join(thread, NULL);
    close(l->done_fd);
    if (l->rc)
        *err = l->err;
    return l->rc;
}

/* ---- what is said at the start ---- */

/* The version of the library that is there at run time, and what an old one means. */
static void print_library(void)
{
    enum { MAJOR, MINOR, PATCH, PARTS };
    long part[PARTS];
    const char *version = MHD_get_version();
    printf("http     libmicrohttpd %s\n", version);
    for (int i = MAJOR; i < PARTS; i++) {
        char *end;
        part[i] = strtol(version, &end, 10);
        if (end == version || (i < PATCH && *end != '.'))
            return; /* not three numbers: nothing is known of it */
        version = end + 1;
    }
    if (part[MAJOR] > 1 || (part[MAJOR] == 1 && (part[MINOR] > 0 || part[PATCH] >= 5)))
        return;
    printf("         warning: older than 1.0.5. Its faults: suspended connections may be passed over for ever (bedside suspends none), and requests\n"
           "         with two lengths may be smuggled past a proxy (bedside refuses them, as far as it is shown them). Put no proxy before it that\n"
           "         shares connections between users, or build with 1.0.5 or newer.\n");
}

static void print_ready(const struct http_listener *listener, const struct chat_service *service, const struct config *c)
{
    const char *key = c->api_key[0] ? " -H \"Authorization: Bearer $BEDSIDE_API_KEY\"" : "";
    printf("text     %s template%s\n", chat_family_name(service->chat_template.family),
           service->chat_template.recognised ? "" : " (a guess: the file's own is not known)");
    print_library();
    printf("\nlistening on %s\n\nTry:\n\n", listener->url);
    if (page_is_demo(service->info->model_name))
        printf(
            "curl -s %s/v1/chat/completions -H 'Content-Type: application/json'%s -d '{\"temperature\": 0, \"chat_template_kwargs\": "
            "{\"enable_thinking\": false}, "
            "\"messages\": [{\"role\": \"system\", \"content\": \"You are a clinical assistant. Cite the record.\\n\\nRecord:\\n[1] Patient: Marta "
            "Wilk, "
            "female, 71 years\\n[2] Allergy: penicillin (rash)\\n[3] Diagnosis: atrial fibrillation, since 2019\\n[4] Medication: warfarin 5 mg once "
            "daily\\n[5] Medication: amiodarone 200 mg once daily\\n[6] Lab: INR 2.4 (2026-03-14)\"}, {\"role\": \"user\", \"content\": \"What dose "
            "of "
            "warfarin is the patient taking?\"}]}'\n\n"
            "This model is a demonstration, trained on invented records and often wrong. It is not for clinical use.\n\n",
            listener->url, key);
    else
        printf("curl -N %s/v1/chat/completions -H 'Content-Type: application/json'%s -d '{\"stream\": true, \"messages\": [{\"role\": \"user\", "
               "\"content\": "
               "\"Hello\"}]}'\n\n",
               listener->url, key);
    fflush(stdout);
}

/* ---- serving ---- */

static const uint64_t FAREWELL_NS = 1000000000; /* for the messages that answers are cut off to reach their clients */

/* Runs until a signal, then lets answers finish. Returns the exit status. */
static int serve_until_signal(struct http_server *http, struct scheduler *scheduler, const struct config *c, int signal_fd)
{
    int signal_number;
    do
        signal_number = wait_signal(signal_fd, http_idle_fd(http), -1);
    while (signal_number <= 0); /* chats ending are no news here */

    log_info("%s: no new requests; %d being answered, up to %lld s for them", signal_number == SIGINT ? "SIGINT" : "SIGTERM", http_active(http),
             (long long)c->drain_timeout);
    http_set_draining(http);
    scheduler_drain(scheduler);
    uint64_t deadline = clock_ns() + (uint64_t)c->drain_timeout * 1000000000u;
    bool cut = false;
    while (http_active(http) > 0) {
        const uint64_t now = clock_ns();
        if (now >= deadline) {
            if (cut) /* they do not read, or a step takes long: their connections are closed without more ado */
                break;
            log_warn("%d answers did not finish within --drain-timeout and are cut off", http_active(http));
            cut = true;
            deadline = now + FAREWELL_NS;
            scheduler_cut(scheduler);
            continue;
        }
        signal_number = wait_signal(signal_fd, http_idle_fd(http), (int)((deadline - now) / 1000000u) + 1);
        if (signal_number > 0)
            stop_at_once(signal_number);
    }
    return 0;
}

/* The files of the prefix cache, some lines' last: where, how much, and whether they can be read by others. */
static void print_disk(const struct config *c, struct cache_disk *disk)
{
    if (!disk)
        return;
    const struct cache_disk_stats n = cache_disk_stats(disk);
    printf("  cache folder           %s: ", c->cache_dir);
    show_bytes(stdout, n.bytes);
    printf(" in %llu files", (unsigned long long)n.files);
    if (c->cache_disk > 0) {
        printf(", ");
        show_bytes(stdout, (unsigned long long)c->cache_disk << 20);
        printf(" at most");
    }
    printf(", %s\n", c->cache_key[0] ? "encrypted" : "not encrypted (--cache-key)");
}

static int serve(const struct config *c, int signal_fd, struct error *err)
{
    int rc = -1;
    struct http_listener listener;
    struct http_server *http = NULL;
    struct loading loading = {.options = setup_engine_options(c, (int)c->max_running)};
    struct scheduler *scheduler = NULL;
    struct cache_disk *disk = NULL;
    struct chat_service service;
    bool have_service = false;

    allow_connections(c);
    if (http_listen(&listener, c->host, (int)c->port, err))
        return -1;
    if (!listener.loopback && !c->api_key[0]) {
        close(listener.fd);
        return error_set(
            err, "--host %s can be reached from other machines: set a key with --api-key (better: BEDSIDE_API_KEY), or listen on 127.0.0.1", c->host);
    }
    if (http_start(&http, &listener, c, err))
        return -1;
    if (setup_cache(c, &loading.options, &disk, err) || load(&loading, signal_fd, err))
        goto done;
    setup_print_engine(stdout, loading.engine, c);
    print_disk(c, disk);
    const struct scheduler_options options = {
        .engine = loading.engine,
        .max_running = (int)c->max_running,
        .max_queue = (int)c->max_queue,
        .prefill_chunk = (int)c->prefill_chunk,
        .max_gap_ms = (int)c->max_gap,
    };
    if (scheduler_open(&scheduler, &options, err) || chat_service_open(&service, loading.engine, scheduler, c, err))
        goto done;
    have_service = true;
    service.disk = disk;
    http_set_service(http, &service);
    print_ready(&listener, &service, c);
    rc = serve_until_signal(http, scheduler, c, signal_fd);
done:
    http_stop(http); /* first: its threads hold jobs and look at the service */
    scheduler_close(scheduler);
    if (have_service)
        chat_service_close(&service);
    engine_close(loading.engine);
    cache_disk_close(disk); /* writes what is queued */
    return rc;
}

int cmd_serve(int argc, char **argv)
{
    struct config c;
    struct error err;
    int n_words = 0;
    const char *word;
    int status = setup_config(&c, "serve", argc, argv, &word, 1, &n_words);
    if (status >= 0)
        return status;
    status = 2;
    if (n_words) {
        fprintf(stderr, "bedside: serve takes no words besides its options; to serve a file: --model FILE\n");
    } else if (!c.model[0]) {
        fprintf(stderr, "bedside: %s\n", setup_which_model);
    } else {
        printf("bedside %s\n", BEDSIDE_VERSION);
        fflush(stdout);
        int signal_fd = open_signals(&err);
        status = signal_fd < 0 || serve(&c, signal_fd, &err) ? 1 : 0;
        if (status)
            fprintf(stderr, "bedside: %s\n", err.text);
        else
            log_info("stopped");
        if (signal_fd >= 0)
            close(signal_fd);
    }
    config_free(&c);
    return status;
}
