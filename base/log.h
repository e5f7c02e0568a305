/* base/log.h: the one global. A line per event on standard error: time, level, text.
 *
 * Control bytes in the text are written as \xNN, so that nothing a client sent can forge a line or move a terminal's cursor.
 * Prompt and answer text never belong here. Thread-safe: a line is written by one write(2). */
#ifndef BEDSIDE_BASE_LOG_H
#define BEDSIDE_BASE_LOG_H

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

void log_set_level(enum log_level level); /* default LOG_INFO */
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_WARN, __VA_ARGS__)
#define log_info(...)  log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)

#endif
