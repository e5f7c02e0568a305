/* server/commands.h: the subcommands of the program. Each gets the words after its name and returns the exit status: 0 done, 1 failed,
 * 2 wrong usage (an unknown option, a value out of range). */
#ifndef BEDSIDE_SERVER_COMMANDS_H
#define BEDSIDE_SERVER_COMMANDS_H

#define BEDSIDE_VERSION "0.1.0"

int cmd_serve(int argc, char **argv);    /* serve --model FILE: answer over HTTP until SIGTERM */
int cmd_run(int argc, char **argv);      /* run --model FILE [TEXT...]: one answer in the terminal */
int cmd_bench(int argc, char **argv);    /* bench --model FILE: how fast several clients are served at once */
int cmd_doctor(int argc, char **argv);   /* doctor [--model FILE]: can the GPU be used, and what is missing? 1: it cannot */
int cmd_inspect(int argc, char **argv);  /* inspect FILE [--tensors]: what a model file holds */
int cmd_tokenize(int argc, char **argv); /* tokenize --model FILE [TEXT...]: text to token ids */

#endif
