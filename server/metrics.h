/* server/metrics.h: GET /metrics, in Prometheus' text format. Numbers only: never a namespace, a prompt or an answer. */
#ifndef BEDSIDE_SERVER_METRICS_H
#define BEDSIDE_SERVER_METRICS_H

#include "base/buf.h"
#include "server/chat.h"

/* Appends all metrics. `connections`: open ones. Any thread; waits for nothing. */
void metrics_write(struct buf *out, const struct chat_service *s, int connections);

#endif
