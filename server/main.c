/* server/main.c: the program. Picks the subcommand and nothing else. */
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "config/config.h"
#include "server/commands.h"

static int cmd_help(int argc, char **argv)
{
    if (argc == 1 && strcmp(argv[0], "--markdown") == 0) {
        config_markdown(stdout);
        return 0;
    }
    if (argc > 0) {
        fprintf(stderr, "bedside: help takes no words but --markdown\n");
        return 2;
    }
    config_help(stdout);
    return 0;
}

static int cmd_version(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    printf("bedside %s\n", BEDSIDE_VERSION);
    return 0;
}

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"serve", cmd_serve},     {"run", cmd_run},           {"bench", cmd_bench},       {"doctor", cmd_doctor},
    {"inspect", cmd_inspect}, {"tokenize", cmd_tokenize}, {"help", cmd_help},         {"--help", cmd_help},
    {"-h", cmd_help},         {"version", cmd_version},   {"--version", cmd_version},
};

/* A crash must not leave the records that were in memory in a file, or with the system's collector of crashes. Of the limit the kernel knows two values that
 * matter here: 0 forbids the file, but a collector (a core_pattern that is a program) is started all the same; 1 forbids both (core(5)). Where a hard limit of 0
 * was there before, the process says itself that it is not to be dumped; that also keeps its user's debuggers and profilers out, so it is not done everywhere. */
static void keep_memory_out_of_core_dumps(void)
{
    const struct rlimit none = {1, 1};
    if (setrlimit(RLIMIT_CORE, &none))
        (void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* 0 is never refused */
}

int main(int argc, char **argv)
{
    keep_memory_out_of_core_dumps();
    if (argc < 2) {
        config_help(stderr);
        return 2;
    }
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 2, argv + 2);
    fprintf(stderr, "bedside: '%s' is not a command; the commands are serve, run, bench, doctor, inspect, tokenize, help and version\n", argv[1]);
    return 2;
}
